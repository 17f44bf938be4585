"""How a script of this folder is loaded: by `python3`, in the project's environment; by other code, as a module."""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def enter(needs: str = "flwr", install: str = "scripts/install") -> None:
    """Start the running script again in the project's environment, unless the present one was chosen for it.

    Chosen is an environment (venv) that has ``needs``. Another Python is kept only where the project has no environment
    of its own: what a system happens to have installed is neither pinned nor whole. In a script that something else
    has imported this does nothing.

    Args:
        needs: a module without which the script cannot run.
        install: the command that installs it, for the message.

    Raises:
        SystemExit: the module is nowhere; the message says what to run.
    """
    started = getattr(sys.modules["__main__"], "__file__", None) or ""
    if Path(started).resolve().parent != ROOT / "scripts":
        return
    has_it, environment = importlib.util.find_spec(needs) is not None, ROOT / os.environ.get("LENSEMBLE_VENV", ".venv")
    if has_it and sys.prefix != sys.base_prefix:
        return
    python = environment / "bin" / "python"
    if python.is_file() and Path(sys.prefix).resolve() != environment.resolve():
        os.execv(python, [str(python), *sys.argv])  # noqa: S606
    if not has_it:
        sys.exit(f"error: run {install} first")


def load(name: str) -> Any:
    """The script ``name`` as a module; its ``main`` is not run. It is loaded once: ``sys.modules`` has it after."""
    module_name = f"{name}_script"
    if module_name not in sys.modules:
        loader = SourceFileLoader(module_name, str(ROOT / "scripts" / name))
        spec = importlib.util.spec_from_loader(module_name, loader)
        assert spec is not None
        module = sys.modules[module_name] = importlib.util.module_from_spec(spec)  # dataclasses look their module up
        try:
            loader.exec_module(module)
        except BaseException:
            del sys.modules[module_name]
            raise
    return sys.modules[module_name]
