"""Writing a file so that readers see the old one or the new one, never half of one."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def write_atomic(path: Path, raw: bytes) -> None:
    """Write ``raw`` beside ``path``, flush it to the disk, rename. OSError leaves ``path`` as it was and no rest."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(raw)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
