"""The hash of this installation's own app: what a site allows and a coordinator announces."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from lensemble_flwr.deploy.shim import content_hash
from lensemble_flwr.errors import LaunchError
from lensemble_flwr.launch import app_dir, stage_app


def bundle_hash(app: Path | None = None) -> str:
    """Hash (hex) of the content of the bundle that ``flwr run`` would send from here (two seconds).

    Two machines get the same hash from the same release, however their zlib compresses
    (:func:`lensemble_flwr.deploy.shim.content_hash`).

    Raises:
        LaunchError: Flower's command is missing or refuses the app.
    """
    with tempfile.TemporaryDirectory(prefix="lensemble-fab-") as folder:
        staged = stage_app(app or app_dir(), Path(folder) / "app")
        environment = {**os.environ, "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
        environment["FLWR_HOME"] = folder
        command = [str(Path(sys.executable).parent / "flwr"), "build", "--app", str(staged)]
        try:
            done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise LaunchError(f"Flower's command flwr cannot be run: {error}.") from error
        built = list(Path(folder).glob("*.fab"))
        if done.returncode or len(built) != 1:
            raise LaunchError(f"flwr build refused the app: {(done.stdout + done.stderr).strip()[-300:]}")
        return content_hash(built[0].read_bytes())
