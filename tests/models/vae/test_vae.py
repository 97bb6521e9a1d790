"""The frame-by-frame VAE equals diffusers called by hand, and obeys the VAE contract."""

import json

import pytest
import torch
from diffusers import AutoencoderKL
from torch.testing import assert_close

from opensora.models.vae import VideoAutoencoderKL
from opensora.registry import MODELS
from opensora.utils.errors import UserError
from opensora.utils.seed import generator, generators, randn_like
from tests.models.vaes import build

TINY = {
    "block_out_channels": (8, 8, 16, 16),
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "mid_block_add_attention": False,
    "latent_channels": 4,
}


@pytest.fixture(scope="module")
def vae():
    torch.manual_seed(0)
    return VideoAutoencoderKL(architecture=TINY).requires_grad_(False).eval()


@pytest.fixture(scope="module")
def video():
    return torch.rand(2, 3, 3, 16, 24, generator=generator(0)) * 2 - 1


def test_equals_diffusers_frame_by_frame(vae, video):
    z = vae.encode(video, generators(7, ids=[0, 1]))
    assert z.shape == (2, 4, 3, 2, 3)
    noise = randn_like(z, generators(7, ids=[0, 1]))
    for t in range(3):
        posterior = vae.autoencoder.encode(video[:, :, t]).latent_dist
        assert_close(z[:, :, t], (posterior.mean + posterior.std * noise[:, :, t]) * 0.18215)
        assert_close(vae.decode(z, 3)[:, :, t], vae.autoencoder.decode(z[:, :, t] / 0.18215).sample)
    assert_close(vae.moments(video)[:, :, 1], vae.autoencoder.encode(video[:, :, 1]).latent_dist.parameters)


def test_forward_is_encode_then_decode(vae, video):
    x_hat, moments = vae(video, generators(7, ids=[0, 1]))
    assert_close(moments, vae.moments(video))
    assert_close(x_hat, vae.decode(vae.encode(video, generators(7, ids=[0, 1])), 3))


@pytest.mark.parametrize("micro_batch_size", [1, 4, 100])
def test_micro_batches_change_nothing(vae, video, micro_batch_size):
    moments, decoded = vae.moments(video), vae.decode(vae.sample(vae.moments(video), generators(1, ids=[0, 1])), 3)
    vae.micro_batch_size = micro_batch_size
    try:
        # convolutions of other batch sizes may sum in another order
        assert_close(vae.moments(video), moments, rtol=1e-5, atol=1e-5)
        assert_close(vae.decode(vae.sample(moments, generators(1, ids=[0, 1])), 3), decoded, rtol=1e-5, atol=1e-5)
    finally:
        vae.micro_batch_size = None


def test_a_batch_equals_its_samples(vae, video):
    both = vae.encode(video, generators(3, ids=[10, 11]))
    for b in range(2):
        assert_close(vae.encode(video[b : b + 1], generators(3, ids=[10 + b])), both[b : b + 1], rtol=1e-5, atol=1e-5)


def test_mode_needs_no_noise(vae, video):
    still = VideoAutoencoderKL(architecture=TINY, posterior="mode")
    moments = vae.moments(video)
    assert_close(still.sample(moments), moments[:, :4] * 0.18215)


@pytest.mark.parametrize(
    ("statistics", "scale", "shift"),
    [
        ({"scaling_factor": 0.5}, [0.5] * 4, [0.0] * 4),
        ({"scaling_factor": 0.5, "shift_factor": 0.1}, [0.5] * 4, [0.1] * 4),
        (
            {"scaling_factor": 0.5, "shift_factor": 9.0, "latents_mean": [1, 2, 3, 4], "latents_std": [1, 2, 4, 5]},
            [0.5, 0.25, 0.125, 0.1],
            [1.0, 2.0, 3.0, 4.0],
        ),
    ],
)
def test_scaling_comes_from_the_config_and_round_trips(video, statistics, scale, shift):
    vae = VideoAutoencoderKL(architecture={**TINY, **statistics}, posterior="mode").eval()
    assert vae.scaling_factor.tolist() == pytest.approx(scale)
    assert vae.shift.tolist() == pytest.approx(shift)
    moments = torch.randn(2, 8, 3, 2, 3, generator=generator(1))
    z = vae.sample(moments)
    assert_close(z[:, 2], (moments[:, 2] - shift[2]) * scale[2])
    with torch.no_grad():
        assert_close(vae.decode(z, 3)[:, :, 0], vae.autoencoder.decode(moments[:, :4, 0]).sample, rtol=1e-4, atol=1e-5)


def test_an_explicit_scaling_factor_wins(tmp_path, vae):
    vae.save_pretrained(tmp_path)
    assert VideoAutoencoderKL(str(tmp_path)).scaling_factor.tolist() == pytest.approx([0.18215] * 4)
    assert VideoAutoencoderKL(str(tmp_path), scaling_factor=0.13025).scaling_factor.tolist() == pytest.approx(
        [0.13025] * 4
    )


def test_scaling_is_not_rounded_by_a_cast(vae, video):
    half = VideoAutoencoderKL(architecture=TINY, dtype="bf16")
    assert half.scaling_factor.dtype == torch.float32
    assert half.autoencoder.dtype == torch.bfloat16
    assert half.encode(video, generators(1, ids=[0, 1])).dtype == torch.float32


def test_sizes(vae, video):
    assert vae.out_channels == 4
    assert vae.latent_size((5, 64, 96)) == (5, 8, 12)
    assert [vae.legal_num_frames(t) for t in (0, 1, 17)] == [1, 1, 17]
    with pytest.raises(UserError, match=r"100x150 .*multiples of 8; the nearest is 96x152"):
        vae.latent_size((1, 100, 150))
    with pytest.raises(UserError, match="the nearest is 8x24"):
        vae.encode(video[..., :3, :])
    with pytest.raises(ValueError, match="num_frames=4, but the latents hold 3"):
        vae.decode(torch.zeros(1, 4, 3, 2, 2), num_frames=4)


def test_fp16_files_are_computed_in_fp32(tmp_path, vae, video):
    vae.save_pretrained(tmp_path / "vae", dtype="fp16")
    assert sorted(path.name for path in (tmp_path / "vae").iterdir()) == [
        "config.json",
        "diffusion_pytorch_model.safetensors",
    ]
    loaded = VideoAutoencoderKL(str(tmp_path), subfolder="vae").eval()
    assert loaded.autoencoder.dtype == torch.float32
    for name, weight in loaded.autoencoder.state_dict().items():
        assert_close(weight, vae.autoencoder.state_dict()[name].half().float(), rtol=0, atol=0)
    assert_close(loaded.moments(video), vae.moments(video), rtol=1e-2, atol=1e-2)
    theirs = AutoencoderKL.from_pretrained(tmp_path / "vae", torch_dtype=torch.float32)
    with torch.no_grad():
        assert_close(theirs.encode(video[:, :, 0]).latent_dist.parameters, loaded.moments(video)[:, :, 0])


def test_statistics_set_later_are_saved(tmp_path):
    vae = VideoAutoencoderKL(architecture=TINY)
    vae.set_latent_statistics(scaling_factor=0.5, latents_mean=[1.0, 2.0, 3.0, 4.0], latents_std=[1.0, 2.0, 4.0, 5.0])
    vae.save_pretrained(tmp_path)
    loaded = VideoAutoencoderKL(str(tmp_path))
    assert_close(loaded.scaling_factor, torch.tensor([0.5, 0.25, 0.125, 0.1]))
    assert_close(loaded.shift, torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert loaded.fingerprint() == vae.fingerprint()


def test_the_fingerprint_is_that_of_weights_and_config(tmp_path, vae):
    vae.save_pretrained(tmp_path)
    first, second = VideoAutoencoderKL(str(tmp_path)), VideoAutoencoderKL(str(tmp_path), micro_batch_size=2)
    assert first.fingerprint() == second.fingerprint() == vae.fingerprint()
    assert VideoAutoencoderKL(str(tmp_path), scaling_factor=1.0).fingerprint() != first.fingerprint()
    with torch.no_grad():
        next(second.parameters()).view(-1)[0] += 1e-3
    assert second.fingerprint() != first.fingerprint()


def test_it_is_registered_and_mistakes_are_refused(tmp_path, vae):
    assert MODELS.build({"type": "VideoAutoencoderKL", "architecture": TINY}).out_channels == 4
    for arguments in ({}, {"from_pretrained": "x", "architecture": TINY}):
        with pytest.raises(UserError, match="exactly one of"):
            VideoAutoencoderKL(**arguments)
    with pytest.raises(UserError, match=r"no argument 'latent_chanels'. Did you mean 'latent_channels'"):
        VideoAutoencoderKL(architecture={"latent_chanels": 4})
    with pytest.raises(UserError, match="posterior='mean'"):
        VideoAutoencoderKL(architecture=TINY, posterior="mean")
    with pytest.raises(UserError, match="there is no folder"):
        VideoAutoencoderKL(str(tmp_path / "not-there"))
    with pytest.raises(UserError, match=r"has no config.json"):
        VideoAutoencoderKL(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match="has no diffusion_pytorch_model"):
        VideoAutoencoderKL(str(tmp_path))


def test_other_classes_and_other_weights_are_refused(tmp_path, vae):
    vae.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "use_quant_conv": False}))
    with pytest.raises(UserError, match=r"do not fit .*quant_conv"):
        VideoAutoencoderKL(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({**config, "_class_name": "AutoencoderKLTemporalDecoder"}))
    with pytest.raises(UserError, match="describes a AutoencoderKLTemporalDecoder"):
        VideoAutoencoderKL(str(tmp_path))


@torch.no_grad()
def test_a_temporal_decoder_equals_diffusers_and_sees_other_frames():
    vae = build("VideoAutoencoderKLTemporalDecoder", posterior="mode")
    x = torch.rand(2, 3, 5, 8, 12, generator=generator(0)) * 2 - 1
    z = vae.encode(x)
    frames = z.transpose(1, 2).flatten(0, 1) / 0.18215  # [(B T), C, h, w]
    for t in range(5):
        assert_close(z[:, :, t], vae.autoencoder.encode(x[:, :, t]).latent_dist.mode() * 0.18215, rtol=1e-4, atol=1e-5)
    expected = vae.autoencoder.decode(frames, num_frames=5).sample.unflatten(0, (2, 5)).transpose(1, 2)
    decoded = vae.decode(z, 5)
    assert_close(decoded, expected, rtol=1e-4, atol=1e-5)
    changed = z.clone()
    changed[:, :, 4] += 1
    assert not torch.allclose(vae.decode(changed, 5)[:, :, 3], decoded[:, :, 3], atol=1e-4)
    vae.decode_chunk_size = 3
    chunks = [vae.decode(chunk, chunk.shape[2]) for chunk in z.split(3, dim=2)]
    assert_close(vae.decode(z, 5), torch.cat(chunks, dim=2), rtol=1e-4, atol=1e-5)
    with pytest.raises(UserError, match="decode_chunk_size=0"):
        build("VideoAutoencoderKLTemporalDecoder", decode_chunk_size=0)


def test_fp16_is_warned_of_where_the_config_says_that_it_overflows():
    with pytest.warns(UserWarning, match="force_upcast, because fp16 overflows"):
        VideoAutoencoderKL(architecture=TINY, dtype="fp16")


def test_settings_that_do_not_exist_are_refused():
    with pytest.raises(UserError, match="memory_format='nhwc' is not one of contiguous, channels_last"):
        VideoAutoencoderKL(architecture=TINY, memory_format="nhwc")
    with pytest.raises(UserError, match="micro_batch_size=0"):
        VideoAutoencoderKL(architecture=TINY, micro_batch_size=0)
