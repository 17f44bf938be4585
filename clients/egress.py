"""The one door out of a participant: the outermost ClientApp mod.

Handlers return an :class:`~lensemble_flwr.federation.wire.Outgoing`, never a Flower message; this mod alone builds
messages, after comparing the reply with what public values say it must look like. Whatever a handler raises is logged
at the site and leaves as a refusal code: no text, no value, no traceback.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

from flwr.app import ConfigRecord, Context, Message, RecordDict

from clients.vectors import to_record
from lensemble_flwr.errors import STOPS, ContractViolation, LensembleError, ResidencyViolation
from lensemble_flwr.federation.wire import BODY, REFUSAL, Expected, Outgoing, Refusal, check_egress, refusal_for
from lensemble_flwr.json_log import log_context

FIELDS, ARRAYS = "m", "v"
"""Names of the two records in a message: byte strings and numbers; one flat vector."""

Handled = tuple[Outgoing, Expected]


def reply_message(request: Message, reply: Outgoing) -> Message:
    """A Flower message that holds exactly this reply."""
    content = RecordDict({FIELDS: ConfigRecord({BODY: reply.body})})
    if reply.vector is not None:
        content[ARRAYS] = to_record(reply.vector)
    return Message(content, reply_to=request)


def refusal_message(request: Message, code: Refusal) -> Message:
    """A Flower message that holds exactly this code."""
    return Message(RecordDict({FIELDS: ConfigRecord({REFUSAL: int(code)})}), reply_to=request)


def egress(message: Message, context: Context, call_next: Callable[[Message, Context], Any]) -> Message:
    """Run the handler; let only a listed reply out. Each message is one line in the site's log, and no more is sent."""
    with log_context(stage=message.metadata.message_type):
        return _egress(message, context, call_next)


def _egress(message: Message, context: Context, call_next: Callable[[Message, Context], Any]) -> Message:
    try:
        with _warnings_into_site_log(context):
            handled = cast(Handled, call_next(message, context))
        if not (isinstance(handled, tuple) and len(handled) == 2):
            raise ResidencyViolation("A handler must return (Outgoing, Expected).")
        reply, expected = handled
        check_egress(message.metadata.message_type, reply, expected)
        site_log(context).info("answered %s", message.metadata.message_type, extra={"event": "answered"})
        return reply_message(message, reply)
    except STOPS:
        raise
    except BaseException as error:  # a panic of compiled code is no Exception, and its text would leave
        code = refusal_for(error)
        event = {"event": f"refused_{code.name.lower()}"}
        known = isinstance(error, LensembleError) and not isinstance(error, ContractViolation | ResidencyViolation)
        site_log(context).error("refused %s: %s", message.metadata.message_type, error, extra=event, exc_info=not known)
        return refusal_message(message, code)


@contextmanager
def _warnings_into_site_log(context: Context) -> Iterator[None]:
    """A warning can tell of private data ("overflow": training diverged), and a simulation forwards stderr."""
    with warnings.catch_warnings(record=True) as caught:
        try:
            yield
        finally:
            for warning in caught:
                text = "%s: %s"
                site_log(context).warning(text, warning.category.__name__, warning.message, extra={"event": "warning"})


def site_log(context: Context) -> logging.Logger:
    """The site's own log when the site is known, else a logger without handlers: never Flower's."""
    logger = context.__dict__.get("lensemble_site_log")
    if isinstance(logger, logging.Logger):
        logger.propagate = False  # a logger is sent between processes by its name alone, without its handlers
        if not logger.handlers:
            logger.addHandler(logging.NullHandler())
        return logger
    silent = logging.getLogger("lensemble.site.unknown")
    silent.propagate = False
    if not silent.handlers:
        silent.addHandler(logging.NullHandler())
    return silent
