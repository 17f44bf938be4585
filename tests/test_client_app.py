"""What a message loads: every one is a new process, so an import is paid in each exchange of each round."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

PROGRAM = """
import sys
from pathlib import Path
from flwr.app import Context, RecordDict
from lensemble_flwr import client_app
from lensemble_flwr.federation.policy import Policy
from lensemble_flwr.federation.site import Site
site = Site.create(Path(sys.argv[1]), Policy(unlimited=True))
run = {"overrides": "model=tiny", "resume": ""}
context = Context(run_id=1, node_id=2, node_config={"site": sys.argv[1]}, state=RecordDict(), run_config=run)
participant = client_app._participant(context)
assert "torch" not in sys.modules
assert participant.task.headline
assert "torch" in sys.modules
"""


def test_only_stages_that_need_the_model_load_torch(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "site")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
