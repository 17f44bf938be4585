"""Compiled loops: when they are used, where their machine code is kept, and that nothing needs them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lensemble_flwr import compiled
from lensemble_flwr.compiled import Loop, cache_folder, is_private
from lensemble_flwr.privacy.mechanism import private_release
from lensemble_flwr.privacy.noise import ReplayEntropy

ROOT = Path(__file__).resolve().parents[1]


def python(code: str, **environment: str) -> str:
    run = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env={**os.environ, **environment},
    )
    return run.stdout.strip()


def test_numba_is_imported_for_large_work_only():
    pytest.importorskip("numba")
    code = (
        "import sys; from lensemble_flwr.compiled import WORTH, wanted\n"
        "print(wanted(1000), 'numba' in sys.modules, wanted(WORTH), 'numba' in sys.modules, wanted(1000))\n"
    )
    assert python(code, LENSEMBLE_KERNELS="") == "False False True True True"
    assert python(code, LENSEMBLE_KERNELS="numpy") == "False False False False False"
    assert python(code, LENSEMBLE_KERNELS="numba") == "True True True True True"
    assert python(code, LENSEMBLE_KERNELS="", NUMBA_DISABLE_JIT="1").split()[2] == "False"


def test_what_preflight_says(monkeypatch):
    monkeypatch.setenv("LENSEMBLE_KERNELS", "numpy")
    assert compiled.describe(1 << 40) == "numpy (LENSEMBLE_KERNELS=numpy)"
    monkeypatch.delenv("LENSEMBLE_KERNELS")
    found = {"numba": object()}
    monkeypatch.setattr(compiled.importlib.util, "find_spec", found.get)
    assert "pays from" in compiled.describe(1000)
    assert compiled.describe(compiled.WORTH) == "compiled by numba"
    found.clear()
    assert "not installed" in compiled.describe(compiled.WORTH)


def test_without_numba_everything_works(tmp_path):
    (tmp_path / "numba.py").write_text("raise ImportError('not here')")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from lensemble_flwr.privacy.mechanism import private_release; from lensemble_flwr import compiled\n"
        "from lensemble_flwr.privacy.noise import ReplayEntropy\n"
        "print(compiled.available(), private_release(None, 3, 1.0, 1.0, ReplayEntropy(1), 20, 1 << 24).q.tolist())\n"
    )
    expected = private_release(None, 3, 1.0, 1.0, ReplayEntropy(1), 20, 1 << 24).q.tolist()
    assert python(code, LENSEMBLE_KERNELS="numba") == f"False {expected}"


def test_a_loop_that_does_not_compile_is_none():
    pytest.importorskip("numba")

    def bad(x):
        return open(x)

    assert Loop(bad, ["void(int64)"]).compiled() is None


def test_machine_code_is_kept_and_found_again(tmp_path, monkeypatch):
    """Also where the package itself cannot be written: only the user's own folder is used."""
    pytest.importorskip("numba")
    code = (
        "from lensemble_flwr.privacy import noise_loops; l = noise_loops.decide; c = l.compiled()\n"
        "print(sum(c.stats.cache_hits.values()), sum(c.stats.cache_misses.values()))\n"
    )
    tmp_path.chmod(0o700)
    kept = {"LENSEMBLE_HOME": str(tmp_path), "NUMBA_CACHE_DIR": str(tmp_path / "elsewhere")}
    assert python(code, **kept) == "0 2"
    assert python(code, **kept) == "2 0"
    assert list((tmp_path / "kernels").rglob("*.nbi"))
    assert not (tmp_path / "elsewhere").exists()
    assert not list((ROOT / "lensemble_flwr").rglob("*.nbi"))


def test_a_folder_that_others_can_write_is_not_used(tmp_path, monkeypatch):
    base = tmp_path.resolve()
    base.chmod(0o700)
    own = base / "own"
    own.mkdir(mode=0o700)
    assert is_private(own)
    for mode in (0o770, 0o702, 0o777):
        own.chmod(mode)
        assert not is_private(own)
    own.chmod(0o700)
    base.chmod(0o777)
    assert not is_private(own), "somebody could rename it"
    base.chmod(0o1777)
    assert is_private(own), "sticky, as /tmp is"
    base.chmod(0o700)
    link = base / "link"
    link.symlink_to(own)
    assert is_private(link)
    monkeypatch.setenv("LENSEMBLE_HOME", str(own))
    assert cache_folder() == own / "kernels"
    (own / "kernels").chmod(0o777)
    assert cache_folder() is None
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert not is_private(own)


def test_no_folder_no_cache(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LENSEMBLE_HOME", str(tmp_path / "file" / "home"))
    assert cache_folder() is None
    assert compiled.WORTH > 1 << 20
