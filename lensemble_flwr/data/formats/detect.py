"""Which format a path holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lensemble_flwr.data.formats.files import walk
from lensemble_flwr.data.formats.reader import Reader
from lensemble_flwr.data.formats.spec import RecordingSpec
from lensemble_flwr.errors import DataError

_HDF5 = (".hdf5", ".h5")


@dataclass(frozen=True)
class Found:
    """A format and the path its reader wants (a file or a folder)."""

    format: str
    path: Path

    def open(self, spec: RecordingSpec) -> Reader:
        """The reader, its module imported now."""
        return _READERS[self.format](self.path, spec)


def detect(path: Path, spec: RecordingSpec) -> Found:
    """Look at the files; ``spec.format`` other than "auto" must be what is found.

    Raises:
        DataError: nothing there, several data sets, or another format.
    """
    path = path.expanduser().absolute()
    if not path.exists():
        raise DataError(f"there are no recordings at {path}.", "Correct the path.")
    found = _detect(path)
    if found is None:
        raise DataError(
            f"{path} holds no recordings of a known format.",
            "Known are LeRobot, robomimic and Minari HDF5, diffusion-policy zarr, and a folder of .npz or .mp4 + .csv.",
        )
    if spec.format not in ("auto", found.format):
        raise DataError(f"{path} is {found.format}, not {spec.format}.", "Correct the path or the format.")
    return found


def _detect(path: Path) -> Found | None:
    if path.is_file():
        if path.suffix.lower() in _HDF5:
            return Found(_hdf5_format(path), path)
        if path.name == "info.json" and path.parent.name == "meta":
            return Found("lerobot", path.parent.parent)
        return None
    if (path / "meta" / "info.json").is_file():
        return Found("lerobot", path)
    if (path / ".zgroup").is_file() or (path / "zarr.json").is_file():
        return Found("zarr", path)
    if (path / "data" / "main_data.hdf5").is_file():
        return Found("minari", path / "data" / "main_data.hdf5")
    if (path / "data" / "metadata.json").is_file():
        raise DataError(f"{path} is a Minari data set that is not stored as HDF5.", "Store it with data_format='hdf5'.")
    single = [*walk(path, _HDF5), *(p for p in sorted(path.iterdir()) if p.suffix == ".zarr" and p.is_dir())]
    if len(single) > 1:
        raise DataError(f"{path} holds {len(single)} data sets.", f"Name one of them, for example {single[0]}.")
    if single:
        return _detect(single[0])
    if any(True for _ in walk(path, (".npz", ".csv"))) or (path / "recordings.json").is_file():
        return Found("folder", path)
    return None


def _hdf5_format(path: Path) -> str:
    from lensemble_flwr.data.formats.hdf5 import layout

    return layout(path)


def _lerobot(path: Path, spec: RecordingSpec) -> Reader:
    from lensemble_flwr.data.formats.lerobot import open_lerobot

    return open_lerobot(path, spec)


def _robomimic(path: Path, spec: RecordingSpec) -> Reader:
    from lensemble_flwr.data.formats.hdf5 import Robomimic

    return Robomimic(path, spec)


def _minari(path: Path, spec: RecordingSpec) -> Reader:
    from lensemble_flwr.data.formats.hdf5 import Minari

    return Minari(path, spec)


def _folder(path: Path, spec: RecordingSpec) -> Reader:
    from lensemble_flwr.data.formats.folder import PlainFolder

    return PlainFolder(path, spec)


def _zarr(path: Path, spec: RecordingSpec) -> Reader:
    from lensemble_flwr.data.formats.zarr_buffer import ReplayBuffer

    return ReplayBuffer(path, spec)


_READERS: dict[str, Callable[[Path, RecordingSpec], Reader]] = {
    "lerobot": _lerobot,
    "robomimic": _robomimic,
    "minari": _minari,
    "folder": _folder,
    "zarr": _zarr,
}
