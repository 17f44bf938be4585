"""The one door: whatever a handler does, only a listed reply or a refusal code leaves."""

from __future__ import annotations

import json
import logging
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict

from clients.egress import ARRAYS, FIELDS, egress
from clients.participant import Participant
from lensemble_flwr.errors import (
    ContractViolation,
    LedgerError,
    PolicyViolation,
    PrivacyBudgetExceeded,
    SecureAggregationError,
)
from lensemble_flwr.federation.policy import Policy
from lensemble_flwr.federation.site import Site
from lensemble_flwr.federation.wire import BODY, REFUSAL, Expected, Outgoing, Refusal, Stage, refused

pytestmark = pytest.mark.usefixtures("flower_task")
CONTEXT = Context(run_id=1, node_id=2, node_config={}, state=RecordDict(), run_config={})


class Panic(BaseException):
    """As a panic of compiled code comes: pyo3's PanicException is no Exception."""


def message(stage: str = Stage.JOIN) -> Message:
    return Message(RecordDict({FIELDS: ConfigRecord({BODY: b""})}), dst_node_id=2, message_type=stage)


def leaves(handler: Any, stage: str = Stage.JOIN) -> RecordDict:
    return egress(message(stage), CONTEXT, handler).content


def code(content: RecordDict) -> Refusal:
    assert list(content) == [FIELDS]
    assert list(content.config_records[FIELDS]) == [REFUSAL]
    value = content.config_records[FIELDS][REFUSAL]
    assert isinstance(value, int)
    return Refusal(value)


def test_a_listed_reply_leaves_as_it_is() -> None:
    vector = np.arange(5, dtype=np.uint8)
    content = leaves(lambda m, c: (Outgoing(b"x" * 32, vector), Expected(32, 5, "|u1")), Stage.TRAIN)
    assert content.config_records[FIELDS] == {BODY: b"x" * 32}
    np.testing.assert_array_equal(content.array_records[ARRAYS]["vector"].numpy(), vector)


@pytest.mark.parametrize(
    "handled",
    [
        None,
        b"raw frames",
        (Outgoing(b"xx"), Expected(3)),
        (Outgoing("text"), Expected(4)),  # type: ignore[arg-type]
        (Outgoing(bytearray(b"xxx")), Expected(3)),  # type: ignore[arg-type]
        (Outgoing(b"xxx", np.zeros(5)), Expected(3)),
        (Outgoing(b"xxx", np.zeros(5, np.float32)), Expected(3, 5, "|u1")),
        (Outgoing(b"xxx", np.zeros(6, np.uint8)), Expected(3, 5, "|u1")),
        (Outgoing(b"xxx", np.zeros((5, 1), np.uint8)), Expected(3, 5, "|u1")),
        (Outgoing(b"xxx", [1, 2, 3, 4, 5]), Expected(3, 5, "|u1")),  # type: ignore[arg-type]
        (Outgoing(b"xxx"), Expected(3, 5, "|u1")),
        ({"loss": 0.5}, Expected(3)),
    ],
)
def test_anything_else_becomes_a_refusal(handled: Any) -> None:
    assert code(leaves(lambda m, c: handled)) == Refusal.PROTOCOL


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (PrivacyBudgetExceeded("secret 17"), Refusal.BUDGET),
        (LedgerError("secret 17"), Refusal.LEDGER),
        (LedgerError("secret 17", busy=True), Refusal.BUSY),
        (PolicyViolation("secret 17"), Refusal.POLICY),
        (SecureAggregationError("secret 17", cause="bad_signature"), Refusal.PROTOCOL),
        (refused("secret 17", Refusal.STALE), Refusal.STALE),
        (ContractViolation("secret 17"), Refusal.PROTOCOL),
        (ValueError("secret 17"), Refusal.PROTOCOL),
        (MemoryError("secret 17"), Refusal.PROTOCOL),
        (KeyError("secret 17"), Refusal.PROTOCOL),
        (Panic("secret 17"), Refusal.PROTOCOL),
    ],
)
def test_an_error_leaves_as_its_code_and_its_text_stays(
    error: BaseException, expected: Refusal, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(m: Message, c: Context) -> None:
        raise error

    content = leaves(fail)
    assert code(content) == expected
    assert b"secret" not in content.deflate()
    assert "secret" not in "".join(capfd.readouterr())


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_a_process_that_is_asked_to_end_ends(stop: type[BaseException]) -> None:
    def end(m: Message, c: Context) -> None:
        raise stop

    with pytest.raises(stop):
        leaves(end)


def test_a_numpy_client_that_gives_nothing_away() -> None:
    client = Participant(None)  # type: ignore[arg-type]
    for ask in (client.get_parameters, client.get_properties):
        with pytest.raises(ContractViolation):
            ask({})
    with pytest.raises(ContractViolation):
        client.evaluate([], {})
    with pytest.raises(ContractViolation):
        client.fit([], {})


def test_a_warning_goes_to_the_site_log_and_not_to_stderr(
    capfd: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder, tmp_path: Path
) -> None:
    """A simulation forwards stderr, and "overflow" would tell that training diverged."""
    context = Context(run_id=1, node_id=2, node_config={}, state=RecordDict(), run_config={})
    site = Site.create(tmp_path / "site", Policy(unlimited=True))

    def diverges(message: Message, context: Context) -> Any:
        context.__dict__["lensemble_site_log"] = site.log
        np.float32(3e38) * np.float32(10.0)
        warnings.warn("PRIVATE 3.14", stacklevel=1)
        return Outgoing(b"xxx"), Expected(3)

    egress(message(), context, diverges)
    assert capfd.readouterr() == ("", "")
    assert not recwarn.list
    written = (tmp_path / "site" / "site.log").read_text()
    assert "overflow" in written
    assert "PRIVATE 3.14" in written


@pytest.mark.parametrize(
    ("error", "traced"),
    [
        (PolicyViolation("No such luck."), False),
        (refused("Too late.", Refusal.STALE), False),
        (ContractViolation("A defect."), True),
        (KeyError("a defect"), True),
    ],
)
def test_the_site_log_traces_defects_and_not_refusals(error: Exception, traced: bool, tmp_path: Path) -> None:
    context = Context(run_id=1, node_id=2, node_config={}, state=RecordDict(), run_config={})
    site = Site.create(tmp_path / "site", Policy(unlimited=True))

    def refuses(message: Message, context: Context) -> Any:
        context.__dict__["lensemble_site_log"] = site.log
        raise error

    egress(message(), context, refuses)
    (line,) = map(json.loads, (tmp_path / "site" / "site.log").read_text().splitlines())
    assert str(error) in line["text"]
    assert line["level"] == "ERROR"
    assert ("traceback" in line) == traced


def test_a_site_log_that_cannot_be_written_says_nothing_elsewhere(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(logging, "raiseExceptions", True)
    site = Site.create(tmp_path / "site", Policy(unlimited=True))
    (tmp_path / "site" / "site.log").mkdir()  # even root cannot append to a folder
    site.log.error("round %d: %s", 1, ValueError("PRIVATE 3.14"))
    assert capfd.readouterr() == ("", "")
