"""Typed errors. Every error says what was wrong (the value too, when it is public) and what to do about it.

An error is raised where the fault is found, carries a stable ``code`` and a ``remediation``, and prints as
``[CODE] what was wrong. What to do.`` The command line maps codes to its exit status (see :func:`exit_status`).
What crosses from a participant to the coordinator is never one of these: it is a refusal code
(:class:`lensemble_flwr.federation.wire.Refusal`), because the text of an error may hold private values.
"""

from __future__ import annotations

EXIT_OK, EXIT_FAILURE, EXIT_BAD_INPUT, EXIT_BUDGET, EXIT_INTERRUPTED = 0, 1, 2, 3, 130


STOPS = (KeyboardInterrupt, SystemExit, GeneratorExit)
"""What asks a process to end. Everything else that is raised is a failure, even where it is no Exception: a panic of
compiled code (pyo3's PanicException) is a BaseException."""


class LensembleError(Exception):
    """Base of all errors of this project.

    Args:
        message: what was wrong, one sentence.
        remediation: what the reader can do, one sentence. Empty when nothing can be done.
        **fields: structured values, kept as attributes (public values only in errors that may leave a site).
    """

    code: str = "INTERNAL"

    def __init__(self, message: str, remediation: str = "", **fields: object) -> None:
        super().__init__(message)
        self.message = message
        self.remediation = remediation
        self.fields = fields
        for name, value in fields.items():
            setattr(self, name, value)

    def __str__(self) -> str:
        tail = f" {self.remediation}" if self.remediation else ""
        return f"[{self.code}] {self.message}{tail}"

    def __reduce__(self):  # errors cross process borders (ray): keep the fields
        return (_rebuild, (type(self), self.message, self.remediation, self.fields))


def _rebuild(cls: type[LensembleError], message: str, remediation: str, fields: dict) -> LensembleError:
    return cls(message, remediation, **fields)


class ConfigError(LensembleError):
    """Bad input: unknown key, wrong type, impossible combination. Nothing was started."""

    code = "CONFIG"


class ContractViolation(LensembleError):
    """A caller broke a function's contract (shape, dtype, order of calls). A defect, not a user's mistake."""

    code = "CONTRACT"


class ResidencyViolation(LensembleError):
    """Something that must stay at the participant was about to leave it. Never caught and ignored."""

    code = "RESIDENCY"


class GaugeError(LensembleError):
    """The latent frame could not be checked or restored."""

    code = "GAUGE"


class FrameDriftExceeded(GaugeError):
    """Frame drift is still over the threshold after alignment."""

    code = "FRAME_DRIFT"


class DegenerateProcrustes(GaugeError):
    """The cross-covariance is too ill-conditioned to determine a rotation."""

    code = "DEGENERATE_PROCRUSTES"


class AggregationError(LensembleError):
    """The sum could not be formed, verified or applied."""

    code = "AGGREGATION"


class SecureAggregationError(AggregationError):
    """Secure aggregation failed; ``cause`` is one of :data:`SECAGG_CAUSES`. No partial sum exists."""

    code = "SECURE_AGGREGATION"

    def __init__(self, message: str, remediation: str = "", *, cause: str, **fields: object) -> None:
        if cause not in SECAGG_CAUSES:
            raise ValueError(f"unknown secure-aggregation cause {cause!r}")
        super().__init__(message, remediation, cause=cause, **fields)


SECAGG_CAUSES = frozenset(
    {
        "below_threshold",
        "below_min_survivors",
        "key_agreement_failed",
        "share_decrypt_failed",
        "bad_signature",
        "inconsistent_roster",
        "mask_reconstruction_failed",
        "sum_check_failed",
        "malformed_update",
        "policy_violation",
        "already_revealed",
        "malformed_message",
        "wrong_state",
        "sum_forged",
        "sum_withheld",
        "sum_unverified",
    }
)


class NonDeterministicAggregation(AggregationError):
    """The same sum gave different bytes when the outer step was recomputed. Never caught and ignored."""

    code = "NON_DETERMINISTIC"


class PrivacyBudgetExceeded(LensembleError):
    """The next release would pass the budget. Nothing was released or charged for the refused round."""

    code = "BUDGET"


class LedgerError(LensembleError):
    """The privacy ledger is missing, damaged, rolled back or in use. Only its operator may repair it."""

    code = "LEDGER"


class ProvenanceError(LensembleError):
    """An update or a data set is not what it is bound to."""

    code = "PROVENANCE"


class CommitmentMismatch(ProvenanceError):
    """An update names another dataset root than the one its participant joined with. It is not summed."""

    code = "COMMITMENT_MISMATCH"


class ArtifactError(LensembleError):
    """A file that the run needs or writes is missing, damaged or cannot be written."""

    code = "ARTIFACT"


class CheckpointIntegrityError(ArtifactError):
    """A checkpoint's content does not match its hash."""

    code = "CHECKPOINT_INTEGRITY"


class RoundError(LensembleError):
    """A round could not be opened or finished."""

    code = "ROUND"


class RunStopped(RoundError):
    """Somebody asked the run to stop; it ended between two rounds and can be resumed."""

    code = "STOPPED"


class FaultToleranceExceeded(RoundError):
    """Fewer participants joined than the federation needs."""

    code = "FAULT_TOLERANCE"


class ProbeError(LensembleError):
    """The public probe is not the pinned one."""

    code = "PROBE"


class PolicyViolation(LensembleError):
    """A site's own policy forbids what the run asks for. The text stays at the site."""

    code = "POLICY"


class DataError(LensembleError):
    """Recorded data cannot be read as asked."""

    code = "DATA"


class LaunchError(LensembleError):
    """A process that the command needs could not be started or died."""

    code = "LAUNCH"


_STATUS_BY_CODE = {"CONFIG": EXIT_BAD_INPUT, "BUDGET": EXIT_BUDGET}


def exit_status(error_or_text: BaseException | str) -> int:
    """Exit status for an error, or for the status text of a failed run (``"... [CODE] ..."``).

    0 success, 1 failure, 2 bad input, 3 privacy budget exhausted.
    """
    if isinstance(error_or_text, LensembleError):
        return _STATUS_BY_CODE.get(error_or_text.code, EXIT_FAILURE)
    text = str(error_or_text)
    for code, status in _STATUS_BY_CODE.items():
        if f"[{code}]" in text:
            return status
    return EXIT_FAILURE
