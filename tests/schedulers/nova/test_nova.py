"""Training and sampling of NOVA: what is drawn, what is a loss, and that sampling is a plain loop without a cache."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from opensora.registry import SCHEDULERS
from opensora.schedulers.nova.nova import known_patches, patches_to_cells
from opensora.schedulers.nova.sampling import Scales
from opensora.utils.errors import UserError
from opensora.utils.seed import generators
from tests.models.nova.toy import build
from tests.schedulers.no_reading import NoReading
from tests.schedulers.nova.toy import SIZE, conditions, rngs, scheduler


@pytest.mark.parametrize(
    ("num_steps", "num_patches"), [(64, 4096), (64, 1440), (4, 16), (8, 3), (1, 7), (64, 1), (5, 5)]
)
def test_patches_appear_along_a_cosine_and_none_is_no_step(num_steps, num_patches):
    hidden = np.round(np.cos(np.pi / 2 * np.arange(num_steps + 1) / num_steps) * num_patches).astype(int)
    known = known_patches(num_steps, num_patches)
    assert (known[0], known[-1]) == (0, num_patches)
    assert np.diff(known).tolist() == [n for n in -np.diff(hidden) if n > 0]


@pytest.mark.parametrize(("num_steps", "shift"), [(25, 1.0), (25, 3.0), (3, 0.5), (1, 2.0)])
def test_noise_levels_are_those_of_diffusers(num_steps, shift):
    """They ended at 1 / num_steps, where training goes down to 1 / 1000."""
    reference = FlowMatchEulerDiscreteScheduler(shift=shift)
    reference.set_timesteps(num_steps)
    levels = scheduler(num_diffusion_steps=num_steps, shift=shift).noise_levels()
    assert levels == pytest.approx(reference.sigmas.tolist(), abs=1e-6)


def test_patches_have_the_order_of_the_patch_embedding():
    x, model = torch.randn(1, 4, 8, 12, generator=torch.Generator().manual_seed(0)), build()
    patches, embed = model.to_patches(x), model.image_decoder.patch_embed
    torch.testing.assert_close(embed.embed_patches(patches), embed(x))
    assert torch.equal(model.to_frames(patches, (8, 12)), x)
    values = patches_to_cells(torch.arange(24.0), (8, 12), 2)
    assert torch.equal(model.to_patches(values[None])[..., 0], torch.arange(24.0))


def test_what_is_hidden_and_how_noisy_it_is():
    made = scheduler()
    shares, times = [], []
    for i in range(200):
        visible = made._draw_visible(rngs(i, 1000), 2, 100, torch.device("cpu"))
        assert all(len(set(ids.tolist())) == visible.shape[2] for ids in visible.flatten(0, 1))
        shares.append(1 - visible.shape[2] / 100)
        times.append(made._draw_times(rngs(i), (4, 2, 25), torch.device("cpu")))
    assert min(shares) >= 0.7
    assert sum(shares) / len(shares) == pytest.approx(0.867, abs=0.015)  # of the truncated normal distribution, by hand
    sigma = torch.stack(times) / 1000
    assert sigma.min() >= 0.001
    assert sigma.max() <= 1
    assert sigma.logit(eps=1e-4).std() == pytest.approx(1, abs=0.03)


def test_the_loss_of_a_perfect_model_is_zero_and_visible_patches_do_not_count():
    model, x0 = build(), torch.randn(2, 4, *SIZE)
    noise = torch.randn(2, 4, 4, *SIZE)
    visible = torch.arange(5).expand(2, 3, 5)

    class Shifted(torch.nn.Module):
        """The real model's parts with an answer that is off at one patch."""

        module = model

        def __init__(self, patch):
            super().__init__()
            off = torch.zeros(16)
            off[patch] = 1.0
            self.off = patches_to_cells(off, SIZE[1:], 2)

        def forward(self, x, t, **_):
            return noise - x[:, None] + self.off

    made = scheduler()
    losses = [
        made.training_losses(Shifted(p), x0, conditions(), noise=noise, visible=visible, generators=rngs(0, 1))
        for p in (0, 9)
    ]
    torch.testing.assert_close(losses[0], torch.zeros(2), atol=1e-6, rtol=0)
    torch.testing.assert_close(
        losses[1], torch.full((2,), 2 / 11)
    )  # 1 of 11 hidden patches, in the first frame and later
    for name, share in (("first", 1 / 11), ("later", 1 / 11)):
        one = scheduler(losses=name).training_losses(
            Shifted(9), x0, conditions(), noise=noise, visible=visible, generators=rngs(0, 1)
        )
        torch.testing.assert_close(one, torch.full((2,), share))


@pytest.mark.parametrize("losses", ["all", "first", "later"])
def test_images_have_no_later_frames_to_learn_from(losses):
    made, x0 = scheduler(losses=losses), torch.randn(2, 4, 1, 8, 8)
    if losses != "later":
        assert (made.training_losses(build(), x0, conditions(), generators=rngs(0, 1)) > 0.1).all()
        return
    with pytest.raises(UserError, match="'later' leaves nothing to learn from a video of one latent frame"):
        made.training_losses(build(), x0, conditions(), generators=rngs(0, 1))


def test_losses_are_of_each_sample_alone_when_all_share_the_visible_patches():
    model, x0, made = build(), torch.randn(2, 4, *SIZE), scheduler()
    visible = made._draw_visible(rngs(5, 6), 3, 16, torch.device("cpu"))
    both = made.training_losses(model, x0, conditions(), visible=visible, generators=rngs(5, 6))
    for b in range(2):
        cond = {name: value[b : b + 1] for name, value in conditions().items()}
        alone = made.training_losses(model, x0[b : b + 1], cond, visible=visible[b : b + 1], generators=rngs(5 + b))
        torch.testing.assert_close(both[b : b + 1], alone)


@pytest.mark.parametrize(("positions", "mixer_rank"), [("absolute", 0), ("rotary", 0), ("absolute", 3), ("rotary", -1)])
def test_sampling_equals_a_loop_without_cache(positions, mixer_rank):
    model, made = build(positions=positions, mixer_rank=mixer_rank), scheduler(cfg_scale=3.0, min_cfg_scale=1.5)
    z, cond = torch.randn(2, 4, *SIZE), conditions()
    null = {"y": model.null_condition(2)}
    ours = made.sample(model, z, cond, null=null, generators=rngs(0, 1))
    torch.testing.assert_close(ours, by_hand(model, z, cond, null), atol=1e-5, rtol=1e-4)


@torch.no_grad()
def by_hand(model, z, cond, null):
    """Sample by sample, patch by patch in python's order, without cache or joint batches."""
    out = torch.zeros_like(z)
    for b, rng in enumerate(rngs(0, 1)):
        order = torch.randperm(16, generator=rng)
        own = {name: value[b : b + 1] for name, value in cond.items()}
        texts = [model.text_tokens(own["y"], own["mask"], own["fps"], own["flow"]),
                 model.text_tokens(null["y"][b : b + 1], None, own["fps"], own["flow"])]  # fmt: skip
        for t in range(3):
            c = [model.video_conditions(out[b : b + 1], text)[:, t] for text in texts]
            known, levels = (0, 1, 5, 10, 16), (1, 0.5005, 0.001, 0)
            for k in range(4):
                visible, new = order[None, : known[k]], order[known[k] : known[k + 1]]
                z_both = [model.image_tokens(out[b : b + 1, :, t], visible, each, (8, 8)) for each in c]
                scale = 1.5 + 1.5 * (k + 1) / 4
                for patch in new.tolist():
                    x = model.to_patches(z[b, :, t])[patch]
                    for i in range(3):
                        time = torch.tensor(1000 * levels[i])
                        cond_v, null_v = (model.image_decoder(x, time, words[0, patch]) for words in z_both)
                        x = x - (null_v + scale * (cond_v - null_v)) * (levels[i] - levels[i + 1])
                    row, column = divmod(patch, 4)
                    out[b, :, t, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2] = x.view(4, 2, 2)
    return out


def test_a_batch_samples_what_its_samples_alone_do():
    model, made, z = build(), scheduler(), torch.randn(2, 4, *SIZE)
    both = made.sample(model, z, conditions(), null={"y": model.null_condition(2)}, generators=rngs(3, 4))
    for b in range(2):
        cond = {name: value[b : b + 1] for name, value in conditions().items()}
        alone = made.sample(model, z[b : b + 1], cond, null={"y": model.null_condition(1)}, generators=rngs(3 + b))
        torch.testing.assert_close(both[b : b + 1], alone, atol=1e-5, rtol=1e-4)


def test_conditioning_frames_come_back_bit_for_bit_and_are_seen():
    model, made, z = build(), scheduler(), torch.randn(2, 4, *SIZE)
    mask = torch.tensor([[0, 1, 1], [1, 1, 1]])
    out = made.sample(model, z, conditions(), mask=mask, guidance_scale=1.0, generators=rngs(0, 1))
    assert torch.equal(out[0, :, 0], z[0, :, 0])
    assert not torch.equal(out[1, :, 0], z[1, :, 0])
    other = z.clone()
    other[0, :, 0] += 1
    changed = made.sample(model, other, conditions(), mask=mask, guidance_scale=1.0, generators=rngs(0, 1))
    assert not torch.allclose(changed[0, :, 1], out[0, :, 1])
    assert torch.equal(changed[1], out[1])
    with pytest.raises(UserError, match="an edit ratio between 0 and 1 has no meaning"):
        made.sample(model, z, conditions(), mask=torch.full((2, 3), 0.5), generators=rngs(0, 1))


@pytest.mark.parametrize("second", [[1, 1, 0], [1, 0, 1], [0, 1, 0]])
def test_a_conditioning_frame_after_a_generated_one_is_refused(second):
    z, mask = torch.randn(2, 4, *SIZE), torch.tensor([[1, 1, 1], second])
    with pytest.raises(UserError, match=r"none of them sees a later one.*leave out --last-image"):
        scheduler().sample(build(), z, conditions(), mask=mask, generators=rngs(0, 1))


@pytest.mark.parametrize(
    ("options", "needed"),
    [
        ({"cfg_scale": 1.0}, False),
        ({"cfg_scale": 1.0, "min_cfg_scale": 1.0}, False),
        ({"cfg_scale": 1.0, "spatiotemporal_guidance_scale": 1.0, "skip_layers": (2,)}, False),
        ({"cfg_scale": 2.0}, True),
        ({"cfg_scale": 1.0, "min_cfg_scale": 3.0}, True),
        ({"cfg_scale": 1.0, "image_guidance_scale": 1.0}, True),
    ],
)
def test_what_needs_a_prediction_without_text(options, needed):
    made = scheduler(**options)
    assert made.needs_null() is needed
    assert made.needs_null(2.0)


@pytest.mark.parametrize(
    "options",
    [
        {"guidance_trunc": 5000},
        {"guidance_trunc": -1},
        {"guidance_renorm": 7},
        {"guidance_renorm": -3},
        {"skip_layers": (-1,), "spatiotemporal_guidance_scale": 1.0},
    ],
)
def test_guidance_that_would_do_nothing_is_refused(options):
    with pytest.raises(UserError, match=r"guidance_trunc|guidance_renorm|skip_layers"):
        SCHEDULERS.build({"type": "nova", **options})


@pytest.mark.parametrize("options", [{"skip_layers": (2,)}, {"spatiotemporal_guidance_scale": 1.0}])
def test_half_of_the_guidance_by_a_weaker_encoder_is_refused(options):
    with pytest.raises(UserError, match="have an effect only together"):
        scheduler(**options)


def sampled_from(model, z, temperature, mask=None, *, ids=(0, 1)):
    cond = {name: value[: len(z)] for name, value in conditions().items()}
    made = scheduler(temperature=temperature)
    return made.sample(model, z, cond, mask=mask, guidance_scale=1.0, generators=rngs(*ids))


def test_a_temperature_of_one_is_the_noise_as_it_is():
    model, z = build(), torch.randn(2, 4, *SIZE)
    plain = scheduler().sample(model, z, conditions(), guidance_scale=1.0, generators=rngs(0, 1))
    assert torch.equal(sampled_from(model, z, 1.0), plain)


def test_the_temperature_scales_the_noise_of_patches_that_are_made():
    model, z = build(), torch.randn(2, 4, *SIZE)
    for temperature in (0.5, 1.5):
        cool = sampled_from(model, z, temperature)
        assert torch.equal(cool, sampled_from(model, temperature * z, 1.0))
        assert not torch.allclose(cool, sampled_from(model, z, 1.0))
    for parameter in model.image_decoder.head.parameters():
        torch.nn.init.zeros_(parameter)  # no velocity anywhere: a patch ends where it begins
    assert torch.equal(sampled_from(model, z, 0.3), 0.3 * z)


def test_without_any_temperature_patches_depend_on_their_order_alone():
    model, z = build(), torch.randn(2, 4, *SIZE)
    cold = sampled_from(model, z, 0.0)
    assert torch.equal(cold, sampled_from(model, torch.randn_like(z), 0.0))
    assert not torch.allclose(cold, sampled_from(model, z, 0.0, ids=(2, 3)))


def test_conditioning_frames_have_no_temperature():
    model, z = build(), torch.randn(2, 4, *SIZE)
    mask = torch.tensor([[0, 1, 1], [1, 1, 1]])
    out = sampled_from(model, z, 0.0, mask)
    assert torch.equal(out[0, :, 0], z[0, :, 0])
    assert not torch.equal(out[1, :, 0], z[1, :, 0])


def test_a_batch_with_a_temperature_samples_what_its_samples_alone_do():
    model, z = build(), torch.randn(2, 4, *SIZE)
    both = sampled_from(model, z, 0.4)
    torch.testing.assert_close(both[:1], sampled_from(model, z[:1], 0.4, ids=(0,)), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("temperature", [-0.1, 2.1, math.nan, math.inf])
def test_a_temperature_out_of_bounds_is_refused(temperature):
    with pytest.raises(UserError, match=r"scheduler.temperature=.* is not from 0 .* to 2"):
        scheduler(temperature=temperature)


class Reads(NoReading):
    """Counts what `NoReading` fails on."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket.__name__ in self.FORBIDDEN
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("positions", ["absolute", "rotary"])
@pytest.mark.parametrize("mixer_rank", [0, 3])
def test_a_training_step_reads_nothing_back_from_the_device(positions, mixer_rank):
    """But for the share of hidden patches, which is drawn on the host (a CPU's generators are on it anyway)."""
    model, made, x0 = build(positions=positions, mixer_rank=mixer_rank), scheduler(), torch.randn(2, 4, *SIZE)
    mask = torch.tensor([[False, True, True], [True, True, True]])
    visible = made._draw_visible(rngs(0, 1), 3, 16, torch.device("cpu"))
    with NoReading():
        made.training_losses(
            model, x0, conditions(), mask=mask, visible=visible, generators=rngs(0, 1)
        ).mean().backward()
    with Reads() as reads:
        made.training_losses(model, x0, conditions(), mask=mask, generators=rngs(0, 1)).mean().backward()
    assert reads.count == 1


def test_every_guidance_changes_the_result_and_none_is_the_conditional_model():
    model, z, cond = build(), torch.randn(1, 4, 2, 8, 8), conditions(1)
    null = {"y": model.null_condition(1)}

    def sampled(**options):
        return scheduler(**options).sample(model, z, cond, null=null, generators=rngs(0))

    plain = sampled(cfg_scale=1.0)
    torch.testing.assert_close(plain, scheduler().sample(model, z, cond, generators=rngs(0)))
    guided = sampled()
    results = [plain, guided, sampled(image_guidance_scale=2.0), sampled(spatiotemporal_guidance_scale=1.0, skip_layers=(2,)),
               sampled(guidance_trunc=500), sampled(guidance_renorm=0.1), sampled(min_cfg_scale=1.0)]  # fmt: skip
    for i, one in enumerate(results):
        assert one.isfinite().all()
        assert not any(torch.allclose(one, other) for other in results[i + 1 :])
    # away from no text and no frames, by as much as earlier frames count anyway: it was one too much
    torch.testing.assert_close(sampled(image_guidance_scale=1.0), guided, atol=1e-5, rtol=1e-4)
    with pytest.raises(UserError, match=r"the image encoder has blocks 0 to \d+, and no 40"):
        sampled(spatiotemporal_guidance_scale=1.0, skip_layers=(40,))


def test_renormalisation_is_of_text_guidance_in_a_whole_frame():
    """As published: next to the patches that are made, whose velocities are predicted, all others stand as noise."""
    text, null, nothing = torch.randn(3, 2, 5, 16).unbind()
    noise = torch.randn(2, 20, 16)
    of_text, of_null, of_nothing = (torch.cat([made, noise], dim=1) for made in (text, null, nothing))
    whole = of_nothing + 8.0 * (of_text - of_null)
    factor = (of_text.norm(dim=(1, 2)) / whole.norm(dim=(1, 2)))[:, None, None]
    expected = factor * whole + 2.0 * (of_null - of_nothing)
    scales, rest = Scales(8.0, renorm=0.01, image=2.0), noise.square().sum((1, 2), keepdim=True)
    velocities = {"text": text, "null": null, "nothing": nothing}
    out, shrunk = scales.combine(velocities, 0, 1, 0.5, rest)
    torch.testing.assert_close(out, expected[:, :5])
    torch.testing.assert_close(shrunk, factor)
    assert (factor < 0.5).all()
    out, shrunk = scales._replace(renorm=0.9).combine(velocities, 0, 1, 0.5, rest)
    torch.testing.assert_close(shrunk, torch.full((2, 1, 1), 0.9))
    torch.testing.assert_close(out, 0.9 * whole[:, :5] + 2.0 * (null - nothing))


@torch.no_grad()
def test_renormalisation_follows_the_noise_of_a_whole_frame():
    model, z, cond = build(), torch.randn(1, 4, 1, 8, 8), conditions(1)
    made, null = scheduler(guidance_renorm=0.1, num_sampling_steps=2), {"y": model.null_condition(1)}
    steps = made.sample_steps(model, z, cond, null=null, generators=rngs(0))
    ours, order = model.to_patches(next(steps).x[:, :, 0]), torch.randperm(16, generator=rngs(0)[0])
    new, state, levels = order[None, : known_patches(2, 16)[1]], model.to_patches(z[:, :, 0]), made.noise_levels()
    texts = [
        model.text_tokens(y, mask, cond["fps"], cond["flow"])
        for y, mask in ((cond["y"], cond["mask"]), (null["y"], None))
    ]
    tokens = [
        model.image_tokens(z[:, :, 0], new[:, :0], model.next_condition(None, text, 0, (1, 8, 8), None)[0], (8, 8))
        for text in texts
    ]
    for level, after in pairwise(levels):
        predicted = [state.clone(), state.clone()]
        for velocity, each in zip(predicted, tokens, strict=True):
            velocity[0, new[0]] = model.image_decoder(state[0, new[0]], torch.tensor(1000 * level), each[0, new[0]])
        guided = predicted[1] + 5 * (predicted[0] - predicted[1])
        state = state + (after - level) * guided * (predicted[0].norm() / guided.norm()).clamp(0.1, 1)
    torch.testing.assert_close(ours[0, new[0]], state[0, new[0]], atol=1e-5, rtol=1e-4)
    assert (ours[0, order[new.shape[1] :]] == 0).all()


@pytest.mark.parametrize("positions", ["absolute", "rotary"])
def test_without_earlier_frames_each_is_the_token_for_none(positions):
    model = build(positions=positions, mixer_rank=3)
    text, past, made = model.text_tokens(*(conditions()[name] for name in ("y", "mask", "fps", "flow"))), None, []
    for t in range(3):
        condition, past = model.next_condition(None, text, t, SIZE, past, with_positions=False)
        made.append(condition)
    model.video_pos_embed, patches = None, model.video_encoder.patch_embed.proj
    torch.nn.init.zeros_(patches.weight)  # every frame is embedded as that token, all at once
    patches.bias.data = model.mask_embed["bos_token"].data[0]
    expected = model.video_conditions(torch.randn(2, 4, *SIZE), text)
    torch.testing.assert_close(torch.stack(made, dim=1), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.slow
def test_a_small_model_learns():
    model, made = build(caption_channels=16).train(), scheduler(loss_repeat=2)
    x0 = torch.randn(2, 4, 2, 8, 8) * 0.1 + torch.tensor([1.0, -1.0]).view(2, 1, 1, 1, 1)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 3e-3)
    losses = []
    for step in range(60):
        loss = made.training_losses(model, x0, conditions(), generators=generators(0, step, ids=(0, 1))).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert sum(losses[-10:]) < 0.6 * sum(losses[:10])


def test_other_models_are_refused():
    with pytest.raises(UserError, match="trains and samples patch by patch, which Linear cannot"):
        scheduler().training_losses(torch.nn.Linear(1, 1), torch.randn(1, 4, 1, 8, 8), {}, generators=rngs(0))
