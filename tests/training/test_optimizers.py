"""`adamw8bit` and `muon`, through an engine: against PyTorch's own optimizers, their state, several processes."""

import re
import sys

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from opensora.acceleration.distributed import World
from opensora.acceleration.engine import build_engine
from opensora.checkpoint.load import complete_checkpoints, open_checkpoint
from opensora.config.load import parse_config
from opensora.config.schema import LoopConfig, TrainConfig
from opensora.training.ema import EMA
from opensora.training.loop import build_optimizer, checkpoint_parts, set_lr
from opensora.training.optimizers import adamw_8bit, check_optimizer
from opensora.training.run import RunState
from opensora.training.saver import Saver
from opensora.utils.errors import UserError
from tests.models.denoisers import build

CPU = torch.device("cpu")
ALONE = World(0, 1, CPU)
LR = 1e-2


class Toy(nn.Module):
    """Layers [75, 128], whose rows two processes share unevenly, [4096, 75], which is not for 8 bits, and one of a single row."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Linear(128, 75), nn.Linear(75, 4096), nn.Linear(4096, 1)])

    def transformer_blocks(self) -> list[nn.Module]:
        return [*self.blocks]

    def forward(self, x):
        first, second, last = self.blocks
        return last(nn.functional.gelu(second(nn.functional.gelu(first(x)))))


def engine_of(optimizer, model=None, world=ALONE, plugin="ddp", **settings):
    """An engine, and the learning rate set as a train loop sets it."""
    model = Toy() if model is None else model
    cfg = TrainConfig(
        model={}, vae={}, text_encoder={}, scheduler={}, optimizer=optimizer, lr=1.0, weight_decay=0.1, dtype="fp32"
    )
    made = build_optimizer(cfg, model)
    engine = build_engine(plugin, model, made, world, dtype="fp32", grad_clip=1.0, **settings)
    set_lr(made, LR)
    return engine


def train(engine, world=ALONE, steps=range(3)):
    for step in steps:
        x = torch.randn(64, 128, generator=torch.Generator().manual_seed(step))
        with engine.micro_step(last=True):
            loss = (engine.model(x[world.rank :: world.size]) - x[world.rank :: world.size, :1]).square().mean()
        engine.backward(loss)
        engine.step()


def whole(state):
    return {name: t.full_tensor() if isinstance(t, DTensor) else t.clone() for name, t in state.items()}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


@pytest.fixture
def eager():
    """torchao compiles its step, which takes 10 s of a CPU."""
    pytest.importorskip("torchao")
    with torch.compiler.set_stance("force_eager"):
        yield


# ---------------------------------------------------------------------------------------------------------- muon

needs_muon = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon came with torch 2.9")
MATRICES = {  # of a block -> the matrices that a weight stacks
    "Latte-class": {"attn.qkv": 3, "attn.proj": 1, "mlp.fc1": 1, "mlp.fc2": 1},
    "STDiT": {
        **dict.fromkeys(("attn.qkv", "attn_temp.qkv"), 3), "cross_attn.kv_linear": 2,
        **dict.fromkeys(("attn.proj", "attn_temp.proj", "cross_attn.q_linear", "cross_attn.proj", "mlp.fc1", "mlp.fc2"), 1),
    },
    "Wan": dict.fromkeys(
        (*(f"{attn}.{end}" for attn in ("attn1", "attn2") for end in ("to_q", "to_k", "to_v", "to_out.0")),
         "ffn.net.0.proj", "ffn.net.2"), 1,
    ),
}  # fmt: skip


@needs_muon
@pytest.mark.parametrize("family", MATRICES)
def test_muon_takes_the_matrices_of_blocks_one_by_one_and_adamw_the_rest(family):
    """To the bit as PyTorch's own, on copies cut by hand."""
    model = build(family)
    engine = engine_of("muon", model)
    copies, matrices, rest = {}, [], []
    for name, weight in model.named_parameters():
        layer = re.fullmatch(r".*blocks\.\d+\.(.*)\.weight", name)
        parts = MATRICES[family].get(layer[1]) if layer else None
        copies[name] = [nn.Parameter(part.clone()) for part in weight.detach().chunk(parts or 1)]
        (rest if parts is None else matrices).extend(copies[name])
    assert matrices
    by_hand = [
        torch.optim.Muon(matrices, lr=LR, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=LR, weight_decay=0.1, fused=True),
    ]
    for _ in range(2):
        for name, weight in model.named_parameters():
            weight.grad = torch.randn_like(weight) * 1e-4  # too small to be clipped
            for copy, gradient in zip(copies[name], weight.grad.chunk(len(copies[name])), strict=True):
                copy.grad = gradient.clone()
        engine.step()
        for optimizer in by_hand:
            optimizer.step()
    assert_same(dict(model.named_parameters()), {name: torch.cat(parts) for name, parts in copies.items()})


def muon_on_two(rank, world_size, tmp_path):
    world, (start, expected) = World(rank, world_size, CPU), torch.load(tmp_path / "expected.pt")
    ddp, hybrid = (engine_of("muon", world=world, hybrid_zero=shards) for shards in (False, True))
    for engine in (ddp, hybrid):
        train(engine, world)
    for (
        name,
        value,
    ) in ddp.model_state().items():  # a sum in another order is rounded otherwise in bf16, of Muon's products
        assert (value - expected[name]).norm() < 0.05 * (expected[name] - start[name]).norm(), name
    # each matrix is whole where its state is
    assert_same(hybrid.model_state(), ddp.model_state())
    assert_same(hybrid.optimizer_state(), ddp.optimizer_state())
    assert len(hybrid.optimizer.state) < len(ddp.optimizer.state)


@needs_muon
@pytest.mark.slow
@pytest.mark.multiprocess
def test_muon_on_two_processes_trains_as_on_one(tmp_path, spawn):
    engine = engine_of("muon")
    start = whole(engine.model_state())
    train(engine)
    torch.save((start, engine.model_state()), tmp_path / "expected.pt")
    spawn(muon_on_two, 2, tmp_path)


@needs_muon
def test_muon_without_a_matrix_to_train():
    model = Toy()
    model.blocks.requires_grad_(False)
    model.bias = nn.Parameter(torch.zeros(3))
    with pytest.raises(UserError, match="optimizer='muon': none of the trained weights is one for it"):
        engine_of("muon", model)


# ------------------------------------------------------------------------------------------------------ adamw8bit


@pytest.mark.extra
def test_moments_of_8_bits_are_near_those_of_32_in_a_quarter_of_the_bytes(eager):
    """After 8 steps: an element is at most 1/127 of its block's largest away in each, and the others' moments are exact."""
    engines = {name: engine_of(name) for name in ("adamw", "adamw8bit")}
    start = {name: weight.clone() for name, weight in engines["adamw"].model_state().items()}
    for engine in engines.values():
        train(engine, steps=range(8))
    exact, found = (engine.model_state() for engine in engines.values())
    for name in ("blocks.0.weight", "blocks.2.weight"):
        moved, apart = exact[name] - start[name], found[name] - exact[name]
        assert 0 < apart.norm() < 0.1 * moved.norm(), name
        size = {
            key: sum(v.nbytes for path, v in engine.optimizer_state().items() if path.startswith(f"{name}/exp_avg"))
            for key, engine in engines.items()
        }
        assert size["adamw8bit"] == size["adamw"] * (1 + 4 / 128) / 4
    state = engines["adamw8bit"].optimizer_state()
    assert state["blocks.0.weight/exp_avg"].dtype == torch.uint8
    assert state["blocks.1.weight/exp_avg"].dtype == torch.float32  # rows of 75 are no whole blocks


def adamw_8bit_on_two(rank, world_size, tmp_path):
    world, expected = World(rank, world_size, CPU), torch.load(tmp_path / "expected.pt")
    with torch.compiler.set_stance("force_eager"):
        for plugin, settings in (
            ("ddp", {}), ("ddp", {"hybrid_zero": True}), ("fsdp2", {}), ("fsdp2", {"optimizer_offload": True})
        ):  # fmt: skip
            case = "-".join([plugin, *settings])
            engine = engine_of("adamw8bit", world=world, plugin=plugin, **settings)
            train(engine, world, steps=range(2))
            run = tmp_path / case
            run.mkdir(exist_ok=True)
            saver = Saver(run, world, LoopConfig(ckpt_async=False), {"model": "toy", "config": {}})
            saver.save(RunState("d", 1, step=2), checkpoint_parts(engine, EMA(engine.raw_model, 0.9)))
            saver.wait()
            torch.distributed.barrier()
            train(engine, world, steps=[2])
            after = whole({**engine.model_state(), **engine.optimizer_state()})
            for name, value in after.items():
                if value.dtype != torch.uint8:  # a sum in another order is another code at times
                    torch.testing.assert_close(value, expected[name], atol=LR / 20, rtol=1e-3, msg=f"{case} {name}")
            # as from a file that a run on any number of processes wrote
            checkpoint = open_checkpoint(complete_checkpoints(run)[-1])
            again = engine_of("adamw8bit", world=world, plugin=plugin, **settings)
            again.load_model_state(checkpoint.tensors("model"), "test")
            again.load_optimizer_state(checkpoint.tensors("optimizer"))
            train(again, world, steps=[2])
            assert_same(whole({**again.model_state(), **again.optimizer_state()}), after)


@pytest.mark.extra
@pytest.mark.slow
@pytest.mark.multiprocess
def test_8_bits_on_two_processes_train_as_on_one_and_resume_to_the_bit(eager, tmp_path, spawn):
    engine = engine_of("adamw8bit")
    train(engine)
    torch.save({**engine.model_state(), **engine.optimizer_state()}, tmp_path / "expected.pt")
    spawn(adamw_8bit_on_two, 2, tmp_path)
    # shards of rows are parts of what one process has
    checkpoint = open_checkpoint(complete_checkpoints(tmp_path / "fsdp2")[-1])
    engine.load_model_state(checkpoint.tensors("model"), "test")
    engine.load_optimizer_state(checkpoint.tensors("optimizer"))
    assert_same(
        engine.optimizer_state(), {name: checkpoint.tensors("optimizer")[name] for name in engine.optimizer_state()}
    )
    train(engine, steps=[2])
    expected = torch.load(tmp_path / "expected.pt")
    for name, value in engine.model_state().items():
        torch.testing.assert_close(value, expected[name], atol=LR / 20, rtol=0)


@pytest.mark.extra
def test_a_step_is_that_of_torchao(eager):
    from torchao.optim import AdamW8bit

    torch.manual_seed(0)
    ours = nn.Parameter(torch.randn(75, 128))
    theirs = nn.Parameter(ours.detach().clone())
    optimizers = (
        adamw_8bit([ours], lr=LR, weight_decay=0.1),
        AdamW8bit([theirs], lr=LR, weight_decay=0.1, block_size=128),
    )
    for _ in range(3):
        ours.grad = torch.randn(75, 128)
        theirs.grad = ours.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(ours, theirs)


@pytest.mark.extra
@pytest.mark.slow
@pytest.mark.nightly
def test_what_torchao_compiles_computes_the_same():
    pytest.importorskip("torchao")
    compiled, plain = (nn.Parameter(torch.linspace(-1, 1, 4096).view(32, 128)) for _ in range(2))
    for weight, stance in ((compiled, "default"), (plain, "force_eager")):
        optimizer = adamw_8bit([weight], lr=LR)
        with torch.compiler.set_stance(stance):
            for step in range(2):
                weight.grad = torch.randn(32, 128, generator=torch.Generator().manual_seed(step))
                optimizer.step()
    torch.testing.assert_close(compiled, plain, atol=LR / 100, rtol=0)


# ----------------------------------------------------------------------------------------------------------- both

BOTH = [pytest.param("muon", marks=needs_muon), pytest.param("adamw8bit", marks=pytest.mark.extra)]


@pytest.mark.parametrize("name", BOTH)
def test_state_round_trips_and_a_step_that_is_not_finite_changes_nothing(name, request):
    if name == "adamw8bit":
        request.getfixturevalue("eager")
    before, after = engine_of(name), engine_of(name)
    train(before, steps=range(2))
    state = {path: value.clone() for path, value in before.optimizer_state().items()}
    after.load_model_state(before.model_state(), "test")
    after.load_optimizer_state(state)
    for weight in after.raw_model.parameters():
        weight.grad = torch.full_like(weight, torch.nan)
    after.step()
    assert_same(after.optimizer_state(), state)
    for engine in (before, after):
        train(engine, steps=[2, 3])
    assert_same(after.optimizer_state(), before.optimizer_state())
    assert_same(after.model_state(), before.model_state())


def test_without_their_packages(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.delattr(torch.optim, "Muon", raising=False)
    check_optimizer("adamw")
    with pytest.raises(UserError, match=r"'adamw8bit' needs torchao .*: pip install -e '\.\[quant\]'"):
        check_optimizer("adamw8bit")
    with pytest.raises(UserError, match=r"'muon' needs torch >= 2\.9"):
        check_optimizer("muon")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["muon", "--plugin=fsdp2"], "with plugin='fsdp2': it needs whole matrices, and a process has a shard. Use "),
        (["muon", "--optimizer-offload=True"], "with optimizer_offload=True"),
        (["muon", "--lora.rank=4"], "with lora: it makes the update of a whole matrix orthogonal"),
        (["muon", "--plugin=zero2"], "with plugin='zero2', whose optimizer cuts"),
        (["adamw8bit", "--plugin=zero2"], "with plugin='zero2', whose optimizer cuts"),
    ],
)
def test_what_does_not_go_with_it_is_refused(options, words):
    name, rival = options
    config = ["configs/quickstart/pretrain.py", f"--optimizer={name}"]
    assert parse_config(TrainConfig, {}, config).optimizer == name
    with pytest.raises(UserError) as error:
        parse_config(TrainConfig, {}, [*config, rival])
    (line,) = [line for line in str(error.value).splitlines() if "optimizer=" in line]
    assert f"optimizer='{name}' does not work {words}" in line


def test_all_else_goes_with_8_bits():
    config = ["configs/quickstart/pretrain.py", "--optimizer=adamw8bit", "--optimizer-offload=True"]
    for more in (["--plugin=fsdp2"], ["--hybrid-zero=True"], ["--lora.rank=4"]):
        parse_config(TrainConfig, {}, [*config, *more])
