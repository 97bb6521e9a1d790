"""What every denoiser must do, whatever is inside: found by walking the registry, at toy size."""

import inspect

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from opensora.acceleration.checkpointing import checkpoint_activations
from opensora.acceleration.compile import compile_blocks
from opensora.registry import MODELS
from tests.models.denoisers import (
    COMPILED_SIZES,
    DENOISERS,
    FAMILIES,
    awake,
    build,
    inputs,
    sample,
    takes_text,
    toy,
)

families = pytest.mark.parametrize("family", FAMILIES)
SIZES = [(1, 4, 4), (3, 6, 8), (2, 5, 7), (5, 3, 1)]


def test_every_denoiser_belongs_to_a_family():
    covered = {inspect.unwrap(MODELS.get(cfg["type"])) for cfg in FAMILIES.values()}
    assert {inspect.unwrap(MODELS.get(name)) for name in DENOISERS} == covered


@pytest.mark.parametrize("name", DENOISERS)
def test_every_registered_name_builds_with_no_further_argument(name):
    with torch.device("meta"):
        model = MODELS.build({"type": name})
    assert model.transformer_blocks()


@pytest.mark.parametrize("name", DENOISERS)
def test_every_registered_name_runs_at_toy_size(name):
    model = awake(MODELS.build({"type": name, **toy(name)}))
    cond = inputs(model)
    assert model(**cond).shape == (2, model.out_channels, 3, 6, 8)


@families
@pytest.mark.parametrize("size", SIZES)
def test_any_size_gives_the_same_size_back(family, size):
    model = build(family)
    out = model(**inputs(model, size=size))
    assert out.shape == (2, model.out_channels, *size)
    assert out.dtype == torch.float32
    assert out.isfinite().all()


@families
def test_tokens_lie_one_after_the_other_in_every_block(family):
    model = build(family)
    seen = []
    for block in model.transformer_blocks():
        block.register_forward_hook(lambda block, args, out: seen.extend((args[0], out)))
    model(**inputs(model))
    assert seen
    assert all(tokens.is_contiguous() for tokens in seen)


@families
def test_a_batch_of_two_equals_two_batches_of_one(family):
    model = build(family)
    cond = inputs(model)
    both = model(**cond)
    alone = torch.cat([model(**sample(cond, b)) for b in range(2)])
    torch.testing.assert_close(both, alone, atol=1e-5, rtol=1e-5)


@families
def test_a_padded_text_token_changes_nothing(family):
    model = build(family)
    if not takes_text(model):
        pytest.skip("its condition has no length")
    cond = inputs(model)
    spoilt = {**cond, "y": cond["y"].clone()}
    spoilt["y"][0, 0, 4:] = 1000.0
    torch.testing.assert_close(model(**spoilt), model(**cond))
    first = sample(cond, 0)
    cut = {**first, "y": first["y"][:, :, :4], "mask": first["mask"][:, :4]}
    torch.testing.assert_close(model(**cut), model(**first), atol=1e-5, rtol=1e-5)


@families
@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_masks_of_0_and_1_are_masks_of_any_dtype(family, dtype):
    """A tokenizer's is int64."""
    model = build(family)
    cond = {**inputs(model), "x_mask": torch.tensor([[False, True, True], [True, False, True]])}
    other = {name: value.to(dtype) if value.dtype == torch.bool else value for name, value in cond.items()}
    assert torch.equal(model(**other), model(**cond))


@families
def test_a_caption_without_any_token_is_finite(family):
    model = build(family)
    if not takes_text(model):
        pytest.skip("its condition has no length")
    cond = inputs(model)
    cond["mask"][0] = False
    assert model(**cond).isfinite().all()


@families
def test_condition_time_and_frame_order_matter(family):
    model = build(family)
    cond = inputs(model)
    out = model(**cond)
    if model.null_condition(1).numel() > 1 or "class" in family:
        assert not torch.allclose(out, model(**{**cond, "y": cond["y"].roll(1, dims=0)}), atol=1e-5)
    assert not torch.allclose(out, model(**{**cond, "timestep": cond["timestep"].roll(1)}), atol=1e-5)
    flipped = model(**{**cond, "x": cond["x"].flip(2)})
    assert not torch.allclose(out.flip(2), flipped, atol=1e-5)


@families
def test_frame_mask_all_true_is_no_mask(family):
    model = build(family)
    cond = inputs(model)
    x_mask = torch.ones(2, 3, dtype=torch.bool)
    torch.testing.assert_close(model(**cond, x_mask=x_mask), model(**cond))


@families
def test_frame_mask_all_false_is_timestep_zero(family):
    model = build(family)
    cond = inputs(model)
    masked = model(**cond, x_mask=torch.zeros(2, 3, dtype=torch.bool))
    at_zero = model(**{**cond, "timestep": torch.zeros(2)})
    torch.testing.assert_close(masked, at_zero, atol=1e-5, rtol=1e-5)


@families
def test_activation_checkpointing_changes_no_gradient(family):
    plain, checkpointed = build(family).train(), build(family).train()
    checkpoint_activations(checkpointed.transformer_blocks())
    for model in (plain, checkpointed):
        model(**inputs(model)).square().mean().backward()
    assert plain.state_dict().keys() == checkpointed.state_dict().keys()
    for a, b in zip(plain.parameters(), checkpointed.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


@families
def test_every_parameter_gets_a_gradient(family):
    model = build(family).train()
    model(**inputs(model)).square().mean().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []


@families
def test_state_dict_round_trip_is_exact(family):
    model, other = build(family), build(family)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1.0)
    other.load_state_dict(model.state_dict())
    cond = inputs(model)
    assert torch.equal(model(**cond), other(**cond))


@families
def test_flops_equal_the_counters(family):
    # the counter does not know PyTorch's CPU attention kernel, so the plain formula is measured
    model = build(family, enable_flash_attn=False)
    cond = {name: value for name, value in sample(inputs(model), 1).items() if name != "mask"}
    with FlopCounterMode(display=False) as counter:
        model(**cond)
    text_len = cond["y"].shape[2]
    assert model.flops((3, 6, 8), text_len) == pytest.approx(counter.get_total_flops(), rel=0.01)


@families
def test_bf16_autocast_stays_near_fp32(family):
    model = build(family)
    cond = inputs(model)
    exact = model(**cond)
    with torch.autocast("cpu", torch.bfloat16):
        short = model(**cond)
    assert short.dtype == torch.float32
    assert (short - exact).norm() / exact.norm() < 0.02


@families
def test_null_condition_fits_a_batch(family):
    model = build(family)
    cond = inputs(model)
    assert model.null_condition(2).shape == cond["y"].shape
    assert model(**{**cond, "y": model.null_condition(2)}).isfinite().all()


@pytest.mark.nightly
@pytest.mark.slow
@families
def test_many_sizes_compile_at_most_twice_for_each_kind_of_block(family):
    """One program for videos of any size and one for images; no graph breaks (fullgraph) and the eager result."""
    torch._dynamo.reset()
    compilations = 0

    def backend(graph, _):
        nonlocal compilations
        compilations += 1
        return graph.forward

    eager, compiled = build(family), build(family)
    compile_blocks(compiled.transformer_blocks(), varying_sizes=True, backend=backend)
    assert compiled.state_dict().keys() == eager.state_dict().keys()
    for size in COMPILED_SIZES:
        cond = inputs(eager, size=size)
        torch.testing.assert_close(compiled(**cond), eager(**cond), atol=1e-5, rtol=1e-5)
    assert 0 < compilations <= 2 * 2  # every toy has two blocks (or pairs), which differ in kind


@pytest.mark.parametrize(
    "wrong", [{"depth": -1}, {"depth": 0}, {"num_heads": 0}, {"mlp_ratio": -4.0}, {"hidden_size": 50, "num_heads": 3}]
)
def test_a_model_without_blocks_or_with_uneven_heads_is_refused(wrong):
    with pytest.raises(ValueError, match=r"depth=.*, num_heads=.*: all are above 0, and hidden_size is a multiple"):
        MODELS.get("STDiT")(**{"hidden_size": 32, "depth": 1, "num_heads": 2} | wrong)
