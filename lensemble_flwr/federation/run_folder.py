"""The coordinator's durable state: one folder per run, from which a run can be resumed or replayed.

    federation.json              federation id, nonce, configuration hash, overrides
    manifest.json                what ran (see :mod:`lensemble_flwr.federation.manifest`)
    evaluation.json              the start's metrics on public held-out data, and which one is the headline
    readings.json                what the start and the last model read along one public episode, for people
    rounds.jsonl                 one line per finished round, appended with fsync
    coordinator.log              what happened when, one JSON object a line; public values only
    checkpoints/round-00000.safetensors ...
    state/stop                       exists once somebody asked the run to stop
    state/round-00003/open.bin       RoundOpen, fsynced before it is first sent
    state/round-00003/attempt        number of the attempt that may be under way
    state/round-00003/asked          exists once somebody may have been asked to reveal
    state/round-00003/sum.npz        the verified integer sum, fsynced before it is used
    state/last-sum.npz               that of the last committed round, where participants verify sums
    state/sent-to.bin                the hash of its model and who was sent that since, where participants verify sums

What is in `state` decides how a broken-off round ends: sum stored -> replayed; asked without a sum -> burnt; neither
-> the same RoundOpen is tried again with the cached vectors.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shlex
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lensemble_flwr.durable import append_fsync, atomic_file, atomic_write, sync_folder
from lensemble_flwr.errors import ArtifactError, CheckpointIntegrityError, ConfigError, RoundError
from lensemble_flwr.federation.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from lensemble_flwr.federation.readings import Readings, to_json
from lensemble_flwr.federation.records import RoundOpen
from lensemble_flwr.json_log import KEYS, json_line, log_context, short_id

SCHEMA_VERSION = 1
_TROUBLE = ("refused", "excluded", "void", "not_shown")
_PART = 1 << 20  # coordinates that are widened at a time
_LOG_TAIL = 1 << 20  # bytes of a log that are looked at


@dataclass(frozen=True)
class StoredSum:
    """The verified sum of one round: its payload (signed integers of any width), the survivors it covers."""

    total: np.ndarray
    survivors: tuple[bytes, ...]
    attempt: int = 0
    tag: int = 0
    """Opened with the sum, where participants verify it."""

    def digest(self) -> bytes:
        """SHA-256 over the survivors and the total as int64, whatever its dtype here."""
        digest = hashlib.sha256(b"lensemble sum\0" + b"".join(self.survivors))
        for start in range(0, self.total.size, _PART):
            digest.update(np.ascontiguousarray(self.total[start : start + _PART], "<i8").data)
        return digest.digest()

    def mark(self) -> bytes:
        """A digest of everything, to find damage on the disk."""
        return hashlib.sha256(self.digest() + self.attempt.to_bytes(4, "big") + self.tag.to_bytes(8, "big")).digest()


def no_run(path: Path) -> ConfigError:
    """The error of a folder that is not a run's."""
    if (path / "sweep.json").is_file():
        point = next((f"{path / p.name}" for p in sorted(path.iterdir()) if p.is_dir()), f"{path}/POINT")
        return ConfigError(
            f"{path} is a sweep, a folder of runs.",
            f"Name one of its runs, as {point}. The command that began the sweep goes on with it.",
        )
    return ConfigError(f"There is no run in {path}.", "Name the folder that lensemble run printed.")


def not_empty(path: Path, found: str) -> ConfigError:
    """The error of a new run in a folder that holds something."""
    hint = "Choose another folder."
    if (path / "federation.json").is_file():
        hint = f"Choose another folder, or continue the run in it: {RunFolder(path).resume_command()}"
    return ConfigError(f"output_dir={path} is not empty ({found}).", hint)


def resume_command(path: Path, superlink: str | None) -> str:
    """What continues a run.

    Args:
        path: the run's folder.
        superlink: the connection; ``"NAME"`` where it is not known, None for a run of simulated sites.
    """
    where = f"--superlink {superlink} " if superlink is not None else ""
    return f"lensemble run {where}--resume {shlex.quote(str(path))}"


class RunFolder:
    """One run's output folder; holds a lock while a coordinator works in it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    # ------------------------------------------------------------------ making and finding

    @classmethod
    def create(
        cls, path: Path, config_hash: bytes, overrides: tuple[str, ...], *, simulation: bool = True
    ) -> RunFolder:
        """A new run: fresh federation id = SHA-256(fresh nonce, configuration hash).

        Args:
            simulation: whether its sites are simulated; the run stays what it is.

        Raises:
            ConfigError: the folder holds something already.
            ArtifactError: it cannot be written.
        """
        try:
            path.mkdir(parents=True, exist_ok=True)
            if found := sorted(p.name for p in path.iterdir() if p.name != "flower.log"):
                raise not_empty(path, found[0])
            for name in ("checkpoints", "state"):
                (path / name).mkdir()
        except OSError as error:
            raise ArtifactError(
                f"The output folder {path} cannot be written: {error.strerror}.", "Choose another output_dir."
            ) from error
        nonce = os.urandom(32)
        record = {
            "schema_version": SCHEMA_VERSION,
            "nonce": nonce.hex(),
            "config_hash": config_hash.hex(),
            "federation_id": hashlib.sha256(b"lensemble federation\0" + nonce + config_hash).hexdigest(),
            "overrides": list(overrides),
            "simulation": simulation,
        }
        atomic_write(path / "federation.json", (json.dumps(record, indent=1) + "\n").encode(), mode=0o644)
        return cls(path)

    @classmethod
    def open(cls, path: Path, config_hash: bytes | None = None) -> RunFolder:
        """An existing run.

        Raises:
            ConfigError: no run there, or it was started with another configuration.
        """
        folder = cls(path)
        if not (path / "federation.json").is_file():
            raise no_run(path)
        if config_hash is not None and folder.federation["config_hash"] != config_hash.hex():
            raise ConfigError(
                f"The run in {path} was started with another configuration.",
                "Resume without overrides: the run's own are used.",
            )
        return folder

    def check_runtime(self, simulation: bool) -> None:
        """A run of real sites goes on with these, one of simulated sites with those.

        Raises:
            ConfigError: it would go on with the others, who would burn its open round and end it in its name.
        """
        if self._simulation is not None and self._simulation != simulation:
            kind = "simulated" if self._simulation else "real"
            raise ConfigError(
                f"The run in {self.path} is one of {kind} sites.", f"To continue it: {self.resume_command()}"
            )

    def resume_command(self) -> str:
        """What continues this run."""
        return resume_command(self.path, "NAME" if self._simulation is False else None)

    @property
    def _simulation(self) -> bool | None:
        """Whether its sites are simulated; None: not recorded."""
        found = self.federation.get("simulation")
        return found if isinstance(found, bool) else None

    @property
    def federation(self) -> dict[str, Any]:
        """What names this run."""
        try:
            record = json.loads((self.path / "federation.json").read_text())
            bytes.fromhex(record["federation_id"])
            return record
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise ArtifactError(f"{self.path / 'federation.json'} is damaged: {error}.") from error

    @property
    def federation_id(self) -> bytes:
        return bytes.fromhex(self.federation["federation_id"])

    @property
    def stop_file(self) -> Path:
        """Once it exists, the run ends at the next point where nothing is lost."""
        return self.path / "state" / "stop"

    @contextmanager
    def lock(self) -> Iterator[None]:
        """One coordinator at a time.

        Raises:
            ConfigError: another process works in the folder.
        """
        with open(self.path / "state" / "lock", "w") as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise ConfigError(f"Another run is working in {self.path}.", "Wait for it or stop it.") from error
            yield

    # ------------------------------------------------------------------ finished rounds

    def rounds(self) -> list[dict[str, Any]]:
        """The finished rounds in order; a torn last line never took effect."""
        path = self.path / "rounds.jsonl"
        if not path.is_file():
            return []
        # What follows the last newline was torn by a crash (append_round cuts it off): it never took effect.
        complete = path.read_bytes().split(b"\n")[:-1]
        try:
            records = [json.loads(line) for line in complete]
        except (ValueError, RecursionError) as error:
            raise ArtifactError(f"A line of {path} is damaged: {error}.", "Restore it from a backup.") from error
        for number, record in enumerate(records):
            wrong = None
            if not isinstance(record, dict):
                wrong = "not an object"
            elif record.get("round") != number:
                wrong = f"round {record.get('round')!r}"
            if wrong:
                raise ArtifactError(f"{path}: line {number + 1} is {wrong}.", "Restore it from a backup.")
        return records

    def append_round(self, record: dict[str, Any]) -> None:
        """Append one finished round (a torn line of an earlier crash is cut off first)."""
        path = self.path / "rounds.jsonl"
        if path.is_file():
            content = path.read_bytes()
            if content and not content.endswith(b"\n"):
                atomic_write(path, content[: content.rfind(b"\n") + 1], mode=0o644)
        append_fsync(path, (json.dumps(record, allow_nan=False) + "\n").encode())

    def log(self, name: str, fields: dict[str, Any]) -> None:
        """Append one event to ``coordinator.log``. What cannot be written is lost: nothing depends on this file."""
        level = "ERROR" if name in ("error", "stopped") else "WARNING" if name in _TROUBLE else "INFO"
        with log_context(federation=short_id(self.federation_id), **{k: fields[k] for k in KEYS if k in fields}):
            line = json_line(level, name, {k: v for k, v in fields.items() if k not in KEYS})
        with contextlib.suppress(OSError), open(self.path / "coordinator.log", "a", encoding="utf-8") as file:
            file.write(line + "\n")

    def last_word(self) -> dict[str, str]:
        """How the run was last taken up or ended with an error, by ``coordinator.log``: {"event", "code", "text"}.

        ``event`` is run or error; empty where the log's last MiB has neither.
        """
        with contextlib.suppress(OSError), open(self.path / "coordinator.log", "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _LOG_TAIL))
            for line in reversed(file.read(_LOG_TAIL).decode("utf-8", "replace").splitlines()):
                with contextlib.suppress(ValueError, AttributeError, RecursionError):
                    event = json.loads(line)
                    if event.get("event") in ("run", "error"):
                        return {name: str(event.get(name, "")) for name in ("event", "code", "text")}
        return {"event": "", "code": "", "text": ""}

    def write_start(
        self, metrics: dict[str, float | None], headline: str, labels: dict[str, dict[str, Any]] | None = None
    ) -> None:
        """Keep the evaluation of the model that the run starts from (``evaluation.json``)."""
        record = {"schema_version": SCHEMA_VERSION, "headline": headline, "start": metrics, "labels": labels or {}}
        atomic_write(self.path / "evaluation.json", (json.dumps(record, indent=1) + "\n").encode(), mode=0o644)

    def write_readings(self, readings: Readings, rounds: int) -> None:
        """Keep what can be seen of the model after ``rounds`` rounds (``readings.json``)."""
        atomic_write(self.path / "readings.json", to_json(readings, rounds), mode=0o644)

    def checkpoint_path(self, index: int) -> Path:
        return self.path / "checkpoints" / f"round-{index:05d}.safetensors"

    def save_checkpoint(self, checkpoint: Checkpoint) -> bytes:
        return save_checkpoint(self.checkpoint_path(checkpoint.round), checkpoint)

    def load_checkpoint(self, index: int) -> Checkpoint:
        """The checkpoint before round ``index``, held against the records of this run.

        Raises:
            CheckpointIntegrityError: damaged, or of another round or run.
        """
        checkpoint = load_checkpoint(self.checkpoint_path(index))
        records = self.rounds()
        expected = records[index - 1].get("checkpoint") if 0 < index <= len(records) else None
        if (
            checkpoint.round != index
            or checkpoint.federation_id != self.federation_id
            or (expected is not None and checkpoint.content_hash().hex() != expected)
        ):
            raise CheckpointIntegrityError(
                f"{self.checkpoint_path(index).name} is not the checkpoint that this run wrote there.",
                "Restore the output folder from a backup.",
            )
        return checkpoint

    # ------------------------------------------------------------------ the round under way

    def _round(self, index: int) -> Path:
        return self.path / "state" / f"round-{index:05d}"

    def opened(self, index: int) -> RoundOpen | None:
        """The RoundOpen that was sent (or was about to be) for this round."""
        path = self._round(index) / "open.bin"
        return RoundOpen.decode(path.read_bytes()) if path.is_file() else None

    def write_opened(self, opened: RoundOpen) -> None:
        """fsync the RoundOpen before it is first sent: a retry needs the identical hash."""
        folder = self._round(opened.round)
        if (folder / "open.bin").exists():
            raise RoundError(f"Round {opened.round} was opened before; its first RoundOpen stands.")
        folder.mkdir(parents=True, exist_ok=True)
        sync_folder(folder.parent)  # else a power cut may take the folder with all that was synced in it
        atomic_write(folder / "open.bin", opened.encode(), mode=0o644)

    def next_attempt(self, index: int) -> int:
        """Count an attempt before it starts; numbers are never used twice."""
        path = self._round(index) / "attempt"
        try:
            attempt = int(path.read_text()) + 1 if path.is_file() else 1
        except ValueError as error:
            raise ArtifactError(f"{path} is damaged.", "Restore the output folder from a backup.") from error
        atomic_write(path, str(attempt).encode(), mode=0o644)
        return attempt

    def mark_asked(self, index: int) -> None:
        """fsync "unmask asked" before anybody is asked."""
        atomic_write(self._round(index) / "asked", b"", mode=0o644)

    def asked(self, index: int) -> bool:
        return (self._round(index) / "asked").exists()

    def store_sum(self, index: int, stored: StoredSum) -> None:
        """fsync the verified sum before it is used."""
        survivors = np.frombuffer(b"".join(stored.survivors), np.uint8)
        opening, mark = np.array([stored.attempt, stored.tag], np.uint64), np.frombuffer(stored.mark(), np.uint8)
        with atomic_file(self._round(index) / "sum.npz", mode=0o644) as file:
            np.savez(file, total=stored.total, survivors=survivors, opening=opening, mark=mark)

    def stored_sum(self, index: int) -> StoredSum | None:
        """The sum of a round that was broken off after unmasking."""
        return self._read_sum(self._round(index) / "sum.npz", "Delete it: the round is then burnt at --resume.")

    def keep_sum(self, index: int) -> None:
        """Keep the sum of a round that is about to be recorded as committed, until the next one is."""
        atomic_write(self._last_sum, (self._round(index) / "sum.npz").read_bytes(), mode=0o644)

    def last_sum(self) -> StoredSum | None:
        """What :meth:`keep_sum` kept, or None."""
        return self._read_sum(self._last_sum, "Restore it from a backup: participants refuse a model without its sum.")

    def write_sent_to(self, theta_hash: bytes, identities: set[bytes]) -> None:
        """Who was sent the model with this hash; in place of those who were sent the one before."""
        atomic_write(self._sent_to, b"".join([theta_hash, *sorted(identities)]), mode=0o644)

    def sent_to(self, theta_hash: bytes) -> set[bytes]:
        """Who was sent the model with this hash, as far as is known."""
        raw = self._sent_to.read_bytes() if self._sent_to.is_file() else b""
        words = [raw[i : i + 32] for i in range(0, len(raw), 32)]
        return set(words[1:]) if words and words[0] == theta_hash else set()

    @property
    def _sent_to(self) -> Path:
        return self.path / "state" / "sent-to.bin"

    @property
    def _last_sum(self) -> Path:
        return self.path / "state" / "last-sum.npz"

    @staticmethod
    def _read_sum(path: Path, remediation: str) -> StoredSum | None:
        if not path.is_file():
            return None
        try:
            with np.load(path) as file:
                raw, total, mark = file["survivors"].tobytes(), file["total"], file["mark"].tobytes()
                attempt, tag = file["opening"].tolist()
            if total.dtype.kind != "i" or total.ndim != 1 or len(raw) % 32:
                raise ValueError("not a sum")
            survivors = tuple(raw[i : i + 32] for i in range(0, len(raw), 32))
            stored = StoredSum(total.astype(np.int64, copy=False), survivors, attempt, tag)
            if stored.mark() != mark:
                raise ValueError("its digest does not match")
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise ArtifactError(f"The stored sum {path} is damaged: {error}.", remediation) from error
        return stored

    def finish_round(self, index: int) -> None:
        """Drop the state of a round whose record is written."""
        folder = self._round(index)
        if folder.is_dir():
            for path in folder.iterdir():
                path.unlink()
            folder.rmdir()
