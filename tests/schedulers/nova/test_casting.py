"""Weights during sampling: what autocast would make of them, and afterwards as before."""

import pytest
import torch

from opensora.acceleration.compile import compile_blocks
from opensora.schedulers.nova.sampling import weights_cast
from tests.models.nova.toy import build, inputs
from tests.schedulers.nova.toy import SIZE, conditions, rngs, scheduler

CPU = torch.device("cpu")


def autocast():
    return torch.autocast("cpu", torch.bfloat16)


def formats(model):
    return {name: parameter.dtype for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("positions", ["absolute", "rotary"])
def test_cast_weights_give_bit_for_bit_what_autocast_gives(positions):
    model = build(positions=positions, mixer_rank=3).requires_grad_(False)
    with torch.no_grad(), autocast():
        plain = model(**inputs())
        with weights_cast(model, CPU):
            assert torch.equal(model(**inputs()), plain)


def test_weights_are_cast_while_sampling_lasts_and_are_the_same_memory_afterwards():
    model, z = build(), torch.randn(2, 4, *SIZE)
    before = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    steps = scheduler().sample_steps(model, z, conditions(), generators=rngs(0, 1))
    with autocast():
        next(steps)
    during = formats(model)
    assert during["image_decoder.blocks.0.proj.fc1.weight"] == torch.bfloat16
    assert during["image_encoder.patch_embed.proj.bias"] == torch.bfloat16
    assert during["image_encoder.norm.weight"] == torch.float32  # autocast computes norms in fp32
    steps.close()  # type: ignore[attr-defined]
    assert set(formats(model).values()) == {torch.float32}
    assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == before


def test_nothing_is_cast_without_autocast_and_what_moved_meanwhile_stays():
    model = build()
    with weights_cast(model, CPU):
        assert set(formats(model).values()) == {torch.float32}
    moved = model.image_decoder.head.weight
    home = torch.zeros_like(moved)
    with autocast(), weights_cast(model, CPU):
        moved.data = home
    assert moved.data_ptr() == home.data_ptr()


@pytest.mark.slow
@pytest.mark.nightly
def test_compiled_blocks_sample_again_without_a_new_program():
    model, z = build().requires_grad_(False), torch.randn(2, 4, *SIZE)
    programs = []
    compile_blocks(model.transformer_blocks(), backend=lambda graph, _: programs.append(graph) or graph.forward)

    def sampled():
        with autocast():
            return scheduler().sample(model, z, conditions(), generators=rngs(0, 1))

    first = sampled()
    count = len(programs)
    assert torch.equal(sampled(), first)
    assert len(programs) == count > 0
