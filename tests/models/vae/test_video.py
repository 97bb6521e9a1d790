"""Diffusers' video VAEs through our contract equal diffusers called by hand, with the scaling of their pipelines."""

import copy
import json

import diffusers
import pytest
import torch
from torch.testing import assert_close

from opensora.models.vae import DiffusersVideoVAE
from opensora.models.vae.video import FAMILIES
from opensora.utils.errors import UserError
from opensora.utils.seed import generator
from tests.models.vaes import ARCHITECTURES, VAES, build, video_of

DIFFUSERS = [name for name, cfg in VAES.items() if cfg["type"] == "DiffusersVideoVAE"]


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


@pytest.mark.parametrize("name", [name for name in DIFFUSERS if name != "KLAllegro"])
def test_equals_diffusers_with_the_same_weights(name):
    vae = build(name, posterior="mode")
    for frames in (1, vae.legal_num_frames(17)):
        x = video_of(vae, frames, batch=1)
        posterior = vae.autoencoder.encode(x).latent_dist
        mean = posterior.mode()
        assert_close(vae.moments(x).chunk(2, dim=1)[0], mean, rtol=1e-4, atol=1e-5)
        decoded = vae.decode(vae.encode(x), frames)
        # Wan clamps; here it does not, for the gradient
        assert_close(decoded.clamp(-1, 1), vae.autoencoder.decode(mean).sample.clamp(-1, 1), rtol=1e-3, atol=1e-4)


def test_allegro_equals_diffusers_where_one_tile_holds_all():
    vae = build("KLAllegro", posterior="mode")
    theirs = vae.autoencoder
    theirs.enable_tiling()
    theirs.kernel, theirs.stride = (8, 16, 24), (8, 16, 24)
    x = video_of(vae, 8, size=(16, 24), batch=1)
    assert_close(vae.moments(x), theirs.encode(x).latent_dist.parameters, rtol=1e-4, atol=1e-5)
    z = vae.encode(x)
    expected = theirs.decode(z / vae.scaling_factor.view(1, -1, 1, 1, 1)).sample.transpose(
        1, 2
    )  # it returns [B, T, C, H, W]
    assert_close(vae.decode(z, 8), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("is_residual", [False, True])
def test_wan_2_2_has_patches_of_its_own(is_residual):
    """Its pixels are shuffled outside the network, columns before rows."""
    patches = {
        "patch_size": 2,
        "in_channels": 12,
        "out_channels": 12,
        "is_residual": is_residual,
        "dim_mult": [1, 2, 2],
    }
    architecture = {"type": "AutoencoderKLWan", **ARCHITECTURES["AutoencoderKLWan"], **patches}
    vae = DiffusersVideoVAE(architecture=architecture, posterior="mode").eval()
    assert vae.strides == (4, 8, 8)
    x = video_of(vae, 9, batch=1)
    assert_close(vae.moments(x), vae.autoencoder.encode(x).latent_dist.parameters, rtol=1e-4, atol=1e-5)
    z = vae.encode(x)
    raw = z / vae.scaling_factor.view(1, -1, 1, 1, 1) + vae.shift.view(1, -1, 1, 1, 1)
    assert_close(vae.decode(z, 9).clamp(-1, 1), vae.autoencoder.decode(raw).sample, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("frames", [1, 5, 9, 17])
@pytest.mark.parametrize("is_residual", [False, True])
def test_wan_at_once_is_diffusers_loop_over_chunks_and_so_are_its_gradients(is_residual, frames):
    sizes = {**ARCHITECTURES["AutoencoderKLWan"], "dim_mult": [1, 2, 2], "is_residual": is_residual}
    architecture = {"type": "AutoencoderKLWan", **sizes}
    chunked, whole = (
        DiffusersVideoVAE(architecture=architecture, posterior="mode", time_chunks=chunks)
        for chunks in ("chunked", "whole")
    )
    whole.load_state_dict(chunked.state_dict())
    x = video_of(chunked, frames, batch=2)
    results = []
    for vae, loop in ((chunked, True), (whole, False)):
        video = x.clone().requires_grad_()
        with torch.enable_grad():
            if loop:  # diffusers' layers, untouched by ours
                theirs = diffusers.AutoencoderKLWan(**{k: v for k, v in architecture.items() if k != "type"})
                theirs.load_state_dict(vae.autoencoder.state_dict())
                moments = theirs.encode(video).latent_dist.parameters
                decoded, weights = FAMILIES["AutoencoderKLWan"].decode(theirs, moments.chunk(2, dim=1)[0]), theirs
            else:
                moments = vae.moments(video)
                decoded, weights = vae.decode(vae.sample(moments), frames), vae.autoencoder
            (decoded.square().mean() + moments.sin().mean()).backward()
        grads = {name: p.grad for name, p in weights.named_parameters() if p.grad is not None}
        results.append((moments.detach(), decoded.detach(), video.grad, grads))
    left, right = results
    for a, b in zip(left[:3], right[:3], strict=True):
        assert_close(a, b, rtol=0, atol=1e-5)
    assert left[3].keys() == right[3].keys()
    for name, grad in left[3].items():
        assert_close(grad, right[3][name], rtol=1e-3, atol=1e-5, msg=name)


def test_wan_is_whole_by_default_where_that_needs_no_more_memory(monkeypatch):
    """Gradients keep all activations anyway; a single frame is one chunk."""
    vae = build("KLWan")
    calls = []
    forward = vae.autoencoder.encoder.forward
    monkeypatch.setattr(
        vae.autoencoder.encoder, "forward", lambda x, **kw: calls.append(x.shape[2]) or forward(x, **kw)
    )
    vae.moments(video_of(vae, 9, batch=1))
    vae.moments(video_of(vae, 1, batch=1))
    with torch.enable_grad():
        vae.moments(video_of(vae, 9, batch=1))
    assert calls == [1, 4, 4, 1, 9]


def test_scaling_is_that_of_the_pipelines():
    """One value for Hunyuan, CogVideoX, Allegro; mean and std a channel for Wan, Mochi; tensors for LTX."""
    for name in ("KLHunyuanVideo", "KLHunyuanVideo15", "KLCogVideoX", "KLAllegro"):
        vae = build(name)
        factor = vae.autoencoder.config.scaling_factor
        assert_close(vae.scaling_factor, torch.full((vae.out_channels,), factor))
        assert not vae.shift.any()
    for name in ("KLWan", "KLQwenImage", "KLMochi"):
        vae = build(name)
        assert_close(vae.shift, torch.tensor([0.1, -0.2, 0.3, 0.0]))
        assert_close(vae.scaling_factor, 1 / torch.tensor([2.0, 1.5, 1.0, 0.5]))
    vae = build("KLLTXVideo")
    vae.autoencoder.latents_mean.fill_(0.5)
    vae.autoencoder.latents_std.fill_(4.0)
    vae.set_latent_statistics()
    assert_close(vae.scaling_factor, torch.full((8,), 0.25))
    assert_close(vae.shift, torch.full((8,), 0.5))


def test_cosmos_has_statistics_for_every_latent_frame():
    vae = build("KLCosmos", posterior="mode")
    config = vae.autoencoder.config
    mean, std = (torch.tensor(config[key]).view(16, -1) for key in ("latents_mean", "latents_std"))
    x = video_of(vae, 17, batch=1)
    raw = vae.moments(x).chunk(2, dim=1)[0]
    for t in range(3):
        assert_close(vae.encode(x)[0, :, t], (raw[0, :, t] - mean[:, t, None, None]) / std[:, t, None, None])
    with pytest.raises(UserError, match="cover 16 latent frames; there are 17"):
        vae.sample(torch.zeros(1, 32, 17, 1, 1))


def test_codes_without_a_posterior_are_not_noisy():
    vae = build("KLCosmos")
    x = video_of(vae, batch=1)
    sampled = vae.encode(x, generator(0))
    vae.posterior = "mode"
    assert_close(sampled, vae.encode(x), rtol=1e-4, atol=1e-5)


def test_ltx_decoders_with_noise_do_not_touch_the_global_generator():
    blocks = {"decoder_inject_noise": (True, True, True), "timestep_conditioning": True}
    vae = DiffusersVideoVAE(
        architecture={"type": "AutoencoderKLLTXVideo", **ARCHITECTURES["AutoencoderKLLTXVideo"], **blocks}
    ).eval()
    for name, parameter in vae.named_parameters():
        if "per_channel_scale" in name:
            parameter.fill_(0.5)
    z = torch.rand(1, 8, 2, 2, 3, generator=generator(0))
    state = torch.get_rng_state()
    first = vae.decode(z, 3)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(1)
    assert_close(vae.decode(z, 3), first)


def test_ltx_may_halve_space_and_time_apart():
    """As LTX 0.9.5 and LTX 2 do; their defaults have cells of 8 x 32 x 32."""
    with torch.device("meta"):
        assert DiffusersVideoVAE(architecture={"type": "AutoencoderKLLTX2Video"}).strides == (8, 32, 32)
    blocks = {"downsample_type": ("spatial",) * 2, "upsample_type": ("spatial",)}
    vae = DiffusersVideoVAE(
        architecture={"type": "AutoencoderKLLTX2Video", **ARCHITECTURES["AutoencoderKLLTX2Video"], **blocks}
    ).eval()
    assert vae.strides == (1, 4, 4)
    x = video_of(vae, 4, batch=1)
    assert vae.encode(x).shape == (1, 8, 4, 2, 3)
    assert vae.decode(vae.encode(x), 4).shape == x.shape


def test_hunyuan_in_chunks_is_near_the_whole():
    default, whole, chunked = (build("KLHunyuanVideo", time_chunks=c) for c in ("default", "whole", "chunked"))
    x = video_of(default, 33, batch=1)
    assert_close(chunked.moments(x), default.moments(x), rtol=0, atol=0)
    assert not torch.allclose(whole.moments(x), default.moments(x), atol=1e-4)
    short = video_of(default, 9, batch=1)
    assert_close(whole.moments(short), default.moments(short), rtol=1e-4, atol=1e-5)
    with pytest.raises(UserError, match="AutoencoderKLQwenImage has one way"):
        build("KLQwenImage", time_chunks="whole")


@pytest.mark.parametrize("name", DIFFUSERS)
def test_fingerprint_tells_chunks_where_they_change_latents(name):
    """Longer than 16 frames, where HunyuanVideo and LTX begin to split."""
    default = build(name, posterior="mode")
    x = video_of(default, default.legal_num_frames(33), size=default.strides[1:], batch=1)
    latents = default.encode(x)
    for chunks in ("whole", "chunked"):
        if name.removeprefix("KL") not in ("HunyuanVideo", "LTXVideo", "LTX2Video", "Mochi", "Wan"):
            with pytest.raises(UserError, match=f"Autoencoder{name} has one way"):
                build(name, time_chunks=chunks)
            continue
        vae = build(name, posterior="mode", time_chunks=chunks)
        same = torch.allclose(vae.encode(x), latents, rtol=1e-4, atol=1e-5)
        assert (vae.fingerprint() == default.fingerprint()) == same


def ramp(frames: int, height: int, width: int) -> torch.Tensor:
    """A smooth image [1, 3, T, H, W] with values that bf16 does not have."""
    rows, columns = torch.linspace(-1, 1, height)[:, None], torch.linspace(-0.9, 1, width)
    return ((rows + columns) / 2).expand(1, 3, frames, height, width).contiguous()


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"tile_size": 32}, {"time_chunks": "chunked"}, {"micro_batch_size": 1}])
@pytest.mark.parametrize("kind", ["built", "cast", "autocast"])
def test_mochi_in_bf16_sees_waves_of_pixels_in_fp32(settings, kind):
    """Waves of 64 and 128 periods a unit. Of rounded pixels, latents are off by 0.55 to 0.8; the weights' rounding is 0.02 to 0.06."""
    x = ramp(13, 48, 64)
    reference = build("KLMochi", posterior="mode", **settings)
    vae = build("KLMochi", posterior="mode", **settings, **({"dtype": "bf16"} if kind != "cast" else {}))
    vae = copy.deepcopy(vae).to(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
        latents = vae.encode(x)
    expected = reference.encode(x)
    assert (latents - expected).norm() < 0.1 * expected.norm()
    decoded, expected = vae.decode(latents, 13), reference.decode(latents, 13)
    assert (decoded - expected).norm() < 0.1 * expected.norm()


def test_mochi_caches_of_rounded_pixels_are_refused():
    """Their fingerprint was the hash alone."""
    assert " pixels=fp32" in build("KLMochi", dtype="bf16").fingerprint()
    assert " " not in build("KLMochi").fingerprint() + build("KLWan", dtype="bf16").fingerprint()


def test_mochi_in_fp32_has_diffusers_gradients():
    vae = build("KLMochi").requires_grad_(True)
    theirs = diffusers.AutoencoderKLMochi(**ARCHITECTURES["AutoencoderKLMochi"])
    theirs.load_state_dict(vae.autoencoder.state_dict())
    x = video_of(vae, 7, batch=1)
    with torch.enable_grad():
        vae.moments(x).square().mean().backward()
        theirs.encode(x).latent_dist.parameters.square().mean().backward()
    for (name, ours), reference in zip(
        vae.autoencoder.encoder.named_parameters(), theirs.encoder.parameters(), strict=True
    ):
        assert_close(ours.grad, reference.grad, rtol=0, atol=0, msg=name)


def test_folders_name_their_class(tmp_path):
    vae = build("KLWan")
    vae.save_pretrained(tmp_path / "model" / "vae", dtype="fp16")
    config = json.loads((tmp_path / "model" / "vae" / "config.json").read_text())
    assert config["_class_name"] == "AutoencoderKLWan"
    loaded = DiffusersVideoVAE(str(tmp_path / "model"), subfolder="vae").eval()
    assert type(loaded.autoencoder) is diffusers.AutoencoderKLWan
    x = video_of(vae, batch=1)
    assert_close(loaded.moments(x), vae.moments(x), rtol=1e-2, atol=1e-2)
    theirs = diffusers.AutoencoderKLWan.from_pretrained(tmp_path / "model" / "vae", torch_dtype=torch.float32)
    assert_close(theirs.encode(x).latent_dist.parameters, loaded.moments(x), rtol=1e-4, atol=1e-5)


def test_statistics_that_a_class_does_not_know_are_kept_too(tmp_path):
    vae = build("KLHunyuanVideo")
    vae.set_latent_statistics(scaling_factor=2.0, latents_mean=[1.0, 2.0, 3.0, 4.0], latents_std=[1.0, 2.0, 4.0, 5.0])
    vae.save_pretrained(tmp_path)
    loaded = DiffusersVideoVAE(str(tmp_path))
    assert_close(loaded.scaling_factor, torch.tensor([2.0, 1.0, 0.5, 0.4]))
    assert_close(loaded.shift, torch.tensor([1.0, 2.0, 3.0, 4.0]))


def test_mistakes_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"architecture needs a type\. Types: AutoencoderKLWan"):
        DiffusersVideoVAE(architecture={})
    with pytest.raises(UserError, match="Did you mean 'AutoencoderKLWan'"):
        DiffusersVideoVAE(architecture={"type": "AutoencoderKLWann"})
    with pytest.raises(UserError, match=r"no argument 'zdim'. Did you mean 'z_dim'"):
        DiffusersVideoVAE(architecture={"type": "AutoencoderKLWan", "zdim": 3})
    with pytest.raises(UserError, match="Wan's code encodes 4 frames at a time"):
        build("KLWan", architecture={**VAES["KLWan"]["architecture"], "temperal_downsample": [True] * 3})
    of_nova = tmp_path / "nova"
    build("KLWan").save_pretrained(of_nova)
    (of_nova / "config.json").write_text(json.dumps({"_class_name": "AutoencoderKLOpenSora"}))
    with pytest.raises(
        UserError, match=r"network is not here. To train .* set vae.type='ScaleOnlyVAE'.*docs/how-to/nova.md"
    ):
        DiffusersVideoVAE(str(of_nova))
    build("VideoAutoencoderKL").save_pretrained(tmp_path)
    with pytest.raises(UserError, match="describes a AutoencoderKL; DiffusersVideoVAE loads AutoencoderKLWan"):
        DiffusersVideoVAE(str(tmp_path))


def test_strides_equal_those_that_the_classes_state():
    for name in FAMILIES:
        vae = build(name.removeprefix("Autoencoder"))
        stated = getattr(vae.autoencoder, "spatial_compression_ratio", None)
        if stated is not None and name != "AutoencoderKLQwenImage" and name != "AutoencoderKLWan":
            assert vae.strides[1:] == (stated, stated)
        stated = getattr(vae.autoencoder, "temporal_compression_ratio", None)
        assert stated in (None, vae.strides[0])
