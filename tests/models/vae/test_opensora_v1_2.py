"""Open-Sora 1.2's VAE: lengths, chunks, published names and shapes, scaling, and causality in time."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

from opensora.models.vae import OpenSoraVAE_V1_2, VAE_Temporal, VideoAutoencoderPipeline
from opensora.models.vae.opensora_v1_2 import image_vae, published_name
from opensora.registry import MODELS
from opensora.utils.errors import UserError
from opensora.utils.seed import generator
from tests.models.vaes import PARTS, VAES, build, video_of

LENGTHS = {1: 1, 2: 1, 4: 1, 5: 2, 16: 4, 17: 5, 18: 6, 33: 9, 34: 10, 51: 15, 102: 30, 204: 60, 408: 120, 816: 240}


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def full_size():
    """Without memory, at full size."""
    with torch.device("meta"):
        return OpenSoraVAE_V1_2(vae_2d=image_vae())


def test_lengths(full_size):
    assert full_size.strides == (4, 8, 8)
    assert full_size.out_channels == 4
    for frames in range(1, 409):
        expected = 5 * (frames // 17) + math.ceil(frames % 17 / 4)
        assert full_size.latent_size((frames, 240, 424)) == (expected, 30, 53)
        assert full_size.legal_num_frames(frames) == frames
    assert {frames: full_size.latent_frames(frames) for frames in LENGTHS} == LENGTHS
    assert [full_size.video_frames(t) for t in (1, 4, 5, 6, 15)] == [4, 16, 17, 21, 51]


def test_causal_padding_of_chunks(full_size):
    """The frames of the first latent frame's four that are zeros in front."""
    assert [full_size.causal_padding(frames) for frames in range(1, 18)] == [3, 2, 1, 0] * 4 + [3]
    assert build("KLWan").causal_padding(9) == 3
    assert build("VideoAutoencoderKL").causal_padding(1) == build("KLAllegro").causal_padding(8) == 0


def test_scale_of_the_latents(full_size):
    assert_close(full_size.shift, torch.tensor([-0.10, 0.34, 0.27, 0.98]))
    assert_close(1 / full_size.scaling_factor, torch.tensor([3.85, 2.32, 2.33, 3.06]))
    assert_close(full_size.spatial_vae.scaling_factor, torch.full((4,), 0.18215))


def test_names_and_shapes_are_the_published_ones(full_size):
    shapes = {published_name(name): tuple(tensor.shape) for name, tensor in full_size.state_dict().items()}
    temporal = {
        name.removeprefix("temporal_vae."): shape for name, shape in shapes.items() if name.startswith("temporal")
    }
    assert temporal == expected_temporal_shapes()
    spatial = {name for name in shapes if name.startswith("spatial")}
    assert len(temporal) + len(spatial) == len(shapes)
    assert shapes["spatial_vae.module.encoder.conv_in.weight"] == (128, 3, 3, 3)
    assert shapes["spatial_vae.module.encoder.mid_block.attentions.0.to_q.weight"] == (512, 512)
    assert shapes["spatial_vae.module.decoder.up_blocks.3.resnets.2.conv2.weight"] == (128, 128, 3, 3)
    assert sum(math.prod(shape) for name, shape in shapes.items() if name in spatial) == 83_653_863  # SDXL's VAE
    assert sum(math.prod(shape) for shape in temporal.values()) == 309_687_144


def expected_temporal_shapes() -> dict[str, tuple[int, ...]]:
    """Written out from the description: 4 levels of 128, 256, 256, 512 channels with 4 blocks each, and 4 more blocks."""
    shapes: dict[str, tuple[int, ...]] = {}

    def conv(name, out, into, kernel, *, bias=True):
        shapes[f"{name}.conv.weight"] = (out, into, kernel, kernel, kernel)
        if bias:
            shapes[f"{name}.conv.bias"] = (out,)

    def norm(name, width):
        shapes[f"{name}.weight"] = shapes[f"{name}.bias"] = (width,)

    def blocks(name, into, out):
        for j in range(4):
            before = into if j == 0 else out
            norm(f"{name}.{j}.norm1", before)
            conv(f"{name}.{j}.conv1", out, before, 3, bias=False)
            norm(f"{name}.{j}.norm2", out)
            conv(f"{name}.{j}.conv2", out, out, 3, bias=False)
            if before != out:
                conv(f"{name}.{j}.conv3", out, before, 1, bias=False)

    for i, (into, out) in enumerate([(128, 128), (128, 256), (256, 256), (256, 512)]):
        blocks(f"encoder.block_res_blocks.{i}", into, out)
    for i, (into, out) in enumerate([(256, 128), (256, 256), (512, 256), (512, 512)]):
        blocks(f"decoder.block_res_blocks.{i}", into, out)
    for part in ("encoder", "decoder"):
        blocks(f"{part}.res_blocks", 512, 512)
    conv("encoder.conv_in", 128, 4, 3, bias=False)
    conv("encoder.conv_blocks.1", 256, 256, 3)  # 0 does not halve time
    conv("encoder.conv_blocks.2", 256, 256, 3)
    norm("encoder.norm1", 512)
    conv("encoder.conv2", 8, 512, 1)
    conv("quant_conv", 8, 8, 1)
    conv("post_quant_conv", 4, 4, 1)
    conv("decoder.conv1", 512, 4, 3)
    conv("decoder.conv_blocks.1", 512, 256, 3)
    conv("decoder.conv_blocks.2", 1024, 512, 3)
    norm("decoder.norm1", 128)
    conv("decoder.conv_out", 4, 128, 3)
    return shapes


def test_the_published_folder_loads(tmp_path):
    vae = build("OpenSoraVAE_V1_2")
    vae.save_pretrained(tmp_path / "ours")
    state = load_file(tmp_path / "ours" / "model.safetensors")
    assert any(name.startswith("spatial_vae.module.") for name in state)
    assert state["scale"].shape == state["shift"].shape == (1, 4, 1, 1, 1)
    # with other statistics, as a file that says so
    state["scale"], state["shift"] = torch.full((1, 4, 1, 1, 1), 2.0), torch.tensor(0.25)
    (tmp_path / "theirs").mkdir()
    save_file(state, tmp_path / "theirs" / "model.safetensors")
    loaded = OpenSoraVAE_V1_2(from_pretrained=str(tmp_path / "theirs"), micro_frame_size=9, **PARTS).eval()
    assert_close(loaded.scaling_factor, torch.full((4,), 0.5))
    assert_close(loaded.shift, torch.full((4,), 0.25))
    x = video_of(vae, 11)
    assert_close(loaded.moments(x), vae.moments(x), rtol=1e-4, atol=1e-5)
    del state["temporal_vae.encoder.conv_in.conv.weight"]
    save_file(state, tmp_path / "theirs" / "model.safetensors")
    with pytest.raises(UserError, match=r"temporal_vae.encoder.conv_in.conv.weight"):
        OpenSoraVAE_V1_2(from_pretrained=str(tmp_path / "theirs"), micro_frame_size=9, **PARTS)


def test_a_pipelines_config_rebuilds_it_without_the_hub(tmp_path):
    vae = build("VideoAutoencoderPipeline", micro_frame_size=5)
    vae.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["micro_frame_size"] == 5
    loaded = VideoAutoencoderPipeline(from_pretrained=str(tmp_path), micro_frame_size=5).eval()
    x = video_of(vae, 7)
    assert_close(loaded.moments(x), vae.moments(x), rtol=1e-4, atol=1e-5)
    # what Open-Sora's own config.json names as the image VAE is a hub id: its weights are in the file
    config["vae_2d"] = {
        "type": "VideoAutoencoderKL",
        "from_pretrained": "PixArt-alpha/pixart_sigma_sdxlvae_T5_diffusers",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="does not fit this VideoAutoencoderPipeline"):  # toy weights, full-size network
        VideoAutoencoderPipeline(from_pretrained=str(tmp_path))
    (tmp_path / "config.json").unlink()
    with pytest.raises(UserError, match=r"vae_2d is needed: there is no config.json"):
        VideoAutoencoderPipeline(from_pretrained=str(tmp_path))


STATISTICS = {  # what a training measures, and other ways to set them
    "one": {"scaling_factor": 0.5, "shift_factor": 0.25, "latents_mean": None, "latents_std": None},
    "one, not shifted": {"scaling_factor": 0.3, "shift_factor": 0, "latents_mean": None, "latents_std": None},
    "by channel": {
        "scaling_factor": 1.0, "shift_factor": None,
        "latents_mean": [0.1, -0.2, 0.3, 0.7], "latents_std": [2.1, 1.3, 1.0, 0.6],
    },
    "more on top": {"scaling_factor": 0.3},
    "unset": {"latents_mean": None},
    "untouched": {},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("statistics", STATISTICS)
@pytest.mark.parametrize("name", ["VideoAutoencoderPipeline", "OpenSoraVAE_V1_2"])
def test_statistics_survive_the_folder(name, statistics, dtype, tmp_path):
    vae = build(name, micro_frame_size=5)
    vae.set_latent_statistics(**STATISTICS[statistics])
    vae.save_pretrained(tmp_path, dtype=dtype)
    loaded = MODELS.build({"type": name, "from_pretrained": str(tmp_path)})
    assert_close(loaded.scaling_factor, vae.scaling_factor, rtol=1e-6, atol=0)  # also of weights in fp16
    assert_close(loaded.shift, vae.shift, rtol=1e-6, atol=0)
    assert loaded.micro_frame_size == 5
    assert loaded.latent_size((21, 8, 8)) == vae.latent_size((21, 8, 8))
    if dtype == "fp32":
        assert loaded.fingerprint() == vae.fingerprint()


@pytest.mark.slow
def test_the_chunks_are_those_of_the_folder_by_default(tmp_path):
    for size in (9, None):
        vae = build("OpenSoraVAE_V1_2", micro_frame_size=size)
        vae.save_pretrained(tmp_path)
        for kind in (OpenSoraVAE_V1_2, VideoAutoencoderPipeline):
            for path in (tmp_path, tmp_path / "model.safetensors"):
                assert kind(from_pretrained=str(path)).micro_frame_size == size
            assert kind(from_pretrained=str(tmp_path), micro_frame_size=5).micro_frame_size == 5
            assert kind(from_pretrained=str(tmp_path), micro_frame_size=None).micro_frame_size is None
    (tmp_path / "config.json").unlink()
    assert OpenSoraVAE_V1_2(from_pretrained=str(tmp_path), **PARTS).micro_frame_size == 17
    assert VideoAutoencoderPipeline(from_pretrained=str(tmp_path), **PARTS).micro_frame_size is None
    for wrong in (0, "17", "whole"):
        with pytest.raises(UserError, match="use a positive number, None or 'saved'"):
            OpenSoraVAE_V1_2(micro_frame_size=wrong, **PARTS)


def test_any_image_vae_of_diffusers_is_described_without_its_weights(tmp_path):
    parts = {**PARTS, "vae_2d": VAES["VideoAutoencoderKLTemporalDecoder"]}
    vae = build("VideoAutoencoderPipeline", **parts)
    vae.spatial_vae.set_latent_statistics(scaling_factor=0.4)
    vae.save_pretrained(tmp_path)
    loaded = VideoAutoencoderPipeline(from_pretrained=str(tmp_path))
    assert loaded.fingerprint() == vae.fingerprint()


def test_the_published_config_keeps_settings_of_the_image_vae(tmp_path, monkeypatch):
    """It names a hub id, whose weights the file has."""
    monkeypatch.setattr("opensora.models.vae.opensora_v1_2.IMAGE_ARCHITECTURE", PARTS["vae_2d"]["architecture"])
    build("OpenSoraVAE_V1_2").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    hub = "PixArt-alpha/pixart_sigma_sdxlvae_T5_diffusers"
    config["vae_2d"] = {"type": "VideoAutoencoderKL", "from_pretrained": hub, "subfolder": "vae", "micro_batch_size": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert VideoAutoencoderPipeline(from_pretrained=str(tmp_path)).spatial_vae.micro_batch_size == 4
    vae = OpenSoraVAE_V1_2(from_pretrained=str(tmp_path), micro_batch_size=2, tile_size=32)
    assert (vae.spatial_vae.micro_batch_size, vae.spatial_vae.tile_size) == (2, 32)


def test_chunks_are_encoded_and_decoded_by_themselves():
    vae = build("OpenSoraVAE_V1_2", posterior="mode")
    x = video_of(vae, 21)
    z = vae.encode(x)
    assert z.shape[2] == 3 + 3 + 1
    assert_close(z, torch.cat([vae.encode(chunk) for chunk in x.split(9, dim=2)], dim=2), rtol=1e-4, atol=1e-5)
    decoded = [vae.decode(part, n) for part, n in zip(z.split([3, 3, 1], dim=2), (9, 9, 3), strict=True)]
    assert_close(vae.decode(z, 21), torch.cat(decoded, dim=2), rtol=1e-4, atol=1e-5)


def test_moments_are_those_of_the_image_latents_mean():
    vae = build("OpenSoraVAE_V1_2")
    x = video_of(vae, 9)
    images = vae.spatial_vae.sample(vae.spatial_vae.moments(x))
    mean = vae.spatial_vae.moments(x).chunk(2, dim=1)[0] * vae.spatial_vae.scaling_factor.view(1, -1, 1, 1, 1)
    assert_close(images, mean)
    assert_close(vae.moments(x), vae.temporal_vae.moments(images), rtol=1e-4, atol=1e-5)
    raw = vae.moments(x).chunk(2, dim=1)[0]
    vae.posterior = "mode"
    shift, scale = (torch.tensor(v).view(1, 4, 1, 1, 1) for v in ((-0.10, 0.34, 0.27, 0.98), (3.85, 2.32, 2.33, 3.06)))
    assert_close(vae.encode(x), (raw - shift) / scale)


def without_norms(vae: VAE_Temporal) -> VAE_Temporal:
    """Group normalisation looks at all frames; without it the network is causal."""
    for module in vae.modules():
        for name, child in list(module.named_children()):
            if isinstance(child, torch.nn.GroupNorm):
                setattr(module, name, torch.nn.Identity())
    return vae


def test_time_is_causal_and_zeros_go_in_front():
    vae = without_norms(build("VAE_Temporal_SD"))
    x = torch.rand(1, 4, 10, 4, 4, generator=generator(0))
    moments = vae.moments(x)  # 10 frames: two zeros in front, cells of frames (1-2), (3-6), (7-10)
    later = x.clone()
    later[:, :, 6:] += 1
    assert_close(vae.moments(later)[:, :, :2], moments[:, :, :2])
    assert not torch.allclose(vae.moments(later)[:, :, 2], moments[:, :, 2])
    padded = torch.cat([torch.zeros(1, 4, 2, 4, 4), x], dim=2)
    assert_close(vae.moments(padded), moments)
    z = torch.rand(1, 4, 3, 4, 4, generator=generator(1))
    assert_close(vae.decode(z, 10), vae.decode(z, 12)[:, :, 2:])
    changed = z.clone()
    changed[:, :, 2] += 1
    assert_close(vae.decode(changed, 12)[:, :, :8], vae.decode(z, 12)[:, :, :8])


def test_training_can_leave_the_image_vae_alone():
    vae = MODELS.build({"type": "OpenSoraVAE_V1_2", "freeze_vae_2d": True, **PARTS})
    assert not any(p.requires_grad for p in vae.spatial_vae.parameters())
    assert all(p.requires_grad for p in vae.temporal_vae.parameters())
    assert vae.last_layer is vae.temporal_vae.last_layer  # a discriminator's weight goes by its gradient
    assert vae.last_layer.requires_grad
    assert build("OpenSoraVAE_V1_2").requires_grad_(True).last_layer.shape[0] == 3
    with pytest.raises(UserError, match="cal_loss=True is not needed"):
        OpenSoraVAE_V1_2(cal_loss=True)


def test_tiles_and_micro_batches_are_the_image_vaes():
    vae = build("OpenSoraVAE_V1_2", tile_size=32, micro_batch_size=2)
    assert vae.spatial_vae.tile_size == 32
    assert vae.tile_size is None
    assert vae.spatial_vae.micro_batch_size == 2
    vae = build("OpenSoraVAE_V1_2", micro_batch_size=2, vae_2d={**PARTS["vae_2d"], "micro_batch_size": 3})
    assert vae.spatial_vae.micro_batch_size == 3  # set for the image VAE itself
    assert build("OpenSoraVAE_V1_2").spatial_vae.micro_batch_size == 4


@pytest.mark.parametrize(
    ("own", "micro_bs", "seen"),
    [(None, None, [16, 2]), (4, None, [4, 4, 4, 4, 2]), (4, 7, [7, 7, 4]), (None, 7, [7, 7, 4])],
)
@pytest.mark.parametrize("name", ["VideoAutoencoderPipeline", "OpenSoraVAE_V1_2"])
def test_frames_of_a_video_go_through_in_micro_batches(name, own, micro_bs, seen):
    vae = build(name, vae_2d={**PARTS["vae_2d"], "micro_batch_size": own})
    x = video_of(vae, 18)
    expected = vae.moments(x)
    sizes: list[int] = []
    vae.spatial_vae.autoencoder.encoder.register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0])))
    assert_close(vae.sliced_moments(x, micro_bs), expected, rtol=1e-4, atol=1e-5)
    assert sizes == 2 * seen  # video by video
    assert (vae.micro_batch_size, vae.spatial_vae.micro_batch_size, vae.temporal_vae.micro_batch_size) == (
        None,
        own,
        None,
    )


def test_levels_and_halvings_must_fit():
    with pytest.raises(UserError, match="needs one entry less"):
        VAE_Temporal(temporal_downsample=(True,))
