"""Offloading, tiles and the estimate: the same videos, with less on the device, and a message before it is too late."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from opensora.acceleration.offload import OffloadedModule, Placement
from opensora.inference.memory import _peak_bytes, advice, estimate, oom_report, tile_images
from opensora.inference.pipeline import VideoPipeline
from opensora.inference.request import Request, as_items
from opensora.utils.errors import UserError

A = "a white dog on the floor"
SIZE = {"num_frames": 4, "image_size": (32, 48), "fps": 8}


def request_for(prompts=(A,), **changes) -> Request:
    return Request(items=as_items(list(prompts)), seed=1, **{**SIZE, **changes})


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["model", "block"])
@pytest.mark.parametrize(
    "step_cache", [None, {"type": "pab", "thresholds": (0, 1000)}, {"type": "teacache", "threshold": 9.0}]
)
def test_offloading_changes_no_bit(cfg, policy, step_cache):
    cfg = replace(cfg, step_cache=step_cache)
    plain = VideoPipeline.from_config(cfg)([A], seed=1, **SIZE)
    moved = VideoPipeline.from_config(replace(cfg, offload=policy))
    assert torch.equal(plain, moved([A], seed=1, **SIZE))
    assert torch.equal(plain, moved([A], seed=1, **SIZE))  # and again, after everything went home
    parts = [*moved.place._offloaded.values(), *(moved.place.stream.blocks if policy == "block" else [])]
    assert len(parts) == (3 if policy == "model" else 5)
    assert not any(part.loaded for part in parts)


def test_blocks_come_one_ahead_and_go(cfg):
    pipeline = VideoPipeline.from_config(
        replace(cfg, offload="block", model={**cfg.model, "depth": 4, "from_pretrained": None})
    )
    stream, seen = pipeline.place.stream, []
    assert stream is not None
    for block in pipeline.model.blocks:
        block.attn.register_forward_hook(lambda *_: seen.append([offloaded.loaded for offloaded in stream.blocks]))
    pipeline([A], seed=1, guidance_scale=1.0, **SIZE)
    one, none = True, False
    first = [[one, one, none, none], [one, one, one, none], [one, none, one, one], [one, one, none, one]]
    later = [first[0], *first[1:]]
    assert seen == first + later * 2


def test_weights_work_on_a_copy_and_come_home():
    layer = nn.Linear(3, 3)
    home = layer.weight.data_ptr()
    offloaded = OffloadedModule(layer.parameters(), torch.device("cpu"))
    offloaded.load()
    assert layer.weight.data_ptr() != home
    offloaded.unload()
    assert layer.weight.data_ptr() == home
    tied = nn.ModuleList([layer, layer])
    assert len(OffloadedModule(tied.parameters(), torch.device("cpu")).pairs) == len(offloaded.pairs) == 2


def test_parts_without_weights_are_left_alone():
    with Placement({"vae": None, "text_encoder": object()}, torch.device("cpu"), "model").using("vae"):
        pass


def test_an_encoder_with_an_order_of_its_own_keeps_it(cfg):
    text_encoder = {**cfg.text_encoder, "between_uses": "unload"}
    pipeline = VideoPipeline.from_config(replace(cfg, text_encoder=text_encoder, offload="model"))
    assert "text_encoder" not in pipeline.place._offloaded
    plain = VideoPipeline.from_config(cfg)([A], seed=1, **SIZE)
    assert torch.equal(pipeline([A], seed=1, **SIZE), plain)
    assert pipeline.text_encoder.model is None


def test_tiles_decode_nearly_the_same(cfg):
    plain = VideoPipeline.from_config(cfg)([A], seed=1, num_frames=2, image_size=(64, 96), fps=8)
    pipeline = VideoPipeline.from_config(replace(cfg, vae_tiling=64))
    assert pipeline.vae.tile_size == 64
    tiled = pipeline([A], seed=1, num_frames=2, image_size=(64, 96), fps=8)
    assert 0 < (plain - tiled).abs().mean() < 0.1
    with pytest.raises(UserError, match="tile_size=60"):
        tile_images(pipeline.vae, 60)


class Chain(nn.Module):
    """1000 -> 4000 -> 1000 numbers a row."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(1000, 4000), nn.Linear(4000, 1000)

    def forward(self, x):
        x = self.up(x)
        return self.down(torch.relu(x))


def test_peaks_are_counted_and_nothing_is_computed():
    chain = Chain()
    chain.up.weight.data.fill_(float("nan"))
    rows = 10**6  # 16 GB if it were computed
    peak = _peak_bytes(chain, lambda: chain(torch.empty(rows, 1000)))
    assert peak == 4 * rows * (2 * 1000 + 2 * 4000)  # input, output, and a hidden layer before and after relu
    assert chain.up.weight.isnan().all()
    assert not chain.up.weight.is_meta


def test_attention_is_counted_without_scores():
    def call():
        q = torch.empty(1, 2, 5000, 8)
        return nn.functional.scaled_dot_product_attention(q, q, q)

    assert _peak_bytes(nn.Identity(), call) == 2 * 4 * 2 * 5000 * 8  # q and the result


@pytest.mark.nightly
@pytest.mark.slow
def test_the_estimate_adds_up(cfg):
    pipeline = VideoPipeline.from_config(cfg)
    size = pipeline.vae.latent_size((4, 32, 48))
    needed = estimate(pipeline, request_for(), size)
    weights = {name: needed.weights[name] for name in ("model", "vae", "text_encoder")}
    assert weights["model"] == sum(4 * w.numel() for w in pipeline.model.state_dict().values())
    assert needed.peak("none") == sum(weights.values()) + max(needed.denoising, needed.decoding)
    assert needed.peak("none") > needed.peak("model") >= needed.peak("block")
    assert estimate(pipeline, request_for([A] * 3), size).denoising > 2 * needed.denoising
    assert estimate(pipeline, request_for(guidance_scale=1.0), size).denoising < needed.denoising
    assert torch.equal(pipeline([A], seed=1, **SIZE), pipeline([A], seed=1, **SIZE))  # the weights are back
    blocks = VideoPipeline.from_config(replace(cfg, offload="block"))
    assert estimate(blocks, request_for(), size).denoising == needed.denoising
    assert not any(block.loaded for block in blocks.place.stream.blocks)
    half = VideoPipeline.from_config(replace(cfg, dtype="bf16"))
    assert estimate(half, request_for(), size).denoising < needed.denoising
    cached = VideoPipeline.from_config(replace(cfg, step_cache={"type": "pab"}))
    assert estimate(cached, request_for(), size).kept == (2 * 3 + 2) * 2 * (4 * 2 * 3) * 32 * 4


@pytest.mark.slow
def test_runs_of_a_size_are_estimated_once(cfg):
    pipeline = VideoPipeline.from_config(cfg)
    size = pipeline.vae.latent_size((4, 32, 48))
    known = estimate(pipeline, request_for(), size)
    assert estimate(pipeline, request_for(), size) is known
    for other in (request_for([A] * 3), request_for(guidance_scale=1.0)):
        assert estimate(pipeline, other, size) != known
    assert estimate(VideoPipeline.from_config(replace(cfg, dtype="bf16")), request_for(), size) != known


def test_out_of_memory_says_what_helps(cfg):
    pipeline = VideoPipeline.from_config(cfg)
    with (
        pytest.raises(
            UserError,
            match=r"out of memory on cpu with 2 videos of 4 frames of 32x48: no more\. What helps: --batch-size 1",
        ),
        oom_report(pipeline, request_for([A, A])),
    ):
        raise torch.OutOfMemoryError("no more.\ndetails")
    tiled = VideoPipeline.from_config(replace(cfg, vae_tiling=64, offload="block", dtype="bf16"))
    assert (
        advice(tiled, request_for())
        == "What helps: --scheduler.guidance.batching split, a smaller size, or fewer frames."
    )
