"""Offloading, tiles and the estimate: the same videos, with less on the device, and a message before it is too late."""

from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from torch import nn

from opensora.acceleration.offload import OffloadedModule, Placement, offload_between_calls
from opensora.inference.memory import advice, available_memory, estimate, oom_report, tile_images
from opensora.inference.pipeline import VideoPipeline
from opensora.utils.errors import UserError

A = "a white dog on the floor"
SIZE = {"num_frames": 4, "image_size": (32, 48), "fps": 8}


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
    assert len(moved.place._offloaded) == 3
    assert not any(part.loaded for part in moved.place._offloaded.values())
    assert (moved.place.blocks is None) == (policy == "model")
    assert policy == "model" or not moved.place.blocks.held


def test_blocks_come_one_ahead_and_go(cfg):
    pipeline = VideoPipeline.from_config(
        replace(cfg, offload="block", model={**cfg.model, "depth": 4, "from_pretrained": None})
    )
    blocks, seen = pipeline.place.blocks, []
    for block in pipeline.model.blocks:
        block.attn.register_forward_hook(lambda *_: seen.append({number + 1 for number in blocks.held}))
    pipeline([A], seed=1, guidance_scale=1.0, **SIZE)
    first, later = [set(), {1, 2}, {2, 3}, {3, 1}], [{3, 1}, {1, 2}, {2, 3}, {3, 1}]
    assert seen == first + later * 2


def test_available_memory_is_what_is_free_and_what_this_process_holds():
    free, held = psutil.virtual_memory(), psutil.Process().memory_info().rss
    available = available_memory(torch.device("cpu"))
    limit = Path("/sys/fs/cgroup/memory.max")  # of a container
    if limit.is_file() and limit.read_text().strip() != "max" and available == int(limit.read_text()):
        return
    assert available == pytest.approx(free.available + held, abs=0.1 * free.total)
    assert available > held


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


def test_a_module_is_loaded_for_each_call_and_leaves_after_an_error_too():
    class Doubled(nn.Linear):
        def twice(self, x):
            out = self.once(self.once(x))
            seen.append(self.weight.data_ptr() != home)  # a call inside a call does not unload
            return out

        def once(self, x):
            seen.append(self.weight.data_ptr() != home)
            return self(x)

    layer, seen = Doubled(3, 3), []
    expected = layer(layer(torch.ones(2, 3)))
    offloaded = offload_between_calls(layer, ["once", "twice"], torch.device("cpu"))
    home = layer.weight.data_ptr()
    assert torch.equal(layer.twice(torch.ones(2, 3)), expected)
    assert layer.weight.data_ptr() == home
    with pytest.raises(RuntimeError):
        layer.once(torch.ones(2, 4))
    assert seen == [True] * 4
    assert not offloaded.loaded


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


@pytest.mark.slow
def test_the_estimate_adds_up(cfg):
    def needed(batch=1, scale=2.0, image_size=(32, 48), **changes):
        return estimate(VideoPipeline.from_config(replace(cfg, **changes)), batch, 4, image_size, scale)

    pipeline = VideoPipeline.from_config(cfg)
    parts = (pipeline.model, pipeline.vae, pipeline.text_encoder)
    weights = sum(w.nbytes for part in parts for w in [*part.parameters(), *part.buffers()])
    tokens = 4 * (4 * 2 * 3) * 32  # bytes of all tokens of one video
    decoding = 6 * 4 * (4 * 32 * 48) * pipeline.vae.last_layer.shape[1]
    assert needed() == weights + max(2 * 12 * tokens, decoding)
    assert needed(batch=50) == weights + 50 * 2 * 12 * tokens
    assert needed(batch=50, scale=1.0) == needed(batch=25)
    assert needed() > needed(offload="model") >= needed(offload="block")
    assert needed(batch=50, dtype="bf16") == weights + 50 * 12 * tokens
    assert needed(batch=50, step_cache={"type": "pab"}) == needed(batch=50) + (2 * 3 + 2) * 50 * 2 * tokens
    assert needed(image_size=(64, 96), vae_tiling=32) < needed(image_size=(64, 96))
    text = sum(w.nbytes for w in [*pipeline.text_encoder.parameters(), *pipeline.text_encoder.buffers()])
    pipeline.text_encoder.to("meta")  # elsewhere, and there when the others do not work
    assert estimate(pipeline, 1, 4, (32, 48), 2.0) == weights - text + max(2 * 12 * tokens, decoding, text)
    assert estimate(pipeline, 9999, 4, (32, 48), 2.0) == weights - text + 9999 * 2 * 12 * tokens


def test_out_of_memory_says_what_helps(cfg):
    pipeline = VideoPipeline.from_config(cfg)
    with (
        pytest.raises(
            UserError,
            match=r"out of memory on cpu with 2 videos of 4 frames of 32x48: no more\. What helps: --batch-size 1",
        ),
        oom_report(pipeline, 2, 4, (32, 48)),
    ):
        raise torch.OutOfMemoryError("no more.\ndetails")
    # a CPU has no error of its own for it; PyTorch and NumPy differ, and refuse at once what no address space holds
    for allocate in (lambda: torch.empty(2**55), lambda: bytearray(2**55)):
        with (
            pytest.raises(UserError, match=r"out of memory on cpu with 2 videos .* What helps"),
            oom_report(pipeline, 2, 4, (32, 48)),
        ):
            allocate()
    with pytest.raises(RuntimeError, match="must match the size"), oom_report(pipeline, 2, 4, (32, 48)):
        torch.ones(2) + torch.ones(3)
    tiled = VideoPipeline.from_config(replace(cfg, vae_tiling=64, offload="block", dtype="bf16"))
    assert advice(tiled, 1) == "What helps: --scheduler.guidance.batching split, a smaller size, or fewer frames."
