"""Optix's call on diffusers' U-Net and our own models: its snippets run with the import changed, and each keyword does something."""

import copy
import logging
from types import SimpleNamespace

import pytest
import torch
from diffusers import AutoencoderKL, AutoencoderKLWan, DiTTransformer2DModel, UNet2DConditionModel
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from opensora.acceleration import optix
from opensora.registry import MODELS
from opensora.utils.errors import UserError
from tests.models.denoisers import TOY, inputs

EAGER = {"compile_vae": False}


def unet() -> UNet2DConditionModel:
    torch.manual_seed(0)
    return UNet2DConditionModel(
        sample_size=8, in_channels=4, out_channels=4, block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=4,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=16, attention_head_dim=4,
    )  # fmt: skip


def autoencoder() -> AutoencoderKL:
    torch.manual_seed(0)
    return AutoencoderKL(block_out_channels=(8, 8), down_block_types=("DownEncoderBlock2D",) * 2,
                         up_block_types=("UpDecoderBlock2D",) * 2, layers_per_block=1, norm_num_groups=4)  # fmt: skip


def denoiser() -> nn.Module:
    torch.manual_seed(0)
    return MODELS.build({"type": "STDiT-XL/2", **TOY})


def test_the_readmes_snippets(monkeypatch):
    monkeypatch.setattr("torch.nn.Module.compile", lambda self: compiled.append(type(self).__name__))
    compiled: list[str] = []
    model, vae = unet(), autoencoder()
    model, vae, opt, ema = optix.compile(model, vae, learning_rate=1e-5, weight_decay=1e-5, use_ema=True)
    assert isinstance(opt, torch.optim.AdamW)
    assert (opt.defaults["lr"], opt.defaults["weight_decay"]) == (1e-5, 1e-5)
    assert compiled == ["Encoder"]
    model_input = optix.sliced_vae(vae, torch.rand(2, 3, 16, 16), use_autocast=True, nhwc=True)
    assert model_input.shape == (2, 4, 8, 8)
    assert model.is_gradient_checkpointing
    before = {name: tensor.clone() for name, tensor in ema.state_dict().items()}
    loss = model(model_input, torch.tensor([3, 700]), torch.randn(2, 5, 16)).sample.square().mean()
    loss.backward()
    opt.step()
    ema.update(model)
    assert not all(torch.equal(before[name], tensor) for name, tensor in ema.state_dict().items())

    model, vae, opt, none = optix.compile(unet(), autoencoder(), learning_rate=1e-5, weight_decay=1e-5,
                                          use_ema=False, compile_vae=False, optim="sgd",
                                          xformer=False)  # fmt: skip
    assert isinstance(opt, torch.optim.SGD)
    assert none is None
    assert compiled == ["Encoder"]


def test_the_vae_is_frozen_in_fp32_and_its_encoder_has_channels_last():
    _, vae, _, _ = optix.compile(unet(), autoencoder().half(), **EAGER)
    kernel = vae.encoder.down_blocks[0].resnets[0].conv1.weight
    assert kernel.dtype == torch.float32
    assert kernel.is_contiguous(memory_format=torch.channels_last)
    assert not any(parameter.requires_grad for parameter in vae.parameters())
    _, vae, _, _ = optix.compile(unet(), autoencoder(), vae_channels_last=False, **EAGER)
    assert vae.encoder.down_blocks[0].resnets[0].conv1.weight.is_contiguous()


def test_a_compiled_encoder_sees_one_size():
    """A short last part is filled up, and its filling cut off again."""
    video, sizes = torch.rand(1, 5, 3, 16, 16), []
    expected = optix.sliced_vae(autoencoder(), video, 2, generators=torch.Generator().manual_seed(0))
    vae = autoencoder()
    vae.encoder.conv_in.register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0])))
    vae.encoder._compiled_call_impl = vae.encoder._call_impl  # compiled as far as one can tell; the hook is Python's
    latents = optix.sliced_vae(vae, video, 2, generators=torch.Generator().manual_seed(0))
    assert sizes == [2, 2, 2]
    torch.testing.assert_close(latents, expected)


def test_a_video_vae_of_diffusers_is_one_of_ours():
    vae = AutoencoderKLWan(base_dim=4, z_dim=4, dim_mult=[1], num_res_blocks=1)
    with pytest.raises(
        UserError, match="AutoencoderKLWan encodes videos as a whole; load its folder as our DiffusersVideoVAE"
    ):
        optix.sliced_vae(vae, torch.rand(1, 5, 3, 16, 16))


def test_the_ema_is_updated_with_optixs_arguments():
    model = Vae()
    ema = optix.ShardedEMA(model)
    model.encoder.weight.data += 1
    model.encoder.requires_grad_(False)
    ema.update(model, 0.9, True)
    torch.testing.assert_close(ema.state_dict()["encoder.weight"], model.encoder.weight)
    model.encoder.weight.data += 1
    ema.update(model, 0.9, False)
    torch.testing.assert_close(ema.state_dict()["encoder.weight"], model.encoder.weight - 0.9)


@pytest.mark.parametrize("checkpointed", [True, False])
def test_our_models_train_the_same_with_checkpointing(checkpointed):
    plain, cond = denoiser(), inputs(denoiser())
    model, _, _, _ = optix.compile(copy.deepcopy(plain), autoencoder(), gradient_checkpointing=checkpointed, **EAGER)
    for one in (plain, model):
        one.train()(**cond).square().mean().backward()
    grads = [{name: p.grad for name, p in one.named_parameters()} for one in (plain, model)]
    torch.testing.assert_close(grads[0], grads[1])


def test_a_transformer_of_diffusers():
    """Its `transformer_blocks` is a list of modules, which can be called too, and must not be."""
    transformer = DiTTransformer2DModel(num_attention_heads=2, attention_head_dim=4, in_channels=4, num_layers=1, sample_size=8,
                                        num_embeds_ada_norm=10, norm_num_groups=4)  # fmt: skip
    model, _, _, _ = optix.compile(transformer.train(), autoencoder(), **EAGER)
    assert model.is_gradient_checkpointing
    model(torch.randn(2, 4, 8, 8), torch.tensor([1, 2]), torch.tensor([1, 2])).sample.square().mean().backward()


@pytest.mark.slow
@pytest.mark.usefixtures("without_code")
def test_a_compiled_denoiser_keeps_its_names():
    torch.manual_seed(0)
    plain = MODELS.build({"type": "DiT-XL/2", **TOY, "depth": 1}).eval()
    with torch.no_grad():
        for parameter in plain.parameters():  # layers that start at zero would hide the blocks
            parameter.normal_(std=0.1)
        cond = inputs(plain)
        expected = plain(**cond)
        torch._dynamo.reset()
        model, _, _, _ = optix.compile(
            plain, autoencoder(), compile_model=True, gradient_checkpointing=False, fusedln=False, **EAGER
        )
        assert not any("_orig_mod" in name for name in model.state_dict())
        torch.testing.assert_close(model(**cond), expected, atol=1e-4, rtol=1e-4)


def test_a_config_may_hold_the_keywords():
    class Config:
        learning_rate = 1e-3
        optim = "adam"
        compile_vae = False
        something_else = 1

    mapping = {
        "optim": "adam",
        "compile_vae": False,
        "dtype": "bf16",
        "compile": True,
        "batch_size": 4,
    }  # of a whole training
    for config in (Config(), mapping):
        _, _, opt, _ = optix.compile(unet(), autoencoder(), config, learning_rate=2e-3)
        assert type(opt) is torch.optim.Adam
        assert opt.defaults["lr"] == 2e-3
    with pytest.raises(UserError, match=r"no keyword 'learning_rat'. Did you mean 'learning_rate'"):
        optix.compile(unet(), autoencoder(), {**mapping, "learning_rat": 1.0})


class Vae(nn.Module):
    """As little as can be."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Conv2d(3, 4, 1)


PLAIN = {"compile_vae": False, "gradient_checkpointing": False}


def is_compiled(config: object, **options: object) -> bool:
    model, *_ = optix.compile(nn.Linear(4, 4), Vae(), config, **PLAIN, **options)
    return model._compiled_call_impl is not None


def test_an_alias_is_the_same_keyword_wherever_it_stands():
    assert is_compiled(SimpleNamespace(compile_model=True))
    assert is_compiled({"compile_model": True})
    assert is_compiled(None, compile_model=True)
    assert not is_compiled(SimpleNamespace(compile_model=False, something_else=1))


def test_two_names_of_one_keyword_must_agree():
    with pytest.raises(UserError, match="compile_model and compile_unet are one keyword"):
        optix.compile(nn.Linear(2, 2), nn.Identity(), compile_model=True, compile_unet=False)


@pytest.mark.parametrize("config", [{"compile_model": False}, {"compile_unet": False}])
def test_keywords_win_over_a_config_under_either_name(config):
    for name in ("compile_unet", "compile_model"):
        assert is_compiled(config, **{name: True})
        assert is_compiled(SimpleNamespace(**config), **{name: True})


@pytest.mark.parametrize("model", [nn.Linear(4, 4).requires_grad_(False), nn.ReLU()])
def test_a_model_with_nothing_to_train_is_reported_before_anything_is_changed(model):
    vae = Vae().half()
    with pytest.raises(UserError, match=f"{type(model).__name__} has nothing to train"):
        optix.compile(model, vae, **PLAIN)
    assert all(p.requires_grad and p.dtype == torch.float16 for p in vae.parameters())


def test_what_is_not_there_is_reported(caplog):
    with pytest.raises(UserError, match=r"no keyword 'compile_vea'. Did you mean 'compile_vae'"):
        optix.compile(unet(), autoencoder(), compile_vea=False)
    with pytest.raises(UserError, match=r"optim='lion' is not one of adam, adamw, sgd"):
        optix.compile(unet(), autoencoder(), optim="lion")
    with pytest.raises(UserError, match=r"Linear has no way to checkpoint activations"):
        optix.compile(nn.Linear(1, 1), autoencoder(), **EAGER)
    for dtype in (torch.bfloat16, "bf16"):
        with pytest.warns(UserWarning, match="steps that are small compared with a weight are lost"):
            model, *_ = optix.compile(unet(), autoencoder(), model_dtype=dtype, **EAGER)
        assert next(model.parameters()).dtype == torch.bfloat16
    with pytest.raises(UserError, match="model_dtype: dtype 'int8' is not one of fp32"):
        optix.compile(unet(), autoencoder(), model_dtype=torch.int8, **EAGER)
    with caplog.at_level(logging.INFO):
        optix.compile(unet(), autoencoder(), **EAGER)
    assert "apex is not installed" in caplog.text
    assert "xformer: not used" in caplog.text


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.multiprocess
def test_two_processes_shard_ema_and_optimizer_and_train_as_one(tmp_path, spawn):
    spawn(train_in, 2, tmp_path)
    whole = train(range(4))
    shares = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)]
    for share in shares:
        torch.testing.assert_close(share["model"], whole["model"], atol=2e-5, rtol=1e-4)  # Adam divides small by small
    torch.testing.assert_close(shares[0]["ema"], whole["ema"], atol=2e-5, rtol=1e-4)
    assert shares[1]["ema"] == {}  # only the first process has all of it
    counts = [share["owned"] for share in shares]
    assert sum(counts) == sum(p.numel() for p in unet().parameters())
    assert max(counts) < 0.6 * sum(counts)
    states = [share["states"] for share in shares]
    assert sum(states) == len(list(unet().parameters()))
    assert min(states) > 0


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.multiprocess
def test_ema_and_weights_begin_alike_in_processes_of_different_seeds(tmp_path, spawn):
    spawn(start_in, 2, tmp_path)
    starts = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)]
    drawn = [seeded(rank).state_dict() for rank in range(2)]
    assert not torch.equal(drawn[0]["0.weight"], drawn[1]["0.weight"])
    for way in ("ddp", "alone"):
        first, second = (start[way] for start in starts)
        for part in ("weights", "ema"):
            assert first[part].keys() == drawn[0].keys()
            assert all(torch.equal(tensor, drawn[0][name]) for name, tensor in first[part].items())
        assert all(torch.equal(tensor, drawn[0][name]) for name, tensor in second["weights"].items())
        assert second["ema"] == {}
        assert first["owned"] | second["owned"] == {name for name in drawn[0] if "running" not in name}
        assert first["owned"]
        assert second["owned"]
    for rank, start in enumerate(starts):  # nothing is shared: each keeps its own
        assert all(torch.equal(tensor, drawn[rank][name]) for name, tensor in start["apart"].items())


def seeded(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(8, 8, 3).to(memory_format=torch.channels_last), nn.Linear(8, 8), nn.Linear(8, 4))
    model.register_buffer("running", torch.rand(3))
    return model


def start_in(rank: int, world_size: int, folder) -> None:
    found = {}
    for way, ddp in (("ddp", True), ("alone", False)):
        model, _, _, ema = optix.compile(seeded(rank), Vae(), use_ema=True, ddp=ddp, **PLAIN)
        inner = model.module if ddp else model
        found[way] = {"weights": inner.state_dict(), "ema": ema.state_dict(model), "owned": set(ema.shadow)}
    apart, *_ = optix.compile(seeded(rank), Vae(), ddp=False, hybrid_zero=False, **PLAIN)
    torch.save({**found, "apart": apart.state_dict()}, folder / f"{rank}.pt")


def train(samples: range) -> dict:
    """Five steps; what a process has then."""
    model, _, opt, ema = optix.compile(
        unet(), autoencoder(), learning_rate=1e-3, use_ema=True, gradient_checkpointing=False, **EAGER
    )
    rng = torch.Generator().manual_seed(5)
    for _ in range(5):
        x, text = torch.randn(4, 4, 8, 8, generator=rng), torch.randn(4, 5, 16, generator=rng)
        own = list(samples)
        loss = model(x[own], torch.arange(4)[own] * 100, text[own]).sample.square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        ema.update(model, decay=0.9)
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    state = getattr(opt, "optim", opt).state
    return {"model": inner.state_dict(), "ema": ema.state_dict(), "states": len(state),
            "owned": sum(tensor.numel() for tensor in ema.shadow.values())}  # fmt: skip


def train_in(rank: int, world_size: int, folder) -> None:
    torch.save(train(range(2 * rank, 2 * rank + 2)), folder / f"{rank}.pt")
