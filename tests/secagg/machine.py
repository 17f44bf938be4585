"""A coordinator that tries anything in any order, against sessions that are guarded as a site guards them.

Used by test_machine.py with few steps and by scripts/attack_secagg with many. Every rule is one message or one crash.
The coordinator sees all messages, of all attempts, holds the identity keys of k members, can restore any older state of
a member's session (Flower's memory may be stale), and can drop, repeat, reorder, replay and damage what it carries. A
member's site gives it what ``federation/participant.py`` gives it: no session state is left twice, one answer a round.

After every step:

* a member deals, masks and signs once in an attempt, however often its state is put back;
* nobody's mask key and self-mask seed have both been revealed often enough to be known, colluders' shares included;
* secrets of one attempt at most are known, so that no two sums of the same payloads can be subtracted;
* with the consistency stage what is known opens no sum of fewer than max(t, m) - k honest members (without it a
  coordinator that lies can open a single update: test_signatures.py);
* whatever the honest coordinator that listens in obtains is the exact sum over its U3, and where sums are verified
  every member of U3 can verify it;
* every refusal is a SecureAggregationError.

In the end the members that have not answered run one more attempt among themselves: it gives the exact sum, or a typed
error when too few are left. So no refusal, whatever came before, leaves a session that hangs.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any, ClassVar

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lensemble_flwr.errors import SecureAggregationError
from lensemble_flwr.secagg import (
    ClientSession,
    ServerSession,
    SessionParams,
    Stage,
    projection,
    shamir,
    signing,
    state,
    wire,
)
from tests.secagg.driver import make_params, payloads, sign

HEADER = wire.HEADER_BYTES
ATTEMPTS = 3
INHERITED = ("threshold", "min_survivors", "consistency", "verify")
KINDS = ("keys", "shares", "masked", "agree", "reveal")


def opened_sums(u2: Mapping[int, AbstractSet[int]], seeds: AbstractSet[int], keys: AbstractSet[int]) -> list[set[int]]:
    """The smallest sets of honest members of whose vectors nothing hides the sum.

    Args:
        u2: honest members that masked, each with the honest members among those it shares a mask with.
        seeds, keys: honest members whose self-mask seed and whose mask key are known.
    """
    found: list[set[int]] = []
    for first in set(u2) & seeds:
        group: set[int] = set()
        todo = {first}
        while todo:
            member = todo.pop()
            group.add(member)
            todo |= u2.get(member, set()) - keys - group  # what is masked with each of these, too
        cancels = group <= set(u2) & seeds and all(i in u2[j] for i in group for j in u2[i] & group)
        if cancels and group not in found:
            found.append(group)
    return found


class Attempt:
    """One attempt: everybody's session, an honest coordinator, and all that the lying one has seen."""

    def __init__(self, params: SessionParams, members: Iterable[int]) -> None:
        self.params = params
        self.clients = {i: ClientSession(params, params.roster[i], sign) for i in members}
        self.server = ServerSession(params)
        self.seen: dict[tuple[str, int], bytes] = {}
        self.vectors: dict[int, np.ndarray] = {}
        self.sum_keys: dict[int, bytes] = {}
        self.states: dict[int, list[bytes]] = {i: [client.to_bytes()] for i, client in self.clients.items()}
        self.t1: dict[int, bytes] = {}
        # owner -> kind -> honest revealers
        self.revealed: dict[int, dict[str, set[int]]] = {i: {"seed": set(), "key": set()} for i in range(params.n)}
        self.u2: dict[int, frozenset[int]] = {}
        self.opened: np.ndarray | None = None


class Coordinator(RuleBasedStateMachine):
    """See the module."""

    counts: ClassVar[Counter[str]] = Counter()
    """Steps (after each of which all is checked), and what came of them, of all machines of this process."""

    @initialize(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        n = data.draw(st.integers(3, 6), "n")
        k = data.draw(st.integers(1, n - 2), "k")
        t = data.draw(st.integers((n + k) // 2 + 1, n), "t")
        m = data.draw(st.integers(max(3, k + 2), n), "m")
        consistency, verify = data.draw(st.booleans(), "consistency"), data.draw(st.booleans(), "verify")
        self.params = make_params(n, 3, k=k, threshold=t, min_survivors=m, consistency=consistency, verify=verify)
        self.q = payloads(self.params)
        self.colluders = frozenset(data.draw(st.permutations(range(n)), "order")[:k])
        self.left: set[bytes] = set()
        self.answered: set[int] = set()
        self.attempts: list[Attempt] = []
        self.open_attempt()
        for kind in KINDS[: data.draw(st.integers(0, 4), "honest stages first")]:
            self.honest_stage(self.attempts[0], kind, range(n))

    # ------------------------------------------------------------------ the site's guards

    def call(self, what: Callable[[], Any]) -> Any:
        """The result, or None after a typed refusal; anything else is a failure of the test."""
        self.counts["calls of sessions"] += 1
        try:
            return what()
        except SecureAggregationError as error:
            self.counts[f"refused: {error.fields['cause']}"] += 1
            return None

    def once(self, client: ClientSession) -> None:
        mark = hashlib.sha256(client.to_bytes()).digest()
        if mark in self.left:
            raise SecureAggregationError("left before", cause="wrong_state")
        self.left.add(mark)

    def ask(self, a: Attempt, i: int, kind: str, message: bytes) -> bytes | None:
        """Member i's answer, as its site lets it answer."""
        client = a.clients[i]

        def answer() -> bytes:
            if kind == "shares":
                self.once(client)
                reply = client.shares(message)
                a.t1[i] = client._state.t1
            elif kind == "masked":
                client.check_envelopes(message)
                self.once(client)
                a.vectors[i] = client.masked(message, self.q[i])
                a.u2[i] = frozenset(j - 1 for j in client._state.shares)
                if a.params.verify:
                    a.sum_keys[i] = client.sum_key()
                reply = client.masked_message()
            elif kind == "agree":
                client.check_survivors(message)
                self.once(client)
                reply = client.agree(message)
            else:
                client.check_question(message)
                if i in self.answered:
                    raise SecureAggregationError("answered", cause="already_revealed")
                self.answered.add(i)
                held = {j: bytes(pair) for j, pair in client._state.shares.items()}
                reply = client.reveal(message)
                self.note(a, i, held, reply)
            return reply

        reply = self.call(answer)
        if reply is not None:
            self.counts[f"answered: {kind}"] += 1
            assert (kind, i) not in a.seen  # a session deals, masks and signs once
            a.seen[kind, i] = reply
            a.states[i].append(client.to_bytes())
        return reply

    def note(self, a: Attempt, i: int, held: dict[int, bytes], reply: bytes) -> None:
        shares = wire.split_evenly(reply[HEADER:-64], sorted(held), shamir.SHARE_BYTES)
        for owner, share in shares.items():
            assert share in (held[owner][:33], held[owner][33:])
            kind = "seed" if share == held[owner][:33] else "key"
            if i not in self.colluders:
                a.revealed[owner - 1][kind].add(i)

    # ------------------------------------------------------------------ what the coordinator does

    def open_attempt(self) -> None:
        overrides = {name: getattr(self.params, name) for name in INHERITED}
        params = make_params(self.params.n, 3, k=self.params.colluders, attempt=len(self.attempts), **overrides)
        members = [i for i in range(params.n) if i not in self.answered]
        self.attempts.append(Attempt(params, members))

    @precondition(lambda self: len(self.attempts) < ATTEMPTS)
    @rule()
    def try_again(self) -> None:
        self.open_attempt()

    def pick(self, data: st.DataObject, *phases: state.Phase) -> tuple[Attempt, int] | None:
        """An attempt and one of its members, mostly one in one of these phases."""
        a = self.attempts[data.draw(st.integers(0, len(self.attempts) - 1), "attempt")]
        members = sorted(a.clients)
        fitting = [i for i in members if a.clients[i]._state.phase in phases]
        if fitting and data.draw(st.integers(0, 5), "fitting"):
            members = fitting
        return (a, data.draw(st.sampled_from(members), "member")) if members else None

    def some(self, data: st.DataObject, members: Iterable[int], mostly: bool = True) -> list[int]:
        members = sorted(members)
        if mostly and data.draw(st.booleans(), "all"):
            return members
        return sorted(data.draw(st.sets(st.sampled_from(members)), "some")) if members else []

    def damage(self, data: st.DataObject, message: bytes) -> bytes:
        """Mostly the message itself."""
        how = data.draw(st.sampled_from([""] * 8 + ["flip", "flip", "cut", "extend", "random"]), "damage")
        if how == "flip":
            bit = data.draw(st.integers(0, 8 * len(message) - 1))
            return message[: bit // 8] + bytes([message[bit // 8] ^ 1 << bit % 8]) + message[bit // 8 + 1 :]
        if how == "cut":
            return message[: data.draw(st.integers(0, len(message) - 1))]
        if how == "extend":
            return message + data.draw(st.binary(min_size=1, max_size=8))
        return data.draw(st.binary(min_size=len(message), max_size=len(message))) if how == "random" else message

    @rule(data=st.data())
    def get_keys(self, data: st.DataObject) -> None:
        if picked := self.pick(data):
            a, i = picked
            reply = self.call(lambda: a.clients[i].keys(vouches=True))
            if reply is not None:
                a.seen["keys", i] = reply

    @rule(data=st.data())
    def send_roster(self, data: st.DataObject) -> None:
        if not (picked := self.pick(data, state.Phase.FRESH)):
            return
        a, i = picked
        entries = {j: message[HEADER:] for (kind, j), message in a.seen.items() if kind == "keys"}
        for j in data.draw(st.sets(st.sampled_from(sorted(self.colluders)), max_size=1), "lying members"):
            pair = hashlib.sha256(data.draw(st.binary(max_size=2))).digest() * 2 + b"\x01" * a.params.verify
            signature = sign(signing.statement(Stage.KEYS, a.params.hash, a.params.roster[j], pair))
            entries[j] = pair + signature
        other = self.attempts[data.draw(st.integers(0, len(self.attempts) - 1), "replayed from")]
        if data.draw(st.integers(0, 4), "replay") == 0:
            entries |= {j: message[HEADER:] for (kind, j), message in other.seen.items() if kind == "keys" and j != i}
        u1 = self.some(data, entries)
        body = [entries[j] for j in u1]
        message = wire.pack(Stage.ROSTER, a.params.hash, self.bitmap(a, u1), *body)
        self.ask(a, i, "shares", self.damage(data, message))

    @rule(data=st.data())
    def send_envelopes(self, data: st.DataObject) -> None:
        if not (picked := self.pick(data, state.Phase.SHARED)) or picked[1] not in picked[0].t1:
            return
        a, i = picked
        u1 = [j - 1 for j in self.u1_of(a, i)]
        envelopes: dict[int, bytes] = {}
        for (kind, j), message in a.seen.items():
            if kind == "shares" and j != i and j in u1:
                readers = [r for r in u1 if r != j]
                sealed = wire.split_evenly(message[HEADER + 32 : -64], readers, wire.envelope_bytes(a.params.verify))
                size = wire.message_size(Stage.SHARES, a.params.n, len(u1), a.params.verify)
                envelopes[j] = sealed[i] if len(message) == size else b""
        if data.draw(st.integers(0, 6), "swap") == 0 and len(envelopes) > 1:
            first, second = sorted(envelopes)[:2]
            envelopes[first], envelopes[second] = envelopes[second], envelopes[first]
        u2 = self.some(data, {*envelopes, i})
        body = [envelopes[j] for j in u2 if j != i]
        message = wire.pack(Stage.ENVELOPES, a.t1[i], self.bitmap(a, u2), *body)
        self.ask(a, i, "masked", self.damage(data, message))

    @rule(data=st.data())
    def send_survivors(self, data: st.DataObject) -> None:
        if not (picked := self.pick(data, state.Phase.MASKED)) or picked[1] not in picked[0].t1:
            return
        a, i = picked
        roots = {j: message[HEADER : HEADER + 32] for (kind, j), message in a.seen.items() if kind == "masked"}
        if data.draw(st.integers(0, 4), "invent") == 0:
            roots |= {j: roots.get(j, bytes(32)) for j in range(a.params.n)}
        if roots and data.draw(st.integers(0, 6), "other root") == 0:
            roots[data.draw(st.sampled_from(sorted(roots)))] = bytes(32)
        u3 = self.some(data, roots)
        message = wire.pack(Stage.SURVIVORS, a.t1[i], self.bitmap(a, u3), *(roots[j] for j in u3))
        self.ask(a, i, "agree" if a.params.consistency else "reveal", self.damage(data, message))

    @precondition(lambda self: self.params.consistency)
    @rule(data=st.data())
    def send_confirmed(self, data: st.DataObject) -> None:
        if not (picked := self.pick(data, state.Phase.AGREED)) or picked[1] not in picked[0].t1:
            return
        a, i = picked
        signatures = {j: message[HEADER:] for (kind, j), message in a.seen.items() if kind == "agree"}
        held = a.clients[i]._state
        if isinstance(held, state.Agreed):  # colluders sign whatever this member was shown
            for j in self.colluders:
                statement = signing.statement(Stage.CONSISTENCY, a.t1[i], a.params.roster[j], held.view)
                signatures[j] = sign(statement)
        signers = self.some(data, signatures)
        message = wire.pack(Stage.CONFIRMED, a.t1[i], self.bitmap(a, signers), *(signatures[j] for j in signers))
        self.ask(a, i, "reveal", self.damage(data, message))

    @rule(data=st.data(), content=st.binary(max_size=300))
    def send_noise(self, data: st.DataObject, content: bytes) -> None:
        if picked := self.pick(data):
            kind = data.draw(st.sampled_from(KINDS[1:]), "stage")
            if kind != "agree" or self.params.consistency:
                assert self.ask(*picked, kind, content) is None

    @rule(data=st.data())
    def restore_older_state(self, data: st.DataObject) -> None:
        if picked := self.pick(data):
            a, i = picked
            blob = data.draw(st.sampled_from(a.states[i]), "state")
            a.clients[i] = ClientSession.from_bytes(blob, a.params, sign)

    @rule(data=st.data())
    def wipe(self, data: st.DataObject) -> None:
        picked = self.pick(data)
        if picked and data.draw(st.integers(0, 9)) == 0:
            self.call(picked[0].clients[picked[1]].wipe)

    # ------------------------------------------------------------------ the honest coordinator that listens in

    def hand(self, a: Attempt, kind: str, i: int, message: bytes) -> None:
        server, identity = a.server, a.params.roster[i]
        if kind == "masked":
            self.call(lambda: server.add_masked(identity, message, a.vectors[i]))
            return
        add = {"keys": server.add_keys, "shares": server.add_shares, "agree": server.add_consistency}
        self.call(lambda: add.get(kind, server.add_reveal)(identity, message))

    @rule(data=st.data())
    def carry_to_the_honest_coordinator(self, data: st.DataObject) -> None:
        if not (picked := self.pick(data)):
            return
        a, i = picked
        kind = data.draw(st.sampled_from(KINDS), "kind")
        if (kind, i) in a.seen:
            sender = data.draw(st.sampled_from([i, i, i, 0]), "in whose name")
            if kind != "masked" or sender in a.vectors:
                self.hand(a, kind, sender, self.damage(data, a.seen[kind, i]))

    @rule(data=st.data(), stages=st.integers(1, 5))
    def go_on_honestly(self, data: st.DataObject, stages: int) -> None:
        """Some stages without a lie, among those that still can: so that deep states are reached often."""
        a = self.attempts[data.draw(st.integers(0, len(self.attempts) - 1), "attempt")]
        for kind in KINDS[:stages]:
            self.honest_stage(a, kind, self.some(data, a.clients))
        if stages == 5:
            self.open_sum(a)

    def honest_stage(self, a: Attempt, kind: str, members: Iterable[int]) -> None:
        server, agree = a.server, a.params.consistency
        if kind == "agree" and not agree:
            return
        requests: dict[str, Callable[[int], bytes]] = {
            "shares": lambda i: server.roster_keys(),
            "masked": lambda i: server.envelopes_for(a.params.roster[i]),
            "agree": lambda i: server.survivors(),
            "reveal": lambda i: server.confirmed() if agree else server.survivors(),
        }
        for i in members:
            if kind == "keys":
                reply = self.call(lambda i=i: a.clients[i].keys(vouches=True))
                if reply is not None:
                    a.seen["keys", i] = reply
            else:
                request = self.call(lambda i=i: requests[kind](i))
                reply = self.ask(a, i, kind, request) if request is not None else None
            if reply is not None:
                self.hand(a, kind, i, reply)

    def open_sum(self, a: Attempt) -> bool:
        total = self.call(a.server.unmask)
        if total is None:
            return False
        self.counts["sums opened"] += 1
        a.opened = total
        expected = sum(self.q[a.params.roster.index(identity)] for identity in a.server.u3)
        assert np.array_equal(total, expected)
        if a.params.verify:  # who is in it masked with the U2 that the server signed for, so all have one key
            keys = {a.sum_keys[a.params.roster.index(identity)] for identity in a.server.u3}
            assert {a.server.tag} == {
                projection.tag(lambda part: total[part], total.size, key, len(a.server.u3)) for key in keys
            }
        return True

    @rule(data=st.data())
    def open_now(self, data: st.DataObject) -> None:
        self.open_sum(self.attempts[data.draw(st.integers(0, len(self.attempts) - 1), "attempt")])

    # ------------------------------------------------------------------ what must hold

    @invariant()
    def nobodys_secrets_are_both_known_and_only_one_attempt_is(self) -> None:
        if not hasattr(self, "attempts"):
            return
        self.counts["steps"] += 1
        t, known_in = self.params.threshold, set()
        for index, a in enumerate(self.attempts):
            for owner in set(range(self.params.n)) - self.colluders:
                counts = {kind: len(who) + len(self.colluders) for kind, who in a.revealed[owner].items()}
                assert min(counts.values()) < t, (index, owner, counts)
                if max(counts.values()) >= t:
                    known_in.add(index)
        assert len(known_in) <= 1
        assert sum(a.opened is not None for a in self.attempts) <= 1

    @precondition(lambda self: hasattr(self, "attempts") and self.params.consistency)
    @invariant()
    def what_is_known_opens_a_sum_of_enough(self) -> None:
        k, honest = len(self.colluders), set(range(self.params.n)) - self.colluders
        for a in self.attempts:
            seeds, keys = (
                {i for i in honest if len(a.revealed[i][kind]) + k >= self.params.threshold} for kind in ("seed", "key")
            )
            masked = {i: set(u2 & honest - {i}) for i, u2 in a.u2.items() if i in honest}
            for group in opened_sums(masked, seeds, keys):
                assert len(group) >= max(self.params.threshold, self.params.min_survivors) - k, (group, masked)

    def teardown(self) -> None:
        if not hasattr(self, "attempts"):
            return
        self.open_attempt()
        last = self.attempts[-1]
        enough = len(last.clients) >= max(self.params.threshold, self.params.min_survivors)
        for kind in KINDS:
            self.honest_stage(last, kind, list(last.clients))
        assert self.open_sum(last) == enough
        self.nobodys_secrets_are_both_known_and_only_one_attempt_is()

    # ------------------------------------------------------------------ helpers

    @staticmethod
    def bitmap(a: Attempt, members: Iterable[int]) -> bytes:
        return wire.pack_members([i + 1 for i in members], a.params.n)

    def u1_of(self, a: Attempt, i: int) -> tuple[int, ...]:
        """Positions of the set that member i dealt to."""
        for blob in reversed(a.states[i]):
            held, _ = state.parse(blob, a.params)
            if isinstance(held, state.Shared):
                return held.u1
        return ()
