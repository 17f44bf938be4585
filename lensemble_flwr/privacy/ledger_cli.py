"""``lensemble ledger init|show|verify|repair PATH``: the operator's view of a privacy ledger."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any, NoReturn

from lensemble_flwr.errors import EXIT_FAILURE, EXIT_OK, ConfigError
from lensemble_flwr.owners import check_owner
from lensemble_flwr.privacy.ledger import Charge, PrivacyLedger
from lensemble_flwr.privacy.ledger_book import STATES
from lensemble_flwr.privacy.ledger_file import Head
from lensemble_flwr.privacy.ledger_repair import Report, repair, verify
from lensemble_flwr.privacy.printed import printed
from lensemble_flwr.privacy.spending import MECHANISMS


def ledger_command(args: list[str]) -> int:
    """Run one subcommand and print plain text; returns the exit status.

    Raises:
        ConfigError: bad arguments, or there is no ledger at all.
        LedgerError: the ledger cannot be used (``verify`` prints that instead and returns 1).
    """
    options = _parser().parse_args(args)
    path: Path = options.path
    options.path = path / "ledger.jsonl" if path.is_dir() else path
    options.head = options.head or _kept_elsewhere(options.path.parent)
    head = options.head or options.path.with_suffix(".head")
    a_site = (options.path.parent / "identity.key").exists()  # whose ledger is lost: that is not a wrong path
    if options.run in (_show, _verify) and not options.path.exists() and not Path(head).exists() and not a_site:
        sites = sorted(p.name for p in path.glob("*/") if (p / "ledger.jsonl").is_file()) if path.is_dir() else []
        raise ConfigError(
            f"There is no ledger in {path}: its log and its head are missing.",
            f"There are {len(sites)} below it; name one: {path / sites[0]}" if sites else "Correct the path.",
        )
    if options.run in (_init, _repair):
        check_owner(options.path.parent)
    return options.run(options)


def _kept_elsewhere(folder: Path) -> Path | None:
    """Where a site keeps its ledger's head, by its settings (``lensemble site init --ledger-head``); None: beside the
    log. A repair beside the log would part the ledger from its real head."""
    try:
        head = json.loads((folder / "site.json").read_text(encoding="utf-8"))["ledger_head"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return Path(head) if isinstance(head, str) and head else None


def _init(options: argparse.Namespace) -> int:
    PrivacyLedger.init(options.path, options.identity, options.head)
    print(f"Started {options.path} for {options.identity.hex()}.")
    return EXIT_OK


def _show(options: argparse.Namespace) -> int:
    with PrivacyLedger.open(options.path, head_path=options.head, read_only=True) as ledger:
        summary = ledger.summary()
        if options.json:
            print(json.dumps(_plain(summary), indent=1, allow_nan=False))
            return EXIT_OK
        print(f"Privacy ledger {summary['path']}, head {summary['head_path']}")
        print(f"identity   {summary['identity']}")
        print(f"records    {summary['records']}, rounds {summary['lifetime']['rounds']}")
        print(f"spent      {_epsilons(ledger, options.delta, None)}")
        if any(summary["repaired"].values()):
            print("           of it charged by repairs for rounds that nobody can name; it counts in each federation")
        for fid, federation in summary["federations"].items():
            print(f"federation {fid}")
            states = ", ".join(f"{federation[state]} {state}" for state in STATES)
            print(f"           rounds {federation['rounds']}: {states}")
            print(f"           {_epsilons(ledger, options.delta, bytes.fromhex(fid))}")
        for event in ledger.events():
            print(f"event      {event.kind} at record {event.seq}: {json.dumps(event.data)}")
        print(f"head       {ledger.head}")
        print("Note the head elsewhere: `lensemble ledger verify PATH --noted HEAD` then finds out an old copy.")
    return EXIT_OK


def _epsilons(ledger: PrivacyLedger, delta: float, fid: bytes | None) -> str:
    local, central = (ledger.spent(view, delta, fid) for view in ("local", "central"))
    return f"epsilon {printed(local, 6)} local, {printed(central, 6)} central at delta {delta:g}"


def _verify(options: argparse.Namespace) -> int:
    report = verify(options.path, options.head, options.noted)
    _print_report(report)
    return EXIT_OK if report.ok else EXIT_FAILURE


def _repair(options: argparse.Namespace) -> int:
    charge = None
    if options.own_noise is not None:
        charge = Charge(
            options.own_noise,
            options.min_survivors,
            options.colluders,
            options.delta_extra,
            mechanism=options.mechanism,
            gap=options.gap,
            per_person=options.per_person,
        )
    report = repair(options.path, options.head, options.charge_rounds, charge, options.identity)
    print(f"Repaired {options.path}; the damaged files are kept beside it as *.damaged-*.")
    _print_report(report)
    return EXIT_OK if report.ok else EXIT_FAILURE


def _print_report(report: Report) -> None:
    if report.ok:
        print(f"The ledger is whole: {report.records} records.")
        if report.beyond:
            print("Its last record lies beyond the head: it counts, and the head follows when the ledger is opened.")
        if report.torn_bytes:
            print(f"{report.torn_bytes} bytes of a record that was never completed follow; they count for nothing.")
    else:
        print(f"The ledger is refused. {report.problem}\n{report.remedy}")
        print(f"A repair would keep {report.records} records, enter {report.found} reservations again that stand after")
        print(f"the damage, and must charge at least {report.lost} rounds for records that are lost.")
    if report.head is not None:
        print(f"head {report.head}")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{self.prog}: {message}.", f"{self.format_usage().strip()}")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="lensemble ledger", description="The privacy ledger of one participant (docs/ledger.md).")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=_Parser)

    def command(name: str, run: Any, text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.add_argument("path", type=Path, metavar="PATH", help="ledger.jsonl, or the folder that holds it")
        sub.add_argument("--head", type=Path, metavar="FILE", help="the head, if it is not beside the log")
        sub.set_defaults(run=run)
        return sub

    init = command("init", _init, "Start a participant's ledger. Once in its life.")
    init.add_argument("--identity", type=_hex32, required=True, metavar="HEX", help="the public key, 64 hex digits")

    show = command("show", _show, "Print what is spent and the head line to note elsewhere.")
    show.add_argument("--delta", type=_delta, default=1e-5, help="at which epsilon is printed (default: %(default)s)")
    show.add_argument("--json", action="store_true", help="print everything as JSON")

    check = command("verify", _verify, "Check a ledger without holding it; exit status 1 if it would be refused.")
    check.add_argument("--noted", type=_head, metavar="HEAD", help="a head that `show` printed earlier")

    mend = command("repair", _repair, "Go on after damage, a loss or a restored backup, charging what may be lost.")
    mend.add_argument("--charge-rounds", type=_whole, default=0, metavar="N", help="rounds that may have been lost")
    mend.add_argument("--own-noise", type=float, metavar="X", help="noise std over C of each: the least ever used")
    mend.add_argument("--min-survivors", type=_whole, default=1, metavar="M", help="of each (default: %(default)s)")
    mend.add_argument("--colluders", type=_whole, default=0, metavar="K", help="of each (default: %(default)s)")
    mend.add_argument("--delta-extra", type=float, default=0.0, metavar="D", help="of each (default: %(default)s)")
    mend.add_argument("--mechanism", choices=MECHANISMS, default="gaussian", help="of each (default: %(default)s)")
    mend.add_argument("--gap", type=float, default=0.0, metavar="G", help="of each, if its noise was discrete")
    mend.add_argument(
        "--per-person",
        type=_whole,
        default=1,
        metavar="P",
        help="participants of a person (default: %(default)s)",
    )
    mend.add_argument("--identity", type=_hex32, metavar="HEX", help="only if the first record cannot be read")
    return parser


def _hex32(text: str) -> bytes:
    try:
        value = bytes.fromhex(text)
    except ValueError:
        value = b""
    if len(value) != 32:
        raise argparse.ArgumentTypeError(f"{text!r} is not 32 bytes (64 hex digits)")
    return value


def _head(text: str) -> Head:
    try:
        return Head.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not NUMBER:HASH") from error


def _whole(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


def _delta(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.0 < value < 1.0:
        raise argparse.ArgumentTypeError(f"{text!r} does not lie between 0 and 1")
    return value


def _plain(value: Any) -> Any:
    """JSON has no infinity: write it as text."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
