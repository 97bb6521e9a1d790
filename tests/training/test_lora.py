"""LoRA of every denoiser: the first step is the base's, what is trained and saved, merge against peft's own output, resume."""

import pytest
import torch
from torch.distributed.tensor import DTensor

from opensora.acceleration.checkpointing import checkpoint_activations
from opensora.acceleration.distributed import World, shutdown
from opensora.acceleration.engine import build_engine
from opensora.checkpoint.load import load_strictly
from opensora.checkpoint.lora import Adapter, adapter_of, merge_adapter, read_adapter, write_adapter
from opensora.config.schema import LoraOptions
from opensora.training.ema import EMA
from opensora.utils.errors import UserError
from tests.models import denoisers
from tests.models.denoisers import FAMILIES, inputs

peft = pytest.importorskip("peft", reason="needs peft: pip install -e '.[lora]'")
from opensora.training.lora import add_lora, target_names  # noqa: E402

families = pytest.mark.parametrize("family", FAMILIES)


def build(family: str):
    """A toy model; of two experts one."""
    return denoisers.build(family, **({"expert": "low"} if family == "Wan-I2V" else {}))


def adapted(family: str, *, trained: bool = True, **options):
    """A toy model with adapters, whose B is not zero where it counts as trained."""
    model = build(family)
    torch.manual_seed(1)
    add_lora(model, LoraOptions(**{"rank": 4, "alpha": 8, "target_modules": "all-linear", **options}), seed=3)
    if trained:
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                torch.nn.init.normal_(parameter, std=0.1)
    return model


def taken_from(model, scale: float = 2.0) -> Adapter:
    return adapter_of(model.state_dict(), "test")._replace(scale=scale)


@families
def test_the_first_step_sees_the_base(family):
    base, model = build(family), adapted(family, trained=False)
    assert torch.equal(base(**inputs(base)), model(**inputs(base)))


@pytest.mark.slow
@families
def test_merged_weights_give_the_adapters_output(family):
    base, model = build(family), adapted(family)
    cond = inputs(base)
    expected = model(**cond)  # peft computes W x + s B A x
    assert not torch.allclose(base(**cond), expected, atol=1e-3)
    assert merge_adapter(base, taken_from(model)) == len(target_names(base, "all-linear"))
    torch.testing.assert_close(base(**cond), expected, atol=2e-6, rtol=1e-5)


@families
def test_only_adapters_learn_and_are_saved(family):
    base, model = build(family), adapted(family)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    before = {name: p.clone() for name, p in model.named_parameters()}
    model.train()(**inputs(base)).square().mean().backward()
    optimizer.step()
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == model.state_dict().keys() == {name for name in before if ".lora_" in name}
    plain = {name.replace(".base_layer", ""): p for name, p in model.named_parameters() if ".lora_" not in name}
    assert all(torch.equal(p, plain[name]) for name, p in base.named_parameters())


def test_state_goes_from_model_to_model():
    model, other = adapted("STDiT"), adapted("STDiT", trained=False)
    cond = inputs(model)
    other.load_state_dict(model.state_dict())
    assert torch.equal(model(**cond), other(**cond))
    third = adapted("STDiT", trained=False)
    load_strictly(third, model.state_dict(), "test")
    assert torch.equal(model(**cond), third(**cond))
    with pytest.raises(RuntimeError, match=r"Missing key.*lora_A"):
        other.load_state_dict({})
    with pytest.raises(UserError, match=r"of a run without lora.*named by --ckpt-path"):
        load_strictly(third, build("STDiT").state_dict(), "test")
    with pytest.raises(UserError, match="of a run with lora"):
        load_strictly(build("STDiT"), model.state_dict(), "test")


def test_the_average_is_that_of_the_adapters():
    model = adapted("STDiT")
    ema = EMA(model, decay=0.5)
    first = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert ema.state_dict().keys() == first.keys()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.add_(1.0)
    ema.update(model, step=100)
    for name, tensor in ema.state_dict().items():
        torch.testing.assert_close(tensor, first[name] + 0.5)


def train_adapters(plugin: str, device: str):
    """Losses of six bf16 steps of one batch, and the engine."""
    model = adapted("STDiT", trained=False).to(device).train()
    cond = {name: value.to(device) for name, value in inputs(model).items()}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, fused=device == "cuda")
    engine = build_engine(plugin, model, optimizer, World(0, 1, torch.device(device)), dtype="bf16", grad_clip=1.0)
    losses = []
    for _ in range(6):
        with engine.micro_step(last=True):
            loss = (engine.model(**cond) - 1).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return torch.tensor(losses), engine


@pytest.mark.parametrize(("plugin", "device"), [("fsdp2", "cpu"), pytest.param("zero2", "cuda", marks=pytest.mark.gpu)])
def test_an_engine_trains_the_adapters_alone(plugin, device):
    if plugin == "zero2":
        pytest.importorskip("colossalai", reason="needs ColossalAI: docs/how-to/speed.md says how to install it")
    expected, ddp = train_adapters("ddp", device)
    try:
        found, engine = train_adapters(plugin, device)
        torch.testing.assert_close(found, expected, atol=0, rtol=3e-2)
        assert found[-1] < 0.99 * found[0]
        base = dict(build("STDiT").named_parameters())
        for name, p in engine.model.named_parameters():
            whole = p.full_tensor() if isinstance(p, DTensor) else p
            if ".lora_" not in name:
                assert torch.equal(whole.cpu(), base[name.replace(".base_layer", "")]), name
        state = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in engine.model_state().items()}
        assert state.keys() == ddp.model_state().keys()
        assert all(".lora_" in path for path in engine.optimizer_state())
        ddp.load_model_state({name: tensor.cpu() for name, tensor in state.items()}, "test")
    finally:
        shutdown()


@pytest.mark.parametrize("family", ["DiT-text", "STDiT3"])
def test_what_we_export_peft_reads(family, tmp_path):
    model = adapted(family, target_modules="attention")
    write_adapter(taken_from(model), tmp_path / "adapter", base="somewhere")
    theirs = peft.PeftModel.from_pretrained(build(family), tmp_path / "adapter")
    cond = inputs(model)
    torch.testing.assert_close(theirs(**cond), model(**cond), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("rslora", [False, True])
def test_what_peft_exports_we_read(rslora, tmp_path):
    options = peft.LoraConfig(r=4, lora_alpha=6, target_modules=["qkv", "fc1"], use_rslora=rslora)
    theirs = peft.get_peft_model(build("STDiT2"), options)
    for name, parameter in theirs.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter, std=0.1)
    theirs.save_pretrained(tmp_path / "adapter")
    ours = build("STDiT2")
    merge_adapter(ours, read_adapter(tmp_path / "adapter"))
    cond = inputs(ours)
    torch.testing.assert_close(ours(**cond), theirs(**cond), atol=2e-6, rtol=1e-5)
    again = build("STDiT2")
    merge_adapter(again, read_adapter(tmp_path / "adapter" / "adapter_model.safetensors"), scale=0.0)
    assert torch.equal(again(**cond), build("STDiT2")(**cond))


def test_other_kinds_of_adapters_are_refused(tmp_path):
    theirs = peft.get_peft_model(
        build("STDiT"), peft.LoraConfig(target_modules=["qkv"], modules_to_save=["final_layer"])
    )
    theirs.save_pretrained(tmp_path / "adapter")
    with pytest.raises(UserError, match="modules_to_save"):
        read_adapter(tmp_path / "adapter")


def test_a_scale_between():
    base, half, whole = build("STDiT"), build("STDiT"), build("STDiT")
    adapter = taken_from(adapted("STDiT"))
    merge_adapter(half, adapter, 0.5)
    merge_adapter(whole, adapter, 1.0)
    name = "blocks.0.attn.qkv.weight"
    states = [m.state_dict()[name] for m in (base, half, whole)]
    torch.testing.assert_close(states[1], (states[0] + states[2]) / 2)


@families
def test_which_layers_are_meant(family):
    model = build(family)
    linear = dict(model.named_modules())
    attention, every = target_names(model, "attention"), target_names(model, "all-linear")
    assert set(attention) < set(every)
    if family.startswith("Wan"):
        layers = {f"{a}.{layer}" for a in ("attn1", "attn2") for layer in ("to_q", "to_k", "to_v", "to_out.0")}
        assert {name.removeprefix("net.blocks.0.").removeprefix("net.blocks.1.") for name in attention} == layers
    else:
        assert {name.rsplit(".", 1)[-1] for name in attention} <= {"qkv", "proj", "q_linear", "kv_linear"}
    end = "attn1.to_out.0" if family.startswith("Wan") else "attn.qkv"
    assert target_names(model, [end]) == [n for n in attention if n.endswith(f".{end}")]
    assert all(isinstance(linear[name], torch.nn.Linear) and "blocks" in name for name in every)


def test_a_layer_that_is_not_there_is_told_with_the_nearest():
    with pytest.raises(UserError, match=r"no linear layer 'attn\.qvk'.*Did you mean 'attn\.qkv'"):
        target_names(build("STDiT"), ["attn.qvk"])
    with pytest.raises(UserError, match="does not fit this DiT"):
        merge_adapter(build("DiT-text"), taken_from(adapted("STDiT")))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rang": 4}, "Did you mean 'rank'"),
        ({"rank": 0}, "rank=0"),
        ({"alpha": -1}, "alpha=-1:"),
        ({"dropout": 1.0}, "dropout=1.0"),
        ({"target_modules": "everything"}, "'attention' or 'all-linear'"),
        ({"target_modules": []}, "target_modules=[]"),
    ],
)
def test_bad_options(options, words):
    with pytest.raises(UserError) as caught:
        LoraOptions.of(options)
    assert words in str(caught.value)
    LoraOptions.of({"rank": 8.0, "target_modules": ["qkv"], "dropout": 0.1})


def test_dropout_is_a_function_of_the_number_of_passes():
    model = adapted("STDiT", dropout=0.5).train()
    cond = inputs(model)
    first, second = model(**cond), model(**cond)
    assert not torch.equal(first, second)
    rng = torch.get_rng_state()
    model.get_buffer("lora_forwards").zero_()
    assert torch.equal(model(**cond), first)
    assert torch.equal(torch.get_rng_state(), rng)
    saved = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    other = adapted("STDiT", dropout=0.5, trained=False).train()
    load_strictly(other, saved, "test")
    assert torch.equal(other(**cond), second)
    assert adapter_of(saved, "test").factors.keys() == taken_from(adapted("STDiT")).factors.keys()
    plain = model.eval()(**cond)
    assert torch.equal(plain, model(**cond))


def test_dropout_with_recomputed_blocks_has_the_same_gradients():
    plain, checkpointed = adapted("STDiT", dropout=0.3).train(), adapted("STDiT", dropout=0.3).train()
    checkpoint_activations(checkpointed.transformer_blocks())
    for model in (plain, checkpointed):
        model(**inputs(model)).square().mean().backward()
    for a, b in zip(plain.parameters(), checkpointed.parameters(), strict=True):
        if a.requires_grad:
            torch.testing.assert_close(a.grad, b.grad)
