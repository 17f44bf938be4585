"""Several processes of one participant that train as one: what they share of a batch, and what they add up.

Gradients are averaged by torch's DistributedDataParallel. The loss is no mean over windows, though: SIGReg is a square
of means over the whole batch, so those sums are added over the processes inside the loss, with their gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

Total = Callable[[Tensor], Tensor]
"""Sums a tensor over the processes; its gradient is summed, too."""


class _Sum(torch.autograd.Function):
    """Sum over the processes; the gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx, value: Tensor) -> Tensor:
        return _sum(value)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return _sum(gradient)


def _sum(value: Tensor) -> Tensor:
    summed = value.clone(memory_format=torch.contiguous_format)
    torch.distributed.all_reduce(summed)
    return summed


@dataclass(frozen=True)
class Team:
    """This process among ``size``; the default is a process of its own."""

    rank: int = 0
    size: int = 1

    def part(self, rows: Tensor) -> Tensor:
        """This process's rows of a batch; together the processes have each row once."""
        return rows[self.rank :: self.size] if self.size > 1 else rows

    def weight(self, mine: int, whole: int) -> float:
        """Factor on a mean over ``mine`` of ``whole`` rows: the mean over processes is then that of the batch."""
        return self.size * mine / whole if self.size > 1 else 1.0

    @property
    def total(self) -> Total | None:
        """None in a process of its own."""
        # The backward pass adds the gradients of all processes, each of which holds the same statistic, and
        # DistributedDataParallel divides by their number: what remains is the gradient of one statistic.
        return None if self.size == 1 else _Sum.apply

    def wrap(self, module: nn.Module) -> Callable[..., Tensor]:
        """The module, with gradients averaged over the processes."""
        if self.size == 1:
            return module
        from torch.nn.parallel import DistributedDataParallel

        return DistributedDataParallel(module)
