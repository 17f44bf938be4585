"""Whom a site's SuperNode trusts: read from how it was started, refused where it cannot be known."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lensemble_flwr.deploy.tls import fingerprint, make_authority, read_authority
from lensemble_flwr.errors import PolicyViolation
from lensemble_flwr.federation.supernode import Ancestor, trusted_authorities


@pytest.fixture
def ca(tmp_path: Path) -> Path:
    make_authority(tmp_path / "ca.key", tmp_path / "ca.crt", "lab.example.org")
    return tmp_path / "ca.crt"


def started(ca: Path, *words: str, seconds_later: float = 60.0) -> Ancestor:
    at = ca.stat().st_ctime + seconds_later
    return Ancestor(("python", "/venv/bin/flower-supernode", "--superlink", "a:1", *words), ca.parent, at)


@pytest.mark.parametrize(
    "words",
    [
        ("--root-certificates", "ca.crt"),
        ("--root-certificates=ca.crt",),
        ("--root-certificates", "x", "--root-certificates", "ca.crt"),
    ],
)
def test_it_is_the_file_that_the_supernode_was_started_with(ca: Path, words: tuple[str, ...]) -> None:
    known = (fingerprint(read_authority(ca)),)
    assert trusted_authorities(Path("/nowhere"), lambda: started(ca, *words)) == known
    absolute = started(ca, "--root-certificates", str(ca))
    assert trusted_authorities(Path("/nowhere"), lambda: absolute) == known


@pytest.mark.parametrize(
    ("words", "later", "why"),
    [
        (("--insecure",), 60.0, "without --root-certificates"),
        ((), 60.0, "without --root-certificates"),
        (("--root-certificates", "ca.crt", "--insecure"), 60.0, "without --root-certificates"),
        (("--root-certificates", "ca.crt"), -1.0, "restart the SuperNode"),
        (("--root-certificates", "gone.crt"), 60.0, "restart the SuperNode"),
    ],
)
def test_what_cannot_be_known_is_refused(ca: Path, words: tuple[str, ...], later: float, why: str) -> None:
    with pytest.raises(PolicyViolation, match=why) as error:
        trusted_authorities(ca, lambda: started(ca, *words, seconds_later=later))
    assert error.value.fields["rule"] == "allowed_coordinators"
    with pytest.raises(PolicyViolation, match="not started by a SuperNode"):
        trusted_authorities(ca, lambda: None)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_a_real_process_above_is_found_and_a_file_touched_later_is_not_believed(ca: Path, tmp_path: Path) -> None:
    os.utime(ca, (1, 1))  # nor does setting its times back help: the change time stays
    program = tmp_path / "flower-supernode"
    program.write_text(
        "import subprocess, sys\n"
        "for line in sys.stdin:\n"
        "    done = subprocess.run([sys.executable, '-c', line], capture_output=True, text=True)\n"
        "    print(done.stdout.strip(), flush=True)\n"
    )
    time.sleep(2.1)  # the system tells when it was booted in whole seconds
    node = subprocess.Popen(
        [sys.executable, str(program), "--root-certificates", "ca.crt"],
        cwd=tmp_path,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])},
    )
    assert node.stdin is not None
    assert node.stdout is not None
    asked = (
        "from lensemble_flwr.federation.supernode import *; from pathlib import Path\\n"
        "try: print(trusted_authorities(Path('/nowhere')))\\n"
        "except Exception as error: print(error)"
    )
    try:

        def ask() -> str:
            node.stdin.write(f'exec("""{asked}""")\n')  # type: ignore[union-attr]
            node.stdin.flush()  # type: ignore[union-attr]
            return node.stdout.readline()  # type: ignore[union-attr]

        assert fingerprint(read_authority(ca)) in ask()
        ca.chmod(0o600)
        assert "restart the SuperNode" in ask()
    finally:
        node.stdin.close()
        node.wait(30)
