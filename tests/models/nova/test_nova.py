"""NOVA's parts: sizes and names as published, causality, the cache, positions, and that visible patches alone are looked at."""

import math

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from opensora.acceleration.compile import compile_blocks
from opensora.models.layers.positions import apply_rotary
from opensora.models.nova.layers import rotary_3d
from opensora.registry import MODELS
from opensora.utils.errors import UserError
from tests.models.nova.toy import TOY, build, inputs

POSITIONS = pytest.mark.parametrize("positions", ["absolute", "rotary"])
MIXERS = pytest.mark.parametrize("mixer_rank", [0, -1, 3])


@pytest.mark.parametrize("length", [0, 513])
def test_more_text_than_the_weights_have_tokens_for_is_refused_at_once(length):
    with pytest.raises(ValueError, match=f"model_max_length={length} is not from 1 to 512"):
        build(model_max_length=length)
    assert build(model_max_length=512).null_condition(1).shape == (1, 1, 512, 16)


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


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_a_mask_of_0_and_1_is_a_mask_of_any_dtype(dtype):
    model, cond = build(), inputs()
    assert torch.equal(model(**{**cond, "mask": cond["mask"].to(dtype)}), model(**cond))


@POSITIONS
@MIXERS
def test_a_batch_of_two_equals_two_batches_of_one(positions, mixer_rank):
    model, cond = build(positions=positions, mixer_rank=mixer_rank), inputs()
    both = model(**cond)
    assert both.shape == cond["noisy"].shape
    assert both.dtype == torch.float32
    alone = [model(**{name: value[b : b + 1] for name, value in cond.items()}) for b in range(2)]
    torch.testing.assert_close(both, torch.cat(alone), atol=1e-5, rtol=1e-5)


@POSITIONS
@MIXERS
def test_frame_by_frame_with_a_cache_equals_all_frames_at_once(positions, mixer_rank):
    model, cond = build(positions=positions, mixer_rank=mixer_rank), inputs()
    text = model.text_tokens(cond["y"], cond["mask"], cond["fps"], cond["flow"])
    together = model.video_conditions(cond["x"], text)
    past, previous = None, None
    for t in range(3):
        c, past = model.next_condition(previous, text, t, cond["x"].shape[2:], past)
        torch.testing.assert_close(c, together[:, t], atol=1e-5, rtol=1e-5)
        previous = cond["x"][:, :, t]


@MIXERS
def test_later_frames_are_changes_of_the_first(mixer_rank):
    """The layer's formula, on what the same weights say without it."""
    model, cond = build(mixer_rank=mixer_rank), inputs()
    text = model.text_tokens(cond["y"], cond["mask"], cond["fps"], cond["flow"])
    plain = build()
    plain.load_state_dict({name: w for name, w in model.state_dict().items() if "mixer" not in name})
    c = plain.video_conditions(cond["x"], text)
    if mixer_rank:
        w, b = model.video_encoder.mixer.proj.weight, model.video_encoder.mixer.proj.bias
        w = w if mixer_rank < 0 else w @ model.video_encoder.mixer.lora.weight
        scale, shift = (c[:, 1:] * c[:, 1:].sigmoid() @ w.T + b).chunk(2, dim=-1)
        c = torch.cat([c[:, :1], c[:, :1] * (1 + scale) + shift], dim=1)
    torch.testing.assert_close(model.video_conditions(cond["x"], text), c, atol=1e-5, rtol=1e-5)


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


class Spy:
    """Attention that keeps how many keys it was called with where cuDNN, which builds a plan for each length, was allowed."""

    def __init__(self, monkeypatch):
        self.planned, self.others = set(), set()
        self.real = F.scaled_dot_product_attention
        monkeypatch.setattr(F, "scaled_dot_product_attention", self)

    def __call__(self, q, k, v, **options):
        (self.planned if torch.backends.cuda.cudnn_sdp_enabled() else self.others).add(k.shape[2])
        return self.real(q, k, v, **options)


@POSITIONS
def test_no_plan_of_attention_depends_on_how_many_patches_are_visible(monkeypatch, positions):
    model, spy = build(positions=positions), Spy(monkeypatch)
    for visible in (0, 1, 5, 9, 23):
        model(**inputs(visible=visible))
        assert torch.backends.cuda.cudnn_sdp_enabled()  # as it was
    assert spy.planned == {7 + 2 + 3 * 6, 6 + 24}  # text, motion and all frames; conditions and all patches
    assert spy.others == {6 + visible for visible in (0, 1, 5, 9, 23)}


def test_a_kernel_for_many_lengths_changes_nothing_here_and_compiles():
    model = build()
    block, x = model.image_encoder.blocks[0], torch.randn(2, 9, 32)
    few, many = (block(x, lengths=lengths)[0] for lengths in ("few", "many"))
    assert torch.equal(few, many)
    compile_blocks([block], backend="aot_eager")
    torch.testing.assert_close(block(x, lengths="many")[0], few)
    assert torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.slow
@pytest.mark.nightly
def test_blocks_compile_as_a_whole():
    model, cond = build(), inputs()
    out = model(**cond)
    compile_blocks(model.transformer_blocks(), backend="aot_eager")
    torch.testing.assert_close(model(**cond), out)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "mixer_rank"), [((1, 16, 16), 0), ((2, 16, 16), -1)])
def test_flops_are_those_that_are_counted(size, mixer_rank):
    model, N = build(width=64, caption_channels=32, mixer_rank=mixer_rank), 64
    cond = inputs(batch=1, size=size, draws=1, visible=int(0.133 * N))
    cond["y"] = torch.randn(1, 1, 7, 32)
    with (
        FlopCounterMode(display=False) as counter,
        sdpa_kernel(SDPBackend.MATH),
    ):  # the only one that is counted on a CPU
        model(**cond)
    # masked attention is counted as if every pair were computed
    assert model.flops(size, 7) == pytest.approx(counter.get_total_flops(), rel=0.02 if size[0] == 1 else 0.06)


PUBLISHED = """
video_encoder image_encoder: patch_embed.proj blocks.N.norm1 blocks.N.attn.qkv blocks.N.attn.proj blocks.N.norm2
    blocks.N.mlp.fc1 blocks.N.mlp.fc2 norm
image_decoder: patch_embed.proj time_cond_embed.timestep_proj.fc1 time_cond_embed.timestep_proj.fc2
    time_cond_embed.condition_proj.fc1 time_cond_embed.condition_proj.fc2 blocks.N.norm1.proj blocks.N.proj.fc1
    blocks.N.proj.fc2 blocks.N.norm2 norm.proj head
text_embed: proj norm
video_pos_embed: norm time_proj.0 time_proj.2
motion_embed: flow_proj.0 flow_proj.2 fps_proj.0 fps_proj.2
"""
"""The layers of the published weights; each has a weight and a bias."""
TENSORS = {"mask_embed.bos_token", "mask_embed.mask_token", "text_embed.weight"}


def published_names() -> set[str]:
    depths = {"video_encoder": 2, "image_encoder": 4, "image_decoder": 2}
    names, parts = set(TENSORS), []
    for word in PUBLISHED.split():
        if word.endswith(":") or word == "video_encoder":
            parts = [*(parts if parts == ["video_encoder"] else []), word.rstrip(":")]
            continue
        for part in parts:
            for n in range(depths[part]) if ".N." in word else (0,):
                names |= {f"{part}.{word.replace('.N.', f'.{n}.')}.{kind}" for kind in ("weight", "bias")}
    return names


def test_a_state_in_published_names_makes_the_same_model(tmp_path):
    model, cond = build(), inputs()
    state = {name: w.clone() for name, w in model.state_dict().items()}
    assert state.keys() == published_names()
    tables = {
        "video_pos_embed.space_embed": torch.zeros(6, 32),
        "image_encoder.pos_embed.space_embed": torch.zeros(24, 32),
    }
    save_file({**state, **tables}, tmp_path / "published.safetensors")
    again = MODELS.build({"type": "NOVA", **TOY, "from_pretrained": str(tmp_path / "published.safetensors")}).eval()
    assert torch.equal(again(**cond), model(**cond))
    assert all(torch.equal(w, state[name]) for name, w in again.state_dict().items())
    rotary, mixed = build(positions="rotary").state_dict().keys(), build(mixer_rank=3).state_dict().keys()
    assert state.keys() - rotary == {name for name in state if name.startswith("video_pos_embed.")}
    assert mixed - state.keys() == {
        f"video_encoder.mixer.{name}" for name in ("lora.weight", "proj.weight", "proj.bias")
    }


def wave(x: float, *, sines_first: bool) -> torch.Tensor:
    """256 numbers, each by itself."""
    sines, cosines = ([f(x * 10000 ** (-k / 128)) for k in range(128)] for f in (math.sin, math.cos))
    return torch.tensor(sines + cosines if sines_first else cosines + sines)


def test_published_numbers_mean_what_they_meant():
    """Waves, the time axis and the order of the head's output, number by number as in the published implementation."""
    model = build(base_size=(16, 8, 12))
    silu, numbers = F.silu, {"flow": torch.tensor([5.0]), "fps": torch.tensor([12.0])}
    motion = model.text_tokens(model.null_condition(1), None, **numbers)[0, -2:]  # behind the caption
    for token, (name, x) in zip(motion, numbers.items(), strict=True):
        first, _, second = getattr(model.motion_embed, f"{name}_proj")
        torch.testing.assert_close(token, second(silu(first(wave(float(x), sines_first=True)))))
    time, (first, _, second) = model.video_pos_embed, model.video_pos_embed.time_proj
    for frame in range(9):  # 9 latent frames span the 16 of the training
        expected = time.norm(second(silu(first(wave(frame * 16 / 9, sines_first=True)))))
        torch.testing.assert_close(time(torch.arange(9), 9)[frame], expected, atol=1e-5, rtol=1e-5)
    head, x, z = model.image_decoder, torch.randn(16), torch.randn(32)
    embed, block = head.time_cond_embed, head.blocks[0]
    condition = embed.timestep_proj(wave(431.0, sines_first=False)) + embed.condition_proj(z)
    tokens = head.patch_embed.proj(x.view(1, 4, 2, 2)).flatten()  # the channel slowest
    for block in head.blocks:
        scale, shift, gate = block.norm1.proj(silu(condition)).chunk(3)
        normed = F.layer_norm(tokens, tokens.shape, eps=1e-6) * (1 + scale) + shift
        tokens = tokens + gate * block.norm2(block.proj(normed))
    scale, shift = head.norm.proj(silu(condition)).chunk(2)
    out = head.head(F.layer_norm(tokens, tokens.shape, eps=1e-6) * (1 + scale) + shift)
    expected = torch.stack(
        [out.view(2, 2, 4)[row, column, channel] for channel in range(4) for row in (0, 1) for column in (0, 1)]
    )
    torch.testing.assert_close(head(x, torch.tensor(431.0), z), expected)


def test_rotary_positions_are_those_of_the_published_implementation():
    """Text and conditions are at position 0; the image encoder's patches, too, are those of frame 0."""
    rng = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 64, generator=rng)

    def score(table: torch.Tensor, i: int, j: int) -> float:
        a, b = (apply_rotary(x[None], table[:, n][:, None]) for x, n in ((q, i), (k, j)))
        return float((a * b).sum())

    table = rotary_3d(64, torch.arange(3), (4, 6), before=5)
    assert table.shape == (2, 5 + 72, 64)
    assert score(table, 1, 4) == pytest.approx(float(q @ k), abs=1e-4)
    assert score(table, 0, 5) == pytest.approx(
        float(q @ k), abs=1e-4
    )  # the first token of frame 0 is at position 0 as well
    at = lambda t, h, w: 5 + t * 24 + h * 6 + w  # noqa: E731
    assert score(table, at(0, 1, 2), at(1, 3, 3)) == pytest.approx(score(table, at(1, 0, 4), at(2, 2, 5)), abs=1e-4)
    moved = {
        axis: score(table, at(0, 0, 0), at(*where))
        for axis, where in {"time": (1, 0, 0), "row": (0, 1, 0), "column": (0, 0, 1)}.items()
    }
    along = (q * k).double().view(32, 2).sum(1)
    cross = q.double()[0::2] * k.double()[1::2] - q.double()[1::2] * k.double()[0::2]
    for axis, (start, width) in {"time": (0, 8), "row": (8, 28), "column": (36, 28)}.items():
        angles = torch.zeros(32, dtype=torch.float64)
        angles[start // 2 : (start + width) // 2] = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
        expected = (along * angles.cos() - cross * angles.sin()).sum()
        assert moved[axis] == pytest.approx(float(expected), abs=1e-3)
