"""``lensemble data``: look at recordings before they are trained on."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lensemble_flwr.errors import EXIT_FAILURE, EXIT_OK, ConfigError, DataError


def data_command(argv: Sequence[str]) -> int:
    """Entry point of the group; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="lensemble data",
        description="A site's own recordings.",
        epilog="Commands:\n" + "\n".join(f"  {name:<8} {text}" for name, (_, text) in COMMANDS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="lensemble data [-h] COMMAND ...",
    )
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help=argparse.SUPPRESS)
    command = parser.parse_args(list(argv[:1])).command
    return COMMANDS[command][0](argv[1:])


def _inspect(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="lensemble data inspect",
        description="What recordings hold as the loader reads them, and every problem with the episode it is in.",
        epilog="Exit status: 0 no problems, 1 problems, 2 no recordings there. On a CPU: lensemble data inspect "
        "my-recordings image_size=64 frameskip=2 --sheet sheet.png",
    )
    parser.add_argument("path", metavar="PATH", help="a folder of recordings, or an HDF5 file")
    parser.add_argument("options", nargs="*", metavar="KEY=VALUE", help="how to read them (docs/own-data.md)")
    parser.add_argument("--sheet", metavar="FILE", help="write a contact sheet of pictures as PNG (private: 0600)")
    parser.add_argument("--sample", type=_count, metavar="N", help="decode only N episodes, evenly spread")
    arguments = parser.parse_intermixed_args(argv)

    from lensemble_flwr.data.formats.detect import detect
    from lensemble_flwr.data.formats.inspect import inspect, write_png

    spec = recording_spec(arguments.options)
    path = Path(arguments.path)
    if arguments.sheet is not None and Path(arguments.sheet).suffix.lower() != ".png":
        raise ConfigError(f"{arguments.sheet} does not end in .png.", "Name the contact sheet something.png.")
    try:
        detect(path, spec)
    except DataError as error:
        said = error.message[:1].upper() + error.message[1:]
        raise ConfigError(said, error.remediation) from error
    try:
        found = inspect(path, spec, arguments.sample, _progress("reading episodes"), arguments.sheet is not None)
    except DataError as error:
        print(f"1 problem:\n  {error.message}\n    {error.remediation}")
        return EXIT_FAILURE
    print(found.text())
    if arguments.sheet is not None and found.sheet is not None:
        write_png(Path(arguments.sheet), found.sheet)
        print(f"contact sheet: {arguments.sheet}")
    return EXIT_FAILURE if found.problems else EXIT_OK


def recording_spec(options: Sequence[str]) -> Any:
    """KEY=VALUE words -> RecordingSpec (ConfigError for what it does not know)."""
    import yaml

    from lensemble_flwr.data.formats.spec import RecordingSpec

    values: dict[str, Any] = {}
    for word in options:
        key, equals, text = word.partition("=")
        if not equals:
            raise ConfigError(f"{word!r} is not KEY=VALUE.", "For example image_size=64.")
        try:
            values[key] = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError(
                f"the value in {word!r} is not understood.", "Quote it, or write a list as [1,2]."
            ) from error
    return RecordingSpec.from_dict(values)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number above zero")
    return int(text)


def _progress(what: str) -> Callable[[int, int], None]:
    """A line that rewrites itself on a terminal; after ten seconds also elsewhere, now and then."""
    begun = shown = time.monotonic()

    def show(done: int, total: int) -> None:
        nonlocal shown
        now = time.monotonic()
        if sys.stderr.isatty():
            if now - shown > 0.2 or done == total:
                shown = now
                left = (now - begun) / done * (total - done)
                end = "\r\x1b[K" if done == total else ""
                text = f"\r{what}: {done}/{total}, {left:.0f} s left\x1b[K{end}"
                print(text, end="", file=sys.stderr, flush=True)
        elif now - shown > 10:
            shown = now
            print(f"{what}: {done}/{total}", file=sys.stderr, flush=True)

    return show


def _prove(argv: Sequence[str]) -> int:
    from lensemble_flwr.deploy.commitment_cli import prove

    return prove(argv)


def _verify(argv: Sequence[str]) -> int:
    from lensemble_flwr.deploy.commitment_cli import verify

    return verify(argv, recording_spec)


COMMANDS: dict[str, tuple[Callable[[Sequence[str]], int], str]] = {
    "inspect": (_inspect, "counts, shapes, ranges, a contact sheet, and every problem"),
    "prove": (_prove, "a proof that one episode is under the root that a site joined with"),
    "verify": (_verify, "check such a proof, or a site's recordings against its roots"),
}
