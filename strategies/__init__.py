"""Flower strategies: thin, over lensemble_flwr."""

from strategies.secure_diloco import SecureDiLoCo

__all__ = ["SecureDiLoCo"]
