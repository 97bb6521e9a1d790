import pytest
import torch

from opensora.schedulers.iddpm import IDDPM
from opensora.schedulers.frame_mask import FrameMask
from opensora.schedulers.noise_schedule import named_schedule

SHAPE = (2, 4, 3, 5, 5)


@pytest.fixture
def z():
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(2))


@pytest.fixture
def cond():
    return {"y": torch.ones(2, 1, 5, 6)}


def schedulers():
    return [
        IDDPM(10, variance="fixed_small"),
        IDDPM(10, prediction="v", variance="fixed_small", sampler="ddim"),
        IDDPM(10),
    ]


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
@pytest.mark.parametrize("scheduler", schedulers(), ids=lambda s: f"{s.sampler}-{s.variance}")
def test_kept_frames_come_back_bit_for_bit(denoiser, rngs, z, cond, scheduler, dtype):
    mask = torch.tensor([[0, 1, 1], [1, 1, 0]]).to(dtype)
    model = denoiser(2 if scheduler.variance == "learned_range" else 1)
    out = scheduler.sample(model, z, cond, mask=mask, generators=rngs(), null={"y": 0 * cond["y"]})
    kept = ~mask.bool()[:, None, :, None, None].expand(SHAPE)
    assert torch.equal(out[kept], z[kept])
    assert not (out[~kept] == z[~kept]).any()
    for call in model.calls:
        assert torch.equal(call["x_mask"], mask.bool().repeat(2, 1))  # [cond; null]


def test_a_mask_of_ones_samples_as_no_mask(denoiser, rngs, z, cond):
    scheduler = IDDPM(10, variance="fixed_small")
    free = scheduler.sample(denoiser(1), z, cond, generators=rngs())
    for mask in (torch.ones(2, 3, dtype=torch.bool), torch.ones(2, 3)):
        assert torch.equal(free, scheduler.sample(denoiser(1), z, cond, mask=mask, generators=rngs()))


def test_no_mask_takes_the_fast_path(denoiser, rngs, z, cond):
    model = denoiser(1)
    IDDPM(4, variance="fixed_small").sample(model, z, cond, generators=rngs())
    assert all("x_mask" not in call for call in model.calls)


def test_a_fraction_edits_the_last_steps(denoiser, rngs, z, cond):
    scheduler = IDDPM(10, variance="fixed_small")
    model = denoiser(1)
    out = scheduler.sample(model, z, cond, mask=torch.tensor([[0.3, 0, 1], [1, 0.29, 0.96]]), generators=rngs())
    active = torch.stack([call["x_mask"] for call in model.calls]).sum(dim=0)  # steps in which each frame moves
    assert active.tolist() == [[3, 0, 10], [10, 3, 10]]

    reference = z[0, :, 0]
    assert all(torch.equal(call["x"][0, :, 0], reference) for call in model.calls[:7])  # kept until then
    entered = model.calls[7]["x"][0, :, 0]
    c = scheduler.sampling_schedule.at(2)
    noise = (entered - c.sqrt_alphas_cumprod * reference) / c.sqrt_one_minus_alphas_cumprod
    assert abs(noise.mean()) < 0.4  # 100 numbers: 4 standard errors
    assert abs(noise.std() - 1) < 0.3
    assert not torch.equal(out[0, :, 0], reference)
    assert not torch.equal(model.calls[0]["x"][1, :, 2], z[1, :, 2])  # 0.96 of 10 steps: noised before the first
    assert torch.equal(model.calls[0]["x"][0, :, 2], z[0, :, 2])  # 1: z is the noise


def test_editing_one_frame_does_not_move_the_noise_of_others(denoiser, rngs, z, cond):
    scheduler = IDDPM(10, variance="fixed_small")
    plain = scheduler.sample(denoiser(1), z, cond, mask=torch.ones(2, 3, dtype=torch.bool), generators=rngs())
    edit = scheduler.sample(denoiser(1), z, cond, mask=torch.tensor([[0.5, 1, 1], [1, 1, 1]]), generators=rngs())
    assert torch.equal(plain[1], edit[1])
    assert torch.equal(plain[0, :, 1:], edit[0, :, 1:])  # the toy denoiser does not mix frames


def test_mistakes_are_named(z, rngs):
    with pytest.raises(ValueError, match=r"shape \(2, 4\), expected \[B, T\] = \[2, 3\]"):
        FrameMask(torch.ones(2, 4), 10, z, rngs())
    with pytest.raises(ValueError, match="a fractional mask draws noise"):
        FrameMask(torch.ones(2, 3), 10, z, None)
    c = named_schedule("linear", 1000).at(0)
    assert FrameMask(torch.ones(2, 3, dtype=torch.bool), 10, z, None).noise_entering(z, 9, c) is z
