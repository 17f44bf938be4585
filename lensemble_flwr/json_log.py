"""Logs as one JSON object a line, each line with the round that it belongs to.

Both the site's own log and the coordinator's use this. What differs is what may stand there: the coordinator's has
public values only, the site's stays at the site.
"""

from __future__ import annotations

import contextvars
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

_CONTEXT: contextvars.ContextVar[dict[str, Any] | None] = contextvars.ContextVar("lensemble_log", default=None)

KEYS = ("federation", "round", "stage")
"""What correlates the lines of all parties: first 16 hex digits of the federation's id, round index, message type."""


def short_id(federation_id: bytes) -> str:
    """A federation's id as it stands in logs and in Flower's group id."""
    return federation_id.hex()[:16]


@contextmanager
def log_context(**known: Any) -> Iterator[None]:
    """Every line that is logged inside carries these of :data:`KEYS`, and what :func:`bind` adds meanwhile."""
    token = _CONTEXT.set({**(_CONTEXT.get() or {}), **known})
    try:
        yield
    finally:
        _CONTEXT.reset(token)


def bind(**known: Any) -> None:
    """Add to the innermost :func:`log_context`; without one it does nothing."""
    context = _CONTEXT.get()
    if context is not None:
        context.update(known)


def json_line(level: str, event: str, fields: dict[str, Any]) -> str:
    """One line, without its end. ``time`` is UTC in ISO 8601 with milliseconds."""
    time = datetime.now(UTC).isoformat(timespec="milliseconds")
    known = {key: (_CONTEXT.get() or {}).get(key) for key in KEYS}
    return json.dumps({"time": time, "level": level, **known, "event": event, **fields})


class JsonFormatter(logging.Formatter):
    """A log record as a line; its event is the record's ``event`` (``extra={"event": ...}``), else "note"."""

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = {"text": record.getMessage()}
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json_line(record.levelname, str(getattr(record, "event", "note")), fields)
