"""Levels 0 to 3 of activation checkpointing: each adds one stack's MLPs, and no gradient changes."""

from collections import Counter

import pytest
import torch
from torch import Tensor

from opensora.acceleration.checkpointing import checkpoint_activations
from opensora.acceleration.compile import compile_blocks
from opensora.config.schema import checkpointed_parts
from opensora.registry import SCHEDULERS
from opensora.utils.seed import generators
from tests.kept_bytes import kept_bytes
from tests.models.nova.toy import build, inputs

LEVELS = ("none", "mlp:1/3", "mlp:2/3", "mlp", "block", "every:2", "selective", "selective:2")
SIZE = (2, 8, 8)


def train_step(level, *, compiled: bool = False) -> list[Tensor]:
    """The losses and all gradients of one training step."""
    model = build(mixer_rank=2).train()
    if compiled:
        compile_blocks(model.transformer_blocks(), backend="aot_eager")
    checkpoint_activations(model.transformer_blocks(), level, model.stack_depths)
    losses = losses_of(model)
    losses.mean().backward()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert all(parameter.grad is not None for parameter in trained)
    return [losses.detach(), *(parameter.grad for parameter in trained)]


def losses_of(model) -> Tensor:
    x0 = torch.randn(2, 4, *SIZE, generator=torch.Generator().manual_seed(0))
    cond = {name: value for name, value in inputs().items() if name in ("y", "mask", "fps", "flow")}
    scheduler = SCHEDULERS.build({"type": "nova", "loss_repeat": 2})
    return scheduler.training_losses(model, x0, cond, generators=generators(0, "levels", ids=(0, 1)))


@pytest.fixture(scope="module")
def plain() -> list[Tensor]:
    return train_step("none")


@pytest.mark.parametrize("level", LEVELS)
def test_losses_and_gradients_are_those_without_it(plain, level):
    assert all(torch.equal(a, b) for a, b in zip(train_step(level), plain, strict=True))


@pytest.mark.nightly
@pytest.mark.slow
def test_with_compiled_blocks(plain):
    torch.testing.assert_close(train_step("mlp", compiled=True), plain, atol=1e-6, rtol=1e-4)
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("level", "again"), [("none", ()), ("mlp:1/3", ("video_encoder",)), ("mlp:2/3", ("video_encoder", "image_encoder")),
                         ("mlp", ("video_encoder", "image_encoder", "image_decoder"))])  # fmt: skip
def test_each_level_adds_the_mlps_of_one_stack(level, again):
    model, calls = build().train(), Counter()
    for name in ("video_encoder", "image_encoder", "image_decoder"):
        for block in getattr(model, name).blocks:
            mlp = block.proj if name == "image_decoder" else block.mlp
            mlp.fc1.register_forward_hook(lambda *_, name=name: calls.update([name]))
            block.norm1.register_forward_hook(lambda *_: calls.update(["rest"]))
    checkpoint_activations(model.transformer_blocks(), level, model.stack_depths)
    losses_of(model).mean().backward()
    depths = dict(zip(("video_encoder", "image_encoder", "image_decoder"), model.stack_depths, strict=True))
    assert {name: calls[name] for name in depths} == {n: depth * (1 + (n in again)) for n, depth in depths.items()}
    assert calls["rest"] == sum(depths.values())


@pytest.mark.slow
def test_each_level_keeps_less():
    kept = []
    for level in LEVELS[:4]:
        model = build().train()
        checkpoint_activations(model.transformer_blocks(), level, model.stack_depths)
        kept.append(kept_bytes(lambda model=model: losses_of(model)))
    assert kept == sorted(kept, reverse=True)
    assert len(set(kept)) == 4


def test_levels_of_the_published_depths():
    stacks = (16, 32, 6)
    assert [checkpointed_parts(level, 54, stacks).count("mlp") for level in LEVELS[:4]] == [0, 16, 48, 54]
    parts = checkpointed_parts("every:20", 54, stacks)
    assert [i for i, part in enumerate(parts) if part == "block"] == [0, 20, 40]
