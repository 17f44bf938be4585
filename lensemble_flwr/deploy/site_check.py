"""What a site's operator wants to know before anybody trains: is everything sound, what is allowed, what was spent, and
what a given run would be refused for. Reads only; nothing here is ever sent."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from lensemble_flwr.config import Config
from lensemble_flwr.data.formats.spec import open_reader
from lensemble_flwr.deploy.bundle import bundle_hash
from lensemble_flwr.deploy.keys import open_to_others, read_node_key
from lensemble_flwr.deploy.scripts import JUDGE
from lensemble_flwr.deploy.site_folder import programs, start_script
from lensemble_flwr.deploy.tls import days_left, fingerprint, read_authority, visit
from lensemble_flwr.errors import LensembleError
from lensemble_flwr.federation.plan import make_plan, opened_charge, round_open
from lensemble_flwr.federation.policy import Policy, run_budget
from lensemble_flwr.federation.roster import Roster
from lensemble_flwr.federation.site import Site
from lensemble_flwr.federation.site_dataset import DATASET, check_dataset, load_dataset
from lensemble_flwr.federation.site_settings import SIMULATOR, SiteSettings
from lensemble_flwr.federation.task import Task
from lensemble_flwr.federation.tasks import build_task
from lensemble_flwr.owners import check_owner
from lensemble_flwr.privacy.printed import printed

OK, WARNING, BAD = "ok", "warning", "REFUSED"
CLOCK_BAD_S, CLOCK_WARN_S = 300.0, 5.0
"""Flower accepts messages of a SuperNode whose clock is up to 300 s late and 5 s early."""
DISK_BAD, DISK_WARN = 64 << 20, 1 << 30
SOON_DAYS = 30.0


@dataclass
class Findings:
    """Lines for a person; the site is sound if none of them is bad."""

    lines: list[tuple[str, str, str]] = field(default_factory=list)

    def add(self, level: str, what: str, text: str) -> None:
        self.lines.append((level, what, text))

    @contextmanager
    def about(self, what: str, more: str = "") -> Iterator[None]:
        """A known error of the block, or a file that cannot be read, is a bad line; ``more`` follows its advice."""
        try:
            yield
        except LensembleError as error:
            self.add(BAD, what, " ".join(filter(None, (error.message, error.remediation, more))))
        except (OSError, UnicodeDecodeError) as error:
            self.add(BAD, what, f"cannot be read: {error}")

    @property
    def sound(self) -> bool:
        return all(level != BAD for level, _, _ in self.lines)

    def text(self) -> str:
        """One finding a line."""
        width = max((len(what) for _, what, _ in self.lines), default=0)
        return "\n".join(f"{level:<8} {what:<{width}}  {text}" for level, what, text in self.lines)


def check_site(folder: Path, config: Config | None = None, *, online: bool = True) -> Findings:
    """Look at everything a site needs.

    Args:
        folder: the site's.
        config: of a run, to be told what it would be refused for; None for the site alone.
        online: whether to visit the SuperLink (certificate, clock).
    """
    found = Findings()
    site = settings = policy = None
    with found.about("site"):
        check_owner(folder)  # opening its ledger may write
        site = Site(folder)
        settings = site.settings
        found.add(OK, "site", f"{settings.name if settings else 'simulated'}, identity {site.identity.hex()}")
    if site is None:
        return found
    with found.about("secrets"):
        _permissions(found, folder, settings)
    with found.about("policy"):
        policy = site.policy
        for line in in_words(policy):
            found.add(OK, "policy", line)
        counts_on_others = policy.max_epsilon_central is not None and policy.max_epsilon_local is None
        if settings is not None and counts_on_others and not (policy.require_roster and policy.require_consistency):
            found.add(
                WARNING,
                "policy",
                "only the central budget is limited and nobody has to be pinned: a coordinator that invents "
                "participants sees this site's update with little noise. Set require_roster and require_consistency, "
                "or max_epsilon_local",
            )
    with found.about("roster"):
        roster, pin = site.roster, f"lensemble site roster {shlex.quote(str(folder))} --add NAME=IDENTITY ..."
        if roster is not None and roster.strangers([site.identity]):
            found.add(BAD, "roster", f"this site is missing in its own roster: {pin}")
        elif roster is None and policy is not None and policy.require_roster:
            found.add(BAD, "roster", f"the policy requires a roster, and none is pinned: {pin}")
    with found.about("ledger"):
        _ledger(found, site, policy)
    with found.about("disk"):
        _disk(found, folder)
    with found.about("sums"):
        _forged(found, folder)
    if settings is not None:
        with found.about("node key"):
            read_node_key(folder / "supernode.key")
            found.add(OK, "node key", "the SuperNode's key can be read")
        with found.about("app"):
            _app(found, folder, policy, settings)
        _tls(found, site, settings, online)
        with found.about("data"):
            _data(found, folder, settings)
    if config is not None and policy is not None:
        with found.about("run"):
            _run(found, site, settings, policy, config)
    return found


def in_words(policy: Policy) -> Iterator[str]:
    """What a policy allows, one sentence a line."""
    for view, epsilon, against in (
        ("local", policy.max_epsilon_local, "anyone, by its own noise"),
        ("central", policy.max_epsilon_central, "a reader of the models, by the noise of all"),
    ):
        limit = "not limited" if epsilon is None else f"at most epsilon {epsilon:g} at delta {policy.delta:g} for life"
        yield f"against {against}: {limit} ({view})"
    if policy.unlimited:
        yield "WITHOUT a lifetime budget"
    yield "updates without noise: " + ("ALLOWED" if policy.allow_non_private else "refused")
    yield "a federation of two: " + (
        "ALLOWED (the peer sees this site's noised update)" if policy.allow_two_party else "refused"
    )
    yield "tasks besides the built-in ones: " + (", ".join(policy.allowed_tasks) or "refused")
    limits = [
        f"at least {policy.min_roster} participants",
        f"sums of at least {policy.min_survivors}",
        f"at least {policy.min_colluders} colluding",
    ]
    if policy.min_threshold:
        limits.append(f"{policy.min_threshold:g} of all to unmask")
    if policy.min_own_noise:
        limits.append(f"own noise at least {policy.min_own_noise:g} C")
    if policy.min_noise_multiplier:
        limits.append(f"sigma at least {policy.min_noise_multiplier:g}")
    if policy.max_clip_norm is not None:
        limits.append(f"C at most {policy.max_clip_norm:g}")
    if policy.max_inner_steps is not None:
        limits.append(f"H at most {policy.max_inner_steps}")
    for most, what in (
        (policy.max_rounds, "rounds"),
        (policy.max_participants, "participants"),
        (policy.max_weights, "weights"),
        (policy.max_processes, "processes"),
    ):
        if most is not None:
            limits.append(f"at most {most:,} {what}")
    if policy.guarantee is not None:
        limits.append(f"guarantee {policy.guarantee}")
    if policy.dataset is not None:
        limits.append(f"data set {policy.dataset}")
    limits.append("noise: " + " or ".join(policy.mechanisms))
    limits.append("rings of " + ", ".join(map(str, policy.ring_bits)) + " bits")
    yield "; ".join(limits)


def _permissions(found: Findings, folder: Path, settings: SiteSettings | None) -> None:
    names = ["identity.key", "site.secret"] + (["supernode.key"] if settings is not None else [])
    loose = [
        text for path in (folder, *(folder / n for n in names)) if path.exists() and (text := open_to_others(path))
    ]
    for text in loose:
        found.add(BAD, "secrets", f"{text}; give it to its owner alone (chmod go-rwx)")
    if not loose:
        found.add(OK, "secrets", "folder and keys can be used by their owner only")


def _ledger(found: Findings, site: Site, policy: Policy | None) -> None:
    with site.ledger() as ledger:
        for text in ledger.recovered:
            found.add(WARNING, "ledger", text)
        total = ledger.summary()["lifetime"]["rounds"]
        delta = policy.delta if policy is not None else 1e-5
        spent = ", ".join(f"{view} {printed(ledger.spent(view, delta))}" for view in ("local", "central"))
        head = ledger.head
        found.add(OK, "ledger", f"whole; {total} rounds, epsilon spent at delta {delta:g}: {spent}")
        found.add(OK, "ledger", f"head {head.seq}:{head.hash}; note it elsewhere, a rollback of both files shows in it")


def _disk(found: Findings, folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    level = BAD if free < DISK_BAD else WARNING if free < DISK_WARN else OK
    found.add(level, "disk", f"{free / 2**20:,.0f} MiB free" + ("" if level == OK else "; free some space"))
    if not os.access(folder, os.W_OK):
        found.add(BAD, "disk", f"{folder} cannot be written")


def _forged(found: Findings, folder: Path) -> None:
    for path in sorted((folder / "sums").glob("*.forged")):
        why = path.read_text(encoding="utf-8").strip()
        found.add(BAD, "sums", f"this site left the federation {path.stem[:16]}: {why}. Delete {path} to rejoin")


def _app(found: Findings, folder: Path, policy: Policy | None, settings: SiteSettings) -> None:
    judge, script = folder / "bin" / JUDGE, folder / "supernode.sh"
    for path, text in ((folder / "bin" / name, text) for name, text in programs().items()):
        if not path.is_file() or not os.access(path, os.X_OK) or path.read_bytes() != text.encode():
            found.add(BAD, "app", f"{path} is missing or is not this release's: lensemble site refresh {folder}")
        elif path == judge and (why := _starts(judge)):
            found.add(BAD, "app", f"{judge} cannot be started ({why}), so no app can run")
    if not script.is_file() or script.read_bytes() != start_script(settings).encode():
        found.add(WARNING, "app", f"{script} is not what this release writes: lensemble site refresh {folder}")
    own = bundle_hash()
    allowed = policy.allowed_fabs if policy is not None else ()
    if allowed is None:
        found.add(BAD, "app", "the policy has no rule allowed_fabs: list apps there, or say any")
    elif allowed == "any":
        found.add(WARNING, "app", "ANY app may run here: whoever submits a run sends its code (rule allowed_fabs)")
    elif own in allowed:
        found.add(OK, "app", f"{len(allowed)} app(s) may run here, this installation's ({own}) among them")
    else:
        found.add(WARNING, "app", f"this installation's own app ({own}) is not among the {len(allowed)} allowed")


def _starts(judge: Path) -> str:
    """Why the judge cannot be started, "" if it can: its disk may be mounted noexec, its Python may be gone."""
    try:
        done = subprocess.run([str(judge), "--judge"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(getattr(error, "strerror", None) or error)
    return "" if (done.returncode, done.stdout) == (0, "judge\n") else f"exit status {done.returncode}"


def _tls(found: Findings, site: Site, settings: SiteSettings, online: bool) -> None:
    with found.about("coordinator"):
        if not settings.superlink:
            found.add(BAD, "coordinator", f"not known yet: lensemble site connect {site.folder} HOST:PORT CA.CRT")
            return
        authority = read_authority(site.folder / "ca.crt")
        name, left = fingerprint(authority), days_left(authority)
        allowed = site.policy.allowed_coordinators
        if allowed is not None and name not in allowed:
            found.add(BAD, "coordinator", f"the rule allowed_coordinators does not list ca.crt ({name})")
        level = BAD if left < 0 else WARNING if left < SOON_DAYS else OK
        found.add(level, "coordinator", f"authority {name}, valid for {left:.0f} more days by this machine's clock")
        if not online:
            return
        server = visit(settings.superlink, site.folder / "ca.crt")
        assert server is not None
        left = days_left(server.certificate)
        level = WARNING if left < SOON_DAYS else OK
        found.add(level, "coordinator", f"{settings.superlink} answers; its certificate is valid for {left:.0f} days")
        if server.clock_ahead_s is None:
            found.add(WARNING, "clock", "the SuperLink does not tell its time")
            return
        # Flower wants the sender's time between 300 s before and 5 s after the SuperLink's.
        ours = -server.clock_ahead_s
        level = BAD if ours > CLOCK_WARN_S + 1 or ours < -CLOCK_BAD_S else WARNING if abs(ours) > CLOCK_WARN_S else OK
        found.add(
            level,
            "clock",
            f"{abs(ours):.0f} s {'ahead of' if ours > 0 else 'behind'} the SuperLink's"
            + ("" if level == OK else "; set it (NTP): Flower refuses SuperNodes over 300 s late or 5 s early"),
        )


def _data(found: Findings, folder: Path, settings: SiteSettings) -> None:
    dataset = load_dataset(folder)
    if dataset is not None:
        # Opened, not only looked at: the empty folder of a disk that is not mounted can be read, too.
        reader = open_reader(dataset.path, dataset.spec)
        found.add(OK, "data", f"{len(reader)} recordings in {dataset.path}, read as {folder / DATASET} says")
        return
    data = settings.data_folder(folder)
    if not data.exists() or not os.access(data, os.R_OK):
        found.add(BAD, "data", f"{data} cannot be read")
    elif settings.data == SIMULATOR:
        found.add(OK, "data", f"simulated recordings of participant {settings.participant}, in {data}")
    elif next(data.glob("lander-*"), None) is None:
        found.add(BAD, "data", f"{data} holds no recordings, and there is no {folder / DATASET}")
    else:
        found.add(OK, "data", f"participant {settings.participant} of {data}")


def _run(found: Findings, site: Site, settings: SiteSettings | None, policy: Policy, config: Config) -> None:
    before = len(found.lines)
    for violation in policy.run_violations(config, site.coordinators()):
        found.add(BAD, "run", violation.message)
        if violation.fields.get("rule") == "allowed_tasks":
            return  # nothing of it is imported here, so there is no more to say
    data_dir = settings.data_folder(site.folder) if settings is not None else None
    dataset = load_dataset(site.folder)
    check_dataset(config, dataset)
    task = build_task(config, data_dir, policy.allowed_tasks, dataset)
    n = config.federation.participants
    prepare = f"lensemble site prepare {shlex.quote(str(site.folder))} [--public DIR] KEY=VALUE ..."
    with found.about("data", f"What is made for a run is made by: {prepare}" if settings is not None else ""):
        hashes = task.episode_hashes(settings.participant if settings is not None else 0)
        public = f"base hash {task.base_hash.hex()[:16]}, probe hash {task.probe_hash.hex()[:16]}"
        found.add(OK, "data", f"{len(hashes)} recordings for this run can be read, and its public files ({public})")
        _excluded(found, task, settings.participant if settings is not None else 0, len(hashes))
    roster = site.roster
    usable = roster is not None and len(roster.members) >= n and not roster.strangers([site.identity])
    if roster is not None and not usable:
        found.add(BAD, "run", f"the pinned roster does not hold {n} participants with this one among them")
    members = tuple(sorted(roster.members.values())[:n]) if roster is not None and usable else _roster(n)
    numbers, plan = cast(Task, _Numbers(task)), make_plan(config, n, task.dimension)
    opened = round_open(config, numbers, plan, bytes(32), 0, bytes(32), members)
    judged = roster if roster is None or usable else Roster({})  # its strangers were reported above
    for violation in policy.violations(opened, judged):
        if judged is not None and not usable and violation.fields.get("rule") == "roster":
            continue
        found.add(BAD, "run", violation.message)
    if opened.private and policy.delta >= 1 / n:
        found.add(BAD, "run", f"the policy's delta {policy.delta:g} is not below 1/{n}")
    with site.ledger() as ledger:
        fresh = os.urandom(32)  # a federation that no ledger knows
        charge, budgets = opened_charge(opened), (*policy.budgets, *run_budget(opened))
        left = ledger.remaining(charge, budgets, fresh)
        full = ledger.would_exceed(charge, budgets, fresh, left + 1)
    planned = config.diloco.rounds
    level = BAD if left == 0 else WARNING if left < planned else OK
    text = f"the budgets allow {min(left, planned)} of its {planned} rounds"
    if level != OK and full is not None:
        whose = "the run's own target" if full.scope == "federation" else f"the rule max_epsilon_{full.view}"
        text += f": more would pass {whose} ({full.epsilon:g} at delta {full.delta:g})"
    found.add(level, "run", text)
    if all(level != BAD for level, _, _ in found.lines[before:]):
        found.add(OK, "run", "nothing here refuses it")


def _excluded(found: Findings, task: Task, partition: int, count: int) -> None:
    """Recordings that are public probe or evaluation episodes: named here, and told to nobody."""
    left_out = task.excluded(partition) if hasattr(task, "excluded") else []
    if not left_out:
        return
    names = ", ".join(left_out[:10]) + (f" and {len(left_out) - 10} more" if len(left_out) > 10 else "")
    text = f"{len(left_out)} of {count} are public probe or evaluation episodes and not trained on: {names}"
    found.add(WARNING, "data", text + ("" if len(left_out) < count else ". NOTHING is left to train on"))


class _Numbers:
    """A task's public numbers without its public files, which may be missing."""

    def __init__(self, task: Task) -> None:
        self.dimension, self.base_hash, self.probe_hash = task.dimension, bytes(32), bytes(32)

    def sketch_hash(self, sketch_seed: int) -> bytes:
        return bytes(32)


def _roster(n: int) -> tuple[bytes, ...]:
    return tuple(i.to_bytes(32, "big") for i in range(n))
