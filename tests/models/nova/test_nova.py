"""NOVA's parts: sizes as published, causality, the cache, positions, and that visible patches alone are looked at."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from opensora.acceleration.compile import compile_blocks
from opensora.models.nova.nova import NOVA, block_causal
from opensora.registry import MODELS
from opensora.utils.errors import UserError

TOY = {"caption_channels": 16, "model_max_length": 7, "width": 32, "num_heads": 2, "video_depth": 2, "image_depth": 4,
       "head_depth": 2}  # fmt: skip
POSITIONS = pytest.mark.parametrize("positions", ["absolute", "rotary"])


def build(**changes) -> NOVA:
    torch.manual_seed(0)
    model = MODELS.build({"type": "NOVA", **TOY, **changes}).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():
                parameter.normal_(std=0.05)
    return model


def inputs(batch=2, size=(3, 8, 12), draws=2, visible=5, seed=1):
    rng = torch.Generator().manual_seed(seed)
    T, H, W = size
    N = H * W // 4
    x = torch.randn(batch, 4, *size, generator=rng)
    return {
        "x": x,
        "timestep": torch.rand(batch, draws, T, N, generator=rng) * 1000,
        "y": torch.randn(batch, 1, 7, 16, generator=rng),
        "noisy": torch.randn(batch, draws, 4, *size, generator=rng),
        "visible": torch.stack([torch.randperm(N, generator=rng)[:visible] for _ in range(batch * T)]).view(
            batch, T, -1
        ),
        "mask": torch.arange(7)[None] < torch.tensor([[4], [7]])[:batch],
        "fps": torch.tensor([8.0, 24.0])[:batch],
        "flow": torch.tensor([5.0, 1.5])[:batch],
    }


@pytest.mark.parametrize(
    ("name", "millions"),
    [("NOVA-d48w768", 364), ("NOVA-d48w1024", 646), ("NOVA-d48w1536", 1450), ("NOVA-d48w1024-T2V", 644)],
)
def test_sizes_as_published(name, millions):
    with torch.device("meta"):
        model = MODELS.build({"type": name})
    # the published figure of the video model counts the motion tokens, which are not trained
    count = sum(p.numel() for p in model.parameters() if p.requires_grad or name.endswith("T2V")) / 1e6
    assert count == pytest.approx(millions, abs=0.5)


@POSITIONS
def test_a_batch_of_two_equals_two_batches_of_one(positions):
    model, cond = build(positions=positions), inputs()
    both = model(**cond)
    assert both.shape == cond["noisy"].shape
    assert both.dtype == torch.float32
    alone = [model(**{name: value[b : b + 1] for name, value in cond.items()}) for b in range(2)]
    torch.testing.assert_close(both, torch.cat(alone), atol=1e-5, rtol=1e-5)


@POSITIONS
def test_frame_by_frame_with_a_cache_equals_all_frames_at_once(positions):
    model, cond = build(positions=positions), inputs()
    text = model.text_tokens(cond["y"], cond["mask"], cond["fps"], cond["flow"])
    together = model.video_conditions(cond["x"], text)
    cache, previous = None, None
    for t in range(3):
        c, cache = model.next_condition(previous, text, t, cond["x"].shape[2:], cache)
        torch.testing.assert_close(c, together[:, t], atol=1e-5, rtol=1e-5)
        previous = cond["x"][:, :, t]


def test_the_mask_is_a_loop_over_frames():
    mask = block_causal(3, 3, 2)
    for i in range(9):
        for j in range(9):
            block = [max(0, (n - 3) // 2) if n >= 3 else 0 for n in (i, j)]
            assert mask[i, j] == (block[1] <= block[0])


@POSITIONS
def test_a_frame_is_made_of_those_before_it_and_of_its_visible_patches(positions):
    model, cond = build(positions=positions), inputs()
    out = model(**cond)
    x = cond["x"].clone()
    x[:, :, 1] += 1  # frame 0 cannot know
    changed = model(**{**cond, "x": x})
    torch.testing.assert_close(changed[:, :, :, 0], out[:, :, :, 0])
    assert not torch.allclose(changed[:, :, :, 2], out[:, :, :, 2])
    hidden = torch.ones(2, 3, 24, dtype=torch.bool).scatter(2, cond["visible"], False)
    where = model.to_frames(hidden[..., None].expand(-1, -1, -1, 16).float(), (8, 12))  # [B, T, C, H, W]
    last = torch.where(where[:, 2] > 0, cond["x"][:, :, 2] + 1, cond["x"][:, :, 2])
    x = cond["x"].clone()
    x[:, :, 2] = last  # the last frame's hidden patches: nobody looks at them
    torch.testing.assert_close(model(**{**cond, "x": x}), out)


def test_text_that_is_padded_changes_nothing_and_no_text_is_the_null_condition():
    model, cond = build(), inputs()
    y = cond["y"].clone()
    y[0, :, 4:] = 99
    torch.testing.assert_close(model(**{**cond, "y": y}), model(**cond))
    none = {**cond, "mask": torch.zeros(2, 7, dtype=torch.bool)}
    null = {**cond, "y": model.null_condition(2), "mask": None}
    torch.testing.assert_close(model(**none), model(**null))


def test_sizes_that_are_no_whole_patches_are_refused():
    with pytest.raises(UserError, match=r"multiples of 4; 6x12 is not. The nearest is 8x12"):
        build().check_size((1, 6, 12))


def test_blocks_compile_as_a_whole():
    model, cond = build(), inputs()
    out = model(**cond)
    compile_blocks(model.transformer_blocks(), backend="aot_eager")
    torch.testing.assert_close(model(**cond), out)


def test_flops_are_those_that_are_counted():
    model = build(width=64, caption_channels=32)
    size, N = (1, 16, 16), 64
    cond = inputs(batch=1, size=size, draws=1, visible=int(0.133 * N))
    cond["y"] = torch.randn(1, 1, 7, 32)
    with (
        FlopCounterMode(display=False) as counter,
        sdpa_kernel(SDPBackend.MATH),
    ):  # the only one that is counted on a CPU
        model(**cond)
    assert model.flops(size, 7) == pytest.approx(counter.get_total_flops(), rel=0.02)
