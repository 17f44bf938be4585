"""Every line is one JSON object, whatever is logged."""

from __future__ import annotations

import json
import logging
from datetime import datetime, timedelta
from pathlib import Path

from lensemble_flwr.federation.run_folder import RunFolder
from lensemble_flwr.json_log import JsonFormatter, bind, log_context, short_id


def formatted(text: str, *args: object, error: BaseException | None = None, **extra: object) -> dict[str, object]:
    info = (type(error), error, error.__traceback__) if error else None
    record = logging.makeLogRecord({"msg": text, "args": args, "levelname": "ERROR", "exc_info": info, **extra})
    line = JsonFormatter().format(record)
    assert "\n" not in line
    return dict(json.loads(line))


def test_a_line_has_all_keys_in_and_out_of_a_round() -> None:
    line = formatted('two\nlines and "quotes" %d', 17)
    assert list(line) == ["time", "level", "federation", "round", "stage", "event", "text"]
    assert (line["federation"], line["round"], line["stage"], line["event"]) == (None, None, None, "note")
    assert line["text"] == 'two\nlines and "quotes" 17'
    assert datetime.fromisoformat(str(line["time"])).utcoffset() == timedelta(0)


def test_what_is_known_later_is_in_the_lines_that_follow_and_gone_with_the_context() -> None:
    bind(round=9)  # outside of any: nothing
    with log_context(stage="query.join"):
        assert formatted("x")["round"] is None
        bind(federation=short_id(bytes(range(32))), round=3)
        with log_context(stage="query.unmask"):
            line = formatted("x", event="answered")
            assert (line["federation"], line["round"], line["stage"]) == ("0001020304050607", 3, "query.unmask")
        assert formatted("x")["stage"] == "query.join"
    assert formatted("x")["round"] is None


def test_a_traceback_is_one_field() -> None:
    try:
        raise ValueError("a\nb")
    except ValueError as error:
        line = formatted("refused", error=error, event="refused_policy")
    assert "ValueError: a\nb" in str(line["traceback"])


def test_the_coordinators_log(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", bytes(32), ())
    with log_context():
        folder.log("round_open", {"round": 2, "roster": 4})
        bind(round=2)
        folder.log("refused", {"stage": "query.join", "code": "POLICY"})
        folder.log("error", {"code": "X", "text": "a\nb"})
    lines = [json.loads(line) for line in (tmp_path / "run" / "coordinator.log").read_text().splitlines()]
    assert [line["level"] for line in lines] == ["INFO", "WARNING", "ERROR"]
    assert [line["round"] for line in lines] == [2, 2, 2]
    assert {line["federation"] for line in lines} == {folder.federation_id.hex()[:16]}
    assert lines[1]["stage"] == "query.join"
    assert (lines[0]["roster"], lines[2]["text"]) == (4, "a\nb")
    (tmp_path / "run" / "coordinator.log").unlink()
    (tmp_path / "run" / "coordinator.log").mkdir()
    folder.log("round", {})  # what cannot be written is lost, and no error
