import pytest
import torch

from opensora.registry import MODELS, SCHEDULERS
from opensora.schedulers.guidance import classifier_free_guidance, guidance_from_config
from opensora.utils.errors import UserError


@pytest.fixture
def inputs():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(2, 4, 3, 5, 5, generator=g)
    y, null = torch.randn(2, 1, 6, 8, generator=g), torch.zeros(2, 1, 6, 8)
    return x, torch.tensor([7, 500]), y, null


@pytest.mark.parametrize("channels", [None, 3, 1])
@pytest.mark.parametrize("scale", [0.0, 2.5])
def test_equals_the_formula_on_the_guided_channels(denoiser, inputs, channels, scale):
    x, t, y, null = inputs
    model = denoiser(2)
    out = classifier_free_guidance(model, {"y": null}, scale, channels)(x, t, y=y)
    with_cond, without = model(x, t, y=y), model(x, t, y=null)
    n = channels or 4
    # the doubled batch may take another vector path than the single one: equal up to rounding
    torch.testing.assert_close(out[:, :n], without[:, :n] + scale * (with_cond[:, :n] - without[:, :n]))
    torch.testing.assert_close(out[:, n:], with_cond[:, n:])  # unguided channels and the variance: conditional branch


def test_one_call_on_condition_then_null(denoiser, inputs):
    x, t, y, null = inputs
    model = denoiser(1)
    mask, fps = torch.ones(2, 6, dtype=torch.bool), torch.tensor([8.0, 24.0])
    classifier_free_guidance(model, {"y": null}, 3.0)(x, t, y=y, mask=mask, fps=fps, x_mask=None)
    (call,) = model.calls
    assert torch.equal(call["x"], torch.cat([x, x]))
    assert torch.equal(call["timestep"], torch.tensor([7, 500, 7, 500]))
    assert torch.equal(call["y"], torch.cat([y, null]))
    assert call["mask"].shape == (4, 6)
    assert torch.equal(call["fps"], torch.tensor([8.0, 24.0, 8.0, 24.0]))
    assert call["x_mask"] is None


def test_no_guidance_is_the_model_itself(denoiser, inputs):
    model = denoiser(1)
    assert classifier_free_guidance(model, None, 4.0) is model
    assert classifier_free_guidance(model, {"y": inputs[3]}, 1.0) is model


def test_mistakes_are_named(denoiser, inputs):
    x, t, y, null = inputs
    model = denoiser(1)
    with pytest.raises(UserError, match="cfg_channel=5, but x has 4 channels"):
        classifier_free_guidance(model, {"y": null}, 2.0, 5)(x, t, y=y)
    with pytest.raises(UserError, match="at least 1 channel"):
        guidance_from_config(2.0, 0, None)
    with pytest.raises(ValueError, match=r"\['z'\], which the condition lacks"):
        classifier_free_guidance(model, {"z": null}, 2.0)(x, t, y=y)
    with pytest.raises(ValueError, match=r"y: .* the null condition \(1, 1, 6, 8\); expected \[2"):
        classifier_free_guidance(model, {"y": null[:1]}, 2.0)(x, t, y=y)
    with pytest.raises(ValueError, match=r"fps: the condition has shape None, the null condition \(2,\)"):
        classifier_free_guidance(model, {"fps": t}, 2.0)(x, t, y=y, fps=None)


def test_a_negative_prompt_brings_its_own_mask_and_length(inputs):
    """The same result whether the texts share a batch, padded, or are two calls."""
    x, t, y, _ = inputs
    torch.manual_seed(0)
    model = MODELS.build(
        {"type": "STDiT-XXS/2", "depth": 2, "hidden_size": 32, "num_heads": 2, "caption_channels": 8,
         "model_max_length": 6}
    ).eval()  # fmt: skip
    for parameter in model.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.05)  # the gates and the last layer start at zero
    g = torch.Generator().manual_seed(1)
    mask = torch.tensor([[True] * 6, [True] * 3 + [False] * 3])
    for length in (6, 4, 9):
        negative = {"y": torch.randn(2, 1, length, 8, generator=g)}
        negative["mask"] = torch.arange(length)[None] < torch.tensor([[length], [2]])
        with torch.no_grad():
            joint = classifier_free_guidance(model, negative, 3.0)(x, t, y=y, mask=mask)
            split = classifier_free_guidance(model, negative, 3.0, batching="split")(x, t, y=y, mask=mask)
            with_cond, without = model(x, t, y, mask=mask), model(x, t, negative["y"], mask=negative["mask"])
        torch.testing.assert_close(joint, split, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(split[:, :4], without[:, :4] + 3 * (with_cond - without)[:, :4])
        assert not torch.allclose(with_cond[:, :4], without[:, :4], rtol=0, atol=1e-4)


def test_a_mask_of_one_side_only_is_all_ones_on_the_other(denoiser, inputs):
    x, t, y, null = inputs
    mask = torch.tensor([[True] * 6, [True] * 2 + [False] * 4])
    for cond in ({"y": y}, {"y": y, "mask": None}):
        model = denoiser(1)
        classifier_free_guidance(model, {"y": null, "mask": mask}, 2.0)(x, t, **cond)
        assert torch.equal(model.calls[0]["mask"], torch.cat([torch.ones(2, 6, dtype=torch.bool), mask]))
    longer = torch.zeros(2, 1, 7, 8)
    model = denoiser(1)
    classifier_free_guidance(model, {"y": longer}, 2.0)(x, t, y=y, mask=mask)
    padded = torch.nn.functional.pad(mask, (0, 1))
    assert torch.equal(model.calls[0]["mask"], torch.cat([padded, torch.ones(2, 7, dtype=torch.bool)]))
    with pytest.raises(ValueError, match=r"\(2, 6\) for a text of 7 tokens"):
        classifier_free_guidance(model, {"y": longer, "mask": mask.clone()}, 2.0)(x, t, y=y, mask=mask)


@pytest.mark.parametrize("channels", [None, 3])
@pytest.mark.parametrize("rescale", [0.0, 0.7])
def test_split_calls_the_model_twice_with_the_same_result(denoiser, inputs, channels, rescale):
    x, t, y, null = inputs
    outputs = []
    for batching, sizes in (("joint", [4]), ("split", [2, 2])):
        model = denoiser(2)
        guided = classifier_free_guidance(model, {"y": null}, 2.5, channels, rescale=rescale, batching=batching)
        outputs.append(guided(x, t, y=y))
        assert [len(call["x"]) for call in model.calls] == sizes
    torch.testing.assert_close(*outputs)


def test_rescale_follows_lin_et_al(denoiser, inputs):
    x, t, y, null = inputs
    model = denoiser(2)
    plain = classifier_free_guidance(model, {"y": null}, 7.0)(x, t, y=y)[:, :4]
    cond = model(x, t, y=y)[:, :4]
    factor = cond.std(dim=(1, 2, 3, 4), keepdim=True) / plain.std(dim=(1, 2, 3, 4), keepdim=True)
    out = classifier_free_guidance(model, {"y": null}, 7.0, rescale=0.7)(x, t, y=y)
    torch.testing.assert_close(out[:, :4], 0.7 * plain * factor + 0.3 * plain)
    torch.testing.assert_close(out[:, 4:], model(x, t, y=y)[:, 4:])
    full = classifier_free_guidance(model, {"y": null}, 7.0, rescale=1.0)(x, t, y=y)[:, :4]
    torch.testing.assert_close(full.std(dim=(1, 2, 3, 4)), cond.std(dim=(1, 2, 3, 4)))


def test_rescale_looks_at_the_denoised_frames(denoiser, inputs):
    x, t, y, null = inputs
    mask = torch.tensor([[True, False, True]] * 2)
    guided = classifier_free_guidance(denoiser(1), {"y": null}, 7.0, rescale=1.0)
    wild = x.clone()
    wild[:, :, 1] *= 100
    kept = [0, 2]
    calm = guided(x, t, y=y, x_mask=mask)[:, :, kept]
    assert torch.equal(calm, guided(wild, t, y=y, x_mask=mask)[:, :, kept])  # the toy denoiser does not mix frames
    torch.testing.assert_close(calm, guided(x[:, :, kept], t, y=y))


def test_a_constant_prediction_is_no_division_by_zero(inputs):
    x, t, y, null = inputs
    guided = classifier_free_guidance(lambda x, t, **_: torch.zeros_like(x), {"y": null}, 7.0, rescale=1.0)
    assert torch.equal(guided(x, t, y=y), torch.zeros_like(x))


def scales(levels, **options):
    guidance = guidance_from_config(3.8, None, options)
    return [guidance.scale_at(index, level) for index, level in enumerate(levels)]


def test_scale_schedules():
    levels = [1.0, 0.75, 0.5, 0.25, 1e-9]
    assert scales(levels) == [3.8] * 5
    assert scales(levels, schedule="power-cosine") == [
        pytest.approx(v, abs=5e-4) for v in (1, 1.0001, 1.027, 1.637, 3.8)
    ]
    linear = scales(levels, schedule="linear")
    assert linear == [pytest.approx(1 + 2.8 * (1 - level)) for level in levels]
    assert scales([0.5] * 14, schedule="oscillating")[:10] == [3.8] * 10
    assert scales([0.5] * 14, schedule="oscillating")[10:] == [3.8, 1, 3.8, 1]
    assert scales([0.5] * 4, schedule="oscillating", oscillation_start=0) == [3.8, 1, 3.8, 1]
    assert scales(levels, interval=(0.25, 0.75)) == [1, 3.8, 3.8, 3.8, 1]
    assert guidance_from_config(3.8, None, {"interval": [0, 1]}).interval == (0.0, 1.0)


@pytest.mark.parametrize("name", ["iddpm", "rflow", "dpm-solver"])
def test_outside_the_interval_the_batch_is_not_doubled(denoiser, rngs, inputs, name):
    x, _, y, null = inputs
    scheduler = SCHEDULERS.build({"type": name, "num_sampling_steps": 10, "guidance": {"interval": (0.25, 0.75)}})
    model = denoiser(2)
    scheduler.sample(model, x, {"y": y}, null={"y": null}, generators=rngs())
    sizes = [len(call["x"]) for call in model.calls]
    assert 4 <= sizes.count(4) <= 6
    assert sizes[0] == sizes[-1] == 2
    model = denoiser(2)
    scheduler.sample(model, x, {"y": y}, null={"y": null}, generators=rngs(), guidance_scale=1.0)
    assert {len(call["x"]) for call in model.calls} == {2}


@pytest.mark.parametrize("name", ["iddpm", "rflow", "dpm-solver"])
def test_guidance_that_no_step_has_is_an_error(denoiser, rngs, inputs, name):
    """Its scale, and a negative prompt with it, would be without effect."""
    x, _, y, null = inputs
    scheduler = SCHEDULERS.build({"type": name, "num_sampling_steps": 4, "guidance": {"interval": (0.9, 0.95)}})
    with pytest.raises(
        UserError, match=r"cfg_scale=3 has no effect: no step .*interval=\(0.9, 0.95\).* noise levels 1, "
    ):
        scheduler.sample(denoiser(2), x, {"y": y}, null={"y": null}, generators=rngs(), guidance_scale=3.0)
    for calm in ({"null": None, "guidance_scale": 3.0}, {"null": {"y": null}, "guidance_scale": 1.0}):
        assert scheduler.sample(denoiser(2), x, {"y": y}, generators=rngs(), **calm).isfinite().all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedul": "linear"}, "Did you mean 'schedule'"),
        ({"schedule": "cosine"}, "schedule='cosine' is not one of constant, linear"),
        ({"batching": "twice"}, "batching='twice' is not one of joint, split"),
        ({"power": 2.0}, "power=2.0 has no effect with schedule='constant'"),
        ({"oscillation_start": 3}, "set schedule='oscillating'"),
        ({"interval": (0.5, 0.2)}, "0 <= low < high <= 1"),
        ({"interval": (0.5,)}, "expected .low, high."),
        ({"interval": 0.9}, "interval=0.9: expected .low, high."),
        ({"interval": ("a", 1)}, "expected .low, high."),
        ({"rescale": "x"}, "rescale='x' one in"),
        ({"schedule": "power-cosine", "power": "x"}, "power='x' must be a number"),
        ({"rescale": 2.0}, r"rescale=2.0 one in \[0, 1\]"),
        ({"schedule": "power-cosine", "power": 0}, "power=0 must be a number above 0"),
    ],
)
def test_mistaken_options_are_named(options, message):
    with pytest.raises(UserError, match=message):
        guidance_from_config(4.0, None, options)


@pytest.mark.parametrize(("scale", "warns"), [(1, True), (1.0, True), (2.0, False), (0.0, False)])
def test_options_without_guidance_are_not_silent(scale, warns, caplog):
    guidance_from_config(scale, None, {"rescale": 0.7})
    assert ("scheduler.guidance (rescale) has an effect only where a call sets another scale" in caplog.text) == warns
    caplog.clear()
    guidance_from_config(1, None, None)
    assert caplog.text == ""
