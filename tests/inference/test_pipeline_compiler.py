"""`compiler` and `compiler_config`: OneDiff's way to compile, from a config to the same video."""

import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file
from torch.torch_version import TorchVersion

from opensora.acceleration.compile.nexfort import record_of
from opensora.acceleration.compile.pipes import parts_of
from opensora.config.load import InferenceConfig, config_from_dict, to_dict
from opensora.inference.pipeline import VideoPipeline
from opensora.registry import MODELS
from opensora.utils.errors import UserError


@pytest.mark.nightly
@pytest.mark.slow
def test_a_compiled_pipeline_makes_the_same_video(cfg):
    expected = VideoPipeline.from_config(cfg)(["a dog"])
    torch._dynamo.reset()
    compiled = replace(cfg, compiler="eager", compiler_config='{"dynamic": true, "memory_format": "channels_last"}')
    pipeline = VideoPipeline.from_config(compiled)
    names = [name for name, module in parts_of(pipeline) if record_of(module) is not None]
    assert names == ["text_encoder", "model", "vae.decoder", "vae.encoder"]
    torch.testing.assert_close(pipeline(["a dog"]), expected, atol=1e-4, rtol=1e-4)


def test_wrong_options_are_reported_before_anything_is_built(cfg, monkeypatch):
    monkeypatch.setattr("opensora.inference.pipeline.build_components", lambda _: pytest.fail("built"))
    with pytest.raises(UserError, match="no word 'O4'"):
        VideoPipeline.from_config(replace(cfg, compiler="nexfort", compiler_config='{"mode": "O4"}'))


NOVA = {
    "type": "NOVA",
    "width": 32,
    "num_heads": 2,
    "video_depth": 1,
    "image_depth": 2,
    "head_depth": 1,
    "motion": False,
}


@pytest.fixture
def nova(cfg, tmp_path):
    """A config of a NOVA with random weights."""
    from opensora.inference.build import COMPONENTS

    model = MODELS.build({**NOVA, "caption_channels": 384, "model_max_length": 16})
    save_file(model.state_dict(), tmp_path / "nova.safetensors")
    scheduler = {"type": "nova", "num_sampling_steps": 2, "num_diffusion_steps": 1, "cfg_scale": 1.0}
    model_config = {**NOVA, "from_pretrained": str(tmp_path / "nova.safetensors")}
    values = {**to_dict(cfg), "num_frames": 1, "image_size": (32, 64), "model": model_config, "scheduler": scheduler}
    return config_from_dict(InferenceConfig, values, COMPONENTS)


@pytest.mark.parametrize(
    ("options", "message"),
    [('{"regional": false}', "compiled by blocks alone"), ('{"mode": "freezing"}', "compiled by blocks alone")],
)
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_nova_is_compiled_by_blocks_alone(nova, options, message):
    with pytest.raises(UserError, match=f"NOVA.*{message}"):
        VideoPipeline.from_config(replace(nova, dtype="bf16", compiler="nexfort", compiler_config=options))


@pytest.mark.slow
@pytest.mark.skipif(
    TorchVersion(torch.__version__) < (2, 14),
    reason="aot_eager of PyTorch 2.11 gives the VAE's group_norm a layout that it refuses",
)
@pytest.mark.nightly
def test_a_compiled_nova_makes_the_same_image_twice(nova):
    expected = VideoPipeline.from_config(nova)(["a dog"])
    torch._dynamo.reset()
    pipeline = VideoPipeline.from_config(replace(nova, compiler="eager"))
    for _ in range(2):
        torch.testing.assert_close(pipeline(["a dog"]), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"compiler": "nexfort", "compile": True}, "compiler does not work with compile"),
        ({"compiler": "nexfort", "step_cache": {"type": "pab"}}, "compiler does not work with step_cache"),
        ({"compiler": "nexfort", "offload": "block"}, "compiler does not work with offload='block'"),
    ],
)
def test_what_does_not_go_together_is_refused(cfg, settings, message):
    from opensora.inference.build import COMPONENTS

    with pytest.raises(UserError, match=message):
        config_from_dict(InferenceConfig, {**to_dict(cfg), **settings}, COMPONENTS)


def test_the_command_line(cfg):
    from opensora.config.command_line import parse_texts

    assert parse_texts(['{"mode": "O3", "dynamic": true}'], str | None) == '{"mode": "O3", "dynamic": true}'
