"""Text of the start scripts and systemd units. No secret stands in them or on a command line: only paths do."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

from lensemble_flwr.owners import user_name

_QUIET = """export FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1 FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1
"""


JUDGE = "flwr-clientapp"
TASK_PROGRAMS = (JUDGE, "flwr-agentapp", "flwr-serverapp", "flwr-simulation", "flwr-model", "flwr-connector")
"""What Flower 1.42 starts for a task. Which one a SuperNode starts follows from the app that a submitter sent: one that
names an ``agentapp`` is handed to ``flwr-agentapp``."""

REFUSES = """#!/bin/sh
# A site runs client apps alone, and those only after bin/flwr-clientapp has judged them.
exit 1
"""
"""The site's own program in place of each of the others."""


def _programs() -> str:
    return shlex.quote(str(Path(sys.executable).parent))


def supernode_script(superlink: str, runtime_port: int) -> str:
    """``supernode.sh``: checks the site, then becomes Flower's SuperNode.

    Flower starts the programs of :data:`TASK_PROGRAMS` by name, and where the first one on the PATH cannot be started
    (its first line names no program, its disk is mounted noexec) the system takes the next. So the site's own, which
    judge the app or refuse it, are the only ones that can be found.
    """
    return f"""#!/bin/sh
# Starts this site's SuperNode; written by `lensemble site init`, `site connect` and `site refresh`.
set -euf
umask 077
SITE=$(CDPATH= cd -- "$(dirname -- "$0")" && pwd)
PROGRAMS={_programs()}
LN=$(command -v ln)
# Flower finds its programs by name, and the run says which one: only the site's own may be on the PATH.
FOUND="$SITE/bin"
IFS=:
for FOLDER in $PATH; do
    OWN=
    for NAME in {" ".join(TASK_PROGRAMS)}; do
        if [ -e "$FOLDER/$NAME" ]; then OWN=no; fi
    done
    if [ -n "$FOLDER" ] && [ -z "$OWN" ]; then FOUND="$FOUND:$FOLDER"; fi
done
unset IFS
export PATH="$FOUND" FLWR_HOME="$SITE/flwr" LENSEMBLE_HOME="$SITE/home"
{_QUIET}# Flower's own helper looks for a message to work on once a second; every stage of a round waits for it.
export FLWR_SUPEREXEC_TASK_POLL_INTERVAL="${{FLWR_SUPEREXEC_TASK_POLL_INTERVAL:-0.1}}"
cd "$SITE"
"$PROGRAMS/python" -m lensemble_flwr.cli site check --offline "$SITE"
"$LN" -sf "$PROGRAMS/flower-superexec" "$SITE/bin/flower-superexec"
exec "$PROGRAMS/flower-supernode" --superlink {shlex.quote(superlink)} --root-certificates "$SITE/ca.crt" \\
    --auth-supernode-private-key "$SITE/supernode.key" --host 127.0.0.1 --port {runtime_port} \\
    --node-config "site=\\"$SITE\\""
"""


def superlink_script(port: int) -> str:
    """``superlink.sh``: Flower's SuperLink with TLS, SuperNode authentication and a database."""
    return f"""#!/bin/sh
# Starts the SuperLink; written by `lensemble coordinator init`.
# Whoever reaches this port can submit runs and read their logs: let only sites and submitters through the firewall.
set -eu
umask 077
COORDINATOR=$(CDPATH= cd -- "$(dirname -- "$0")" && pwd)
PROGRAMS={_programs()}
export PATH="$PROGRAMS:$PATH" FLWR_HOME="$COORDINATOR/flwr"
export LENSEMBLE_HOME="${{LENSEMBLE_HOME:-$COORDINATOR/home}}" LENSEMBLE_ROSTER="$COORDINATOR/roster.json"
{_QUIET}cd "$COORDINATOR"
exec flower-superlink --ssl-ca-certfile ca.crt --ssl-certfile server.crt --ssl-keyfile server.key \\
    --enable-supernode-auth --database state.db --disable-runtime-dependency-installation \\
    --host "${{LENSEMBLE_HOST:-0.0.0.0}}" --port {port}
"""


def own_user() -> str:
    """Who runs this, for a unit's ``User=``: not what the environment says, which ``runuser`` and others hand on."""
    return user_name(os.geteuid()).removeprefix("#")


def _unit_word(path: Path) -> str:
    """A path without quotes and backslashes as one word of a unit file (systemd.syntax(7), systemd.unit(5))."""
    return '"' + str(path).replace("%", "%%") + '"'


def systemd_unit(what: str, script: Path, user: str) -> str:
    """A unit that starts a script at boot and again after it ends.

    Flower refuses a SuperNode that comes back within a minute of a ``kill -9`` (its program then ends at once), so the
    unit tries for ever, twenty seconds apart.
    """
    folder = script.parent
    return f"""[Unit]
Description={what.replace("%", "%%")}
After=network-online.target
Wants=network-online.target
StartLimitIntervalSec=0

[Service]
User={user}
ExecStart={_unit_word(script)}
Restart=always
RestartSec=20
TimeoutStopSec=60
UMask=0077
NoNewPrivileges=true
PrivateTmp=true
ProtectSystem=full
ReadWritePaths={_unit_word(folder)}

[Install]
WantedBy=multi-user.target
"""
