"""Alignment: exact conjugation, a gate that fires on frame changes only, and moments to forget."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lensemble_flwr.errors import ContractViolation, DegenerateProcrustes, FrameDriftExceeded
from lensemble_flwr.gauge import FrameSurface, align, conjugate, procrustes_align
from tests.gauge.test_procrustes import random_orthogonal, rows


class Toy(nn.Module):
    """The smallest model with a frame: a nonlinear encoder that ends in Linear, a residual predictor, an adapter."""

    def __init__(self, d: int, inputs: int = 20, hidden: int = 24) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, d))
        self.frame = nn.Linear(d, d, bias=False)
        self.inp = nn.Linear(2 * d + 3, hidden)
        self.out = nn.Linear(hidden, d)
        self.B = nn.Parameter(torch.randn(hidden, d))
        self.d = d

    def encode(self, x: Tensor) -> Tensor:
        return self.frame(self.body(x))

    def predict(self, before: Tensor, now: Tensor, action: Tensor) -> Tensor:
        hidden = torch.tanh(self.inp(torch.cat([now, 4 * (now - before), action], dim=1)))
        return 2 * now - before + self.out(hidden) + hidden @ self.B

    def surface(self) -> FrameSurface:
        d = self.d
        return FrameSurface(("frame.weight", "out.weight", "out.bias"), (("inp.weight", ((0, d), (d, 2 * d))),), ("B",))


def encode_with(model: Toy, x: Tensor):
    return lambda state: torch.func.functional_call(_Encode(model), {f"m.{n}": t for n, t in state.items()}, (x,))


class _Encode(nn.Module):
    def __init__(self, m: Toy) -> None:
        super().__init__()
        self.m = m

    def forward(self, x: Tensor) -> Tensor:
        return self.m.encode(x)


@pytest.mark.parametrize("d", [4, 16])
@pytest.mark.parametrize("reflect", [False, True])
def test_a_conjugated_model_computes_the_same_in_the_new_frame(d: int, reflect: bool) -> None:
    torch.manual_seed(d)
    model, other = Toy(d), Toy(d)
    q = random_orthogonal(d, 7, reflect)
    other.load_state_dict(conjugate(model.state_dict(), model.surface(), q))
    x, action = rows(50, 20).float(), rows(50, 3, 1).float()
    with torch.no_grad():
        z, turned = model.encode(x), other.encode(x)
        assert (turned.double() - z.double() @ q).abs().max() < 1e-5
        expected = model.predict(z[:-1], z[1:], action[1:]).double() @ q
        got = other.predict(turned[:-1], turned[1:], action[1:]).double()
        assert (got - expected).abs().max() < 1e-4 * expected.abs().max()


@pytest.mark.parametrize("reflect", [False, True])
def test_a_rotated_participant_is_restored_to_1e5(reflect: bool) -> None:
    torch.manual_seed(0)
    model = Toy(16)
    x = rows(256, 20, 2).float()
    reference = model.encode(x).detach()
    rotated = conjugate(model.state_dict(), model.surface(), random_orthogonal(16, 5, reflect))
    encode = encode_with(model, x)
    found = align(rotated, model.surface(), encode(rotated), reference, reencode=encode)
    assert found.fired
    assert found.drift.max_deg > 15
    assert found.drift.reflects == reflect
    assert (encode(found.state) - reference).abs().max() < 1e-5
    for name, value in model.state_dict().items():
        assert (found.state[name] - value).abs().max() < 1e-5, name
    assert set(found.reset) == {"frame.weight", "out.weight", "out.bias", "inp.weight", "B"}


@pytest.mark.parametrize(
    ("d", "reflect"),
    [
        *((d, reflect) for d in (32, 256) for reflect in (False, True)),
        pytest.param(1024, True, marks=pytest.mark.slow),
    ],
)
def test_rotations_are_absorbed_to_1e5_at_every_size(d: int, reflect: bool) -> None:
    """Encoder outputs, predictions and weights of a turned model come back, in float32."""
    torch.manual_seed(d)
    model = Toy(d, inputs=d, hidden=d)
    x, action = rows(4 * d, d, 2).float(), rows(4 * d, 3, 1).float()
    with torch.no_grad():
        for layer in (model.body[0], model.body[2], model.frame):  # latents that vary in all directions
            layer.weight.copy_(torch.linalg.qr(layer.weight)[0])
        scale = model.encode(x).std()
        model.frame.weight.div_(scale)  # a latent of spread one, as SIGReg keeps it
        reference = model.encode(x)
        predicted = model.predict(reference[:-1], reference[1:], action[1:])
        turned = conjugate(model.state_dict(), model.surface(), random_orthogonal(d, 5, reflect))
        encode = encode_with(model, x)
        found = align(turned, model.surface(), encode(turned), reference)
        assert found.fired
        assert found.drift.reflects == reflect
        assert (encode(found.state) - reference).abs().max() < 1e-5
        back = Toy(d, inputs=d, hidden=d)
        back.load_state_dict(found.state)
        z = back.encode(x)
        error = (back.predict(z[:-1], z[1:], action[1:]) - predicted).abs().max()
        assert error < 1e-5 * predicted.abs().max()


def test_weak_directions_that_alone_seem_to_turn_are_left_alone() -> None:
    """Exact Procrustes would turn directions that hold only noise by any angle; for no gain, so nothing fires."""
    strong = torch.zeros(400, 10, dtype=torch.float64)
    strong[:, :3] = rows(400, 3)
    reference, trained = strong + 0.05 * rows(400, 10, 8), strong + 0.05 * rows(400, 10, 9)
    exact, _ = procrustes_align(trained, reference)
    assert torch.linalg.matrix_norm(exact[3:, 3:] - torch.eye(7)) > 1  # what it would have done to the noise
    found = align({}, FrameSurface((), ()), trained, reference)
    assert not found.fired


def test_local_learning_without_a_turn_passes_bit_for_bit() -> None:
    torch.manual_seed(0)
    model = Toy(8)
    x = rows(128, 20).float()
    reference = model.encode(x).detach()
    trained = {n: t + 0.05 * torch.randn_like(t) for n, t in model.state_dict().items()}
    found = align(trained, model.surface(), encode_with(model, x)(trained), reference, threshold_deg=30)
    assert not found.fired
    assert found.reset == ()
    assert found.q is None
    assert all(torch.equal(found.state[n], t) for n, t in trained.items())


def test_null_directions_invent_no_drift() -> None:
    """Rank-3 latents with a little noise: plain Procrustes reads a large angle, the gate does not fire."""
    reference = torch.zeros(300, 12, dtype=torch.float64)
    reference[:, :3] = rows(300, 3)
    noisy = reference + 1e-4 * rows(300, 12, 4)
    found = align({}, FrameSurface((), ()), noisy, reference + 1e-4 * rows(300, 12, 5))
    assert not found.fired
    assert found.drift.max_deg < 5


def test_a_large_angle_without_improvement_is_no_frame_change() -> None:
    latents, reference = rows(200, 6, 1), rows(200, 6, 2)  # unrelated: any rotation is as good as another
    found = align({}, FrameSurface((), ()), latents, reference)
    assert found.drift.max_deg > 15
    assert found.residual_after > 0.8 * found.residual_before
    assert not found.fired


def test_a_turn_that_the_landmarks_do_not_determine_is_refused() -> None:
    reference = rows(200, 6)
    reference[:, 5] = 0
    with pytest.raises(DegenerateProcrustes):
        align({}, FrameSurface((), ()), reference @ random_orthogonal(6, 3), reference)


def test_drift_that_survives_alignment_is_refused() -> None:
    reference, q = rows(200, 6), random_orthogonal(6, 3)
    with pytest.raises(FrameDriftExceeded):
        align({}, FrameSurface((), ()), reference @ q, reference, reencode=lambda state: reference @ q)


def test_rotating_the_difference_would_be_wrong() -> None:
    """The turn acts on full weights; the caller re-differences."""
    torch.manual_seed(0)
    model, q = Toy(4), random_orthogonal(4, 1)
    full = model.state_dict()
    turned = conjugate(full, model.surface(), q)
    zero = {n: torch.zeros_like(t) for n, t in full.items()}
    of_zero_difference = conjugate(zero, model.surface(), q)
    assert all(not t.any() for t in of_zero_difference.values())
    assert (turned["frame.weight"] - full["frame.weight"]).abs().max() > 0.05


def test_refuses_matrices_that_do_not_fit() -> None:
    model = Toy(4)
    with pytest.raises(ContractViolation):
        conjugate(model.state_dict(), model.surface(), random_orthogonal(5, 0))
    with pytest.raises(ContractViolation):
        conjugate(model.state_dict(), model.surface(), 2 * torch.eye(4))


def test_missing_groups_are_skipped() -> None:
    model, q = Toy(4), random_orthogonal(4, 0)
    state = {n: t for n, t in model.state_dict().items() if n != "B"}
    assert set(conjugate(state, model.surface(), q)) == set(state)
