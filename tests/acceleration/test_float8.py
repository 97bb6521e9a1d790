"""Float8 linear layers, emulated on the CPU: which they are, that names and parameters stay, and how near bf16 they train."""

import copy
import sys

import pytest
import torch
from torch import nn

from opensora.acceleration.checkpointing import checkpoint_activations
from opensora.acceleration.compile import compile_blocks
from opensora.acceleration.distributed import init_world
from opensora.acceleration.float8 import check_float8, convert_linears, recipe_of
from opensora.acceleration.sequence_parallel import parallelise
from opensora.config.load import TrainConfig, parse_config
from opensora.config.lora import LoraOptions
from opensora.registry import DATASETS, MODELS, SCHEDULERS
from opensora.training.lora import add_lora
from opensora.utils.errors import UserError
from tests.acceleration.float8_training import WIDE, compare, gradients, relative, train
from tests.acceleration.toy_training import ALONE, engine_for
from tests.acceleration.toy_training import train as train_whole_batch
from tests.models.denoisers import FAMILIES, build, inputs

pytest.importorskip("torchao", reason="needs torchao: pip install -e '.[quant]'")
CPU = torch.device("cpu")
COMPONENTS = {
    **dict.fromkeys(("model", "vae", "text_encoder"), MODELS),
    **dict.fromkeys(("scheduler", "val_scheduler"), SCHEDULERS),
    "dataset": DATASETS,
}
RECIPES = ("rowwise", "tensorwise", "rowwise_with_gw_hp")
SELF, CROSS, MLP = {"qkv", "proj"}, {"q_linear", "proj"}, {"fc1", "fc2"}
PARTS = {"attn": SELF, "attn_temp": SELF, "cross_attn": CROSS, "mlp": MLP}


def converted(family: str, recipe: str = "rowwise", **changes: int) -> nn.Module:
    model = build(family, **changes)
    convert_linears(model, recipe, emulate=True)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_which_layers_and_that_parameters_stay(family):
    model = build(family)
    before, state = dict(model.named_parameters()), list(model.state_dict())
    count = convert_linears(model, emulate=True)
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    assert list(model.state_dict()) == state
    found = [
        name for name, layer in model.named_modules() if isinstance(layer, nn.Linear) and type(layer) is not nn.Linear
    ]
    assert count == len(found)
    blocks = model.transformer_blocks()
    expected = sum(
        isinstance(getattr(part, layer, None), nn.Linear)
        for block in blocks
        for name, part in block.named_children()
        for layer in PARTS.get(name, ())
    )
    assert count == expected >= 4 * len(blocks)  # at least qkv, proj, fc1, fc2 of each
    few_rows = ("kv_linear", "embed", "adaLN", "final", "t_block")
    assert not any(word in name for name in found for word in few_rows)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("rows", [32, 37])  # the second is filled up to 48
@pytest.mark.parametrize("transposed", [False, True])
def test_a_layer_against_the_formula(recipe, rows, transposed):
    """Products of factors with 3 bits of mantissa (e5m2: 2): errors of some percent, and far from none."""
    model = build("STDiT")
    plain = copy.deepcopy(model.blocks[0].mlp.fc1)
    convert_linears(model, recipe, emulate=True)
    layer = model.blocks[0].mlp.fc1
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(2, rows, 48, generator=rng)
    x = (x.transpose(0, 1).contiguous().transpose(0, 1) if transposed else x).requires_grad_()
    grad = torch.randn(2, rows, 192, generator=rng)
    out = layer(x)
    assert out.shape == (2, rows, 192)
    actual = torch.autograd.grad(out, (x, layer.weight, layer.bias), grad)
    wanted = plain(x)
    expected = torch.autograd.grad(wanted, (x, plain.weight, plain.bias), grad)
    assert 0.01 < relative(out - layer.bias, wanted - plain.bias) < 0.06
    assert 0.01 < relative(actual[0], expected[0]) < 0.09
    if recipe == "rowwise_with_gw_hp":
        assert relative(actual[1], expected[1]) < 1e-5
    else:
        assert 0.01 < relative(actual[1], expected[1]) < 0.09
    torch.testing.assert_close(actual[2], expected[2])


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("family", ["STDiT", "STDiT3", "DiT-text", "PixArt"])
def test_prediction_and_gradients_are_near_those_in_fp32(family, recipe):
    compare(recipe, family)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_wider_model_is_as_near(recipe):
    compare(recipe, "STDiT", **WIDE)


def test_autocast_gives_bf16_and_the_plain_mlp_path():
    mlp = converted("STDiT").blocks[0].mlp
    assert not mlp._is_fused(torch.zeros(1, 4, 48))
    assert type(mlp.fc1) is not nn.Linear  # so nor on a GPU
    x = torch.randn(2, 8, 48)
    with torch.autocast("cpu", torch.bfloat16):
        assert mlp.fc1(x).dtype == torch.bfloat16
        assert mlp(x).dtype == torch.bfloat16
    assert mlp(x).dtype == torch.float32


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
def test_training_lowers_the_loss_as_in_bf16(recipe, engine):
    losses = {name: train(name, engine) for name in (None, recipe)}
    assert losses[recipe][-1] < 0.8 * losses[recipe][0]
    # later steps of so small a model on the same noise differ by more, whatever rounds them
    torch.testing.assert_close(losses[recipe][:10], losses[None][:10], atol=0, rtol=5e-3)
    assert losses[recipe][1:] != losses[None][1:]


SLOW = [("STDiT", level, (1, 6, 6)) for level in ("none", "block", "selective")]


@pytest.mark.parametrize(
    ("family", "level", "second"),
    [("DiT-text", "none", (3, 6, 8)), *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
)
def test_compiled_blocks_compute_the_same(family, level, second):
    """Without graph breaks. aot_eager leaves operations as they are, but under autocast compiled blocks sum in fp32 (ADR 10)."""
    eager, compiled = converted(family, depth=1), converted(family, depth=1)
    compile_blocks(compiled.transformer_blocks(), backend="aot_eager")
    checkpoint_activations(compiled.transformer_blocks(), level)
    assert list(compiled.state_dict()) == list(eager.state_dict())
    for size in dict.fromkeys(((3, 6, 8), second)):  # 2 x 36 and 2 x 9 rows: filled up in both, by other numbers
        cond = inputs(eager, size=size)
        for autocast, output, gradient in ((False, 1e-3, 1e-2), (True, 2e-2, 1e-1)):
            out, grads = gradients(compiled, cond, autocast=autocast)
            expected, wanted = gradients(eager, cond, autocast=autocast)
            assert relative(out, expected) < output
            assert max(relative(grads[name], wanted[name]) for name in grads if wanted[name].norm() > 1e-6) < gradient


@pytest.mark.parametrize("level", ["block", "mlp", "selective"])
def test_checkpointing_changes_no_gradient(level):
    plain, cond = converted("STDiT"), inputs(build("STDiT"))
    checkpointed = converted("STDiT")
    checkpoint_activations(checkpointed.transformer_blocks(), level)
    _, expected = gradients(plain, cond)
    _, actual = gradients(checkpointed, cond)
    torch.testing.assert_close(actual, expected, atol=0, rtol=0)


def test_what_the_config_says():
    assert [recipe_of(value) for value in (False, True, "rowwise", "tensorwise")] == [
        None,
        "rowwise",
        "rowwise",
        "tensorwise",
    ]


def test_refusals():
    with pytest.raises(UserError, match=r"needs a GPU with float8 products.*a CPU has none"):
        convert_linears(build("STDiT"))
    with pytest.raises(UserError, match="Did you mean 'rowwise'"):
        check_float8("rowise", CPU)
    with pytest.raises(UserError, match="has no linear layer whose sizes are multiples of 16"):
        convert_linears(build("STDiT", hidden_size=40), emulate=True)  # 40 is no multiple
    model = converted("STDiT")
    with pytest.raises(UserError, match="in float8 already"):
        convert_linears(model, emulate=True)


def test_without_torchao(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(UserError, match=r"needs torchao: pip install -e '.\[quant\]'"):
        check_float8("rowwise", CPU)


def test_adapters_are_refused():
    pytest.importorskip("peft", reason="needs peft: pip install -e '.[lora]'")
    model = build("STDiT")
    add_lora(model, LoraOptions(), seed=0)
    with pytest.raises(UserError, match="does not go with LoRA"):
        convert_linears(model, emulate=True)


def test_a_checkpoint_goes_from_float8_to_bf16_and_back():
    eight, plain = converted("STDiT"), build("STDiT")
    with torch.no_grad():
        eight.blocks[0].mlp.fc1.weight.add_(1)
    plain.load_state_dict(eight.state_dict())
    again = converted("STDiT")
    again.load_state_dict(plain.state_dict())
    assert torch.equal(again.blocks[0].mlp.fc1.weight, eight.blocks[0].mlp.fc1.weight)
    assert copy.deepcopy(eight).state_dict().keys() == plain.state_dict().keys()


SHARED = (("ddp", 2, {}), ("fsdp2", 1, {}), ("fsdp2", 2, {"fsdp_reshard": "zero3"}))


def stdit() -> nn.Module:
    return converted("STDiT", hidden_size=64, num_heads=4).train()


def trains_as_one(rank, world_size, folder):
    for name, sp_size, settings in SHARED:
        world = init_world("cpu", sp_size)
        model = stdit()
        checkpoint_activations(model.transformer_blocks(), "block")
        parallelise(model, world.sp_group)
        found = train_whole_batch(engine_for(name, world, "bf16", settings, model), world)
        torch.testing.assert_close(found, torch.load(folder / "expected.pt"), atol=0, rtol=1e-2)


@pytest.mark.multiprocess
@pytest.mark.slow
def test_two_processes_train_as_one(spawn, tmp_path):
    """Losses and norms, with sequence parallelism too. Scales of the weights' gradients are of a process's tokens."""
    torch.save(train_whole_batch(engine_for("ddp", ALONE, "bf16", {}, stdit()), ALONE), tmp_path / "expected.pt")
    spawn(trains_as_one, 2, tmp_path)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--float8=rowwise", "--lora.rank=4"), "float8='rowwise' does not go with lora"),
        (("--float8", "--plugin=zero2"), "float8=True does not go with plugin='zero2'"),
        (("--float8=tensorwise", "--dtype=fp32"), "float8='tensorwise' does not go with dtype='fp32'"),
        (("--float8=rowise",), "expected bool or 'rowwise' or 'tensorwise'"),
    ],
)
def test_config(options, words):
    with pytest.raises(UserError) as error:
        parse_config(TrainConfig, COMPONENTS, ["configs/quickstart/pretrain.py", *options])
    assert words in str(error.value)


def test_config_that_is_right():
    for options, value in ((["--float8"], True), (["--float8", "tensorwise"], "tensorwise"), ([], False)):
        cfg = parse_config(TrainConfig, COMPONENTS, ["configs/quickstart/pretrain.py", *options])
        assert cfg.float8 == value
