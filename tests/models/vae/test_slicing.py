"""sliced_vae equals one call, for images and videos, for our VAEs and diffusers' own."""

import pytest
import torch
from diffusers import AutoencoderKL
from einops import rearrange
from torch import nn
from torch.testing import assert_close

from opensora.acceleration.vae_slicing import images_at_a_time
from opensora.models.vae import VideoAutoencoderKL, sliced_vae
from opensora.utils.errors import UserError
from opensora.utils.seed import generator, generators
from tests.models.vaes import KL, build

pytestmark = pytest.mark.usefixtures("_no_grad")


@pytest.fixture
def _no_grad():
    with torch.no_grad():
        yield


@pytest.fixture
def frames():
    return torch.rand(2, 5, 3, 16, 24, generator=generator(0)) * 2 - 1  # [B, T, 3, H, W]


def sizes_seen(module: nn.Module) -> list[int]:
    """The batch sizes that the module is called with from now on."""
    seen: list[int] = []
    module.register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs[0])))
    return seen


@pytest.mark.parametrize("micro_bs", [None, 1, 3, 100])
def test_videos_in_any_micro_batches(frames, micro_bs):
    vae = build("VideoAutoencoderKL")
    expected = vae.encode(rearrange(frames, "B T C H W -> B C T H W"), generators(1, ids=[0, 1]))
    seen = sizes_seen(vae.autoencoder.encoder)
    z = sliced_vae(vae, frames, micro_bs, generators=generators(1, ids=[0, 1]))
    assert z.shape == (2, 4, 5, 4, 6)  # frames after channels
    assert_close(z, expected, rtol=1e-4, atol=1e-5)
    assert seen == {None: [10], 1: [1] * 10, 3: [3, 3, 3, 1], 100: [10]}[micro_bs]


@pytest.mark.parametrize("micro_bs", [None, 2])
def test_images_and_diffusers_own_class(frames, micro_bs):
    vae = build("VideoAutoencoderKL")
    images = frames[:, 0]
    z = sliced_vae(vae, images, micro_bs, generators=generator(5))
    assert z.shape == (2, 4, 4, 6)
    assert_close(sliced_vae(vae.autoencoder, images, micro_bs, generators=generator(5)), z, rtol=1e-4, atol=1e-5)
    theirs = vae.autoencoder.encode(images).latent_dist.sample(generator(5)) * vae.autoencoder.config.scaling_factor
    assert_close(z, theirs, rtol=1e-4, atol=1e-5)


def test_a_video_vae_is_split_by_videos():
    vae = build("KLWan")
    x = torch.rand(3, 5, 3, 8, 8, generator=generator(0)) * 2 - 1
    expected = vae.encode(rearrange(x, "B T C H W -> B C T H W"), generators(1, ids=[0, 1, 2]))
    seen = sizes_seen(vae.autoencoder.quant_conv)
    assert_close(
        sliced_vae(vae, x, micro_bs=10, generators=generators(1, ids=[0, 1, 2])), expected, rtol=1e-4, atol=1e-5
    )
    assert seen == [2, 1]


def test_images_at_a_time_follow_height_and_width():
    assert [images_at_a_time(*size) for size in [(1024, 1024), (1001, 2000), (1000, 1000), (720, 1280)]] == [
        1,
        1,
        2,
        2,
    ]
    assert [images_at_a_time(*size) for size in [(576, 1024), (512, 512), (500, 500), (256, 4000)]] == [8, 8, 16, 16]


def test_channels_last_is_by_size_of_the_image_too(frames):
    """A tensor with channels last keeps its logical shape, so its height is not mistaken for channels."""
    vae = build("VideoAutoencoderKL")
    expected = sliced_vae(vae, frames, generators=generator(0))
    z = sliced_vae(vae, frames, nhwc=True, generators=generator(0))
    assert_close(z, expected, rtol=1e-4, atol=1e-5)
    kernel = vae.autoencoder.encoder.conv_in.weight
    assert kernel.is_contiguous(memory_format=torch.channels_last)
    assert vae.memory_format == "contiguous"
    decoder = vae.autoencoder.decoder.conv_in.weight
    assert not decoder.is_contiguous(memory_format=torch.channels_last)


def test_autocast_computes_in_bf16_and_returns_fp32(frames):
    vae = build("VideoAutoencoderKL")
    expected = sliced_vae(vae, frames, generators=generator(0))
    z = sliced_vae(vae, frames, use_autocast=True, generators=generator(0))
    assert z.dtype == torch.float32
    assert 0 < (z - expected).abs().max() < 0.05


def test_the_vaes_own_micro_batch_comes_before_the_rule(frames):
    vae = build("VideoAutoencoderKL", micro_batch_size=4)
    seen = sizes_seen(vae.autoencoder.encoder)
    vae.sliced_moments(rearrange(frames, "B T C H W -> B C T H W"))
    assert seen == [4, 4, 2]


def test_compiled_networks_see_one_size(frames):
    """The last micro-batch is filled up; the stance runs what would be compiled as it is."""
    x = rearrange(frames, "B T C H W -> B C T H W")
    with torch.compiler.set_stance("force_eager"):
        plain, vae = build("VideoAutoencoderKL"), build("VideoAutoencoderKL", micro_batch_size=4, compile=True)
        assert vae.state_dict().keys() == plain.state_dict().keys()
        encoded, decoded = sizes_seen(vae.autoencoder.encoder), sizes_seen(vae.autoencoder.decoder)
        moments = vae.moments(x)
        assert_close(moments, plain.moments(x), rtol=1e-4, atol=1e-5)
        z = plain.sample(moments, generator(0))
        assert_close(vae.decode(z, 5), plain.decode(z, 5), rtol=1e-4, atol=1e-5)
    assert encoded == decoded == [4, 4, 4]


def test_overflow_and_wrong_shapes_are_refused(frames):
    vae = VideoAutoencoderKL(architecture=KL)
    with torch.no_grad():
        vae.autoencoder.encoder.conv_out.bias.fill_(float("inf"))
    with pytest.raises(UserError, match="not finite; try weights in fp32 or bf16"):
        sliced_vae(vae, frames, generators=generator(0))
    with pytest.raises(ValueError, match=r"takes \[B, 3, H, W\]"):
        sliced_vae(vae, frames[0, 0])


def test_no_gradient_is_kept(frames):
    vae = build("VideoAutoencoderKL").requires_grad_(True)
    with torch.enable_grad():
        assert not sliced_vae(vae, frames, generators=generator(0)).requires_grad


def test_shifted_latents_of_diffusers(frames):
    theirs = AutoencoderKL(**vae_arguments(), shift_factor=0.3, scaling_factor=2.0).eval()
    ours = VideoAutoencoderKL(architecture={**KL, "shift_factor": 0.3, "scaling_factor": 2.0}).eval()
    ours.autoencoder.load_state_dict(theirs.state_dict())
    z = sliced_vae(theirs, frames, generators=generator(0))
    assert_close(z, sliced_vae(ours, frames, generators=generator(0)), rtol=1e-4, atol=1e-5)


def test_latents_that_diffusers_scales_by_channel(frames):
    """What training a VAE here exports: each channel has its mean and standard deviation."""
    statistics = {"latents_mean": [0.1, -0.2, 0.3, 0.0], "latents_std": [2.0, 1.5, 1.0, 0.5]}
    for settings in (
        {**statistics, "scaling_factor": 1.0},
        {**statistics, "scaling_factor": 0.5, "shift_factor": 0.3},  # which is ignored next to a mean
        {"latents_mean": statistics["latents_mean"], "scaling_factor": 0.5},
    ):
        theirs = AutoencoderKL(**vae_arguments(), **settings).eval()
        ours = VideoAutoencoderKL(architecture={**KL, **settings}).eval()
        ours.autoencoder.load_state_dict(theirs.state_dict())
        z = sliced_vae(theirs, frames, generators=generator(0))
        assert_close(z, sliced_vae(ours, frames, generators=generator(0)), rtol=1e-4, atol=1e-5)
    with pytest.raises(UserError, match="AutoencoderKL: latents_mean and latents_std do not fit 4 channels"):
        sliced_vae(AutoencoderKL(**vae_arguments(), latents_mean=[0.0] * 3, latents_std=[1.0] * 3), frames)


def vae_arguments():
    levels = len(KL["block_out_channels"])
    blocks = {
        "down_block_types": ("DownEncoderBlock2D",) * levels,
        "up_block_types": ("UpDecoderBlock2D",) * levels,
    }
    return {**KL, **blocks}
