"""LoRA files of Wan: what we write, diffusers and peft read; what they and other programs write, we read."""

import json
import re

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, WanPipeline, WanTransformer3DModel
from safetensors.torch import load_file, save_file

from opensora.checkpoint.load import save_checkpoint
from opensora.checkpoint.lora import merge_adapter, parameters_of, read_adapter, read_adapters
from opensora.config.schema import LoraOptions
from opensora.models.wan.convert import original_name
from opensora.training.lora import add_lora, target_names
from opensora.utils.errors import UserError
from tests.models.wan.toys import TINY, VARIANTS, build, inputs
from tools.lora import export

peft = pytest.importorskip("peft", reason="needs peft: pip install -e '.[lora]'")
FORMS = ("peft", "diffusers", "comfyui", "kohya")
QKV = ["to_q", "to_k", "to_v"]


def checkpoint(folder, variant="t2v", targets="all-linear", **changes):
    """A checkpoint of a LoRA run, whose alpha is not its rank, and the model with the adapters."""
    model = build(variant, **changes)
    add_lora(model, LoraOptions(rank=4, alpha=6.0, target_modules=targets), seed=0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(std=0.2)
    component = {"type": "Wan", **TINY, **VARIANTS[variant], **changes, "from_pretrained": "somewhere"}
    config = {"model": component, "lora": {"rank": 4, "alpha": 6.0, "target_modules": targets}}
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return save_checkpoint(folder / "step1", {"ema": state}, state={}, manifest={"config": config, "step": 1}), model


def plain_net(model):
    """diffusers' network without adapters."""
    net = WanTransformer3DModel.from_config(dict(model.net.config)).eval()
    net.load_state_dict(model.net.state_dict())
    return net


def run(net, x, timestep, y, mask, condition=None, image_features=None):
    text = torch.zeros(len(x), 512, y.shape[-1])
    text[:, : y.shape[2]] = torch.where(mask[..., None], y[:, 0], 0)
    x = x if condition is None else torch.cat([x, condition], dim=1)
    return net(x, timestep, text, image_features, return_dict=False)[0]


def pipeline(net):
    parts = {"tokenizer": None, "text_encoder": None, "vae": None, "scheduler": FlowMatchEulerDiscreteScheduler()}
    return WanPipeline(**parts, transformer=net)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("variant", "targets"), [("t2v", "attention"), ("i2v", "all-linear")])
@torch.no_grad()
def test_what_we_export_is_read_by_diffusers_and_by_us(form, variant, targets, tmp_path, caplog):
    folder, adapted = checkpoint(tmp_path, variant, targets)
    out = export(folder, tmp_path / ("peft" if form == "peft" else "lora.safetensors"), form=form)
    cond = inputs(adapted)
    expected = adapted(**cond)
    merged = build(variant)
    assert not torch.allclose(merged(**cond), expected, atol=1e-3)
    adapter, plain = read_adapter(out), read_adapter(folder)
    merge_adapter(merged, adapter)
    torch.testing.assert_close(merged(**cond), expected, atol=1e-6, rtol=1e-5)
    by_parameter = [
        {names[n]: (*pair, one.scale_of(n)) for n, pair in one.factors.items()}
        for one, names in ((adapter, parameters_of(merged, adapter)), (plain, parameters_of(merged, plain)))
    ]
    for name, (A, B, scale) in by_parameter[1].items():
        assert torch.equal(by_parameter[0][name][0], A)
        assert torch.equal(by_parameter[0][name][1], B)
        assert by_parameter[0][name][2] == scale == 1.5
    assert all(not B.any() for name, (_, B, _) in by_parameter[0].items() if name not in by_parameter[1])

    net = plain_net(build(variant))
    if form == "peft":
        net = peft.PeftModel.from_pretrained(net, out)
    else:
        pipe = pipeline(net)
        pipe.load_lora_weights(str(tmp_path), weight_name=out.name)
        assert {name for name, m in net.named_modules() if hasattr(m, "lora_A")} >= {
            name.removeprefix("net.") for name in target_names(build(variant), targets)
        }
    torch.testing.assert_close(-run(net, **cond), expected, atol=1e-6, rtol=1e-5)


def trained_by_peft(net, **options):
    """A network of diffusers with an adapter of peft, nothing of it zero."""
    torch.manual_seed(2)
    net.add_adapter(peft.LoraConfig(r=4, lora_alpha=6, target_modules=[*QKV, "ffn.net.2"], **options))
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if ".lora_" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return net


@pytest.mark.parametrize(
    "options",
    [
        {"rank_pattern": {"attn1.to_q": 2}, "alpha_pattern": {"blocks.1.attn2.to_k": 9}, "use_rslora": True},
        {"use_dora": True},
        {"lora_bias": True},
    ],
)
@pytest.mark.parametrize("form", ["peft", "diffusers"])
@torch.no_grad()
def test_what_peft_and_diffusers_save_we_read(form, options, tmp_path):
    net = trained_by_peft(plain_net(build("t2v")), **options)
    if form == "peft":
        net.save_lora_adapter(tmp_path, weight_name="lora.safetensors")  # names without a prefix
    else:
        layers, config = (
            peft.get_peft_model_state_dict(net, adapter_name="default"),
            net.peft_config["default"].to_dict(),
        )
        WanPipeline.save_lora_weights(
            tmp_path, layers, transformer_lora_adapter_metadata={**config, "target_modules": QKV}
        )
    model = build("t2v")
    merge_adapter(model, read_adapter(tmp_path))
    cond = inputs(model)
    torch.testing.assert_close(model(**cond), -run(net, **cond), atol=2e-6, rtol=1e-5)


@torch.no_grad()
def test_names_alphas_and_differences_of_comfyui_and_kohya(tmp_path):
    """Each layer has its own rank and alpha; norms, biases and tables have differences."""
    rng, tensors, expected = torch.Generator().manual_seed(3), {}, build("i2v")
    ranks = iter(range(1, 1000))
    for name, parameter in expected.named_parameters():
        layer, _, kind = name.removeprefix("net.").rpartition(".")
        theirs = "diffusion_model." + original_name(f"{layer}.weight").removesuffix(".weight")
        if kind == "weight" and parameter.ndim > 1 and (rank := next(ranks)) % 3:
            A = torch.randn(rank, *parameter.shape[1:], generator=rng)
            B = torch.randn(len(parameter), rank, *[1] * (parameter.ndim - 2), generator=rng)
            tensors |= {f"{theirs}.lora_down.weight": A, f"{theirs}.lora_up.weight": B}
            scale = 1.0
            if rank % 2:
                tensors[f"{theirs}.alpha"], scale = torch.tensor(0.5), 0.5 / rank
            parameter += scale * (B.flatten(1) @ A.flatten(1)).view_as(parameter)
        else:
            difference = torch.randn(parameter.shape, generator=rng)
            if kind not in ("weight", "bias"):
                theirs = f"diffusion_model.{original_name(name.removeprefix('net.'))}"
            tensors[f"{theirs}.{'diff_b' if kind == 'bias' else 'diff'}"] = difference
            parameter += difference
    save_file(tensors, tmp_path / "comfyui.safetensors")
    assert "diffusion_model.img_emb.proj.4.diff" in tensors
    assert "diffusion_model.blocks.0.norm3.diff_b" in tensors
    assert "diffusion_model.head.modulation.diff" in tensors
    kohya = {}
    for name, tensor in tensors.items():
        layer, part = re.fullmatch(r"diffusion_model\.(.+?)\.(lora_\w+\.weight|alpha|diff_b|diff)", name).groups()
        kohya[f"lora_unet_{layer.replace('.', '_')}.{part}"] = tensor
    save_file(kohya, tmp_path / "kohya.safetensors")
    for file in ("comfyui", "kohya"):
        merged = build("i2v")
        merge_adapter(merged, read_adapter(tmp_path / f"{file}.safetensors"))
        torch.testing.assert_close(merged.state_dict(), expected.state_dict(), atol=1e-5, rtol=1e-5)
    with pytest.raises(UserError, match="does not fit this Wan"):
        merge_adapter(build("t2v"), read_adapter(tmp_path / "kohya.safetensors"))
    save_file(
        {**tensors, "diffusion_model.blocks.0.self_attn.q.hada_w1_a": torch.ones(1)}, tmp_path / "more.safetensors"
    )
    with pytest.raises(UserError, match=r"it also holds diffusion_model\.blocks\.0\.self_attn\.q\.hada"):
        read_adapter(tmp_path / "more.safetensors")


@pytest.mark.parametrize("axis", [0, 1])
@torch.no_grad()
def test_doras_magnitude_is_of_rows_or_columns(axis, tmp_path):
    model, name = build("t2v"), "net.blocks.1.ffn.net.0.proj"
    weight = model.get_submodule(name).weight.clone()
    A, B = torch.randn(2, weight.shape[1]), torch.randn(len(weight), 2)
    m = torch.rand(1, weight.shape[1]) if axis == 0 else torch.rand(len(weight), 1)
    layer = "lora_unet_blocks_1_ffn_0"
    parts = {"lora_down.weight": A, "lora_up.weight": B, "alpha": torch.tensor(1.0), "dora_scale": m}
    save_file({f"{layer}.{key}": value for key, value in parts.items()}, tmp_path / "dora.safetensors")
    merge_adapter(model, read_adapter(tmp_path / "dora.safetensors"), 0.25)
    moved = weight + 0.5 * B @ A
    expected = m * moved / moved.norm(dim=axis, keepdim=True)
    torch.testing.assert_close(model.get_submodule(name).weight, weight + 0.25 * (expected - weight))


@torch.no_grad()
def test_a_t2v_lora_fits_the_i2v_base(tmp_path):
    folder, _ = checkpoint(tmp_path, "t2v")
    out = export(folder, tmp_path / "lora.safetensors", form="comfyui")
    base, model = build("i2v").state_dict(), build("i2v")
    assert merge_adapter(model, read_adapter(out)) == 20
    assert torch.equal(
        model.state_dict()["net.blocks.0.attn2.add_k_proj.weight"], base["net.blocks.0.attn2.add_k_proj.weight"]
    )


@torch.no_grad()
def test_two_experts(tmp_path, caplog):
    folder, adapted = checkpoint(tmp_path, boundary=0.9, expert="low")
    assert all(name.startswith("net.") for name in adapted.state_dict())
    out = export(folder, tmp_path / "low.safetensors", form="comfyui")
    silent = tmp_path / "silent.safetensors"
    save_file(load_file(out), silent)  # as other programs write it: no expert in the header
    both = {f"transformer{n}.blocks.0.attn1.to_q.lora_{f}.weight": torch.ones(1, 24) if f == "A" else torch.ones(24, 1) * s
            for n, s in (("", 1), ("_2", 2)) for f in "AB"}  # fmt: skip
    save_file(both, tmp_path / "both.safetensors")
    base = build("t2v", boundary=0.9).state_dict()

    def changed(lora, scale=1.0):
        model = build("t2v", boundary=0.9)
        for path, adapter, strength in read_adapters(lora, scale):
            merge_adapter(model, adapter, strength, path)
        return {
            name: value - base[name] for name, value in model.state_dict().items() if not torch.equal(value, base[name])
        }

    assert {name.split(".")[0] for name in changed(str(folder))} == {"net_2"}
    assert changed({"low": str(folder.parent)}).keys() == changed(str(folder)).keys()  # the newest checkpoint of a run
    assert changed(str(folder)).keys() == changed(str(out)).keys() == changed({"low": str(silent)}).keys()
    with pytest.raises(UserError, match=r"two experts, and the file does not say which.*--lora.high FILE"):
        changed(str(silent))
    caplog.set_level("INFO", "opensora")
    two = changed({"high": str(silent), "low": [str(out), str(silent)]}, [0.5, 1.0, -0.5])
    assert f"{silent}: merged into the high-noise expert" in caplog.text
    torch.testing.assert_close(two["net.blocks.0.attn1.to_q.weight"], two["net_2.blocks.0.attn1.to_q.weight"])
    assert len(two) == 40
    changed({"high": str(out)})
    assert "is of the low-noise expert, and goes into the high-noise one" in caplog.text
    one = changed(str(tmp_path / "both.safetensors"))
    assert {name: round(float(value.mean())) for name, value in one.items()} == {
        "net.blocks.0.attn1.to_q.weight": 1,
        "net_2.blocks.0.attn1.to_q.weight": 2,
    }
    with pytest.raises(UserError, match="is for two networks"):
        merge_adapter(build("t2v"), read_adapter(tmp_path / "both.safetensors"))
    with pytest.raises(UserError, match="2 numbers for 1 LoRAs"):
        changed(str(out), [1.0, 2.0])
    with pytest.raises(UserError, match=r"lora\.hi: the experts"):
        changed({"hi": str(out)})


def test_a_lora_is_no_base(tmp_path):
    folder, _ = checkpoint(tmp_path)
    for form in FORMS[1:]:
        out = export(folder, tmp_path / f"{form}.safetensors", form=form)
        with pytest.raises(UserError, match="looks like a LoRA"):
            build("t2v", from_pretrained=str(out))
    with pytest.raises(UserError, match=r"suffix \.safetensors"):
        export(folder, tmp_path / "folder", form="kohya")
    with pytest.raises(UserError, match="there already"):
        export(folder, tmp_path / "kohya.safetensors", form="kohya")
    assert json.loads((export(folder, tmp_path / "peft") / "adapter_config.json").read_text())["r"] == 4
