"""scripts/train.py with lora: resume, small checkpoints, export, merge, and the merged model is the adapted one."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from opensora.checkpoint.load import complete_checkpoints, open_checkpoint, read_weights
from opensora.checkpoint.lora import merge_adapter, read_adapter
from opensora.registry import MODELS
from opensora.utils.errors import UserError
from tests.scripts.runs import assert_same_run, losses
from tools.lora import export, merge

pytest.importorskip("peft", reason="needs peft: pip install -e '.[lora]'")
SIZES = {"caption_channels": 16, "model_max_length": 12}
LORA = ("--lora.rank=4.0", "--lora.target_modules=all-linear", "--lora.dropout=0.2")


@pytest.fixture
def base(tmp_path):
    """Weights to adapt, none of them zero."""
    torch.manual_seed(0)
    model = MODELS.build({"type": "STDiT-XXS/2", **SIZES})
    state = {name: torch.randn_like(tensor) * 0.1 for name, tensor in model.state_dict().items()}
    save_file(state, tmp_path / "base.safetensors")
    return tmp_path / "base.safetensors"


@pytest.mark.slow
def test_a_lora_from_training_to_plain_weights(train, base, tmp_path):
    options = (*LORA, f"--ckpt-path={base}", "--ckpt-every=2")
    whole = train(*options, "--max-steps=4", name="whole")
    train(*options, "--max-steps=2", name="half")
    rest = train(*options, "--max-steps=4", f"--load={complete_checkpoints(tmp_path / 'half')[-1]}", name="rest")
    assert_same_run(whole, rest)  # dropout too
    assert losses(whole)[2:] == losses(rest)

    checkpoint = complete_checkpoints(whole)[-1]
    saved = open_checkpoint(checkpoint).tensors("model")
    assert all("lora_" in name for name in saved)
    size = sum(file.stat().st_size for file in (checkpoint / "model").iterdir())
    assert size < base.stat().st_size / 2

    merge(checkpoint, tmp_path / "merged.safetensors", dtype="fp32")
    adapter = export(checkpoint, tmp_path / "adapter")
    model = MODELS.build({"type": "STDiT-XXS/2", **SIZES, "from_pretrained": str(base)})
    assert merge_adapter(model, read_adapter(adapter)) == 18
    merged = load_file(tmp_path / "merged.safetensors")
    assert all(torch.equal(tensor, merged[name]) for name, tensor in model.state_dict().items())
    before = read_weights(base)
    changed = {name for name, tensor in merged.items() if not torch.equal(tensor, before[name])}
    assert len(changed) == 18
    MODELS.build({"type": "STDiT-XXS/2", **SIZES, "from_pretrained": str(tmp_path / "merged.safetensors")})
    with pytest.raises(UserError, match="looks like a LoRA"):
        MODELS.build({"type": "STDiT-XXS/2", **SIZES, "from_pretrained": str(checkpoint)})
    merge(
        adapter,
        tmp_path / "zero.safetensors",
        base=str(base),
        config=checkpoint.parent / "config.json",
        scale=0.0,
        dtype="fp32",
    )
    assert all(torch.equal(tensor, before[name]) for name, tensor in load_file(tmp_path / "zero.safetensors").items())


@pytest.mark.slow
def test_a_lora_of_wan_from_training_to_diffusers(train, tmp_path):
    from diffusers import WanPipeline, WanTransformer3DModel

    sizes = {"hidden_size": 24, "depth": 2, "num_heads": 2, "ffn_dim": 32, "caption_channels": 16}
    component = {"type": "Wan", "in_channels": 4, "model_max_length": 12, **sizes}
    torch.manual_seed(0)
    config, state = MODELS.build(component).to_diffusers()
    net = WanTransformer3DModel.from_config(config)
    net.load_state_dict(state)
    net.eval().save_pretrained(tmp_path / "transformer")
    model = [f"--model.{name}={value}" for name, value in sizes.items()]
    flow = (
        "--scheduler.type=rflow",
        f"--ckpt-path={tmp_path / 'transformer'}",
        "--max-steps=3",
        "--lr=0.1",
        "--ema-decay=0.1",
    )
    run = train("--model.type=Wan", *model, *LORA[:1], "--lora.alpha=6", *flow)
    checkpoint = complete_checkpoints(run)[-1]
    trained = MODELS.build({**component, "from_pretrained": str(tmp_path / "transformer")}).eval().requires_grad_(False)
    x, y, t = torch.randn(1, 4, 2, 4, 6), torch.randn(1, 1, 12, 16), torch.tensor([500.0])
    before = trained(x, t, y)
    assert merge_adapter(trained, read_adapter(checkpoint)) == 16
    assert not torch.allclose(trained(x, t, y), before, atol=1e-3)
    merge(checkpoint, tmp_path / "merged.safetensors", dtype="fp32")
    merged = MODELS.build({**component, "from_pretrained": str(tmp_path / "merged.safetensors")}).eval()
    assert all(torch.equal(tensor, merged.state_dict()[name]) for name, tensor in trained.state_dict().items())
    out = export(checkpoint, tmp_path / "comfyui.safetensors", form="comfyui")
    parts = {"tokenizer": None, "text_encoder": None, "vae": None, "scheduler": None}
    pipe = WanPipeline(**parts, transformer=net)
    pipe.load_lora_weights(str(tmp_path), weight_name=out.name)
    torch.testing.assert_close(
        -net.requires_grad_(False)(x, t, y[:, 0], return_dict=False)[0], trained(x, t, y), atol=1e-6, rtol=1e-5
    )


def test_adapters_of_random_weights_are_refused(train, base, tmp_path, capsys):
    """Also where a run resumes and the base is forgotten."""
    run = train(*LORA, f"--ckpt-path={base}", "--max-steps=1")
    for options in ((), (f"--load={complete_checkpoints(run)[-1]}",)):
        with pytest.raises(SystemExit):
            train(*LORA, "--max-steps=2", *options, name="none")
        assert "set --ckpt-path (model.from_pretrained)" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


@pytest.mark.nightly
@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize("plugin", ["ddp", "fsdp2"])
def test_two_processes_train_the_adapters_of_one(train, together, base, plugin):
    options = ("--lora.rank=4", f"--ckpt-path={base}")
    one = train(*options, "--batch-size=4", name="one")
    (two,) = together(("two", *options, "--batch-size=2", f"--plugin={plugin}"))
    torch.testing.assert_close(losses(one), losses(two), atol=1e-6, rtol=1e-5)
    parts = [open_checkpoint(complete_checkpoints(run)[-1]).tensors("ema") for run in (one, two)]
    torch.testing.assert_close(*parts, atol=2e-5, rtol=1e-4)


def test_settings_without_effect(train, capsys):
    for options, words in (
        (("--lora.rank=4", "--model.freeze=text"), "model.freeze='text' has no effect with lora"),
        (
            ("--lora.rank=4", "--model.only_train_temporal=True"),
            "model.only_train_temporal=True has no effect with lora",
        ),
        (("--lora.rang=4",), "Did you mean 'rank'"),
        (("--lora.dropout=0.1", "--compile=True"), "which compile=True cannot"),
    ):
        with pytest.raises(SystemExit):
            train(*options)
        assert words in capsys.readouterr().err
