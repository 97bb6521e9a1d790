import pytest
import torch

from opensora.schedulers.guidance import classifier_free_guidance
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
        classifier_free_guidance(model, {"y": null}, 2.0, 0)
    with pytest.raises(ValueError, match=r"\['z'\], which the condition lacks"):
        classifier_free_guidance(model, {"z": null}, 2.0)(x, t, y=y)
    with pytest.raises(ValueError, match=r"y: the null condition has shape \(1, 1, 6, 8\), expected \[2"):
        classifier_free_guidance(model, {"y": null[:1]}, 2.0)(x, t, y=y)
    with pytest.raises(ValueError, match="mask: one of"):
        classifier_free_guidance(model, {"mask": null}, 2.0)(x, t, y=y, mask=None)
