"""`compile_pipe` on a toy PixArt pipeline of diffusers: order, ignores, results; and which rules hold for a pipeline."""

import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from opensora.acceleration.compile.nexfort import record_of
from opensora.acceleration.compile.pipes import parts_of
from opensora.acceleration.compile.quantise import is_quantised
from opensora.acceleration.compiler import compile_pipe, quantize_pipe
from opensora.utils.errors import UserError
from tests.acceleration.compiler.toys import autoencoder, pixart, sampled


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()


def compiled_parts(pipe) -> list[str]:
    return [name for name, module in parts_of(pipe) if record_of(module) is not None]


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.usefixtures("without_code")
def test_the_seeds_snippet(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    pipe = pixart()
    expected = sampled(pipe)

    options = '{"mode": "O3", "memory_format": "channels_last"}'
    pipe = compile_pipe(pipe, backend="nexfort", options=options, fuse_qkv_projections=True)

    np.testing.assert_allclose(sampled(pipe), expected, atol=1e-5)


@pytest.mark.nightly
@pytest.mark.slow
def test_parts_and_layout_and_results():
    pipe = pixart()
    names, expected = list(pipe.transformer.state_dict()), sampled(pipe)
    options = {"mode": "low-precision", "memory_format": "channels_last"}
    given = json.dumps(options)
    assert compile_pipe(pipe, backend="aot_eager", options=options) is pipe
    assert json.dumps(options) == given
    assert compiled_parts(pipe) == ["transformer", "vae.decoder", "vae.encoder"]
    kernel = pipe.vae.decoder.conv_in.weight
    assert kernel.is_contiguous(memory_format=torch.channels_last)
    assert list(pipe.transformer.state_dict()) == names
    np.testing.assert_allclose(sampled(pipe), expected, atol=1e-5)
    compile_pipe(pipe, backend="none", options={"memory_format": "contiguous_format"})
    assert compiled_parts(pipe) == []
    assert kernel.is_contiguous()


@pytest.mark.extra
def test_only_denoisers_are_quantised():
    pytest.importorskip("torchao")
    first = SimpleNamespace(text_encoder=nn.Linear(8, 8), transformer=nn.Linear(8, 8).eval(), unet=nn.Linear(8, 8))
    assert quantize_pipe(first, ignores=["unet"], quant_type="int8_weightonly", quant_min_features=8) is first
    assert [is_quantised(part) for part in vars(first).values()] == [False, True, False]
    pipe = SimpleNamespace(text_encoder=nn.Linear(8, 8), transformer=nn.Linear(8, 8).eval(), vae=autoencoder())
    compile_pipe(pipe, backend="aot_eager", options={"mode": "quant:cache-all", "quant_min_features": 8})
    assert [is_quantised(part) for part in (pipe.text_encoder, pipe.transformer)] == [False, True]
    assert record_of(pipe.text_encoder).options.words == record_of(pipe.vae.decoder).options.words == {"cache-all"}


def test_quantising_names_what_it_lacks():
    with pytest.raises(UserError, match="ignores='unett' is not a part of it; it has unet"):
        quantize_pipe(SimpleNamespace(unet=nn.Linear(8, 8)), ignores=["unett"])
    with pytest.raises(UserError, match="no denoiser to quantise"):
        quantize_pipe(SimpleNamespace(vae=autoencoder()))


def test_parts_come_in_onediffs_order():
    names = ["vae", "transformer", "text_encoder_3", "unet", "text_encoder_2", "text_encoder", "prior", "decoder", "fast_unet",
             "controlnet", "image_encoder"]  # fmt: skip
    pipe = SimpleNamespace(**{name: nn.Linear(1, 1) for name in names})
    pipe.vae = autoencoder()
    pipe.vqgan = nn.Module()
    pipe.vqgan.down_blocks, pipe.vqgan.up_blocks = nn.Linear(1, 1), nn.Linear(1, 1)
    assert [name for name, _ in parts_of(pipe)] == [
        "text_encoder", "text_encoder_2", "image_encoder", "unet", "controlnet", "fast_unet", "prior", "decoder", "transformer",
        "vqgan.down_blocks", "vqgan.up_blocks", "vae.decoder", "vae.encoder",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("ignores", "left"),
    [
        (["vae"], ["transformer"]),
        (["vae.decoder"], ["transformer", "vae.encoder"]),
        (["transformer", "vae.encoder"], ["vae.decoder"]),
    ],
)
def test_ignores_are_names_or_their_beginnings(ignores, left):
    pipe = compile_pipe(pixart(), backend="aot_eager", ignores=ignores)
    assert compiled_parts(pipe) == left


def test_an_ignore_that_is_no_part_is_refused():
    with pytest.raises(
        UserError, match=r"ignores='va' is not a part of it; it has transformer, vae.decoder, vae.encoder"
    ):
        compile_pipe(pixart(), backend="aot_eager", ignores=["va"])


def test_fused_projections_compute_the_same():
    pipe = pixart()
    expected = sampled(pipe)
    compile_pipe(pipe, backend="none", fuse_qkv_projections=True)
    assert any("to_qkv" in name for name in pipe.transformer.state_dict())
    np.testing.assert_allclose(sampled(pipe), expected, atol=1e-5)
    with pytest.raises(UserError, match="has no way to do it"):
        compile_pipe(SimpleNamespace(unet=nn.Linear(1, 1)), backend="none", fuse_qkv_projections=True)


def test_jit_compiles_what_repeats_blocks():
    pipe = compile_pipe(pixart(), options={"mode": "jit"})
    assert compiled_parts(pipe) == ["transformer"]
    assert [block._compiled_call_impl is not None for block in pipe.transformer.transformer_blocks] == [True, True]


def test_jit_takes_an_earlier_program_off_what_it_leaves_eager():
    pipe = compile_pipe(pixart(), backend="aot_eager")
    compile_pipe(pipe, options={"mode": "jit"})
    assert compiled_parts(pipe) == ["transformer"]
    assert pipe.vae.decoder._compiled_call_impl is None


def test_what_a_pipeline_cannot_do_is_refused():
    with pytest.raises(UserError, match="SimpleNamespace has none of the parts unet"):
        compile_pipe(SimpleNamespace())
    unet = nn.Linear(1, 1).eval()
    with pytest.raises(UserError, match="a step cache decides in Python"):
        compile_pipe(SimpleNamespace(model=unet, step_cache=object()))
    offloaded = SimpleNamespace(model=unet, place=SimpleNamespace(policy="model"))
    with pytest.raises(UserError, match="moves weights"):
        compile_pipe(offloaded, options={"mode": "freezing"})
    offloaded.place.policy = "block"
    with pytest.raises(UserError, match="moves weights"):
        compile_pipe(offloaded)
