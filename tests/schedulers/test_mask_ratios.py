"""Masks of conditioning frames: which there are, how often, and that every length has them."""

import pytest
import torch

from opensora.schedulers.mask_ratios import KINDS, RANDOM_SHARE, MaskRatios
from opensora.schedulers.rf.rectified_flow import RectifiedFlow
from opensora.utils.errors import UserError
from opensora.utils.seed import generator, generators

OPENSORA_1_2 = {
    "random": 0.05,
    "interpolate": 0.005,
    "quarter_random": 0.005,
    "quarter_head": 0.005,
    "quarter_tail": 0.005,
    "quarter_head_tail": 0.005,
    "image_random": 0.025,
    "image_head": 0.05,
    "image_tail": 0.025,
    "image_head_tail": 0.025,
}


def draws(kind: str, num_frames: int, count: int) -> list[str]:
    """Masks as text: "G" is a conditioning frame, "." is learnt."""
    masks = MaskRatios({kind: 1.0})
    rng = generator(0, kind)
    return ["".join(".G"[not value] for value in masks.draw(num_frames, rng).tolist()) for _ in range(count)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_frames", [1, 2, 3, 4, 5])
def test_every_kind_for_every_short_length_leaves_a_frame_to_learn(kind, num_frames):
    """The case of Open-Sora #612: fewer than four latent frames, 1000 draws of each kind."""
    drawn = draws(kind, num_frames, 1000)
    assert all(len(mask) == num_frames and "." in mask for mask in drawn)
    assert any("G" in mask for mask in drawn) is (kind != "identity" and num_frames > 1)


@pytest.mark.parametrize(
    ("kind", "num_frames", "possible"),
    [
        ("identity", 4, {"...."}),
        ("interpolate", 5, {"G.G.G", ".G.G."}),
        ("interpolate", 2, {"G.", ".G"}),
        ("image_head", 4, {"G..."}),
        ("image_tail", 4, {"...G"}),
        ("image_head_tail", 4, {"G..G"}),
        ("image_head_tail", 2, {"G."}),
        ("image_random", 3, {"G..", ".G.", "..G"}),
        ("quarter_head", 8, {"G.......", "GG......"}),
        ("quarter_tail", 8, {".......G", "......GG"}),
        ("quarter_head_tail", 8, {"G......G", "GG....GG"}),
        ("quarter_random", 5, {"G....", ".G...", "..G..", "...G.", "....G"}),
        ("quarter_random", 8, {"." * i + "G" * n + "." * (8 - i - n) for n in (1, 2) for i in range(9 - n)}),
        ("random", 2, {"..", "G.", ".G"}),
    ],
)
def test_the_masks_of_a_kind(kind, num_frames, possible):
    assert set(draws(kind, num_frames, 500)) == possible


def test_conditioning_frames_at_random():
    """The share of conditioning frames is uniform in [0.1, 0.9]: mean 0.5, and of 1000 frames a variance of 0.8^2 / 12."""
    shares = torch.tensor([mask.count("G") / 1000 for mask in draws("random", 1000, 2000)])
    low, high = RANDOM_SHARE
    assert shares.mean() == pytest.approx(0.5, abs=0.02)  # 4 standard errors
    assert shares.std() == pytest.approx((high - low) / 12**0.5, abs=0.02)
    assert low - 0.06 < shares.min() < low + 0.03
    assert high - 0.03 < shares.max() < high + 0.06


def test_kinds_come_as_often_as_they_should():
    """At four deviations of a binomial of 20000; the kind itself is drawn."""
    masks, count = MaskRatios(OPENSORA_1_2), 20_000
    kinds = [masks.draw_kind(generator(7, "mask", i)) for i in range(count)]
    for kind, p in {**OPENSORA_1_2, "identity": 0.8}.items():
        assert kinds.count(kind) == pytest.approx(count * p, abs=4 * (count * p * (1 - p)) ** 0.5), kind


def test_golden_masks():
    """A change of these masks changes the training runs of everybody who resumes one."""
    masks = MaskRatios({"random": 0.5, "quarter_head_tail": 0.25, "interpolate": 0.25})
    drawn = masks(torch.zeros(6, 4, 8, 2, 2), generators(42, "train", 3, ids=range(6)))
    assert ["".join(".G"[not value] for value in row) for row in drawn.tolist()] == [
        "....G.G.",
        "G.G.G.G.",
        "G.G.G.G.",
        "..GG..G.",
        "G......G",
        ".GG.GG.G",
    ]


def test_a_mask_is_a_function_of_seed_step_and_index():
    masks, z = MaskRatios({"random": 1.0}), torch.zeros(4, 4, 8, 2, 2)
    whole = masks(z, generators(1, "train", 5, ids=range(4)))
    halves = [masks(z[:2], generators(1, "train", 5, ids=ids)) for ids in ([0, 1], [2, 3])]
    assert torch.equal(whole, torch.cat(halves))
    assert not torch.equal(whole, masks(z, generators(1, "train", 6, ids=range(4))))
    assert not torch.equal(whole, masks(z, generators(2, "train", 5, ids=range(4))))


def test_masks_leave_the_noise_of_a_step_alone():
    z = torch.zeros(2, 4, 8, 2, 2)
    rngs, plain = (generators(1, "train", 5, ids=range(2)) for _ in range(2))
    MaskRatios({"random": 1.0})(z, rngs)
    assert [g.get_state().tolist() for g in rngs] == [g.get_state().tolist() for g in plain]


@pytest.mark.parametrize("ratios", [None, {}, {"identity": 1.0}, {"random": 0.0}])
def test_without_conditioning_frames_there_is_no_mask(ratios):
    """None takes the models' fast path."""
    assert MaskRatios(ratios)(torch.zeros(2, 4, 8, 2, 2), generators(0, ids=range(2))) is None
    assert MaskRatios({"random": 1.0})(torch.zeros(2, 4, 1, 2, 2), generators(0, ids=range(2))) is None


@pytest.mark.parametrize(
    ("ratios", "message"),
    [
        ({"randon": 0.1}, "'randon' is unknown.*Did you mean 'random'"),
        ({"random": 1.2}, r"mask_ratios.random=1.2: expected a probability"),
        ({"random": -0.1}, r"mask_ratios.random=-0.1: expected a probability"),
        ({"random": float("nan")}, "expected a probability"),
        ({"random": 0.6, "image_head": 0.6}, "add up to 1.2"),
        ({"identity": 0.5, "random": 0.1}, "add up to 0.6; leave 'identity' out"),
    ],
)
def test_what_is_no_table_of_ratios(ratios, message):
    with pytest.raises(UserError, match=message):
        MaskRatios(ratios)


@pytest.mark.parametrize("num_frames", [1, 2, 4])
def test_the_loss_is_over_learnt_frames_and_never_of_nothing(num_frames):
    """Of a model that predicts 0, rectified flow's loss of a frame is mean((x_0 - noise)^2) over that frame."""
    masks, x_0 = MaskRatios({"random": 1.0}), torch.randn(8, 4, num_frames, 3, 3, generator=generator(0))
    noise = torch.randn(x_0.shape, generator=generator(1))
    mask = masks(x_0, generators(0, ids=range(8)))
    losses = RectifiedFlow().training_losses(
        lambda x, t, **cond: torch.zeros_like(x), x_0, {}, mask=mask, t=torch.full((8,), 500.0), noise=noise
    )
    per_frame = ((x_0 - noise) ** 2).mean(dim=(1, 3, 4))
    learnt = torch.ones_like(per_frame, dtype=torch.bool) if mask is None else mask
    expected = torch.stack([frames[row].mean() for frames, row in zip(per_frame, learnt, strict=True)])
    torch.testing.assert_close(losses, expected)


def test_all_that_the_conditioning_frames_may_be():
    def found(ratios, num_frames):
        return {"".join(".G"[g] for g in row) for row in MaskRatios(ratios).given_frames(num_frames).tolist()}

    assert found({"image_head": 0.5, "image_tail": 0.5, "random": 0.0}, 4) == {"G...", "...G"}
    assert found({"image_head": 0.5, "image_head_tail": 0.2}, 3) == {"G..", "G.G", "..."}
    assert found({"image_head": 1.0}, 1) == found(None, 1) == {"."}
    with pytest.raises(UserError, match="with interpolate, random the conditioning frames are drawn anew"):
        found({"image_head": 0.5, "random": 0.2, "interpolate": 0.3}, 4)
