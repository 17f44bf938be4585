"""Loops compiled by numba, where it is installed and worth its start-up. Everything works, slower, without.

A :class:`Loop` wraps a plain Python function and gives its compiled form, or None: the caller then takes its numpy
path, which is the reference, and the two must agree to the last bit. Hence no fast-math flag is ever set: LLVM then
neither reorders float64 operations nor fuses a multiplication with an addition.

Compiling takes seconds, once: the machine code is kept in ``$LENSEMBLE_HOME/kernels``. What lies there is executed, so
a folder that anybody else could write, or reach by renaming one above it, is not used; each process then compiles anew.
numba itself is imported at first use, which with loading the loops takes a second, hence only for work of at least
:data:`WORTH` coordinates.
``LENSEMBLE_KERNELS=numpy`` turns compiled loops off, ``LENSEMBLE_KERNELS=numba`` asks for them at any size.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import stat
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

WORTH = 1 << 26
"""Coordinates from which importing numba and loading a loop costs less than the numpy path does."""

_lock = threading.Lock()
_usable: bool | None = None  # None: numba was not looked for yet


def wanted(size: int) -> bool:
    """Whether work of ``size`` coordinates should be given to compiled loops: numba is loaded, or ``size`` is worth it.

    Safe in any process: never raises, and imports numba only if it should be used.
    """
    choice = os.environ.get("LENSEMBLE_KERNELS", "")
    if choice == "numpy" or not (size >= WORTH or choice == "numba" or "numba" in sys.modules):
        return False
    return available()


def describe(size: int) -> str:
    """Which loops work of ``size`` coordinates gets in a fresh process, and why; for people."""
    if os.environ.get("LENSEMBLE_KERNELS", "") == "numpy":
        return "numpy (LENSEMBLE_KERNELS=numpy)"
    if importlib.util.find_spec("numba") is None:
        return "numpy (numba is not installed)"
    if size < WORTH and os.environ.get("LENSEMBLE_KERNELS", "") != "numba":
        return f"numpy (numba pays from {WORTH:,} coordinates on)"
    return "compiled by numba"


def available() -> bool:
    """Whether numba can be imported and compiles (it may be told not to: NUMBA_DISABLE_JIT)."""
    global _usable
    with _lock:
        if _usable is None:
            try:
                _usable = not _settings().DISABLE_JIT
            except Exception:  # a numba that does not fit this numpy raises other things than ImportError
                _usable = False
        return _usable


def _settings() -> Any:
    from numba.core import config

    return config


class Loop:
    """A function over arrays, to be compiled at first use.

    Args:
        function: in the subset of Python that numba compiles, without randomness and input or output.
        signatures: numba signatures. Nothing else can be called.
    """

    def __init__(self, function: Callable[..., Any], signatures: list[str]) -> None:
        self.function, self._signatures = function, signatures
        self._compiled: Any = None
        self._tried = False

    def compiled(self) -> Any:
        """The machine code as a callable that releases the interpreter lock, or None without a working numba."""
        if not self._tried:
            if available():
                with _lock:
                    if not self._tried:
                        self._compiled = self._compile()
            self._tried = True
        return self._compiled

    def _compile(self) -> Any:
        import numba

        settings, folder = _settings(), cache_folder()
        before = settings.CACHE_DIR
        try:
            if folder is not None:
                settings.CACHE_DIR = str(folder)  # read when a function is decorated
            return numba.njit(
                self._signatures, nogil=True, error_model="numpy", fastmath=False, cache=folder is not None
            )(self.function)
        except Exception as error:  # a platform that numba does not compile for: the numpy path does the work
            name = getattr(self.function, "__name__", "a loop")
            logging.getLogger(__name__).warning("%s is not compiled, numpy does its work: %s", name, error)
            return None
        finally:
            settings.CACHE_DIR = before


def use(size: int, *loops: Loop) -> bool:
    """Whether ``size`` coordinates go through these loops: :func:`wanted`, and every one of them compiles."""
    return wanted(size) and all(one.compiled() is not None for one in loops)


def loop(*signatures: str) -> Callable[[Callable[..., Any]], Loop]:
    """Decorator: make a :class:`Loop`."""
    return lambda function: Loop(function, list(signatures))


def cache_folder() -> Path | None:
    """A folder that only this user can write, for machine code; None if there is none."""
    from lensemble_flwr.errors import ArtifactError
    from lensemble_flwr.home import home

    try:
        folder = home() / "kernels"
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder if is_private(folder) else None
    except (OSError, ArtifactError):
        return None


def is_private(folder: Path) -> bool:
    """Whether nobody but this user (and root) can change what ``folder`` holds, or put another in its place.

    Raises:
        OSError: it cannot be looked at.
    """
    folder = folder.resolve(strict=True)
    own = folder.stat()
    if own.st_uid != os.geteuid() or own.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return False
    for above in folder.parents:
        status = above.stat()
        if status.st_uid not in (0, os.geteuid()):
            return False
        if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
            return False
    return True
