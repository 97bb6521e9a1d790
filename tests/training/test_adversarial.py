"""The discriminator's shapes and independence, the hinge loss, and the weight that balances the two losses."""

import itertools

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.testing import assert_close

from opensora.acceleration.distributed import World
from opensora.acceleration.engine import build_engine
from opensora.acceleration.engines.base import LossScale
from opensora.checkpoint.load import save_checkpoint
from opensora.models.vae.discriminator import PatchDiscriminator, StyleGANDiscriminator, blur_and_halve
from opensora.registry import MODELS
from opensora.training.adversarial import AdversarialLoss, NoDiscriminator, hinge_loss
from opensora.utils.errors import UserError
from opensora.utils.seed import generator

CPU = World(0, 1, torch.device("cpu"))
PLAIN = LossScale(CPU.device, enabled=False)


def video(*shape, seed=0):
    return torch.rand(*shape, generator=generator(seed)) * 2 - 1


@pytest.fixture
def adversarial():
    torch.manual_seed(0)
    discriminator = PatchDiscriminator(dims=3, channels=8, num_layers=2)
    optimizer = torch.optim.AdamW(discriminator.parameters(), lr=1e-2)
    engine = build_engine("ddp", discriminator, optimizer, CPU, dtype="fp32")
    return AdversarialLoss(discriminator, engine, optimizer, lr=1e-2, weight=0.5, start=3)


@pytest.mark.parametrize(("dims", "frames", "expected"), [(2, 5, 5), (3, 5, 2), (3, 1, 1), (3, 17, 5)])
def test_shapes_of_scores_and_samples_do_not_mix(dims, frames, expected):
    model = PatchDiscriminator(dims=dims, channels=8)
    x = video(2, 3, frames, 64, 48)
    scores = model(x)
    assert scores.shape[:3] == (2, 1, expected)
    assert_close(model(x[1:]), scores[1:])


def test_the_field_of_view_is_pix2pix_70_pixels():
    model = PatchDiscriminator(dims=2, channels=8)
    x = video(1, 3, 1, 128, 128).requires_grad_()
    scores = model.layers[0](x[:, :, 0])
    for layer in model.layers[1:]:
        scores = scores if isinstance(layer, nn.GroupNorm) else layer(scores)  # its statistics see everything
    scores[0, 0, 7, 7].backward()
    seen = x.grad[0, :, 0].abs().sum(0) > 0
    assert seen.any(0).sum() == seen.any(1).sum() == 70


def test_wrong_settings_are_refused():
    for settings in ({"dims": 1}, {"channels": 12}, {"num_layers": 0}):
        with pytest.raises(UserError, match="dims is 2 or 3"):
            PatchDiscriminator(**settings)


SMALL = {"image_size": (16, 24), "num_frames": 5, "filters": 4, "channel_multipliers": (2, 4, 4), "num_groups": 2}


def test_the_discriminator_of_whole_videos_has_open_soras_size():
    """Parameters of the released settings, counted from the layers' kernels and biases."""
    with torch.device("meta"):
        model = MODELS.build({"type": "DISCRIMINATOR_3D"})
    count, widths = 3 * 27 * 128 + 128, [128, 256, 512, 512, 512, 512]
    for a, b in itertools.pairwise(widths):
        count += (27 * a * a + a) + (27 * a * b + b) + a * b + 2 * (a + b)  # two convolutions, projection, two norms
    count += 27 * 512 * 512 + 512 + 2 * 512  # the last convolution and norm
    count += 512 * (1 * 4 * 4) * 512 + 512 + 513  # 17 x 128 x 128 halved five times: 1 x 4 x 4 cells
    assert sum(p.numel() for p in model.parameters()) == count


def test_it_judges_each_video_alone_and_of_one_size(monkeypatch):
    model, x = StyleGANDiscriminator(**SMALL), video(2, 3, 5, 16, 24)
    scores = model(x)
    assert scores.shape == (2, 1)
    assert_close(model(x[1:]), scores[1:])
    with pytest.raises(UserError, match=r"judges videos of \(5, 16, 24\) .*, not of \(4, 16, 24\)"):
        model(x[:, :, :4])
    for wrong in ({"image_size": 20}, {"num_groups": 3}, {"num_frames": 4}):
        with pytest.raises(UserError, match=r"multiples of 8, 2 for each block; .* at least 5"):
            StyleGANDiscriminator(**{**SMALL, **wrong})


def test_values_are_blurred_before_every_second_is_left_out():
    x = video(2, 3, 5, 6, 4).double()
    expected = x
    for axis in (2, 3, 4):  # one after the other, by hand
        n = x.shape[axis]
        at = [[abs(i - 1), i, n - 1 - abs(n - 2 - i)] for i in range(0, n, 2)]  # reflected at the ends
        parts = [expected.index_select(axis, torch.tensor(column)) for column in zip(*at, strict=True)]
        expected = parts[0] / 4 + parts[1] / 2 + parts[2] / 4
    assert_close(blur_and_halve(x), expected)


@pytest.mark.parametrize("name", ["N_Layer_DISCRIMINATOR_3D", "DISCRIMINATOR_3D"])
def test_weights_of_a_checkpoint_and_of_a_2d_network(name, tmp_path):
    settings = SMALL if name == "DISCRIMINATOR_3D" else {"channels": 8, "num_layers": 2}
    torch.manual_seed(0)
    plain = MODELS.build({"type": name, **settings})
    own = plain.state_dict()
    save_checkpoint(tmp_path / "c", {"discriminator": own}, state={}, manifest={"step": 1})
    load = {"type": name, **settings, "from_pretrained": str(tmp_path / "c" / "discriminator")}
    again = MODELS.build(load).state_dict()
    assert all(torch.equal(again[key], value) for key, value in own.items())
    fresh = MODELS.build({**load, "use_pretrained": False}).state_dict()
    first = next(iter(own))
    assert not torch.equal(fresh[first], own[first])

    flat = {key: value[:, :, value.shape[2] // 2] if value.ndim == 5 else value for key, value in own.items()}
    save_file({key: value.contiguous() for key, value in flat.items()}, tmp_path / "flat.safetensors")
    load["from_pretrained"] = str(tmp_path / "flat.safetensors")
    inflated = MODELS.build({**load, "inflate_from_2d": True}).state_dict()
    for key, value in own.items():
        if value.ndim == 5 and value.shape[2] == 3:
            assert torch.equal(inflated[key][:, :, 1], value[:, :, 1])
            assert not inflated[key][:, :, [0, 2]].any()
        else:
            assert torch.equal(inflated[key], value)
    with pytest.raises(UserError, match="shape"):
        MODELS.build(load)


def test_losses(adversarial):
    real, fake = torch.tensor([2.0, 0.0]), torch.tensor([-3.0, 0.5])
    assert float(hinge_loss(real, fake)) == pytest.approx(0.5 * (0.5 + 0.75))
    x, adversarial.scale = video(1, 3, 4, 32, 32), "fixed"
    g_loss, values = adversarial.generator_loss(x, x.mean(), x, 3, PLAIN)
    assert_close(values["g_loss"], -adversarial.discriminator(x).mean())
    assert_close(g_loss, 0.5 * values["g_loss"])


def test_the_adaptive_weight_makes_both_gradients_equally_long(adversarial):
    """VQGAN, eq. 7: with weight 1 the GAN's gradient at the last layer is as long as the reconstruction's."""
    adversarial.weight = 1.0
    layer = nn.Conv3d(3, 3, 1)
    x = video(1, 3, 4, 32, 32)
    x_hat = layer(x)
    reconstruction = 7 * (x_hat - x).abs().mean()
    g_loss, values = adversarial.generator_loss(x_hat, reconstruction, layer.weight, 3, PLAIN)
    length = [torch.autograd.grad(loss, layer.weight, retain_graph=True)[0].norm() for loss in (reconstruction, g_loss)]
    assert_close(length[0], length[1], rtol=0.05, atol=0)  # but for the 1e-4 below the fraction
    assert values["g_scale"] > 0


@pytest.mark.slow
def test_fp16_does_not_lose_the_gradients_that_the_adaptive_weight_compares(adversarial):
    """Of a mean over 3 million values, each of which is below what fp16 can hold."""
    layer = nn.Conv3d(4, 3, 3, padding=1)
    h, error = torch.randn(1, 4, 5, 256, 256), 0.005 * torch.randn(1, 3, 5, 256, 256)
    found = {}
    for dtype, scale in ((torch.float32, PLAIN), (torch.float16, LossScale(CPU.device, enabled=True))):
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            x_hat = layer(h)
            reconstruction = (x_hat.float() - (x_hat.detach().float() + error)).square().mean()
            found[dtype] = float(
                adversarial.generator_loss(x_hat, reconstruction, layer.weight, 3, scale)[1]["g_scale"]
            )
    assert found[torch.float16] == pytest.approx(found[torch.float32], rel=0.05)


def test_gradients_that_overflow_do_not_spoil_the_loss(adversarial):
    """The step is skipped by its norm; a loss that is NaN would be taken for bad data."""
    layer = nn.Conv3d(3, 3, 1)
    x_hat = layer(video(1, 3, 1, 32, 32))
    scale = LossScale(CPU.device, enabled=True)
    scale.scale = torch.tensor(torch.inf)
    g_loss, values = adversarial.generator_loss(x_hat, x_hat.abs().mean(), layer.weight, 3, scale)
    assert g_loss == values["g_scale"] == 0


def test_the_discriminator_is_not_trained_by_the_generator(adversarial):
    layer = nn.Conv3d(3, 3, 1)
    x_hat = layer(video(1, 3, 1, 32, 32))
    g_loss, _ = adversarial.generator_loss(x_hat, x_hat.abs().mean(), layer.weight, 3, PLAIN)
    g_loss.backward()
    assert layer.weight.grad.abs().sum() > 0
    assert all(p.grad is None and p.requires_grad for p in adversarial.discriminator.parameters())


def test_nothing_happens_before_the_start(adversarial):
    x = video(1, 3, 1, 32, 32)
    before = {name: value.clone() for name, value in adversarial.engine.model_state().items()}
    g_loss, values = adversarial.generator_loss(x, x.mean(), x, 2, PLAIN)
    assert g_loss == 0
    assert values == adversarial.discriminator_step(x, -x, 2, last=True, share=1.0) == {}
    assert adversarial.step(2, torch.tensor(7.0)) == 7
    assert all(torch.equal(value, before[name]) for name, value in adversarial.engine.model_state().items())


def test_it_is_trained_and_its_state_comes_back(adversarial):
    real, fake = video(4, 3, 4, 32, 32), torch.zeros(4, 3, 4, 32, 32)
    losses = []
    for step in range(3, 23):
        losses.append(float(adversarial.discriminator_step(real, fake, step, last=True, share=1.0)["d_loss"]))
        assert adversarial.step(step, torch.tensor(7.0)) == 7
    assert losses[-1] < 0.2 < losses[0]
    saved = {part: {k: v.clone() for k, v in tensors.items()} for part, tensors in adversarial.state().items()}
    after = adversarial.discriminator_step(real, fake, 23, last=True, share=1.0)["d_loss"]
    adversarial.step(23, torch.tensor(7.0))
    adversarial.load(saved, "saved")
    assert_close(adversarial.discriminator_step(real, fake, 23, last=True, share=1.0)["d_loss"], after, rtol=0, atol=0)
    assert saved["discriminator_optimizer"].keys() == adversarial.state()["discriminator_optimizer"].keys()


def test_without_a_discriminator_nothing_is_added():
    x, without = torch.ones(1), NoDiscriminator()
    without.set_lr(0.5)
    assert without.generator_loss(x, x.sum(), x, 0, PLAIN) == (0, {})
    assert without.state() == without.discriminator_step(x, x, 0, last=True, share=1.0) == {}
    assert without.step(0, torch.tensor(7.0)) == 7
