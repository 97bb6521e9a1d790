"""Architectures recognised by names: ours by building them, others by their published names."""

import pytest
import torch

from opensora.models.loading import recognise, star
from tests.models.denoisers import FAMILIES, build

LABELS = {
    "DiT": "DiT or Latte",
    "Latte": "DiT or Latte",
    "PixArt-Sigma": "PixArt",
    "PixArt-Sigma-compressed": "PixArt-Sigma with compressed keys",
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_denoiser_is_recognised(family):
    name = LABELS.get(family) or LABELS.get(family.split("-")[0]) or family.split("-")[0]
    found = recognise(build(family).state_dict())
    assert found.startswith(f"{name} (") or found.startswith(f"{name}, ")
    assert "2 blocks" in found or "2 spatial blocks and 2 temporal blocks" in found
    assert found.endswith("of width 48")


@pytest.mark.parametrize("family", ["DiT-class", "PixArt", "LatteT2V"])
def test_and_in_diffusers_names(family):
    settings = {"PixArt": {"no_temporal_pos_emb": True}, "LatteT2V": {"base_size": 32}}.get(family, {})
    _, state = build(family, **settings).to_diffusers()
    assert recognise(state).startswith(f"{family.split('-')[0]} in diffusers' names (")


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["temp_embed", "t_embedder.mlp.0.weight", "blocks.0.adaLN_modulation.1.weight"], "Latte ("),
        (["double_blocks.0.img_attn.qkv.weight", "single_blocks.0.linear1.weight"], "FLUX or Open-Sora 2"),
        (["encoder.conv_in.weight", "decoder.conv_in.weight", "decoder.mid_block.x"], "a VAE"),
        (["conv_in.weight", "down_blocks.0.x", "mid_block.x", "up_blocks.0.x"], "a U-Net"),
        (["shared.weight", "encoder.block.0.layer.0.SelfAttention.q.weight"], "a T5 text encoder"),
        (["text_model.encoder.layers.0.mlp.fc1.weight"], "a CLIP text encoder"),
        (["blocks.0.mlp.fc1.weight/exp_avg"], "an optimizer's state"),
    ],
)
def test_others(names, expected):
    assert recognise({name: torch.zeros(1) for name in names}).startswith(expected)


def test_unknown_names():
    assert recognise({"weight": torch.zeros(1)}) is None
    assert recognise({}) is None


def test_only_numbers_of_blocks_are_starred():
    assert star("blocks.11.mlp.fc1.weight") == "blocks.*.mlp.fc1.weight"
    assert star("encoder.block.3.layer.0.x") == "encoder.block.*.layer.*.x"
    assert star("t_embedder.mlp.2.weight") == "t_embedder.mlp.2.weight"
