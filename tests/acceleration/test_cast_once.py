"""Weights that are rounded once a forward pass: the bits of autocast's, whatever is trained, checkpointed, compiled or averaged."""

import copy
from functools import partial

import pytest
import torch
from torch import nn

from opensora.acceleration.checkpointing import checkpoint_activations
from opensora.acceleration.compile import compile_blocks
from opensora.acceleration.distributed import World
from opensora.acceleration.engine import build_engine
from opensora.acceleration.engines.cast_once import CastOnce, slots_of
from opensora.config.load import TrainConfig, parse_config
from opensora.config.lora import LoraOptions
from opensora.training.lora import add_lora
from opensora.utils.errors import UserError
from tests.conftest import start_ranks
from tests.models.denoisers import FAMILIES, build, inputs

CPU = torch.device("cpu")
ALONE = World(0, 1, CPU)
SIZE = (3, 6, 8)


def engine_of(model, *, world=ALONE, dtype="bf16", cast_once=True):
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    return build_engine("ddp", model, optimizer, world, dtype=dtype, grad_clip=0.5, cast_once=cast_once)


def train(engine, model, *, steps=2, parts=2, seed=0, sizes=(SIZE,)):
    """Losses and norms of a few steps of a few micro-batches, whose sizes take turns."""
    told = []
    for step in range(steps):
        for part in range(parts):
            number = parts * step + part
            cond = inputs(model, size=sizes[number % len(sizes)], seed=100 * seed + number)
            with engine.micro_step(last=part == parts - 1):
                loss = (engine.model(**cond) - 0.3).square().mean() / parts
            engine.backward(loss)
            told.append(float(loss.detach()))
        told.append(float(engine.step()))
    return told


def check_equal(model, engine_of=engine_of, plain_engine_of=None, **options):
    """The same model trains the same with both engines, bit by bit; returns what changed."""
    plain = copy.deepcopy(model)
    plain_engine_of = plain_engine_of or partial(engine_of, cast_once=False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert train(engine_of(model), model, **options) == train(plain_engine_of(plain), plain, **options)
    state, expected = model.state_dict(), plain.state_dict()
    assert all(torch.equal(state[name], expected[name]) for name in expected)
    return [name for name in state if not torch.equal(state[name], before[name])]


@pytest.mark.parametrize("family", FAMILIES)
def test_training_gives_the_bits_of_autocast(family):
    model = build(family).train()
    blocks = model.transformer_blocks()
    seen = sum(len(slots_of(block)) for block in blocks)
    in_linears = sum(
        len(list(layer.parameters()))
        for block in blocks
        for path, layer in block.named_modules()
        if isinstance(layer, nn.Linear) and "adaLN_modulation" not in path  # which computes in fp32
    )
    assert seen == in_linears > 0
    assert check_equal(model)


@pytest.mark.parametrize("level", ["block", "mlp", "selective"])
def test_checkpointing_computes_again_with_the_same_weights(level):
    model = build("STDiT3").train()
    plain = copy.deepcopy(model)
    checkpoint_activations(model.transformer_blocks(), level)
    assert train(engine_of(model), model) == train(engine_of(plain, cast_once=False), plain)


@pytest.mark.slow
@pytest.mark.parametrize("level", ["none", pytest.param("block", marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", ["STDiT", pytest.param("DiT-text", marks=pytest.mark.slow)])
def test_compiled_blocks_have_no_casts_of_weights(family, level):
    graphs = {True: [], False: []}

    def compiled(*, cast_once):
        def backend(graph, example_inputs):
            graphs[cast_once].append(graph)
            return graph

        model = build(family).train()
        compile_blocks(model.transformer_blocks(), backend=backend)
        checkpoint_activations(model.transformer_blocks(), level)
        return train(engine_of(model, cast_once=cast_once), model)

    assert compiled(cast_once=True) == compiled(cast_once=False)
    # blocks, micro-batches and steps share a program; only STDiT's first block has positions of its own
    assert len(graphs[True]) == len(graphs[False]) == (2 if family == "STDiT" else 1)
    narrow, wide = (
        [node.meta["example_value"].dtype for graph in graphs[once] for node in graph.graph.nodes if _is_weight(node)]
        for once in (True, False)
    )
    assert len(narrow) == len(wide) > 0
    assert set(narrow) == {torch.bfloat16}
    assert set(wide) == {torch.float32}


def _is_weight(node) -> bool:
    """An input of the graph that is a linear layer's."""
    return node.op == "placeholder" and any(part in node.name for part in ("qkv", "proj", "_linear", "fc1", "fc2"))


def test_frozen_weights_are_rounded_and_stay():
    model = build("STDiT", freeze="not_temporal").train()
    changed = check_equal(model)
    assert changed
    assert all("attn_temp" in name for name in changed)


def test_adapters_train_and_what_they_adapt_stays():
    pytest.importorskip("peft", reason="pip install peft")
    model = build("STDiT").train()
    add_lora(model, LoraOptions(rank=2), seed=0)
    plain = copy.deepcopy(model)
    engine = engine_of(model)
    rounded = {id(slot.layer) for block in engine.casts.blocks for slot in block}
    assert rounded == {
        id(layer)
        for block in model.transformer_blocks()
        for layer in block.modules()
        if type(layer) is nn.Linear  # of STDiT's block all compute under autocast, what is inside of peft's layers too
    }
    assert train(engine, model) == train(engine_of(plain, cast_once=False), plain)
    state, expected = model.state_dict(), plain.state_dict()
    assert all(torch.equal(state[name], expected[name]) for name in expected)


def test_outside_of_the_passes_the_model_is_as_it_was():
    model = build("STDiT").train()
    before = dict(model.named_parameters())
    engine = engine_of(model)

    def check():
        assert dict(model.named_parameters()).keys() == before.keys()
        assert all(parameter is before[name] for name, parameter in model.named_parameters())

    with engine.micro_step(last=True):
        assert model.blocks[0].mlp.fc1.weight.dtype == torch.bfloat16
        loss = engine.model(**inputs(model, size=SIZE)).square().mean()
    check()
    engine.backward(loss)
    check()
    assert all(parameter.grad.dtype == torch.float32 for parameter in before.values() if parameter.grad is not None)
    with pytest.raises(KeyError, match="broken"), engine.micro_step(last=True):
        raise KeyError("broken")
    check()
    engine.step()
    check()
    train(engine, model)  # a pass whose loss nobody wanted does no harm


def test_weights_that_change_meanwhile_are_rounded_anew():
    model = build("DiT-text").train()
    engine, cond = engine_of(model), inputs(model, size=SIZE)

    def prediction():
        with engine.micro_step(last=True):
            return engine.model(**cond).detach()

    first = prediction()
    with torch.no_grad():
        model.blocks[0].mlp.fc2.weight.mul_(1.5)
    assert not torch.equal(prediction(), first)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert torch.equal(model(**cond), prediction())


def on_two_processes(rank, folder):
    """The same steps by both engines on different samples of each process."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=(folder / "rendezvous").as_uri(), rank=rank, world_size=2)
    world, found = World(rank, 2, CPU), []
    for cast_once in (True, False):
        model = build("STDiT").train()
        engine = engine_of(model, world=world, cast_once=cast_once)
        found.append((train(engine, model, seed=rank), model.state_dict()))
    (told, state), (expected, wanted) = found
    assert told == expected
    assert all(torch.equal(state[name], wanted[name]) for name in wanted)
    dist.destroy_process_group()


def test_two_processes(tmp_path):
    start_ranks(on_two_processes, (tmp_path,), 2, "cast_once", 120)


def test_what_has_nothing_to_round_is_refused():
    with pytest.raises(
        UserError, match=r"Sequential has no linear layers in attention or MLPs of blocks\. Leave it out"
    ):
        CastOnce(nn.Sequential(nn.Linear(2, 2)), torch.bfloat16)
    model = build("STDiT")
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(UserError, match="cast_once=True has no effect with plugin='fsdp2'"):
        build_engine("fsdp2", model, optimizer, ALONE, cast_once=True)


def test_fp32_says_that_it_has_no_effect(caplog):
    model = build("STDiT").train()
    assert engine_of(model, dtype="fp32").casts is None
    assert "cast_once=True has no effect with dtype=fp32" in caplog.text


@pytest.mark.parametrize("setting", ["--dtype=fp32", "--plugin=fsdp2"])
def test_a_config_is_told_where_it_has_no_effect(setting):
    config = ["configs/quickstart/pretrain.py", "--cast-once"]
    assert parse_config(TrainConfig, {}, config).cast_once
    with pytest.raises(UserError, match="cast_once=True has no effect with plugin="):
        parse_config(TrainConfig, {}, [*config, setting])
