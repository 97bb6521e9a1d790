"""Wan against diffusers' own network and pipeline, with random weights of tiny size."""

import runpy
from pathlib import Path

import pytest
import torch
from diffusers import (
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    UniPCMultistepScheduler,
    WanPipeline,
    WanTransformer3DModel,
)
from transformers import T5TokenizerFast, UMT5Config, UMT5EncoderModel

from opensora.registry import SCHEDULERS, TEXT_ENCODERS
from opensora.training.batch_encoder import freeze
from tests.models.wan.toys import VARIANTS, build, inputs

ROOT = Path(__file__).parents[3]


def diffusers_output(model, x, timestep, y, mask, condition=None, image_features=None):
    text = torch.zeros(len(x), 512, y.shape[-1])
    text[:, : y.shape[2]] = torch.where(mask[..., None], y[:, 0], 0)
    config, state = model.to_diffusers()
    net = WanTransformer3DModel.from_config(config).eval()
    net.load_state_dict(state)
    x = x if condition is None else torch.cat([x, condition], dim=1)
    return net(x, timestep, text, image_features, return_dict=False)[0]


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_the_prediction_is_minus_diffusers(variant):
    model = build(variant)
    cond = inputs(model)
    torch.testing.assert_close(model(**cond), -diffusers_output(model, **cond), atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_conditioning_frames_have_timestep_0_as_in_ti2v():
    model = build("ti2v")
    cond = inputs(model)
    x_mask = torch.tensor([[False, True, True], [True, True, True]])
    t = torch.where(x_mask, cond["timestep"][:, None], 0).repeat_interleave(6, dim=1)  # of each token
    theirs = diffusers_output(model, **{**cond, "timestep": t})
    torch.testing.assert_close(model(**cond, x_mask=x_mask), -theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_the_training_loss_is_that_of_diffusers_network(variant):
    """Of noise - x_0, which its trainers take; on the way, times are shifted and per sample."""
    model = build(variant)
    cond = inputs(model)
    x0, t, noise = cond.pop("x"), cond.pop("timestep"), torch.randn(2, model.in_channels, 3, 4, 6)
    losses = SCHEDULERS.build({"type": "rflow"}).training_losses(model, x0, cond, t=t, noise=noise)
    tau = (t / 1000).reshape(-1, 1, 1, 1, 1)
    theirs = diffusers_output(model, (1 - tau) * x0 + tau * noise, t, **cond)
    torch.testing.assert_close(losses, (theirs - (noise - x0)).square().mean((1, 2, 3, 4)), atol=1e-5, rtol=1e-5)


SOLVERS = {
    "unipc": lambda shift: UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift
    ),
    "flow-euler": lambda shift: FlowMatchEulerDiscreteScheduler(shift=shift),
    "dpm++": lambda shift: DPMSolverMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift
    ),
}


def pipeline(model, scheduler, **config):
    """diffusers' own, without encoders: text is given as features and latents are asked for."""
    net = WanTransformer3DModel.from_config(dict(model.net.config)).eval()
    net.load_state_dict(model.net.state_dict())
    parts = {"tokenizer": None, "text_encoder": None, "vae": None}
    pipe = WanPipeline(**parts, transformer=net, scheduler=scheduler, **config)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def latents_of(pipe, noise, text, negative, **options):
    """What diffusers' pipeline samples, for a size that fits the noise [B, 4, 3, 4, 6]."""
    texts = {"prompt_embeds": text[:, 0], "negative_prompt_embeds": negative[:, 0]}
    size = {"height": 32, "width": 48, "num_frames": 9}
    return pipe(latents=noise, output_type="latent", **texts, **size, **options).frames


@pytest.mark.parametrize("sampler", SOLVERS)
@torch.no_grad()
def test_a_sample_is_that_of_diffusers_pipeline(sampler):
    model = build("t2v")
    noise, text, negative = torch.randn(2, 4, 3, 4, 6), torch.randn(2, 1, 512, 16), torch.randn(2, 1, 512, 16)
    scheduler = SCHEDULERS.build(
        {"type": "rflow", "num_sampling_steps": 4, "cfg_scale": 5.0, "sampler": sampler, "shift": 3.0}
    )
    ours = scheduler.sample(model, noise, {"y": text}, null={"y": negative})
    pipe = pipeline(model, SOLVERS[sampler](3.0))
    theirs = latents_of(pipe, noise, text, negative, num_inference_steps=4, guidance_scale=5.0)
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("boundary", [0.875, 0.9])
@torch.no_grad()
def test_two_experts_share_the_steps_as_in_diffusers(boundary):
    model = build("t2v", boundary=boundary)
    noise, text, negative = torch.randn(1, 4, 3, 4, 6), torch.randn(1, 1, 512, 16), torch.randn(1, 1, 512, 16)
    guidance = {"schedule": "stages", "boundary": boundary, "low_scale": 3.0}
    scheduler = {"type": "rflow", "num_sampling_steps": 5, "cfg_scale": 4.0, "guidance": guidance}
    ours = SCHEDULERS.build({**scheduler, "sampler": "unipc", "shift": 5.0}).sample(
        model, noise, {"y": text}, null={"y": negative}
    )
    low = WanTransformer3DModel.from_config(dict(model.net_2.config)).eval()
    low.load_state_dict(model.net_2.state_dict())
    pipe = pipeline(model, SOLVERS["unipc"](5.0), transformer_2=low, boundary_ratio=boundary)
    scales = {"guidance_scale": 4.0, "guidance_scale_2": 3.0}
    theirs = latents_of(pipe, noise, text, negative, num_inference_steps=5, **scales)
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_text_is_that_of_diffusers_pipeline(tmp_path):
    """UMT5 in a pipeline's folder, through `Wan.text`: prompt, negative and empty prompt, cleaned and padded to 512 alike."""
    vocabulary = ROOT / "assets/tokenizers/t5"
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "vocab_size": 32128}
    torch.manual_seed(0)
    encoder = UMT5EncoderModel(UMT5Config(**sizes)).eval()
    pipe = WanPipeline(
        tokenizer=T5TokenizerFast.from_pretrained(vocabulary), text_encoder=encoder, vae=None, transformer=None,
        scheduler=SOLVERS["unipc"](3.0),
    )  # fmt: skip
    pipe.text_encoder.save_pretrained(tmp_path / "text_encoder")
    pipe.tokenizer.save_pretrained(tmp_path / "tokenizer")
    prompts = ["a &amp;lt; b,  two\n spaces ", "“A dog” CafÃ© 湖"]
    negative = ["blurred, 过曝", ""]
    theirs = pipe.encode_prompt(prompts, negative, max_sequence_length=512)
    settings = {
        **runpy.run_path(str(ROOT / "configs/_base_/wan.py"))["text_encoder"],
        "from_pretrained": str(tmp_path),
        "dtype": "fp32",
    }
    ours = TEXT_ENCODERS.build(settings)
    model = build("t2v")
    for texts, expected in zip((prompts, negative), theirs, strict=True):
        y, mask = ours.encode(texts)
        torch.testing.assert_close(model.text(y, mask, 512), expected, atol=1e-6, rtol=0)
    tokens = tmp_path / "tokenizer/tokenizer.json"
    before = ours.fingerprint()
    tokens.write_text(tokens.read_text() + " ")
    assert ours.fingerprint() != before


def test_it_can_be_frozen_as_an_encoder_is():
    """As in tools.eval.held_out_loss: what shards encoders by their `shard` leaves it alone."""
    model = build("t2v")
    assert freeze(model, torch.device("cpu")) is model
    assert not any(parameter.requires_grad for parameter in model.parameters())
