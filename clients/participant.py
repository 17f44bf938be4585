"""The Flower NumPyClient of a participant: a thin rim over :class:`SiteParticipant`.

Flower starts a new process per message (in deployment), so a new object is built for each; protocol secrets lie in
``context.state`` while a round is open, everything else in the site's folder.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Context
from flwr.client import NumPyClient

from lensemble_flwr.errors import ContractViolation
from lensemble_flwr.federation.participant import SiteParticipant
from lensemble_flwr.federation.wire import ENVELOPES, Outgoing

_RECORD = "lensemble"


class ContextMemory(MutableMapping[str, bytes]):
    """The part of Context.state that is ours: byte strings by name, about 100 bytes a member in all."""

    def __init__(self, context: Context) -> None:
        if _RECORD not in context.state.config_records:
            context.state[_RECORD] = ConfigRecord()
        self._record: Any = context.state.config_records[_RECORD]

    def __getitem__(self, key: str) -> bytes:
        return self._record[key]

    def __setitem__(self, key: str, value: bytes) -> None:
        self._record[key] = value

    def __delitem__(self, key: str) -> None:
        del self._record[key]

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._record))

    def __len__(self) -> int:
        return len(self._record)


class Participant(NumPyClient):
    """``fit`` is a round's training stage: train, align, reserve, clip, noise, encode, mask.

    It needs an open round (stages open_round and share_keys before it). There is no other way to get parameters,
    properties or an evaluation out of a participant: those methods raise.
    """

    def __init__(self, site_participant: SiteParticipant) -> None:
        self.inner = site_participant

    def fit(self, parameters: list[np.ndarray], config: dict[str, Any]) -> tuple[list[np.ndarray], int, dict[str, Any]]:
        """One masked update.

        Args:
            parameters: ``[theta]``, float32, shape (d,); nothing where this participant holds the model already.
            config: ``{"envelopes": bytes}``, this participant's encrypted shares.

        Returns:
            ``([masked ring vector], 1, {})``: no count, no metric.
        """
        if len(parameters) != 1 and (parameters or ENVELOPES not in config):
            raise ContractViolation(f"fit takes one flat vector, not {len(parameters)}.")
        out = self.masked_update(parameters[0] if parameters else None, config[ENVELOPES])
        assert out.vector is not None
        return [out.vector], 1, {}

    def masked_update(self, theta: np.ndarray | None, envelopes: bytes) -> Outgoing:
        """The whole reply of the training stage: what ``fit`` gives, with what the participant signs beside it."""
        return self.inner.masked_update(theta, envelopes)

    def get_parameters(self, config: dict[str, Any]) -> list[np.ndarray]:
        raise ContractViolation("A participant's parameters never leave it.")

    def get_properties(self, config: dict[str, Any]) -> dict[str, Any]:
        raise ContractViolation("A participant tells no properties.")

    def evaluate(self, parameters: list[np.ndarray], config: dict[str, Any]) -> tuple[float, int, dict[str, Any]]:
        raise ContractViolation("A participant reports no evaluation; the coordinator evaluates on public data.")
