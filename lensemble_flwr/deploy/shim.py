"""A site's own ``flwr-clientapp``: lets Flower run an app only if the site's policy lists the hash of its content.

Flower's SuperNode starts the program ``flwr-clientapp`` by name for every message and hands it the app bundle (FAB)
that the submitter of the run sent. `lensemble site init` writes a copy of this file into the site's ``bin`` folder,
which the site's start script puts first on the PATH. It must stand alone: it imports nothing of the app's packages,
so that none of them is loaded before the bundle was judged. Tied to flwr 1.42: where the names it wraps are missing,
it refuses to run at all.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import io
import json
import re
import shutil
import sys
import zipfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

MOST_BYTES = 64 * 2**20
"""Of an unpacked app; Flower itself takes bundles of up to 10 MiB."""


_NOT_LISTED = "The site's rule allowed_fabs does not list this app."


class AppRefused(Exception):
    """The app is not on the site's list. Flower sends this text to the coordinator: no hash list, no path in it."""


def allowed_fabs(site: Path) -> list[str] | None:
    """The policy's list; None when it says ``any``. A policy without the rule, or that cannot be read, raises."""
    old, new = site / "policy.json", site / "policy.yaml"
    if old.exists() == new.exists():
        raise AppRefused("The site's policy cannot be read.")
    try:
        text = (old if old.exists() else new).read_text(encoding="utf-8")
        if old.exists():
            tree = json.loads(text)
        else:
            import yaml

            tree = yaml.safe_load(text)
    except Exception as error:
        raise AppRefused("The site's policy cannot be read.") from error
    if len(re.findall(r"""^\s*["']?allowed_fabs["']?\s*:""", text, re.MULTILINE)) > 1:
        raise AppRefused("The site's rule allowed_fabs stands there twice.")
    rule = tree.get("allowed_fabs") if isinstance(tree, dict) else []
    if rule == "any":
        return None
    if rule is None:
        raise AppRefused("The site's policy has no rule allowed_fabs; it must list apps, or say any.")
    if not isinstance(rule, list) or not all(isinstance(item, str) for item in rule):
        raise AppRefused("The site's rule allowed_fabs cannot be read.")
    return rule


def content_hash(fab: bytes) -> str:
    """SHA-256 (hex) of what a bundle unpacks to: every file's name and bytes, in the order of the names.

    The bundle itself is a zip archive, and the bytes of one depend on the version of the zlib that made it.

    Raises:
        AppRefused: no zip archive, larger than any app, or one in which a name stands twice (what it unpacks to would
            then depend on the reader): no such bundle is on a list.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(fab)) as bundle:
            items = bundle.infolist()
            names = [item.filename for item in items]
            if len(set(names)) != len(names) or sum(item.file_size for item in items) > MOST_BYTES:
                raise AppRefused(_NOT_LISTED)
            digest = hashlib.sha256(b"lensemble app 1\0")
            for item in sorted(items, key=lambda item: item.filename.encode()):
                for part in (item.filename.encode(), bundle.read(item)):
                    digest.update(len(part).to_bytes(8, "big") + part)
            return digest.hexdigest()
    except AppRefused:
        raise
    except Exception as error:
        raise AppRefused(_NOT_LISTED) from error


def judge(site: Path, fab: bytes) -> None:
    """Raise :class:`AppRefused` unless the bundle may run here; the hash of a refused one goes to the site's log.

    Listed is the hash of the content, or (as earlier releases printed it) the SHA-256 of the archive's own bytes.
    """
    digest = hashlib.sha256(fab).hexdigest()
    try:
        listed = allowed_fabs(site)
        if listed is not None and digest not in listed:
            digest = content_hash(fab)
        if listed is not None and digest not in listed:
            raise AppRefused(_NOT_LISTED)
    except AppRefused as error:
        note(site, f"{error} Its hash is {digest}.")
        raise


def note(site: Path, text: str) -> None:
    """A line in the site's own log. What cannot be logged is lost: an OSError's text would go to the coordinator."""
    with contextlib.suppress(OSError), open(site / "site.log", "a", encoding="utf-8") as log:
        # The keys of lensemble_flwr.json_log, which cannot be imported here.
        line = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "level": "ERROR", "federation": None}
        line |= {"round": None, "stage": None, "event": "app_refused", "text": text}
        log.write(json.dumps(line) + "\n")


def holds(fab: bytes, folder: Path) -> bool:
    """Whether the folder has exactly the bundle's files, byte for byte, and nothing else."""
    with zipfile.ZipFile(io.BytesIO(fab)) as bundle:
        names = [item.filename for item in bundle.infolist() if not item.is_dir()]
        wanted = {name: bundle.read(name) for name in names if name.split("/")[0] != ".info"}
    found = [path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()]
    if any(path.is_symlink() for path in found) or folder.is_symlink():
        return False
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found} == wanted


def install_guard(site: Path, module: Any, loading: Any) -> None:
    """Wrap Flower's installation of a bundle, and tie the folder that is loaded to the one that was installed."""
    install, project_dir = module.install_from_fab, loading.get_project_dir
    installed: list[Path] = []

    @functools.wraps(install)
    def guarded(fab: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(fab, bytes):
            raise AppRefused("The app did not come as one bundle.")
        judge(site, fab)
        try:
            path = Path(install(fab, *args, **kwargs))
            if not holds(fab, path):  # Flower takes a folder of that name as it is: half installed once, or put there
                shutil.rmtree(path)
                path = Path(install(fab, *args, **kwargs))
            same = holds(fab, path)
        except Exception as error:  # its text would name folders of this site to the coordinator
            note(site, f"The app cannot be installed: {error}")
            raise AppRefused("The app cannot be installed here.") from None
        if not same:
            raise AppRefused("The app that was installed is not the bundle that was judged.")
        # Compiled files beside the code would not be the bundle's; they go where only this bundle's are looked for.
        sys.pycache_prefix = str(site / "home" / "bytecode" / hashlib.sha256(fab).hexdigest())
        installed.append(path)
        return path

    @functools.wraps(project_dir)
    def judged(*args: Any, **kwargs: Any) -> Any:
        # The name and hash that lead to this folder come from the coordinator, apart from the bundle itself.
        path = Path(project_dir(*args, **kwargs))
        if path not in installed:
            raise AppRefused("The app to load is not the bundle that was judged.")
        return path

    module.install_from_fab, loading.get_project_dir = guarded, judged


def main() -> None:
    """Judge, then be Flower's own ``flwr-clientapp``; with ``--judge`` only say that this program can be started."""
    if sys.argv[1:] == ["--judge"]:
        print("judge")
        return
    from flwr.supernode.cli import flwr_clientapp

    module = importlib.import_module("flwr.supernode.runtime.run_clientapp")
    install_guard(Path(__file__).resolve().parent.parent, module, importlib.import_module("flwr.clientapp.utils"))
    flwr_clientapp()


if __name__ == "__main__":
    main()
