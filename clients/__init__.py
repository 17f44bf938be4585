"""Flower clients: thin, over lensemble_flwr."""

from clients.participant import Participant

__all__ = ["Participant"]
