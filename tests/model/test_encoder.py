"""The encoder: shapes, no batch statistics, a free frame at its end."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lensemble_flwr.errors import ContractViolation, DataError
from lensemble_flwr.model import Encoder, WorldModel, preset
from lensemble_flwr.model.encoder import attach_landmark_norm, attach_normaliser, fit_pixels, fold_normaliser
from tests.model.blobs import CONTINUOUS, blobs


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    torch.manual_seed(0)
    made = Encoder(preset("tiny"))
    fit_pixels(made, blobs(CONTINUOUS, 10, 0).frames)
    return made


def test_uint8_and_float_frames_give_the_same_latents(encoder: Encoder) -> None:
    frames = blobs(CONTINUOUS, 2, 5).frames
    z = encoder(frames)
    assert z.shape == (len(frames), 8)
    assert z.dtype == torch.float32
    assert torch.allclose(z, encoder(frames.float() / 255), atol=1e-5)
    strided = frames.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    assert torch.allclose(z, encoder(strided), atol=1e-5)


def test_a_latent_does_not_depend_on_its_batch(encoder: Encoder) -> None:
    frames = blobs(CONTINUOUS, 2, 5).frames
    encoder.train()
    assert torch.allclose(encoder(frames)[:3], encoder(frames[:3]), atol=1e-5)


def test_there_are_no_batch_statistics_in_a_model() -> None:
    with torch.device("meta"):
        model = WorldModel(preset("small"))
    assert not [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    assert {n for n, _ in model.named_buffers()} == {"encoder.mean_image", "adapter.mean", "adapter.basis"}


def test_it_ends_in_a_plain_linear_map(encoder: Encoder) -> None:
    assert isinstance(encoder.frame_proj, nn.Linear)
    assert encoder.frame_proj.bias is None
    frames = blobs(CONTINUOUS, 1, 6).frames
    z = encoder(frames)
    turned = Encoder(preset("tiny"))
    turned.load_state_dict(encoder.state_dict())
    q = torch.linalg.qr(torch.randn(8, 8, generator=torch.Generator().manual_seed(0)))[0]
    with torch.no_grad():
        turned.frame_proj.weight.copy_(q.T @ encoder.frame_proj.weight)
    assert torch.allclose(turned(frames), z @ q, atol=1e-5)


def test_mean_image_takes_the_background_away(encoder: Encoder) -> None:
    pixels = encoder.pixels(blobs(CONTINUOUS, 10, 0).frames)
    assert pixels.mean(dim=0).abs().max() < 1e-4


def test_folding_the_normaliser_changes_nothing(encoder: Encoder) -> None:
    torch.manual_seed(1)
    made = Encoder(preset("tiny"))
    frames = blobs(CONTINUOUS, 12, 3).frames
    fit_pixels(made, frames)
    attach_normaliser(made)
    with torch.no_grad():
        made.normaliser.weight.uniform_(0.5, 2)
        made.normaliser.bias.uniform_(-1, 1)
    made.train()
    before = made(frames).detach()
    fold_normaliser(made, frames)
    assert isinstance(made.normaliser, nn.Identity)
    assert torch.allclose(made(frames), before, atol=2e-4)
    assert set(made.state_dict()) == set(encoder.state_dict())
    fold_normaliser(made, frames)  # nothing left to fold


def test_landmark_norm_is_the_identity_at_first_and_holds_the_landmarks_statistics() -> None:
    torch.manual_seed(2)
    made = Encoder(preset("tiny"))
    private, landmarks = blobs(CONTINUOUS, 3, 4).frames, blobs(CONTINUOUS, 6, 5).frames
    fit_pixels(made, landmarks)
    plain = made(private)
    units = made.projected(landmarks)
    attach_landmark_norm(made, landmarks)
    assert torch.allclose(made(torch.cat([private, landmarks]))[: len(private)], plain, atol=1e-4)
    with torch.no_grad():  # other weights below: the landmarks' mean and spread stay
        made.projector.weight.mul_(3).add_(0.1 * torch.randn_like(made.projector.weight))
        made.projector.bias.add_(5)
    moved = made.projected(landmarks)
    normalised = made.normaliser(moved)
    assert (moved.mean(dim=0) - units.mean(dim=0)).abs().min() > 1
    assert torch.allclose(normalised.mean(dim=0), units.mean(dim=0), atol=1e-3)
    assert torch.allclose(normalised.std(dim=0), units.std(dim=0), rtol=2e-2, atol=1e-3)
    both = made(torch.cat([private, landmarks]))
    alone = made(torch.cat([private[:1], landmarks]))  # no frame's latent depends on its private neighbours
    assert torch.allclose(alone[:1], both[:1], atol=1e-5)
    fold_normaliser(made, landmarks)
    assert isinstance(made.normaliser, nn.Identity)
    assert torch.allclose(made(private), both[: len(private)], atol=1e-4)


def test_refusals(encoder: Encoder) -> None:
    for frames in (torch.zeros(1, 64, 64, 3), torch.zeros(3, 64, 64), torch.zeros(1, 3, 32, 32)):
        with pytest.raises(ContractViolation):
            encoder(frames)
    with pytest.raises(ContractViolation):
        encoder(torch.zeros(1, 3, 64, 64, dtype=torch.int64))
    with pytest.raises(DataError):
        fit_pixels(Encoder(preset("tiny")), torch.full((20, 3, 64, 64), 7, dtype=torch.uint8))
