"""Activation checkpointing: the same gradients at every level, less kept in the stated order, blocks recomputed as stated."""

import copy
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from opensora.acceleration.checkpointing import (
    checkpoint_activations,
)
from opensora.acceleration.compile import compile_blocks
from opensora.acceleration.streaming import BlockStreams, stream_blocks
from opensora.config.schema import checkpointed_parts
from opensora.registry import MODELS
from opensora.utils.errors import UserError
from tests.acceleration.products import Products
from tests.kept_bytes import counted_bytes, kept_bytes
from tests.models.denoisers import build, inputs

DEPTH = 4
# from what keeps most to what keeps least
ORDER = ("none", "mlp:1/3", "mlp:2/3", "mlp", "selective", "every:2", "selective:2", "attention", "block")
LEVELS = ("every:1", "every:3", "selective:3", "selective+every:3", *ORDER)


def toy(level: str = "none", family: str = "STDiT") -> nn.Module:
    model = build(family, depth=DEPTH).train()
    checkpoint_activations(model.transformer_blocks(), level)
    return model


def gradients(model: nn.Module) -> list[Tensor]:
    model(**inputs(model)).square().mean().backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.fixture(scope="module")
def plain() -> list[Tensor]:
    return gradients(toy())


@pytest.mark.parametrize("level", LEVELS)
def test_gradients_are_those_without_it(plain, level):
    assert all(torch.equal(a, b) for a, b in zip(plain, gradients(toy(level)), strict=True))


@pytest.mark.parametrize("family", ["DiT-text", "LatteT2V", "PixArt-Sigma-compressed", "STDiT3"])
@pytest.mark.parametrize("level", ["mlp", "selective", "selective:2"])
def test_other_architectures(family, level):
    torch.testing.assert_close(gradients(toy(level, family)), gradients(toy("none", family)))


def test_names_of_the_state_stay():
    plain = toy().state_dict().keys()
    for level in LEVELS:
        assert toy(level).state_dict().keys() == plain
    moved = toy("block")
    stream_blocks(moved, torch.device("cpu"), resident=2, activations=True)
    assert moved.state_dict().keys() == plain


def test_less_is_kept_in_the_stated_order():
    kept = []
    for level in ORDER:
        model = toy(level)
        cond = inputs(model)
        kept.append(kept_bytes(lambda model=model, cond=cond: model(**cond)))
    assert kept == sorted(kept, reverse=True)
    assert len(set(kept)) == len(kept)
    assert kept[-1] < kept[0] / 8


def test_what_is_kept_of_a_large_model_needs_no_memory():
    assert (
        counted_bytes(lambda: MODELS.build({"type": "STDiT-XL/2", "depth": 2}), (16, 32, 32), 8, "block", "bf16")
        < 2**30
    )


def test_autograd_saves_less_too():
    """Counted another way: what passes the hooks of autograd, of which selective checkpointing's own store is no part."""
    counts = []
    for level in ("none", "mlp:1/3", "mlp:2/3", "mlp", "every:2", "block"):
        saved: list[int] = []

        def pack(tensor: Tensor, saved: list[int] = saved) -> Tensor:
            saved.append(tensor.numel() * tensor.element_size())
            return tensor

        model = toy(level)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(**inputs(model))
        counts.append(sum(saved))
    assert counts == sorted(counts, reverse=True)
    assert len(set(counts)) == len(counts)


@pytest.mark.parametrize(
    ("level", "blocks", "mlps"),
    [
        ("none", [1, 1, 1, 1], [1, 1, 1, 1]),
        ("block", [2, 2, 2, 2], [2, 2, 2, 2]),
        ("every:2", [2, 1, 2, 1], [2, 1, 2, 1]),
        ("every:3", [2, 1, 1, 2], [2, 1, 1, 2]),
        ("mlp", [1, 1, 1, 1], [2, 2, 2, 2]),
        ("mlp:1/3", [1, 1, 1, 1], [2, 2, 1, 1]),
        ("mlp:2/3", [1, 1, 1, 1], [2, 2, 2, 1]),
    ],
)
def test_what_is_computed_twice(level, blocks, mlps):
    model = build("STDiT", depth=DEPTH).train()
    calls: Counter[tuple[str, int]] = Counter()
    for i, block in enumerate(model.blocks):
        block.norm1.register_forward_hook(lambda *_, i=i: calls.update([("block", i)]))
        block.mlp.fc1.register_forward_hook(lambda *_, i=i: calls.update([("mlp", i)]))
    checkpoint_activations(model.transformer_blocks(), level)
    gradients(model)
    assert [calls["block", i] for i in range(DEPTH)] == blocks
    # a hook that runs again stops where the last tensor that is needed is made, which is behind the first layer of an MLP
    assert [calls["mlp", i] for i in range(DEPTH)] == mlps


def test_selective_computes_no_product_again():
    counts = {}
    for level in ("none", "block", "attention", "selective"):
        model = toy(level)
        with Products() as products:
            gradients(model)
        counts[level] = products.count
    for name in ("aten::addmm", "aten::_scaled_dot_product_flash_attention_for_cpu"):
        assert counts["none"][name] == counts["selective"][name] < counts["block"][name], name
    name = "aten::_scaled_dot_product_flash_attention_for_cpu"
    assert counts["attention"][name] == counts["none"][name]
    assert counts["attention"]["aten::addmm"] == counts["block"]["aten::addmm"]
    assert counts["selective"]["aten::gelu"] == counts["none"]["aten::gelu"] + DEPTH


def test_nothing_is_computed_twice_without_gradients():
    model = toy("block").eval()
    with torch.no_grad(), Products() as products:
        model(**inputs(model))
    with torch.no_grad(), Products() as plain:
        other = toy()
        other(**inputs(other))
    assert products.count["aten::addmm"] == plain.count["aten::addmm"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "level",
    ["selective", *(pytest.param(n, marks=pytest.mark.nightly) for n in ("block", "every:2", "mlp", "selective:2"))],
)
def test_with_compiled_blocks(plain, level):
    model = build("STDiT", depth=DEPTH).train()
    compile_blocks(model.transformer_blocks(), backend="aot_eager")
    checkpoint_activations(model.transformer_blocks(), level)
    torch.testing.assert_close(gradients(model), plain, atol=1e-6, rtol=1e-4)
    torch._dynamo.reset()


class Squash(torch.autograd.Function):
    """A function of its own inside a compiled block, as those with kernels are; it keeps a result of what it computes."""

    @staticmethod
    def forward(ctx, x: Tensor, scale: Tensor) -> Tensor:
        squashed = x.tanh()
        ctx.save_for_backward(squashed, scale)
        return squashed * scale.to(x.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        squashed, scale = ctx.saved_tensors
        return grad * scale.to(grad.dtype) * (1 - squashed * squashed), (grad * squashed).sum((0, 1)).to(scale.dtype)


class Squashing(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, width), nn.Linear(width, width)
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return Squash.apply(self.fc2(Squash.apply(self.fc1(x), self.scale)), self.scale)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn, self.mlp = Squashing(), Squashing()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(x)
        return x + self.mlp(x)


def step(level: str, dtype: torch.dtype, backend: str | None = None) -> tuple[int, list[Tensor]]:
    """Bytes kept by autograd next to the weights, and gradients, of blocks compiled with a backend, or eager ones."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(DEPTH)))
    if backend is not None:
        compile_blocks(model, backend=backend)
    checkpoint_activations(model, level)
    x = torch.randn(2, 16, 32, requires_grad=True)
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with hooks, torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        out = model(x)
    out.float().square().mean().backward()
    for parameter in model.parameters():
        kept.pop(parameter.untyped_storage().data_ptr(), None)
    return sum(kept.values()), [x.grad, *(parameter.grad for parameter in model.parameters())]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("level", "programs"), [("block", 1), ("every:2", 2), ("mlp", 1), ("selective", 1), ("selective:2", 2)]
)
def test_what_functions_compute_is_computed_again_when_compiled(level, programs, dtype):
    """As without the compiler, which left to itself keeps it in PyTorch 2.10 and 2.11; blocks share a program as before."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    kept, found = step(level, dtype, "aot_eager")
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == programs
    eager, expected = step(level, dtype)
    torch.testing.assert_close(found, expected)
    if level.startswith("selective"):  # whose store, without the compiler, is out of sight
        eager = step("none", dtype)[0] - 1
    assert kept <= eager
    torch._dynamo.reset()


@pytest.mark.slow
def test_no_warning_of_what_no_block_does(capfd):
    """Of operations in place, from PyTorch, whose warning comes once in a process."""
    torch._logging.warning_once.cache_clear()
    torch._dynamo.reset()
    step("selective", torch.float32, "aot_eager")
    assert "context_fn" not in capfd.readouterr().err
    torch._dynamo.reset()


def test_what_each_value_means():
    assert [checkpointed_parts(level, 28).count("mlp") for level in ("none", "mlp:1/3", "mlp:2/3", "mlp")] == [
        0,
        10,
        19,
        28,
    ]
    assert checkpointed_parts("none", 2) == ["nothing"] * 2
    assert checkpointed_parts("block", 2) == checkpointed_parts("every:1", 2) == ["block"] * 2
    assert checkpointed_parts("selective:1", 2) == checkpointed_parts("selective", 2) == ["selective"] * 2
    assert checkpointed_parts("every:2", 3) == ["block", "nothing", "block"]
    assert checkpointed_parts("selective:2", 3) == ["selective", "block", "selective"]
    assert checkpointed_parts("selective+every:3", 5) == ["block", "selective", "selective", "block", "selective"]
    assert checkpointed_parts("selective+every:1", 2) == ["block"] * 2
    assert checkpointed_parts("mlp:1/3", 3, (2, 1, 0)) == ["mlp", "mlp", "nothing"]


@pytest.mark.parametrize(
    "value",
    [
        "4",
        "mlp:3/3",
        "mlp:1",
        "every:0",
        "every:",
        "every:x",
        "selective:0",
        "selective:",
        "selective+every:0",
        "selective+every",
        "mlp+every:2",
        "block:2",
        "blocks",
        "",
        "all",
    ],
)
def test_other_values_are_refused_with_those_there_are(value):
    with pytest.raises(
        UserError, match=r"none, block, every:k, mlp, mlp:1/3, mlp:2/3, attention, selective, selective:k"
    ):
        checkpointed_parts(value, 4)


def test_blocks_without_an_mlp():
    with pytest.raises(UserError, match="a Linear has none; try 'block'"):
        checkpoint_activations([nn.Linear(2, 2)], "mlp")


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.multiprocess
def test_with_sharded_weights(spawn, tmp_path):
    spawn(check_sharded, 2, tmp_path)


def check_sharded(rank: int, world_size: int, folder: Path) -> None:
    """FSDP2 gathers a block's weights again for what is recomputed."""
    from torch.distributed.fsdp import fully_shard

    whole = toy()
    expected = gradients(whole)
    for level in ("block", "mlp", "selective", "every:2"):
        for offloaded in (False, True)[: 1 if level == "selective" else 2]:
            model = copy.deepcopy(toy())
            names = model.state_dict().keys()
            checkpoint_activations(model.transformer_blocks(), level)
            if offloaded:
                BlockStreams(model.transformer_blocks(), torch.device("cpu"), min_bytes=0)
            for block in model.transformer_blocks():
                fully_shard(block)
            fully_shard(model)
            got = [gradient.full_tensor() for gradient in gradients(model)]
            torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-5)
            assert model.state_dict().keys() == names


@pytest.mark.parametrize("level", ["every:2", "mlp", "mlp:2/3", "selective", "selective:2", "selective+every:2"])
def test_levels_reach_blocks_of_diffusers(level):
    """Whose MLP has another name."""
    plain, checkpointed = build("Wan").train(), build("Wan").train()
    checkpoint_activations(checkpointed.transformer_blocks(), level)
    for model in (plain, checkpointed):
        model(**inputs(model)).square().mean().backward()
    for a, b in zip(plain.parameters(), checkpointed.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
    ffn = checkpointed.transformer_blocks()[0].ffn
    assert ("forward" in vars(ffn)) == level.startswith("mlp")
