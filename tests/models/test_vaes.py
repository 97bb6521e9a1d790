"""What every VAE must do, whatever is inside: found by walking the registry and diffusers' classes, at toy size.

Sizes are checked for 1 to 64 frames; the network runs at a few of them. Tolerances: 1e-5 where only the order of sums differs
(micro-batches, a batch and its samples); the seams of tiles are tested where the mathematics is exact (LTX has neither group
normalisation nor attention) and, for the others, against the plain result with a stated bound.
"""

import hashlib
import inspect
import json

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from opensora.models.vae.base import VideoVAE
from opensora.models.vae.video import FAMILIES, DiffusersVideoVAE
from opensora.registry import MODELS
from opensora.utils.errors import UserError
from opensora.utils.seed import generator, generators, randn_like
from tests.models.vaes import VAES, build, video_of

vaes = pytest.mark.parametrize("name", VAES)


@pytest.fixture(autouse=True)
def _no_gradients(request):
    with torch.set_grad_enabled("gradient" in request.node.name):
        yield


def legal(vae: VideoVAE, most: int = 64) -> list[int]:
    return [frames for frames in range(1, most + 1) if vae.legal_num_frames(frames) == frames]


def test_every_registered_vae_and_every_class_of_diffusers_is_here():
    registered = {name for name in MODELS.choices() if "VAE" in name or "Autoencoder" in name}
    without_network = {"ScaleOnlyVAE"}  # tests/models/vae/test_scale_only.py
    assert registered == {cfg["type"] for cfg in VAES.values()} | without_network
    here = {cfg["architecture"]["type"] for cfg in VAES.values() if cfg["type"] == "DiffusersVideoVAE"}
    assert here == set(FAMILIES) == set(DiffusersVideoVAE._classes())


@vaes
def test_sizes_of_1_to_64_frames(name):
    vae = build(name)
    _, height, width = vae.strides
    lengths = legal(vae, 80)
    for frames in range(1, 65):
        near = vae.legal_num_frames(frames)
        assert vae.legal_num_frames(near) == near
        # the nearest, and of two equally near ones the smaller
        assert near == min(lengths, key=lambda n: (abs(n - frames), n))
        if near != frames:
            with pytest.raises(UserError, match=f"cannot encode {frames} frames.*the nearest is {near}"):
                vae.latent_size((frames, 2 * height, 3 * width))
            continue
        t, h, w = vae.latent_size((frames, 2 * height, 3 * width))
        assert (t, h, w) == (vae.latent_frames(frames), 2, 3)
        # the longest video with so many latent frames is at least this one, and has as many
        assert vae.video_frames(t) >= frames
        assert vae.latent_frames(vae.video_frames(t)) == t
        assert frames / vae.strides[0] <= t <= frames


@vaes
def test_the_nearest_lengths_below_and_above(name):
    vae = build(name)
    lengths = legal(vae, 120)
    for frames in range(1, 65):
        assert vae.legal_num_frames_within(frames) == max([n for n in lengths if n <= frames], default=lengths[0])
        assert vae.legal_num_frames_over(frames) == min(n for n in lengths if n >= frames)


@vaes
def test_chunks_are_encoded_by_themselves(name):
    """The latents of a video are those of its chunks: that is what makes it right to put a reference where one begins."""
    vae = build(name)
    vae.posterior = "mode"
    chunk = vae.chunk_latent_frames
    if chunk is None:
        return
    frames = vae.video_frames(chunk)
    assert vae.legal_num_frames(frames) == frames
    x = video_of(vae, 3 * frames, batch=1)
    chunks = [vae.encode(part) for part in x.split(frames, dim=2)]
    assert {z.shape[2] for z in chunks} == {chunk}
    assert_close(torch.cat(chunks, dim=2), vae.encode(x), rtol=1e-4, atol=1e-5)


@vaes
def test_odd_sizes_are_refused_with_the_nearest(name):
    vae = build(name)
    frames, (_, height, width) = legal(vae)[0], vae.strides
    for h in range(1, 4 * height):
        for w in (width, 2 * width + 1):
            if h % height == 0 and w % width == 0:
                assert vae.latent_size((frames, h, w))[1:] == (h // height, w // width)
                assert vae.legal_size((frames, h, w)) == (frames, h, w)
            else:
                with pytest.raises(UserError, match=r"multiples of .*; the nearest is (\d+)x(\d+)") as caught:
                    vae.latent_size((frames, h, w))
                near = [int(n) for n in str(caught.value).rstrip(".").rpartition(" ")[2].split("x")]
                vae.latent_size((frames, *near))
                assert vae.legal_size((frames, h, w)) == (frames, *near)
                assert abs(near[0] - h) <= max(height / 2, height - 1)


@vaes
def test_encode_then_decode_gives_back_the_size(name):
    vae = build(name)
    lengths = legal(vae, 26)
    for frames in (lengths[0], lengths[1], lengths[-2]):
        x = video_of(vae, frames)
        z = vae.encode(x, generators(0, ids=range(len(x))))
        assert z.shape == (len(x), vae.out_channels, *vae.latent_size(tuple(x.shape[2:])))
        assert z.dtype == torch.float32
        decoded = vae.decode(z, frames)
        assert decoded.shape == x.shape
        assert decoded.dtype == torch.float32
        assert decoded.isfinite().all()
        assert vae.decode(z).shape[2] == vae.video_frames(z.shape[2])


@vaes
def test_wrong_numbers_of_frames_are_refused(name):
    vae = build(name)
    lengths = legal(vae)
    z = vae.encode(video_of(vae, lengths[0]))
    other = next(n for n in lengths if vae.latent_frames(n) != z.shape[2])
    with pytest.raises(ValueError, match=f"num_frames={other}, but the latents hold {z.shape[2]} frames"):
        vae.decode(z, other)
    with pytest.raises(ValueError, match="takes"):
        vae.moments(video_of(vae, lengths[0])[:, :, 0])


@vaes
def test_moments_sample_and_encode_agree(name):
    vae = build(name)
    x = video_of(vae)
    moments = vae.moments(x)
    mean, logvar = moments.chunk(2, dim=1)
    rngs = lambda: generators(3, ids=range(len(x)))  # noqa: E731
    noise = randn_like(mean, rngs())
    z = vae.encode(x, rngs())
    assert_close(z, vae.sample(moments, rngs()), rtol=0, atol=0)
    raw = mean + (0.5 * logvar.clamp(-30, 20)).exp() * noise
    scale, shift = (v.view(1, len(v), -1, 1, 1)[:, :, : z.shape[2]] for v in (vae.scaling_factor, vae.shift))
    assert_close(z, (raw - shift) * scale)
    vae.posterior = "mode"
    assert_close(vae.sample(moments), (mean - shift) * scale)
    # what decoding unscales is what encoding scaled
    assert_close(vae.decode(vae.sample(moments), x.shape[2]), reconstructed(vae, moments), rtol=1e-3, atol=1e-4)


def reconstructed(vae: VideoVAE, moments: torch.Tensor) -> torch.Tensor:
    """The mean decoded with statistics that do nothing."""
    scale, shift = vae.scaling_factor, vae.shift
    vae.scaling_factor, vae.shift = torch.ones_like(scale), torch.zeros_like(shift)
    try:
        return vae.decode(moments.chunk(2, dim=1)[0], video_of(vae).shape[2])
    finally:
        vae.scaling_factor, vae.shift = scale, shift


@vaes
def test_a_batch_equals_its_samples_and_micro_batches_change_nothing(name):
    vae = build(name)
    x = video_of(vae, batch=3)
    moments = vae.moments(x)
    decoded = vae.decode(vae.sample(moments, generators(1, ids=[5, 6, 7])), x.shape[2])
    for b in range(3):
        assert_close(vae.moments(x[b : b + 1]), moments[b : b + 1], rtol=1e-4, atol=1e-5)
        alone = vae.decode(vae.sample(moments[b : b + 1], generators(1, ids=[5 + b])), x.shape[2])
        assert_close(alone, decoded[b : b + 1], rtol=1e-4, atol=1e-5)
    vae.micro_batch_size = 2
    assert_close(vae.moments(x), moments, rtol=1e-4, atol=1e-5)
    assert_close(
        vae.decode(vae.sample(moments, generators(1, ids=[5, 6, 7])), x.shape[2]), decoded, rtol=1e-4, atol=1e-5
    )


@vaes
def test_state_dict_and_folder_round_trips_are_exact(name, tmp_path):
    vae, other = build(name), build(name)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.1)
    assert other.fingerprint() != vae.fingerprint()
    other.load_state_dict(vae.state_dict())
    assert other.fingerprint() == vae.fingerprint()
    vae.set_latent_statistics(
        scaling_factor=1.0,
        latents_mean=[0.1 * c for c in range(vae.out_channels)],
        latents_std=[1.0 + c for c in range(vae.out_channels)],
    )
    assert other.fingerprint() != vae.fingerprint()
    if not hasattr(vae, "save_pretrained"):
        return
    vae.save_pretrained(tmp_path / "vae")
    cfg = {"type": VAES[name]["type"], "from_pretrained": str(tmp_path / "vae")}
    loaded = MODELS.build(cfg).eval()
    assert_close(loaded.scaling_factor, vae.scaling_factor)
    assert_close(loaded.shift, vae.shift)
    x = video_of(vae)
    assert_close(loaded.moments(x), vae.moments(x), rtol=1e-4, atol=1e-5)
    z = vae.encode(x, generator(0))
    assert_close(loaded.decode(z, x.shape[2]), vae.decode(z, x.shape[2]), rtol=1e-4, atol=1e-5)
    assert loaded.fingerprint() == vae.fingerprint()


@vaes
def test_one_scale_and_shift_for_all_channels(name):
    vae = build(name)
    vae.set_latent_statistics(scaling_factor=0.5, shift_factor=0.25, latents_mean=None, latents_std=None)
    assert_close(vae.scaling_factor.flatten(), torch.full((vae.out_channels,), 0.5))
    assert_close(vae.shift.flatten(), torch.full((vae.out_channels,), 0.25))
    with pytest.raises(UserError, match=r"no statistic \['scale'\]"):
        vae.set_latent_statistics(scale=1.0)


@vaes
def test_gradients_reach_every_parameter(name):
    vae = build(name).requires_grad_(True).train()
    x_hat, moments = vae(video_of(vae, legal(vae, 40)[1 if vae.strides[0] > 1 else 2]), generator(0))
    (x_hat.square().mean() + moments.square().mean()).backward()
    without = [key for key, p in vae.named_parameters() if p.grad is None or not p.grad.any()]
    assert [key for key in without if not unused(key)] == []
    assert vae.last_layer.grad is not None
    assert vae.last_layer.shape[0] >= vae.in_channels


def unused(key: str) -> bool:
    """Layers that diffusers' own code has and never calls, or whose gradient is zero by symmetry."""
    return "to_k.bias" in key or "time_mixer" in key


@vaes
def test_channels_last_changes_nothing(name):
    plain, last = build(name), build(name, memory_format="channels_last")
    x = video_of(plain)
    moments = plain.moments(x)
    assert_close(last.moments(x), moments, rtol=1e-3, atol=1e-4)
    z = plain.sample(moments, generator(0))
    assert_close(last.decode(z, x.shape[2]), plain.decode(z, x.shape[2]), rtol=1e-3, atol=1e-4)
    kernels = [m.weight for m in last.modules() if isinstance(m, nn.Conv2d)]
    assert all(kernel.is_contiguous(memory_format=torch.channels_last) for kernel in kernels)


@vaes
def test_pixels_of_0_to_255_are_refused(name):
    vae = build(name)
    x = video_of(vae)
    with pytest.raises(UserError, match=r"in \[-1, 1\]; these are torch.uint8"):
        vae.moments(((x + 1) * 127.5).to(torch.uint8))
    if vae.in_channels == 3:
        with pytest.raises(UserError, match=r"these reach 2\d\d"):
            vae.moments((x + 1) * 127.5)


TILED = [name for name, cfg in VAES.items() if "tile_size" in inspect.signature(MODELS.get(cfg["type"])).parameters]


@pytest.mark.parametrize("name", TILED)
def test_tiles_lie_where_they_belong(name):
    """Roughly: an untrained network on noise has no smooth image to hide seams in. Misplaced tiles give an error of
    1.4 times the spread; `tests/models/vae/test_splitting.py` is exact."""
    vae = build(name)
    side = 4 * vae.strides[1]
    tiled = build(name, tile_size=side, tile_overlap=0.5)
    x = video_of(vae, size=(side + 3 * vae.strides[1], side), batch=1)
    moments = vae.moments(x)
    mean, again = (m.chunk(2, dim=1)[0] for m in (moments, tiled.moments(x)))
    assert 0 < (again - mean).square().mean().sqrt() < 0.9 * mean.std()
    z = vae.sample(moments, generator(0))
    decoded, again = vae.decode(z, x.shape[2]), tiled.decode(z, x.shape[2])
    assert again.shape == decoded.shape
    assert (again - decoded).square().mean().sqrt() < 1.2 * decoded.std()
    small = video_of(vae, size=(side, side), batch=1)
    assert_close(tiled.moments(small), vae.moments(small), rtol=1e-4, atol=1e-5)


@vaes
def test_fingerprint_of_defaults_is_that_of_config_and_weights(name):
    """The formula written out: caches of before stay valid."""
    vae = build(name)
    config = {key: value for key, value in vae._config().items() if not key.startswith("_")}
    expected = hashlib.blake2b(json.dumps(config, sort_keys=True, default=list).encode(), digest_size=16)
    for key, weight in sorted(vae._network().state_dict().items()):
        expected.update(f"{key} {weight.dtype} {tuple(weight.shape)}".encode())
        expected.update(weight.reshape(-1).contiguous().view(torch.uint8).numpy())
    assert vae.fingerprint() == expected.hexdigest()
    assert build(name, posterior="mode", micro_batch_size=2).fingerprint() == vae.fingerprint()


@pytest.mark.parametrize("name", TILED)
def test_fingerprint_is_the_same_with_tiles(name):
    """Validation of a training from a cache may decode in tiles, and images within a tile have the same latents."""
    side = 4 * build(name).strides[1]
    assert build(name, tile_size=side).fingerprint() == build(name).fingerprint()


def test_a_tile_that_cuts_cells_is_refused():
    with pytest.raises(UserError, match=r"tile_size=30 is no multiple of the VAE's 4 pixels; try 32"):
        build("VideoAutoencoderKL", tile_size=30)
    with pytest.raises(UserError, match=r"tile_overlap=0\.7"):
        build("VideoAutoencoderKL", tile_size=32, tile_overlap=0.7)
