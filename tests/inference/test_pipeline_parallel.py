"""A pipeline on several processes against one: sequence parallel, guidance in two halves, both; all features on."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from opensora.acceleration.cfg_parallel import make_parallel_plan
from opensora.acceleration.distributed import World
from opensora.config.load import InferenceConfig, config_from_dict, to_dict
from opensora.inference.mask_strategy import FrameCondition
from opensora.inference.pipeline import Request, VideoPipeline
from opensora.inference.prompts import as_items
from opensora.inference.references import Conditioning
from opensora.utils.errors import UserError

PROMPTS = ["a white dog on the floor", "a city street at night", "three boats"]


def request_for(**changes) -> Request:
    image = torch.rand(3, 1, 32, 48, generator=torch.Generator().manual_seed(0)) * 2 - 1
    given = [Conditioning([image], [FrameCondition()]), *[Conditioning([], [])] * 2]
    items = as_items(PROMPTS, None, [None, "blurry", None])
    options = {"num_frames": 5, "image_size": (32, 48), "fps": 8, "seed": 1, "loop": 2, "conditioning": given}
    return Request(items=items, **{**options, **changes})


def compare(rank: int, world_size: int, folder: Path) -> None:
    cfg = config_from_dict(InferenceConfig, json.loads((folder / "cfg.json").read_text()))
    world = World(rank, world_size, torch.device("cpu"))
    exact = torch.load(folder / "exact.pt")
    for sp_size, cfg_parallel, changes in (
        (2, False, {}),
        (2, True, {}),
        (2, True, {"offload": "block", "step_cache": {"type": "pab", "thresholds": (0, 1000)}}),
        (2, True, {"step_cache": {"type": "teacache", "threshold": 9.0}}),
    ):
        changed = replace(cfg, sp_size=sp_size, cfg_parallel=cfg_parallel, **changes)
        plan = make_parallel_plan(world, sp_size, cfg_parallel=cfg_parallel)
        made = VideoPipeline.from_config(changed, plan=plan).sample(request_for(), decode=plan.is_leader)
        assert (made.video is not None) == plan.is_leader
        key = changes.get("step_cache", {"type": "none"})["type"]
        # fp32 rounding: sums over tokens are in another order
        for ours, theirs in zip(made.latents, exact[key], strict=True):
            torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=1e-4)


@pytest.mark.nightly
@pytest.mark.multiprocess
@pytest.mark.slow
def test_four_processes_make_the_videos_of_one(cfg, spawn, tmp_path):
    exact = {}
    for cache in (None, {"type": "pab", "thresholds": (0, 1000)}, {"type": "teacache", "threshold": 9.0}):
        pipeline = VideoPipeline.from_config(replace(cfg, step_cache=cache))
        exact["none" if cache is None else cache["type"]] = pipeline.sample(request_for()).latents
    torch.save(exact, tmp_path / "exact.pt")
    (tmp_path / "cfg.json").write_text(json.dumps(to_dict(cfg)))
    spawn(compare, 4, tmp_path)


def two_processes(rank: int, world_size: int, folder: Path) -> None:
    cfg = config_from_dict(InferenceConfig, json.loads((folder / "cfg.json").read_text()))
    plan = make_parallel_plan(World(rank, world_size, torch.device("cpu")), cfg_parallel=True)
    for scheduler, message in (
        ({**cfg.scheduler, "cfg_scale": 1.0}, "no effect with cfg_scale=1"),
        ({**cfg.scheduler, "guidance": {"batching": "split"}}, "no effect with scheduler.guidance.batching='split'"),
    ):
        with pytest.raises(UserError, match=message):
            VideoPipeline.from_config(replace(cfg, scheduler=scheduler, cfg_parallel=True), plan=plan)
    pipeline = VideoPipeline.from_config(replace(cfg, cfg_parallel=True), plan=plan)
    made = pipeline.sample(request_for(loop=1)).latents
    exact = torch.load(folder / "exact.pt")
    torch.testing.assert_close(made[0], exact["none"][0], atol=2e-4, rtol=1e-4)
    for cache in CACHES:
        pipeline = VideoPipeline.from_config(unguided_at_times(cfg, cache, cfg_parallel=True), plan=plan)
        made = pipeline.sample(request_for(loop=1)).latents
        torch.testing.assert_close(made[0], exact[cache["type"]][0], atol=2e-4, rtol=1e-4)


CACHES = ({"type": "pab", "thresholds": (0, 1000)}, {"type": "teacache", "threshold": 9.0})


def unguided_at_times(cfg: InferenceConfig, cache: dict, **changes) -> InferenceConfig:
    """Steps with guidance and without, where a half of one is of the same shape as the whole of the other."""
    scheduler = {**cfg.scheduler, "num_sampling_steps": 8, "guidance": {"interval": (0.3, 0.8)}}
    return replace(cfg, scheduler=scheduler, step_cache=cache, **changes)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.multiprocess
def test_guidance_on_two_processes(cfg, spawn, tmp_path):
    exact = {"none": VideoPipeline.from_config(cfg).sample(request_for(loop=1)).latents}
    for cache in CACHES:
        pipeline = VideoPipeline.from_config(unguided_at_times(cfg, cache))
        exact[cache["type"]] = pipeline.sample(request_for(loop=1)).latents
        assert pipeline.step_cache.reused
    torch.save(exact, tmp_path / "exact.pt")
    (tmp_path / "cfg.json").write_text(json.dumps(to_dict(cfg)))
    spawn(two_processes, 2, tmp_path)
