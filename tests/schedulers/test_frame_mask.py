"""One meaning of frame masks, in every registered scheduler."""

import pytest
import torch

from opensora.registry import SCHEDULERS
from opensora.schedulers.frame_mask import FrameMask
from opensora.utils.seed import generators

SHAPE = (2, 4, 3, 5, 5)
FIXED = {"type": "iddpm", "variance": "fixed_small"}
SAMPLERS = {
    "ancestral": FIXED,
    "ancestral, learned": {"type": "iddpm"},
    "ddim, v": {**FIXED, "prediction": "v", "sampler": "ddim"},
    "ddim, eta": {**FIXED, "sampler": "ddim", "eta": 0.7},
    "iddpm-speed": {"type": "iddpm-speed"},
    "euler": {"type": "rflow"},
    "heun": {"type": "rflow", "sampler": "heun"},
    "midpoint, shifted": {"type": "rflow", "sampler": "midpoint", "shift": 3.0},
    "euler, discrete": {"type": "rflow", "time": "discrete"},
    "dpm-solver": {"type": "dpm-solver"},
}
every_sampler = pytest.mark.parametrize("name", SAMPLERS)


def build(name, num_steps=10):
    return SCHEDULERS.build({**SAMPLERS[name], "num_sampling_steps": num_steps})


def factor(scheduler) -> int:
    return 2 if getattr(scheduler, "variance", "") == "learned_range" else 1


@pytest.fixture
def z():
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(2))


@pytest.fixture
def cond():
    return {"y": torch.ones(2, 1, 5, 6)}


def identity(x_0, noise, index):
    return x_0 + 10 * (index + 1) * noise


@every_sampler
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_kept_frames_come_back_bit_for_bit(denoiser, rngs, z, cond, name, dtype):
    scheduler = build(name)
    mask = torch.tensor([[0, 1, 1], [1, 1, 0]]).to(dtype)
    model = denoiser(factor(scheduler))
    out = scheduler.sample(model, z, cond, mask=mask, generators=rngs(), null={"y": 0 * cond["y"]})
    kept = ~mask.bool()[:, None, :, None, None].expand(SHAPE)
    assert torch.equal(out[kept], z[kept])
    assert not (out[~kept] == z[~kept]).any()
    for call in model.calls:
        assert torch.equal(call["x_mask"], mask.bool().repeat(2, 1))  # [cond; null]
        assert torch.equal(call["x"].chunk(2)[0][kept], z[kept])


@every_sampler
def test_a_mask_of_ones_samples_as_no_mask(denoiser, rngs, z, cond, name):
    scheduler = build(name)
    free = scheduler.sample(denoiser(factor(scheduler)), z, cond, generators=rngs())
    for mask in (torch.ones(2, 3, dtype=torch.bool), torch.ones(2, 3)):
        masked = scheduler.sample(denoiser(factor(scheduler)), z, cond, mask=mask, generators=rngs())
        assert torch.equal(free, masked)


@every_sampler
def test_no_mask_takes_the_fast_path(denoiser, rngs, z, cond, name):
    scheduler = build(name, 4)
    model = denoiser(factor(scheduler))
    scheduler.sample(model, z, cond, generators=rngs())
    assert all("x_mask" not in call for call in model.calls)


@every_sampler
def test_a_fraction_edits_from_its_noise_level(denoiser, rngs, z, cond, name):
    """Whatever the sampler: kept before, denoised after, from a mixture of the frame and noise."""
    scheduler = build(name)
    model = denoiser(factor(scheduler))
    mask = torch.tensor([[0.4, 0, 1], [1, 0.39, 0.99]])
    steps = list(scheduler.sample_steps(model, z, cond, mask=mask, generators=rngs()))
    changed = torch.stack([~(step.x == z).flatten(3).all(dim=3).all(dim=1) for step in steps])  # [steps, B, T]
    assert torch.equal(changed, changed.cummax(dim=0).values)  # once denoised, to the end
    count = changed.sum(dim=0)
    assert count[0, 1] == 0
    assert count[0, 2] == count[1, 0] == count[1, 2] == 10
    assert 2 <= count[0, 0] == count[1, 1] <= 5
    assert steps[-1].x.isfinite().all()
    before = 10 - int(count[0, 0])
    for step in steps[:before]:
        assert torch.equal(step.x[0, :, 0], z[0, :, 0])
        assert torch.equal(step.x_0[0, :, 0], z[0, :, 0])  # the preview shows the frame that is kept


def test_the_steps_and_the_noise_of_an_edit_in_iddpm(denoiser, rngs, z, cond):
    scheduler = build("ancestral")
    model = denoiser(1)
    out = scheduler.sample(model, z, cond, mask=torch.tensor([[0.3, 0, 1], [1, 0.29, 0.96]]), generators=rngs())
    active = torch.stack([call["x_mask"] for call in model.calls]).sum(dim=0)  # steps in which each frame is denoised
    assert active.tolist() == [[3, 0, 10], [10, 3, 10]]
    reference = z[0, :, 0]
    entered = model.calls[7]["x"][0, :, 0]
    c = scheduler.sampling_schedule.at(2)
    noise = (entered - c.sqrt_alphas_cumprod * reference) / c.sqrt_one_minus_alphas_cumprod
    assert abs(noise.mean()) < 0.4  # 100 values: 4 standard errors
    assert abs(noise.std() - 1) < 0.3
    assert not torch.equal(out[0, :, 0], reference)
    assert not torch.equal(model.calls[0]["x"][1, :, 2], z[1, :, 2])  # 0.96 of 10 steps: noised before the first
    assert torch.equal(model.calls[0]["x"][0, :, 2], z[0, :, 2])  # 1: z is the noise


def test_a_shifted_flow_edits_from_the_level_that_is_asked_for(denoiser, rngs, z, cond):
    """tau = 0.5 of a flow that is shifted by 9 comes in its last tenth, not half-way."""
    scheduler = SCHEDULERS.build({"type": "rflow", "shift": 9.0, "num_sampling_steps": 20})
    model = denoiser(1)
    scheduler.sample(model, z, cond, mask=torch.tensor([[0.5, 1, 1], [1, 1, 1]]), generators=rngs())
    taus = torch.stack([call["timestep"][0] / 1000 for call in model.calls])
    active = torch.stack([call["x_mask"][0, 0] for call in model.calls])
    first = taus[active][0]
    assert abs(first - 0.5) == (taus - 0.5).abs().min()
    assert active.sum() == 2


@pytest.mark.parametrize("name", ["ancestral", "ddim, eta", "euler"])
def test_editing_one_frame_leaves_the_noise_of_others(denoiser, rngs, z, cond, name):
    scheduler = build(name)
    plain = scheduler.sample(denoiser(1), z, cond, mask=torch.ones(2, 3, dtype=torch.bool), generators=rngs())
    edit = scheduler.sample(denoiser(1), z, cond, mask=torch.tensor([[0.5, 1, 1], [1, 1, 1]]), generators=rngs())
    assert torch.equal(plain[1], edit[1])
    assert torch.equal(plain[0, :, 1:], edit[0, :, 1:])  # the toy denoiser does not mix frames


@pytest.mark.parametrize("seed", range(40))
def test_any_mask_on_any_levels(seed):
    """Each edited frame enters exactly once, at the level nearest to its value; 0 is never denoised, 1 always."""
    g = torch.Generator().manual_seed(seed)
    falling = torch.rand(seed % 12, generator=g).sort(descending=True).values
    levels = [1.0, *(0.001 + 0.99 * falling).tolist()]
    values = [0.0, 1.0, 1e-6, 1 - 1e-6, *torch.rand(4, generator=g).tolist()]
    mask = torch.tensor([values])
    z = torch.zeros(1, 1, len(values), 1, 1)
    frames = FrameMask(mask, levels, z, generators(0, ids=[0]), identity)
    active = torch.stack([frames.active(i)[0] for i in range(len(levels))])
    entered = torch.stack([(frames.noise_entering(z, i) != 0)[0, 0, :, 0, 0] for i in range(len(levels))])
    for frame, value in enumerate(mask[0].tolist()):
        assert int(entered[:, frame].sum()) == (1 if 0 < value < 1 else 0)
        if value in (0, 1):
            assert active[:, frame].all() == bool(value)
            assert active[:, frame].any() == bool(value)
            continue
        first = int(active[:, frame].int().argmax())
        assert entered[first, frame]
        assert active[first:, frame].all()
        assert not active[:first, frame].any()
        assert abs(levels[first] - value) <= min(abs(level - value) for level in levels) + 1e-6


def test_mistakes_are_named(z, rngs):
    with pytest.raises(ValueError, match=r"shape \(2, 4\), expected \[B, T\] = \[2, 3\]"):
        FrameMask(torch.ones(2, 4), [1.0], z, rngs(), identity)
    with pytest.raises(ValueError, match="a fractional mask draws noise"):
        FrameMask(torch.ones(2, 3), [1.0], z, None, identity)
    assert FrameMask(torch.ones(2, 3, dtype=torch.bool), [1.0], z, None, identity).noise_entering(z, 0) is z


def test_steps_in_which_nothing_changes_share_the_mask_and_leave_x_alone(z, rngs):
    """So that they launch nothing; what the steps of a run see is the comparison with their bounds all the same."""
    mask = torch.tensor([[0.3, 1, 1], [1, 1, 0.7]])
    frames = FrameMask(mask, [1.0, 0.75, 0.5, 0.25], z, rngs(), identity)
    for index, bound in enumerate(frames.bounds):
        assert torch.equal(frames.active(index), mask > bound)
    assert frames.active(2) is frames.active(1)
    assert frames.active(1) is not frames.active(0)
    assert frames.all_denoised == [False, False, False, True]
    assert [frames.noise_entering(z, i) is z for i in range(4)] == [True, False, True, False]
    kept = FrameMask(mask > 0.5, [1.0, 0.5], z, None, identity)
    assert kept.active(1) is kept.active(0)
    assert kept.all_denoised == [False, False]
