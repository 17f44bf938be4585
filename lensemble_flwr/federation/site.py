"""A participant's own folder: everything that must outlive a process, a run and Flower itself.

identity.key     Ed25519 private key, 32 bytes: who this participant is, for ever
identity.pub     its public key in hex: what the other participants pin
roster.json      whom this site is willing to sum with, if its operator pinned that
site.secret      32 bytes: salts of dataset roots
policy.yaml      what the operator allows (policy.json at a simulated site)
site.json        how this site is run (settings; only real sites have it)
ca.crt           certificate authority of the coordinator whom the site's SuperNode trusts (only real sites)
ledger.jsonl, ledger.head   the privacy ledger
answered/        one empty file per round whose unmask question was answered (the latch)
over/            one empty file per round that is settled: no protocol session of it goes on
masked/          one empty file per state of a protocol session that must not be left twice; deleted with its round
federations/     per federation: the dataset root it was joined with, the last round whose end was told
releases/        encoded updates that may still have to be sent again
local/           the action head and optimizer moments, adopted with a release; a lock while a federation trains
sums/            where sums are verified: the model that this site knows to be right, the key of a sum to come (secret)
models/          the committed models that this site ended its runs with
site.log         the site's own log, one JSON object a line; never sent anywhere
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from logging.handlers import RotatingFileHandler
from pathlib import Path

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from lensemble_flwr.data.commitment import derive_salt
from lensemble_flwr.durable import atomic_write, file_errors, sync_folder
from lensemble_flwr.errors import ArtifactError, ConfigError, LedgerError, SecureAggregationError
from lensemble_flwr.federation.policy import Policy, load_policy, save_policy
from lensemble_flwr.federation.roster import PUBLIC_KEY_FILE, ROSTER_FILE, Roster, load_roster
from lensemble_flwr.federation.site_settings import SiteSettings, load_settings
from lensemble_flwr.federation.supernode import fingerprints
from lensemble_flwr.json_log import JsonFormatter
from lensemble_flwr.privacy.ledger import PrivacyLedger
from lensemble_flwr.privacy.mechanism import Release

_CHAIN_HEAD = 68
_MARKS = ("answered", "over", "masked", "federations")


class _SilentFileHandler(RotatingFileHandler):
    """What cannot be logged is lost: logging's own fallback prints the record, values and all, to stderr."""

    def handleError(self, record: logging.LogRecord) -> None:
        pass


class Site:
    """One participant's folder. Opening it reads keys; the ledger is opened (and locked) only while it is used."""

    def __init__(self, folder: Path) -> None:
        """Open an existing site.

        Raises:
            ConfigError: the folder is no site or is damaged.
        """
        self.folder = folder
        self._key = Ed25519PrivateKey.from_private_bytes(self._read("identity.key", 32))
        self.identity = self._key.public_key().public_bytes_raw()
        self._secret = self._read("site.secret", 32)

    @classmethod
    def create(
        cls, folder: Path, policy: Policy, policy_file: str = "policy.json", ledger_head: Path | None = None
    ) -> Site:
        """Make a site's folder with fresh keys, an empty ledger and this policy.

        Args:
            policy_file: ``policy.yaml`` for an operator to read and edit.
            ledger_head: where the ledger's head is kept; beside the log by default. The site's settings must name it.

        Raises:
            ConfigError: there is a site, or the ledger of one that lost its key.
            ArtifactError: the folder cannot be written.
        """
        cls.check_free(folder)
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for name in ("answered", "releases", "local", "models"):
                (folder / name).mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise ArtifactError(f"The site folder {folder} cannot be written: {error.strerror}.") from error
        for name in ("ledger.jsonl", "ledger.head"):  # of a creation that broke off: nothing was ever spent by it
            (folder / name).unlink(missing_ok=True)
        private = Ed25519PrivateKey.generate()
        atomic_write(folder / "site.secret", secrets.token_bytes(32))
        save_policy(folder / policy_file, policy)
        public = private.public_key().public_bytes_raw()
        atomic_write(folder / PUBLIC_KEY_FILE, public.hex().encode() + b"\n", mode=0o644)
        PrivacyLedger.init(folder / "ledger.jsonl", public, ledger_head)
        # The key comes last: a folder with a key is a whole site.
        atomic_write(folder / "identity.key", private.private_bytes_raw())
        return cls(folder)

    @classmethod
    def check_free(cls, folder: Path) -> None:
        """Whether a site can be made in a folder: it may hold what a creation left that broke off, at most the first
        line of a ledger.

        Raises:
            ConfigError: there is a site, or what one has spent, without its key.
        """
        if cls.exists(folder):
            raise ConfigError(f"There is a site in {folder} already.", "Use it, or choose another folder.")
        path = folder / "ledger.jsonl"
        with file_errors(path, "read"):
            used = path.exists() and path.read_bytes().count(b"\n") > 1
            head = path.with_suffix(".head")
            used |= head.exists() and b'"seq":0}' not in head.read_bytes()
        if used or any((folder / name).is_dir() and any((folder / name).iterdir()) for name in _MARKS):
            raise ConfigError(
                f"{folder} has the ledger or the latches of a site, and no identity.key: a new site in it would forget "
                "what was spent.",
                "Put identity.key back from a backup. Without one the spent budget stays with that data: see "
                "docs/deploy.md, Keys and their loss.",
            )

    @classmethod
    def exists(cls, folder: Path) -> bool:
        """Whether the folder holds a whole site."""
        return (folder / "identity.key").is_file()

    def _read(self, name: str, size: int) -> bytes:
        try:
            data = (self.folder / name).read_bytes()
        except OSError as error:
            raise ConfigError(f"The site {self.folder} has no readable {name}.", "Create the site first.") from error
        if len(data) != size:
            raise ConfigError(f"The site's {name} is damaged: {len(data)} bytes instead of {size}.")
        return data

    @property
    def policy(self) -> Policy:
        """The policy as it is on disk now; rules are read again each round.

        Raises:
            ConfigError: missing, not valid, or there are two.
        """
        old, new = self.folder / "policy.json", self.folder / "policy.yaml"
        if old.exists() and new.exists():
            raise ConfigError(f"The site {self.folder} has two policies.", "Remove policy.json or policy.yaml.")
        return load_policy(old if old.exists() else new)

    @property
    def settings(self) -> SiteSettings | None:
        """How a real site is run; None at a simulated one."""
        return load_settings(self.folder)

    def coordinators(self) -> tuple[str, ...]:
        """SHA-256 fingerprints (hex) of the certificate authorities in the site's ``ca.crt``; none without the file.

        Raises:
            ConfigError: the file holds no certificates.
        """
        return fingerprints(self.folder / "ca.crt")

    @property
    def roster(self) -> Roster | None:
        """The pinned roster as it is on disk now, or None."""
        return load_roster(self.folder / ROSTER_FILE)

    def sign(self, statement: bytes) -> bytes:
        """An Ed25519 signature as this participant; only the protocol's statements are ever signed."""
        return self._key.sign(statement)

    def ledger(self) -> PrivacyLedger:
        """Open and lock this site's ledger (a context manager)."""
        settings = self.settings
        head = Path(settings.ledger_head) if settings is not None and settings.ledger_head else None
        return PrivacyLedger.open(self.folder / "ledger.jsonl", identity=self.identity, head_path=head)

    def dataset_salt(self, federation_id: bytes) -> bytes:
        """Salt of the dataset root for one federation: two federations cannot link a data set by its root."""
        return derive_salt(self._secret, federation_id)

    # ------------------------------------------------------------------ the latch

    def answer_once(self, federation_id: bytes, round_index: int) -> None:
        """Persist that this round's unmask question is about to be answered.

        Raises:
            SecureAggregationError: it was answered (or about to be) before; a second answer could let colluders
                subtract two sums.
        """
        if not self._only_once("answered", f"{federation_id.hex()}-{round_index}"):
            raise SecureAggregationError(f"Round {round_index} was already answered.", cause="already_revealed")

    def end_round(self, federation_id: bytes, round_index: int) -> None:
        """Persist that this round is over: nothing is signed or answered for it any more, whatever state comes back."""
        self._only_once("over", f"{federation_id.hex()}-{round_index}")

    def over(self, federation_id: bytes, round_index: int) -> bool:
        """Whether this round is over for this site."""
        return (self.folder / "over" / f"{federation_id.hex()}-{round_index}").exists()

    def session_once(self, federation_id: bytes, round_index: int, session: bytes) -> None:
        """Persist that a protocol session is about to leave this state (by dealing shares, masking, or signing
        the survivors).

        Args:
            federation_id, round_index: the round, so that :meth:`delete_release` can tidy up.
            session: the session's state before; only a hash of it is kept.

        Raises:
            SecureAggregationError: it left this state before; the masks of one session protect one vector.
        """
        name = f"{federation_id.hex()}-{round_index}-{hashlib.sha256(session).hexdigest()}"
        if not self._only_once("masked", name):
            raise SecureAggregationError("This session is past this stage.", cause="wrong_state")

    def _only_once(self, folder: str, name: str) -> bool:
        """Create an empty file durably; False if it was there. Atomic between processes."""
        path = self.folder / folder / name
        try:
            if not path.parent.is_dir():
                path.parent.mkdir(mode=0o700, exist_ok=True)
                sync_folder(self.folder)
            handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        except FileExistsError:
            return False
        except OSError as error:
            raise ArtifactError(
                f"The site cannot write {path}: {error.strerror}.", "Free space, then resume."
            ) from error
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
        sync_folder(path.parent)
        return True

    def answered(self, federation_id: bytes, round_index: int) -> bool:
        """Whether this round's unmask question was answered."""
        return (self.folder / "answered" / f"{federation_id.hex()}-{round_index}").exists()

    @contextmanager
    def training(self, federation_id: bytes, timeout_s: float) -> Iterator[None]:
        """One process at a time trains for a federation; the ledger stays free. The lock goes with its process.

        Raises:
            LedgerError: another one trains for longer than ``timeout_s`` seconds (busy).
        """
        path = self.folder / "local" / f"{federation_id.hex()}.lock"
        deadline = time.monotonic() + timeout_s
        with file_errors(path, "open"):
            path.parent.mkdir(mode=0o700, exist_ok=True)
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            while True:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() >= deadline:
                        raise LedgerError("Another process of this site still trains.", busy=True) from None
                    time.sleep(0.05)
            yield
        finally:
            os.close(handle)

    # ------------------------------------------------------------------ cached releases

    def _release_path(self, federation_id: bytes, round_index: int) -> Path:
        return self.folder / "releases" / f"{federation_id.hex()}-{round_index}.q"

    def save_release(self, federation_id: bytes, round_index: int, release: Release) -> bytes:
        """Write an encoded update before it may be sent; returns the SHA-256 of its bytes."""
        pieces, digest = release.pieces(), hashlib.sha256()
        atomic_write(self._release_path(federation_id, round_index), pieces)
        for piece in pieces:
            digest.update(piece)
        return digest.digest()

    def load_release(self, federation_id: bytes, round_index: int, expected_hash: bytes) -> Release | None:
        """The cached update, or None when it is missing or not the one that the ledger names."""
        try:
            return Release.from_bytes(self._release_path(federation_id, round_index).read_bytes(), expected_hash)
        except (OSError, ArtifactError):
            return None

    def log_release(self, federation_id: bytes, round_index: int, release: Release) -> None:
        """Keep a copy for the site's own audits; only the site's policy can ask for it, never a run."""
        folder = self.folder / "released"
        folder.mkdir(mode=0o700, exist_ok=True)
        atomic_write(folder / f"{federation_id.hex()}-{round_index}.q", release.pieces())

    def delete_release(self, federation_id: bytes, round_index: int) -> None:
        """Forget a cached update once its round is over."""
        self._release_path(federation_id, round_index).unlink(missing_ok=True)
        for path in (self.folder / "masked").glob(f"{federation_id.hex()}-{round_index}-*"):
            path.unlink(missing_ok=True)

    # ------------------------------------------------------------------ what was told about a federation

    def dataset_root(self, federation_id: bytes) -> bytes | None:
        """The root that this site joined a federation with, or None."""
        path = self.folder / "federations" / f"{federation_id.hex()}.root"
        root = path.read_bytes() if path.is_file() else b""
        return root if len(root) == 32 else None

    def keep_dataset_root(self, federation_id: bytes, root: bytes) -> None:
        """Fix the root of a federation."""
        (self.folder / "federations").mkdir(mode=0o700, exist_ok=True)
        atomic_write(self.folder / "federations" / f"{federation_id.hex()}.root", root)

    def last_closed(self, federation_id: bytes) -> tuple[int, bytes] | None:
        """(round, hash of the model after it) of the last round whose end this site was told."""
        path = self.folder / "federations" / f"{federation_id.hex()}.closed"
        content = path.read_bytes() if path.is_file() else b""
        return (int.from_bytes(content[:4], "big"), content[4:]) if len(content) == 36 else None

    def note_closed(self, federation_id: bytes, round_index: int, theta_hash: bytes) -> None:
        """Remember how a round ended, unless a later one is remembered."""
        known = self.last_closed(federation_id)
        if known is None or known[0] < round_index:
            (self.folder / "federations").mkdir(mode=0o700, exist_ok=True)
            content = round_index.to_bytes(4, "big") + theta_hash
            atomic_write(self.folder / "federations" / f"{federation_id.hex()}.closed", content)

    # ------------------------------------------------------------------ verified sums

    def _sums(self, federation_id: bytes, kind: str) -> Path:
        (self.folder / "sums").mkdir(mode=0o700, exist_ok=True)
        return self.folder / "sums" / f"{federation_id.hex()}.{kind}"

    def save_chain(self, federation_id: bytes, head: bytes, state: np.ndarray) -> None:
        """Replace the model, with its momentum, that this site knows to be right; ``head`` (68 bytes) names it."""
        atomic_write(self._sums(federation_id, "state"), head + state.tobytes())

    def chain_head(self, federation_id: bytes) -> bytes | None:
        """The name of the model that :meth:`save_chain` kept, or None."""
        try:
            with open(self._sums(federation_id, "state"), "rb") as file:
                head = file.read(_CHAIN_HEAD)
        except FileNotFoundError:
            return None
        return head if len(head) == _CHAIN_HEAD else None

    def chain_values(self, federation_id: bytes, dtype: str, start: int, count: int) -> np.ndarray:
        """``count`` values of what :meth:`save_chain` kept, from byte ``start`` after its name; fewer if there are."""
        return np.fromfile(self._sums(federation_id, "state"), dtype, count, offset=_CHAIN_HEAD + start)

    def drop_chain(self, federation_id: bytes) -> None:
        """Forget a model that turned out to be damaged."""
        self._sums(federation_id, "state").unlink(missing_ok=True)

    def save_pending(self, federation_id: bytes, pending: bytes) -> None:
        """Keep the secrets with which the sum of the round under way will be verified; replaces those before."""
        atomic_write(self._sums(federation_id, "pending"), pending)

    def pending(self, federation_id: bytes) -> bytes | None:
        """What :meth:`save_pending` kept, or None."""
        path = self._sums(federation_id, "pending")
        return path.read_bytes() if path.is_file() else None

    def drop_pending(self, federation_id: bytes) -> None:
        """Overwrite and forget them. (A disk may keep what was overwritten: the secret is of no use any more.)"""
        path = self._sums(federation_id, "pending")
        if path.is_file():
            path.write_bytes(bytes(path.stat().st_size))
            path.unlink()

    def distrust(self, federation_id: bytes, why: str) -> None:
        """Never take part in this federation again, unless the operator deletes the file."""
        atomic_write(self._sums(federation_id, "forged"), why.encode() + b"\n")

    def distrusted(self, federation_id: bytes) -> str | None:
        """Why this site does not take part in a federation any more, or None."""
        path = self.folder / "sums" / f"{federation_id.hex()}.forged"
        return path.read_text().strip() if path.is_file() else None

    # ------------------------------------------------------------------ local training state

    def local_state(self, federation_id: bytes) -> bytes | None:
        """The action head and optimizer moments that were adopted last, or None."""
        path = self.folder / "local" / f"{federation_id.hex()}.state"
        return path.read_bytes() if path.is_file() else None

    def stage_local_state(self, federation_id: bytes, round_index: int, state: bytes) -> None:
        """Write the state that belongs to a release; it counts only once :meth:`adopt_local_state` ran."""
        atomic_write(self.folder / "local" / f"{federation_id.hex()}-{round_index}.staged", state)

    def adopt_local_state(self, federation_id: bytes, round_index: int) -> None:
        """Make the staged state the current one (with ``encoded``; a retry never trains again)."""
        staged = self.folder / "local" / f"{federation_id.hex()}-{round_index}.staged"
        if staged.is_file():
            os.replace(staged, self.folder / "local" / f"{federation_id.hex()}.state")
            sync_folder(staged.parent)

    def discard_staged_state(self, federation_id: bytes, round_index: int) -> None:
        """Forget the state of a forfeited release."""
        (self.folder / "local" / f"{federation_id.hex()}-{round_index}.staged").unlink(missing_ok=True)

    def save_model(self, federation_id: bytes, theta: np.ndarray, verified: bool = True) -> None:
        """Keep the model with which this site ended the federation (little-endian float32), by its name as one that it
        could not verify."""
        name = f"{federation_id.hex()}{'' if verified else '.unverified'}.theta"
        atomic_write(self.folder / "models" / name, np.ascontiguousarray(theta, "<f4").view(np.uint8).data)

    # ------------------------------------------------------------------ the site's own log

    @property
    def log(self) -> logging.Logger:
        """The site's own log file, one JSON object a line. Values may stand here; nothing of it is ever sent."""
        logger = logging.getLogger(f"lensemble.site.{self.identity.hex()[:16]}")
        if not logger.handlers:
            logger.setLevel(logging.INFO)
            logger.propagate = False  # Flower forwards the root logger
            handler = _SilentFileHandler(self.folder / "site.log", maxBytes=1 << 20, backupCount=2, delay=True)
            handler.setFormatter(JsonFormatter())
            logger.addHandler(handler)
        return logger
