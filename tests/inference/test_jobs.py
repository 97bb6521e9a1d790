"""Batches of samples: what is in one batch shares all that a request has once."""

import logging
from dataclasses import replace

import torch
from PIL import Image

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


def test_what_only_references_use_is_for_the_prompts_that_have_some(cfg, tmp_path, caplog):
    """Whether align has an effect is a matter of all prompts, not of a batch of them."""
    image = tmp_path / "first.png"
    Image.new("RGB", (48, 32)).save(image)
    with_reference = f'a dog{{"reference_path": "{image}", "mask_strategy": "0"}}'
    caplog.set_level(logging.INFO)
    cfg = replace(cfg, align=2, mask_strategy_format="five-fields", batch_size=1)
    jobs(replace(cfg, prompt=["a city", "a hand"]))
    assert "align=2 has no effect" in caplog.text
    assert "mask_strategy_format='five-fields' has no effect" in caplog.text
    caplog.clear()
    cfg = replace(cfg, prompt=[with_reference, "a city"])
    pipeline = VideoPipeline.from_config(cfg)
    requests = [request_of(cfg, batch, pipeline) for batch in batches(jobs(cfg), cfg.batch_size)]
    assert "no effect" not in caplog.text
    assert [len(request.conditioning[0].references) for request in requests] == [1, 0]
