"""Action heads: the part of the model that stays at the participant.

Bodies differ in their action spaces, so every participant embeds its own actions. A head is never broadcast,
aggregated or released; :class:`~lensemble_flwr.model.layout.ParameterLayout` refuses its names.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from lensemble_flwr.errors import ContractViolation
from lensemble_flwr.model.spec import HeadSpec, ModelSpec


class ActionHead(nn.Module):
    """Actions of one body -> embedding (..., action_embed_dim): ``Linear -> GELU -> Linear``.

    On a one-hot vector the first layer is an embedding table, so discrete bodies use the same layers; they may also
    hand in the numbers of the choices (an integer tensor without the last axis).
    """

    def __init__(self, head: HeadSpec, model: ModelSpec) -> None:
        super().__init__()
        self.head = head
        self.inner = nn.Linear(head.dim, model.action_hidden)
        self.outer = nn.Linear(model.action_hidden, model.action_embed_dim)

    def forward(self, actions: Tensor) -> Tensor:
        """Embed actions.

        Args:
            actions: (..., dim) floats; for a discrete body also (...) integers in 0..dim-1.

        Raises:
            ContractViolation: wrong width, or integers for a continuous body.
        """
        if not actions.is_floating_point():
            if self.head.kind != "discrete":
                raise ContractViolation(f"A continuous body got actions of dtype {actions.dtype}.", "Use floats.")
            actions = functional.one_hot(actions.long(), self.head.dim).to(self.inner.weight.dtype)
        if actions.shape[-1] != self.head.dim:
            raise ContractViolation(
                f"Actions are {actions.shape[-1]} wide; the head was built for {self.head.dim}.",
                "Use the head of this body.",
            )
        return self.outer(functional.gelu(self.inner(actions.to(self.inner.weight.dtype))))


def head_from_state(head: HeadSpec, model: ModelSpec, state: dict[str, Tensor]) -> ActionHead:
    """An :class:`ActionHead` with the given weights.

    Raises:
        ContractViolation: the weights do not fit.
    """
    made = ActionHead(head, model)
    try:
        made.load_state_dict(state)
    except RuntimeError as error:
        raise ContractViolation("The stored action head does not fit.", "Use the head of this body.") from error
    return made


def clone_state(module: nn.Module) -> dict[str, Tensor]:
    """A detached CPU copy of a module's state."""
    return {name: value.detach().to("cpu", copy=True) for name, value in module.state_dict().items()}
