"""Rounds with pinned identities and the consistency stage, and a coordinator that lies in them.

Node 101 is the one that is lied to, unless a test says otherwise.
"""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from lensemble_flwr.config import config_hash, load_config
from lensemble_flwr.errors import LensembleError, RoundError, SecureAggregationError
from lensemble_flwr.federation.claim_inputs import claim_inputs, claims_of
from lensemble_flwr.federation.coordinator import Reply
from lensemble_flwr.federation.participant import Runtime, SiteParticipant
from lensemble_flwr.federation.plan import make_plan, round_open, session_params
from lensemble_flwr.federation.policy import save_policy
from lensemble_flwr.federation.records import JoinReply, JoinRequest, Outcome, RoundClose, RoundOpen
from lensemble_flwr.federation.roster import ROSTER_FILE, Roster, save_roster
from lensemble_flwr.federation.site import Site
from lensemble_flwr.federation.task import theta_hash
from lensemble_flwr.federation.tasks import build_task
from lensemble_flwr.federation.wire import Refusal, Stage
from lensemble_flwr.preflight import _traffic
from lensemble_flwr.secagg import ClientSession, signing, state
from lensemble_flwr.secagg import wire as secagg_wire
from tests.federation.harness import Federation, Killed

NODE = 101
HEADER = secagg_wire.HEADER_BYTES
Fields = Mapping[str, Any]


def pinned(tmp_path: Path, overrides: str = "diloco.rounds=1") -> Federation:
    """Four sites that have pinned each other."""
    federation = Federation(tmp_path, f"secagg.pinned=true {overrides}")
    sites = [node.site for node in federation.transport.members.values()]
    roster = Roster({f"s{i}": site.identity for i, site in enumerate(sites)})
    for site in sites:
        save_roster(site.folder / "roster.json", roster)
    return federation


def site_of(federation: Federation, node: int = NODE) -> Site:
    return federation.transport.members[node].site


def replies(federation: Federation, stage: str) -> dict[int, list[Refusal | None]]:
    found: dict[int, list[Refusal | None]] = {node: [] for node in federation.transport.members}
    for at, node, _, reply in federation.transport.log:
        if at == stage and reply is not None:
            found[node].append(reply.refusal)
    return found


def outcomes(federation: Federation) -> list[tuple[str, int]]:
    return [(record["outcome"], record["participants"]) for record in federation.rounds()]


# ---------------------------------------------------------------- the stage itself


@pytest.mark.parametrize(
    ("overrides", "asked"),
    [
        ("", False),
        ("secagg.pinned=true", True),
        ("secagg.consistency=true", True),
        ("secagg.pinned=true secagg.consistency=false", False),
    ],
)
def test_one_exchange_more_and_only_when_it_is_on(tmp_path: Path, overrides: str, asked: bool) -> None:
    federation = Federation(tmp_path, f"diloco.rounds=1 {overrides}")
    federation.start()
    stages = list(dict.fromkeys(stage for stage, *_ in federation.transport.log))
    agree = [Stage.AGREE] if asked else []
    assert stages == [Stage.JOIN, Stage.OPEN, Stage.SHARE, Stage.TRAIN, *agree, Stage.UNMASK, Stage.CLOSE]
    assert outcomes(federation) == [("committed", 4)]


def test_pinned_sites_commit_and_lose_members(tmp_path: Path) -> None:
    federation = pinned(tmp_path, "diloco.rounds=4")
    drops = dict(enumerate((Stage.SHARE, Stage.TRAIN, Stage.AGREE, Stage.UNMASK)))

    def before(stage: str, node: int, fields: Fields) -> Any:
        return False if node == NODE and stage == drops.get(len(federation.rounds())) else None

    federation.transport.before = before
    federation.start()
    assert outcomes(federation) == [("committed", 3), ("committed", 3), ("committed", 4), ("committed", 4)]


def test_two_that_do_not_agree_make_the_attempt_void_and_nobody_was_asked(tmp_path: Path) -> None:
    federation = pinned(tmp_path)
    lost: list[int] = []

    def before(stage: str, node: int, fields: Fields) -> Any:
        if stage == Stage.AGREE and node in (NODE, NODE + 1) and len(lost) < 2:
            lost.append(node)
            return False
        return None

    federation.transport.before = before
    federation.start()
    assert outcomes(federation) == [("committed", 4)]
    assert [name for name, _ in federation.events].count("void") == 1
    assert replies(federation, Stage.UNMASK) == {node: [None] for node in federation.transport.members}
    assert federation.ledger_rounds() == [1] * 4


# ---------------------------------------------------------------- whom a site sums with


def opened_for(federation: Federation, federation_id: bytes, strangers: int = 0, **changes: Any) -> RoundOpen:
    config, task = federation.config, federation.task
    me = site_of(federation).identity
    others = [node.site.identity for node in federation.transport.members.values() if node.site.identity != me]
    invented = [
        Ed25519PrivateKey.from_private_bytes(bytes([i + 1]) * 32).public_key().public_bytes_raw()
        for i in range(strangers)
    ]
    roster = tuple(sorted([me, *invented, *others[: 3 - strangers]]))
    plan = make_plan(config, len(roster), task.dimension)
    theta = theta_hash(task.layout, task.initial())
    return dataclasses.replace(round_open(config, task, plan, federation_id, 0, theta, roster), **changes)


def joined(federation: Federation, runtime: Runtime | None = None) -> tuple[SiteParticipant, bytes]:
    """Node 101's participant, which joined a federation of the coordinator's."""
    participant = federation.transport.participant(NODE)
    if runtime is not None:
        participant.runtime = runtime
    federation_id = b"f" * 32
    request = JoinRequest(federation_id, config_hash(federation.config), federation.task.base_hash)
    participant.join(request.encode())
    return participant, federation_id


def refusal(participant: SiteParticipant, opened: RoundOpen) -> str:
    with pytest.raises(LensembleError) as error:
        participant.open_round(opened.encode(), 1, None)
    with participant.site.ledger() as ledger:
        assert not ledger.rounds(opened.federation_id)
    assert list((participant.site.folder / "releases").iterdir()) == []
    assert participant.public_round() is None
    return str(error.value)


@pytest.mark.parametrize("strangers", [1, 2, 3])
@pytest.mark.parametrize("simulation", [True, False])
def test_invented_participants_are_refused_before_anything_leaves(
    tmp_path: Path, strangers: int, simulation: bool
) -> None:
    federation = pinned(tmp_path)
    participant, federation_id = joined(federation, Runtime(simulation))
    assert "not pinned here" in refusal(participant, opened_for(federation, federation_id, strangers))
    participant.open_round(opened_for(federation, federation_id).encode(), 1, None)  # the real ones are welcome


def test_a_pinned_roster_is_held_to_in_any_run(tmp_path: Path) -> None:
    """Also where the submitter does not ask for pinned identities."""
    federation = Federation(tmp_path, "diloco.rounds=1")
    members = [node.site.identity for node in federation.transport.members.values()]
    save_roster(site_of(federation).folder / "roster.json", Roster({f"s{i}": key for i, key in enumerate(members[:3])}))
    federation.start()  # the others have pinned nobody and go on without it
    assert outcomes(federation) == [("committed", 3)]
    assert replies(federation, Stage.OPEN)[NODE] == [Refusal.POLICY]


def test_a_site_without_a_roster_takes_no_part_in_a_pinned_run(tmp_path: Path) -> None:
    federation = Federation(tmp_path, "secagg.pinned=true diloco.rounds=1")
    with pytest.raises(RoundError, match="pinned roster") as error:
        joined(federation, Runtime(simulation=False))
    assert error.value.fields["refusal"] == Refusal.POLICY
    participant, federation_id = joined(federation)  # simulated sites pin the sites beside them
    participant.runtime = Runtime(simulation=False)
    assert "pinned roster" in refusal(participant, opened_for(federation, federation_id))


def test_a_damaged_roster_stops_the_site(tmp_path: Path) -> None:
    federation = pinned(tmp_path)
    (site_of(federation).folder / "roster.json").write_text("{}")
    federation.start()
    assert replies(federation, Stage.JOIN)[NODE][0] == Refusal.POLICY
    assert outcomes(federation) == [("committed", 3)]


def test_the_policy_can_insist(tmp_path: Path) -> None:
    federation = Federation(tmp_path, "diloco.rounds=1")
    site = site_of(federation)
    participant, federation_id = joined(federation)
    opened = opened_for(federation, federation_id)
    policy = site.policy
    save_policy(site.folder / "policy.json", dataclasses.replace(policy, require_consistency=True))
    assert "require_consistency" in refusal(participant, opened)
    save_policy(site.folder / "policy.json", dataclasses.replace(policy, require_roster=True))
    assert "require_roster" in refusal(participant, opened)
    save_policy(site.folder / "policy.json", policy)
    participant.open_round(opened.encode(), 1, None)


@pytest.mark.parametrize(
    "changes", [{"consistency": False}, {"pinned": False}, {"pinned": False, "consistency": False}]
)
def test_the_stage_cannot_be_talked_away(tmp_path: Path, changes: dict[str, Any]) -> None:
    federation = pinned(tmp_path)
    participant, federation_id = joined(federation)
    assert "not those" in refusal(participant, opened_for(federation, federation_id, **changes))


def test_somebody_elses_name_and_keys_do_not_help(tmp_path: Path) -> None:
    """A node that joins under node 101's identity without its key: its keys are not signed, so it is left out."""
    federation = pinned(tmp_path)

    def impostor(stage: str, node: int, reply: Reply) -> Reply:
        if stage == Stage.OPEN and node == NODE:
            return dataclasses.replace(reply, body=reply.body[:HEADER] + bytes(range(64)) + reply.body[-64:])
        return reply

    federation.transport.after = impostor
    federation.start()
    assert federation.excluded(0) == {"bad_signature"}
    assert outcomes(federation) == [("committed", 3)]


def test_swapped_keys_are_refused_before_shares_are_dealt(tmp_path: Path) -> None:
    federation = pinned(tmp_path)

    def before(stage: str, node: int, fields: Fields) -> Any:
        if stage != Stage.SHARE or node != NODE:
            return None
        body = bytearray(fields["body"])
        own = session_params(RoundOpen.decode(federation.transport.members[NODE].memory["open"]), 1)
        victim = next(p for p in range(4) if p + 1 != own.position(site_of(federation).identity))
        at = HEADER + 1 + 128 * victim
        key = Ed25519PrivateKey.from_private_bytes(bytes(32)).public_key().public_bytes_raw()
        body[at : at + 32] = hashlib.sha256(key).digest()
        return {**fields, "body": bytes(body)}

    federation.transport.before = before
    federation.start()
    assert replies(federation, Stage.SHARE)[NODE] == [Refusal.PROTOCOL]
    assert replies(federation, Stage.TRAIN)[NODE] == []
    assert federation.ledger_rounds()[1] == 0


# ---------------------------------------------------------------- split views


def without_one(body: bytes, federation: Federation, out: int) -> bytes:
    """A SURVIVORS message that leaves out node `out`."""
    opened = RoundOpen.decode(federation.transport.members[NODE].memory["open"])
    position = session_params(opened, 1).position(site_of(federation, out).identity)
    members = [p for p in range(1, 5) if body[HEADER] >> (p - 1) & 1]
    roots = secagg_wire.split_evenly(body[HEADER + 1 :], members, 32)
    kept = [p for p in members if p != position]
    bitmap = secagg_wire.pack_members(kept, 4)
    return body[:HEADER] + bitmap + b"".join(roots[p] for p in kept)


def test_one_that_is_shown_other_survivors_reveals_nothing(tmp_path: Path) -> None:
    federation = pinned(tmp_path)

    def before(stage: str, node: int, fields: Fields) -> Any:
        if stage == Stage.AGREE and node == NODE:
            return {**fields, "body": without_one(fields["body"], federation, 103)}
        return None

    federation.transport.before = before
    federation.start()
    assert replies(federation, Stage.AGREE)[NODE] == [None]  # it signs what it was shown
    assert replies(federation, Stage.UNMASK)[NODE] == []
    assert federation.excluded(0) == {"bad_signature"}
    assert outcomes(federation) == [("committed", 4)]
    # the coordinator asks it all the same, with signatures of what the others saw
    question = next(f for s, n, f, _ in federation.transport.log if s == Stage.UNMASK)
    assert federation.transport.deliver(Stage.UNMASK, NODE, question).refusal is not None
    assert not site_of(federation).answered(federation.folder.federation_id, 0)  # type: ignore[union-attr]


def test_a_view_split_in_halves_is_answered_by_nobody(tmp_path: Path) -> None:
    federation = pinned(tmp_path)
    asked: list[Reply] = []
    signatures: dict[int, Reply] = {}

    def before(stage: str, node: int, fields: Fields) -> Any:
        if stage == Stage.AGREE and node < 102:
            return {**fields, "body": without_one(fields["body"], federation, 103)}
        return None

    def after(stage: str, node: int, reply: Reply) -> Reply:
        if stage == Stage.AGREE:
            signatures[node] = reply
        if stage == Stage.AGREE and len(signatures) == 4:  # now it has all that it can get
            params = session_params(RoundOpen.decode(federation.transport.members[NODE].memory["open"]), 1)
            for chosen in ((100, 101), (102, 103), (100, 101, 102), (100, 101, 102, 103)):
                ordered = sorted((params.position(site_of(federation, n).identity), n) for n in chosen)
                bitmap = secagg_wire.pack_members([p for p, _ in ordered], 4)
                body = b"".join(signatures[n].body[HEADER:] for _, n in ordered)
                binding = reply.body[2:HEADER]
                question = secagg_wire.pack(secagg_wire.Stage.CONFIRMED, binding, bitmap, body)
                asked.extend(federation.transport.deliver(Stage.UNMASK, n, {"body": question}) for n in (100, 102))
            signatures.clear()
        return reply

    federation.transport.before, federation.transport.after = before, after
    with pytest.raises(SecureAggregationError, match="3 attempts"):
        federation.start()
    assert len(asked) == 3 * 8
    assert all(reply.refusal is not None for reply in asked)
    for node in federation.transport.members.values():
        assert not (node.site.folder / "answered").exists() or not list((node.site.folder / "answered").iterdir())
    assert federation.ledger_rounds() == [1] * 4  # the same payload in every attempt


def test_a_site_signs_one_view_even_if_its_memory_is_put_back(tmp_path: Path) -> None:
    federation = pinned(tmp_path)
    seen: list[Refusal | None] = []

    def before(stage: str, node: int, fields: Fields) -> Any:
        if stage == Stage.AGREE and node == NODE and not seen:
            memory = federation.transport.members[NODE].memory
            stale = dict(memory)
            other = {**fields, "body": without_one(fields["body"], federation, 103)}
            for request in (fields, other, fields):
                memory.clear()
                memory.update(stale)
                seen.append(federation.transport.deliver(Stage.AGREE, NODE, request).refusal)
            return False
        return None

    federation.transport.before = before
    federation.start()
    assert seen == [None, Refusal.PROTOCOL, Refusal.PROTOCOL]


@pytest.mark.parametrize("stage", [Stage.AGREE, Stage.UNMASK])
def test_a_bad_question_does_not_use_the_one_answer_up(tmp_path: Path, stage: str) -> None:
    federation = pinned(tmp_path)
    first: list[Reply] = []

    def before(at: str, node: int, fields: Fields) -> Any:
        if at == stage and node == NODE and not first:
            for body in (b"", b"garbage", fields["body"][:-1] + bytes([fields["body"][-1] ^ 1]), bytes(5000)):
                first.append(federation.transport.deliver(at, NODE, {"body": body}))
        return None

    federation.transport.before = before
    federation.start()
    # of the last kind, one signature of four may be wrong at unmask: three are enough
    assert [r.refusal is not None for r in first] in ([True] * 4, [True, True, False, True])
    assert outcomes(federation)[0][0] == "committed"


# ---------------------------------------------------------------- answered once, through attempts and resume


@pytest.mark.parametrize(("count", "colluders"), [(2, 0), (3, 1)])
def test_the_attempt_rule_holds_through_resume(tmp_path: Path, count: int, colluders: int) -> None:
    """Some answer (t = 3 of them, or fewer), the coordinator dies, forgets that it asked, and asks the rest too.

    Who answered refuses for ever, but for one that colludes and forgets: with it t answers are not found again.
    """
    federation = pinned(tmp_path, "diloco.rounds=2")
    answered: list[int] = []

    def after(stage: str, node: int, reply: Reply) -> Reply:
        if stage == Stage.UNMASK and not federation.rounds():
            answered.append(node)
            if len(answered) == count:
                raise Killed
        return reply

    federation.transport.after = after
    with pytest.raises(Killed):
        federation.start()
    (tmp_path / "run/state/round-00000/asked").unlink()
    federation.transport.log.clear()
    federation.transport.after = lambda stage, node, reply: reply
    for colluder in answered[:colluders]:
        shutil.rmtree(site_of(federation, colluder).folder / "answered")
    with pytest.raises(SecureAggregationError, match="3 attempts"):
        federation.resume()
    assert all(code is not None for codes in replies(federation, Stage.UNMASK).values() for code in codes)
    opened = replies(federation, Stage.OPEN)
    assert {node for node, codes in opened.items() if codes[0] is not None} == set(answered[colluders:])


def test_killed_between_the_latch_and_the_answer_it_never_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The latch is on disk first: that round is lost for this member, whatever it is asked; the others carry it."""
    federation = pinned(tmp_path)
    honest = ClientSession.reveal

    def die(self: ClientSession, question: bytes) -> bytes:
        if self._identity == site_of(federation).identity:
            raise MemoryError
        return honest(self, question)

    monkeypatch.setattr(ClientSession, "reveal", die)
    stale: dict[str, bytes] = {}

    def before(stage: str, node: int, fields: Fields) -> Any:
        if stage == Stage.UNMASK and node == NODE:
            stale.update(federation.transport.members[NODE].memory)
        return None

    federation.transport.before = before
    federation.start()
    assert outcomes(federation) == [("committed", 4)]
    monkeypatch.undo()
    federation.transport.members[NODE].memory.update(stale)
    question = next(f for s, n, f, _ in federation.transport.log if s == Stage.UNMASK and n == NODE)
    assert federation.transport.deliver(Stage.UNMASK, NODE, question).refusal is not None


# ---------------------------------------------------------------- secrets


def test_secrets_are_in_the_memory_of_an_open_round_and_nowhere_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seeds, private keys, mask keys and shares, of every session, against every file, message and event of the run."""
    federation, secrets, plain = pinned(tmp_path, "diloco.rounds=2"), set[bytes](), list[bytes]()
    wipe, masked = state.wipe, ClientSession.masked

    def spy(old: state.State) -> None:
        secrets.update(bytes(secret) for secret in old.secrets())
        wipe(old)

    def keep_q(self: ClientSession, envelopes: bytes, q: np.ndarray, **kw: Any) -> np.ndarray:
        plain.append(q.astype("<i8").tobytes()[:64])
        return masked(self, envelopes, q, **kw)

    monkeypatch.setattr(state, "wipe", spy)
    monkeypatch.setattr(ClientSession, "masked", keep_q)
    held: list[bool] = []

    def before(stage: str, node: int, fields: Fields) -> Any:
        memory = federation.transport.members[node].memory
        if stage == Stage.UNMASK:
            held.append(sum(map(len, memory.values())) < 64 << 10)
        return None

    federation.transport.before = before
    federation.start()
    assert len(secrets) > 2 * 4 * 10
    assert len(plain) == 8
    assert held == [True] * 8
    halves = {part for secret in secrets for part in ([secret] if len(secret) == 32 else [secret[:33], secret[33:]])}
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    memory = b"".join(value for node in federation.transport.members.values() for value in node.memory.values())
    requests = [bytes(v) for _, _, f, _ in federation.transport.log for v in f.values() if isinstance(v, bytes)]
    # one share per peer is revealed on purpose, in the answers to the last question
    answers = [r.body for s, _, _, r in federation.transport.log if r is not None and s != Stage.UNMASK]
    vectors = [r.vector.tobytes() for _, _, _, r in federation.transport.log if r is not None and r.vector is not None]
    texts = [repr(federation.events).encode(), repr(federation.transport.errors).encode()]
    for blob in (*files.values(), memory, *requests, *answers, *vectors, *texts):
        assert not any(secret in blob or secret.hex().encode() in blob for secret in halves)
    for blob in (memory, *requests, *answers, *vectors, *texts):
        assert not any(q in blob for q in plain)
    assert not any(q in content for path, content in files.items() if "sites" not in path.parts for q in plain)


# ---------------------------------------------------------------- what may be claimed


@pytest.mark.parametrize(
    ("overrides", "guarantee"),
    [
        ("", "local"),
        ("secagg.pinned=true", "central"),
        ("secagg.consistency=true", "local"),
        ("secagg.pinned=true secagg.consistency=false", "local"),
    ],
)
def test_the_coordinators_line_follows_the_configuration(overrides: str, guarantee: str) -> None:
    config = load_config(f"experiment=linear privacy.guarantee=central {overrides}")
    plan = make_plan(config, 4, 17)
    real = next(row for row in claims_of(config, plan, False) if row.observer == "coordinator")
    assert (real.guarantee, real.holds) == (guarantee, True)
    simulated = next(row for row in claims_of(config, plan, True) if row.observer == "coordinator")
    assert (simulated.holds, simulated.why_not) == (False, "simulated, not claimed")
    inputs = claim_inputs(config, plan, False)
    roster = tuple(bytes([i]) * 32 for i in range(4))
    opened = round_open(config, build_task(config), plan, bytes(32), 0, bytes(32), roster)
    assert (inputs.identities_pinned, inputs.consistency_stage) == (opened.pinned, opened.consistency)


def test_what_is_signed_is_only_ever_the_protocols(tmp_path: Path) -> None:
    """The prefix keeps a protocol signature from being taken for anything else that is signed with the same key."""
    federation = pinned(tmp_path)
    statements: list[bytes] = []
    honest = Site.sign

    def spy(self: Site, statement: bytes) -> bytes:
        statements.append(statement)
        return honest(self, statement)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Site, "sign", spy)
        federation.start()
    stages = secagg_wire.Stage
    signed = [stages.KEYS, stages.SHARES, stages.MASKED, stages.CONSISTENCY, stages.REVEAL]
    joins = [s for s in statements if s.startswith(b"lensemble join\x00\x02")]
    assert len(joins) == len(set(joins)) == 4
    statements = [s for s in statements if s not in joins]
    assert len(statements) == len(signed) * 4 == len(set(statements))
    assert sorted(stages(s[15]) for s in statements) == sorted(4 * signed)
    assert all(s.startswith(b"LSA1 signature\x02") and len(s) == 15 + 1 + 3 * 32 for s in statements)
    example = signing.statement(stages.KEYS, bytes(32), bytes(32), b"")
    assert example == b"LSA1 signature\x02\x10" + bytes(64) + hashlib.sha256(b"").digest()


@pytest.mark.parametrize("lie", ["identity", "dataset_root", "signature", "another federation"])
def test_nobody_joins_in_anothers_name_or_binds_it_to_another_root(tmp_path: Path, lie: str) -> None:
    federation = pinned(tmp_path)
    other = site_of(federation, 103).identity

    def after(stage: str, node: int, reply: Reply) -> Reply:
        if stage != Stage.JOIN or node != NODE:
            return reply
        join = JoinReply.decode(reply.body)
        changes = {"identity": other, "dataset_root": bytes(32), "signature": bytes(64)}
        if lie == "another federation":
            statement = JoinReply.statement(bytes(32), join.identity, join.dataset_root)
            changed = dataclasses.replace(join, signature=site_of(federation).sign(statement))
        else:
            changed = dataclasses.replace(join, **{lie: changes[lie]})
        return dataclasses.replace(reply, body=changed.encode())

    federation.transport.after = after
    federation.start()
    told = [fields for name, fields in federation.events if name == "refused"]
    assert {(fields["stage"], fields["code"]) for fields in told} == {(Stage.JOIN, "BAD_SIGNATURE")}
    assert len({fields["node"] for fields in told}) == 1  # the liar, and who it is
    assert outcomes(federation) == [("committed", 3)]


@pytest.mark.parametrize("secure", ["secagg.pinned=false", "secagg.pinned=true", "secagg.verify_sum=true"])
def test_preflight_counts_the_bytes_that_a_round_sends(tmp_path: Path, secure: str) -> None:
    federation = Federation(tmp_path, f"diloco.rounds=2 {secure}")
    federation.start()
    plan = make_plan(federation.config, 4, federation.task.dimension)
    secagg = federation.config.secagg
    up, down = _traffic(plan, secagg.compares_views, secagg.verify_sum)
    record = federation.rounds()[1]  # the first has no RoundClose to send
    assert record["bytes_up"] == 4 * up
    assert abs(record["bytes_down"] - 4 * down) < 4 * 64  # lengths of the two records are rounded


@pytest.mark.parametrize("stage", [Stage.JOIN, Stage.OPEN, Stage.SHARE, Stage.TRAIN, Stage.AGREE, Stage.UNMASK])
def test_whatever_bytes_a_coordinator_sends_only_a_typed_error_comes_of_them(tmp_path: Path, stage: str) -> None:
    """Before the genuine message of a stage: noise, cuts, additions, flipped bits. Nothing else is ever raised."""
    federation, rng = pinned(tmp_path), np.random.default_rng(7)
    done: list[Reply] = []

    def before(at: str, node: int, fields: Fields) -> Any:
        if at != stage or node != NODE or done:
            return None
        name = "envelopes" if at == Stage.TRAIN else "body"
        good = fields[name]
        flips = [bytearray(good) for _ in range(12)]
        for flipped in flips:
            flipped[int(rng.integers(len(good)))] ^= 1 << int(rng.integers(8))
        cuts = [good[: int(rng.integers(len(good)))] for _ in range(6)]
        noise = [rng.bytes(len(good)), rng.bytes(40), b"", good + b"\0", 2 * good, bytes(1 << 16)]
        for body in (*map(bytes, flips), *cuts, *noise):
            done.append(federation.transport.deliver(at, node, {**fields, name: body}))
        for odd in (None, 7, "text", [1]):
            done.append(federation.transport.deliver(at, node, {**fields, name: odd}))
        return None

    federation.transport.before = before
    federation.start()
    assert len(done) == 28
    raised = [error for _, node, error in federation.transport.errors if node == NODE]
    assert len(raised) >= 22  # of CONFIRMED one signature in four may be wrong
    assert all(isinstance(error, LensembleError) for error in raised)
    # what is refused does not use a session up
    assert outcomes(federation) == [("committed", 4)]


def test_a_round_that_is_over_is_never_signed_again(tmp_path: Path) -> None:
    """A lying coordinator closes a round and brings an older Flower state back: no second view is signed."""
    federation = pinned(tmp_path)
    kept: dict[str, Any] = {}

    class Stop(BaseException):
        pass

    def before(stage: str, node: int, fields: Any) -> None:
        if stage == Stage.AGREE and node == NODE and not kept:
            kept.update(memory=dict(federation.transport.members[node].memory), body=fields["body"])

    def after(stage: str, node: int, reply: Any) -> Any:
        if stage == Stage.AGREE and node == NODE:
            raise Stop
        return reply

    federation.transport.before, federation.transport.after = before, after
    with pytest.raises(Stop):
        federation.start()
    site = federation.transport.members[NODE].site

    def stale() -> SiteParticipant:
        memory = dict(kept["memory"])
        return SiteParticipant(site, federation.config, federation.task, 1, memory, Runtime(simulation=True))

    opened = stale().public_round()
    assert opened is not None
    burnt = RoundClose(
        opened.federation_id, opened.round, int(Outcome.BURNT), opened.digest(), opened.theta_hash, bytes(32), ()
    )
    stale().close_round(burnt.encode(), None)
    with pytest.raises(RoundError, match="over"):
        stale().agree(kept["body"])
    with pytest.raises(LensembleError):
        stale().unmask(kept["body"])


def test_a_round_that_a_later_close_settled_is_never_signed_again(tmp_path: Path) -> None:
    """Which states were left is forgotten with a round, so that it is over must be on the disk before."""
    federation = pinned(tmp_path)
    kept: dict[str, Any] = {}

    def before(stage: str, node: int, fields: Any) -> Any:
        if stage == Stage.AGREE and node == NODE:
            other = without_one(fields["body"], federation, 103)
            kept.update(memory=dict(federation.transport.members[node].memory), body=other)
        return None if stage != Stage.CLOSE or node != NODE else False

    federation.transport.before = before
    federation.start()
    fid = federation.folder.federation_id  # type: ignore[union-attr]
    later = RoundClose(fid, 7, int(Outcome.BURNT), bytes(32), bytes(32), bytes(32), ())
    assert federation.transport.deliver(Stage.CLOSE, NODE, {"body": later.encode()}).refusal is None
    memory = federation.transport.members[NODE].memory
    memory.clear()
    memory.update(kept["memory"])
    assert federation.transport.deliver(Stage.AGREE, NODE, {"body": kept["body"]}).refusal == Refusal.STALE


def test_who_is_not_pinned_does_not_stop_the_others(tmp_path: Path) -> None:
    """A connected stranger would be refused by every site in every round: the coordinator leaves it out."""
    federation = pinned(tmp_path, "federation.participants=4 federation.min_participants=3 diloco.rounds=1")
    sites = {node: member.site for node, member in federation.transport.members.items()}
    stranger = max(sites)
    known = {f"s{node}": site.identity for node, site in sites.items() if node != stranger}
    for node, site in sites.items():
        if node != stranger:
            save_roster(site.folder / ROSTER_FILE, Roster(known))
    federation.start(roster=Roster(known))
    assert [r["outcome"] for r in federation.rounds()] == ["committed"]
    assert federation.rounds()[0]["participants"] == 3


def test_a_view_is_signed_once_though_the_round_ends_in_between(tmp_path: Path) -> None:
    """One process has found the round open; another signs and closes it, and with it go the marks of its sessions."""
    federation = pinned(tmp_path)
    signed: list[bytes] = []
    refusals: list[LensembleError] = []

    def before(stage: str, node: int, fields: Fields) -> Any:
        if stage != Stage.AGREE or node != NODE or signed:
            return None
        assert federation.folder is not None
        opened, member = federation.folder.opened(0), federation.transport.members[NODE]
        assert opened is not None
        inner = federation.transport.participant(NODE)
        shown = fields["body"]
        members, body = secagg_wire.unpack_with_members(shown, secagg_wire.Stage.SURVIVORS, shown[2:34], 4)
        own = opened.roster.index(member.site.identity) + 1
        left = [j for j in members if j != next(j for j in members if j != own)]
        roots = secagg_wire.split_evenly(body, members, 32)
        other = secagg_wire.pack(
            secagg_wire.Stage.SURVIVORS, shown[2:34], secagg_wire.pack_members(left, 4), *(roots[j] for j in left)
        )

        def process() -> SiteParticipant:
            site = Site(member.site.folder)
            return SiteParticipant(site, inner.config, inner.task, member.partition, dict(member.memory), inner.runtime)

        late = process()
        mark = late.site.session_once

        def meanwhile(*args: Any) -> None:
            signed.append(process().agree(shown).body)
            close = RoundClose(
                opened.federation_id, 0, Outcome.BURNT, opened.digest(), opened.theta_hash, bytes(32), ()
            )
            process().close_round(close.encode(), None)
            mark(*args)

        late.site.session_once = meanwhile  # type: ignore[method-assign]
        try:
            signed.append(late.agree(other).body)
        except LensembleError as error:
            refusals.append(error)
        return False

    federation.transport.before = before
    federation.start()
    assert len(signed) == 1
    assert len(refusals) == 1
    assert "is over" in str(refusals[0])
