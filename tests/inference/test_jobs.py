"""Batches of samples: what is in one batch shares all that a request has once."""

from dataclasses import replace

import torch

from opensora.inference.jobs import batches, jobs, request_of
from opensora.inference.pipeline import VideoPipeline


def test_no_two_samples_of_a_prompt_are_alike(cfg):
    """Three prompts do not fill two batches of two: the third's must not take along the next sample of the first."""
    cfg = replace(cfg, prompt=["a white dog", "a city at night", "three"], num_sample=2, batch_size=2)
    pipeline = VideoPipeline.from_config(cfg)
    latents: dict[str, list[torch.Tensor]] = {}
    for batch in batches(jobs(cfg), cfg.batch_size):
        made = pipeline.sample(request_of(cfg, batch, pipeline), decode=False).latents[0]
        for job, z in zip(batch, made, strict=True):
            latents.setdefault(job.item.text, []).append(z)
    assert [len(samples) for samples in latents.values()] == [2, 2, 2]
    assert min((one - other).abs().mean() for one, other in latents.values()) > 1e-2
