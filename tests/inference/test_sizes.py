"""From names to frames, height and width."""

import json
import logging

import pytest

from opensora.config.load import InferenceConfig, TrainConfig, config_from_dict, parse_config, to_dict
from opensora.datasets.buckets.bucket import FRAME_ALIASES, Buckets, move_to_legal_sizes
from opensora.inference.build import inference_config
from opensora.inference.sizes import (
    VideoSize,
    legal_dataset,
    named_length,
    take_whole_patches,
    trained_sizes,
    video_size,
    warn_of_conditioning_frames,
    warn_outside_training,
)
from opensora.models.vae.base import VideoVAE
from opensora.utils.errors import UserError
from tests.models.vaes import build

PARTS = {
    "model": {"type": "STDiT"},
    "vae": {"type": "VideoAutoencoderKL"},
    "text_encoder": {"type": "t5"},
    "scheduler": {"type": "iddpm"},
}


def config(**fields):
    fields = {"num_frames": 16, "fps": 24, "image_size": (32, 48), **fields}
    return config_from_dict(InferenceConfig, {**PARTS, **{k: v for k, v in fields.items() if v is not None}})


@pytest.fixture(scope="module")
def frame_wise():
    return build("VideoAutoencoderKL")  # 4 pixels in a cell


@pytest.fixture(scope="module")
def in_chunks():
    return build("OpenSoraVAE_V1_2", micro_frame_size=17)


@pytest.fixture(scope="module")
def causal():
    return build("KLWan")  # 4 k + 1 frames


def test_numbers_are_taken_as_they_are(frame_wise):
    assert video_size(config(), frame_wise) == VideoSize(16, (32, 48), 24.0, 24.0)
    assert video_size(config(frame_interval=3), frame_wise).save_fps == 8
    assert video_size(config(frame_interval=3, save_fps=23.976), frame_wise).save_fps == 23.976
    assert video_size(config(num_frames="51"), frame_wise).num_frames == 51
    image = video_size(config(num_frames=1), frame_wise)
    assert (image.model_fps, image.image_size) == (120, (32, 48))  # what images had in training


@pytest.mark.parametrize(("name", "frames"), FRAME_ALIASES.items())
def test_the_names_of_open_sora_1_2(in_chunks, name, frames):
    """With its VAE and its 24 frames a second."""
    assert named_length(name, in_chunks, 24) == frames


@pytest.mark.parametrize(
    ("name", "fps", "every_frame", "chunks", "four_k_1"),
    [
        ("1s", 24, 24, 34, 25),
        ("2s", 8, 16, 17, 17),
        ("1x", 8, 16, 17, 17),
        ("2s", 12, 24, 34, 25),
        ("2s", 23.976, 48, 51, 49),
        ("3s", 24, 72, 85, 73),
        ("0.5s", 24, 12, 17, 13),
        ("0.01s", 24, 1, 17, 1),
        ("2.5x", 8, 40, 51, 41),
        ("4s", 16, 64, 68, 65),
        ("16", 24, 16, 16, 16),
    ],
)
def test_names_with_other_rates_and_vaes(frame_wise, in_chunks, causal, name, fps, every_frame, chunks, four_k_1):
    lengths = [named_length(name, vae, fps) for vae in (frame_wise, in_chunks, causal)]
    assert lengths == [every_frame, chunks, four_k_1]


@pytest.mark.parametrize(
    "name", ["", "s", "x", "4 s", "4m", "-4s", "4S", "1e3s", "4.s", ".5s", "4s4", "nan", "٤s", "9" * 20, "0s", "0"]
)
def test_what_is_no_length(frame_wise, name):
    with pytest.raises(UserError, match=rf"num_frames='{name}'"):
        named_length(name, frame_wise, 24)


def test_durations(frame_wise, causal, caplog):
    caplog.set_level(logging.INFO)
    assert video_size(config(num_frames=None, duration=2.0), frame_wise).num_frames == 48
    assert video_size(config(num_frames=None, duration=2.0, frame_interval=3), frame_wise).num_frames == 16
    assert video_size(config(num_frames=None, duration=2.0, save_fps=30), frame_wise).num_frames == 60
    assert video_size(config(num_frames=None, duration=0.001), frame_wise).num_frames == 1
    caplog.clear()
    assert video_size(config(num_frames=None, duration=2.1, image_size=(32, 64)), causal).num_frames == 49  # 50 is none
    assert "duration=2.1: 49 frames, 2.04 seconds at 24 frames a second" in caplog.text


@pytest.mark.parametrize(
    ("resolution", "ratio", "order", "size", "shape"),
    [
        ("480p", "9:16", "height:width", (480, 856), "landscape, moved from 480x854 to multiples of 8"),
        ("480p", "16:9", "height:width", (856, 480), "portrait"),
        ("480p", "9:16", "width:height", (856, 480), "portrait"),
        ("480p", "16:9", "width:height", (480, 856), "landscape"),
        ("480p", "0.56", "height:width", (480, 856), "landscape"),
        ("720p", "9:16", "height:width", (720, 1280), "(height x width), landscape."),
        ("512", "1:1", "height:width", (512, 512), "square"),  # a lookup that failed in Open-Sora 1.2
        ("512", "9:16", "height:width", (384, 672), "landscape"),
        ("64px", "1:1", "height:width", (64, 64), "square"),
        ("240x424", None, "height:width", (240, 424), "landscape"),
        ("33x50", None, "height:width", (32, 48), "moved from 33x50"),
    ],
)
def test_names_of_sizes(frame_wise, caplog, resolution, ratio, order, size, shape):
    caplog.set_level(logging.INFO)
    order = {} if ratio is None or ":" not in ratio else {"aspect_ratio_order": order}
    cfg = config(image_size=None, resolution=resolution, aspect_ratio=ratio, **order)
    assert video_size(cfg, frame_wise).image_size == size
    assert shape in caplog.text
    assert f"{size[0]}x{size[1]} pixels (height x width)" in caplog.text


def test_named_sizes_are_multiples_of_vae_and_patch(causal):
    """The VAE's 4 or 8 pixels and the model's patch; height and width may differ."""
    cfg = config(num_frames=17, image_size=None, resolution="480p", aspect_ratio="9:16")
    step = causal.strides[1]
    for patch in ((1, 2, 2), (1, 4, 2), (1, 1, 1)):
        size = video_size(cfg, causal, patch).image_size
        assert all(side % (step * max(patch)) == 0 for side in size)
        assert abs(size[0] - 480) <= step * max(patch) / 2


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"image_size": None, "resolution": "481p", "aspect_ratio": "1:1"}, "'481p' is unknown"),
        ({"image_size": None, "resolution": "480p"}, "comes in several shapes: set aspect_ratio"),
        ({"image_size": None, "resolution": "480p", "aspect_ratio": "wide"}, "aspect ratio 'wide'"),
        ({"image_size": None, "resolution": "480p", "aspect_ratio": "1:9"}, "no shape near '1:9'"),
    ],
)
def test_sizes_that_there_are_not(frame_wise, fields, message):
    with pytest.raises(UserError, match=message):
        video_size(config(**fields), frame_wise)


def test_sizes_and_lengths_that_the_vae_does_not_take_are_moved(frame_wise, causal, caplog):
    """Open-Sora's own samples are 240x426; its VAEs drop the rest."""
    caplog.set_level(logging.INFO)
    assert video_size(config(image_size=(240, 426)), frame_wise).image_size == (240, 424)
    assert "image_size 240x426 (height x width): the VAE takes no such size, moved to 240x424" in caplog.text
    caplog.clear()
    assert video_size(config(image_size=(30, 46), num_frames=18), causal)[:2] == (17, (32, 48))
    assert "num_frames=18: the VAE makes no such video (it takes 4k + 1 frames), moved to 17." in caplog.text
    caplog.clear()
    assert video_size(config(num_frames=17), causal)[:2] == (17, (32, 48))
    assert not caplog.records


def test_sizes_of_wan_are_whole_patches_and_lengths_are_checked_before_it_loads():
    vae = build("KLWan")
    clips = {"type": "VideoTextDataset", "num_frames": 5, "image_size": (40, 56)}
    take_whole_patches(vae, {"type": "STDiT-XL/2"})  # pads what it cannot take
    side = vae.strides[1]
    assert vae.legal_size((5, 3 * side, 5 * side)) == (5, 3 * side, 5 * side)
    take_whole_patches(vae, {"type": "Wan2.2-TI2V-5B"})
    assert legal_dataset({**clips, "image_size": (3 * side, 5 * side)}, vae)["image_size"] == (4 * side, 4 * side)
    buckets = Buckets({f"{3 * side}x{5 * side}": {5: (1.0, 1)}})
    move_to_legal_sizes(buckets, vae)
    assert (buckets[0].height, buckets[0].width) == (4 * side, 4 * side)
    with pytest.raises(UserError, match=f"sizes are multiples of {2 * side}"):
        vae.latent_size((5, 3 * side, 4 * side))
    with pytest.raises(UserError, match=r"cannot encode 6 frames: it takes 4k \+ 1 frames; the nearest is 5"):
        legal_dataset({**clips, "num_frames": 6}, vae)


def test_a_dataset_reads_clips_of_a_size_that_the_vae_takes(frame_wise):
    component = {"type": "VideoTextDataset", "num_frames": 3, "image_size": (30, 46)}
    assert legal_dataset(component, frame_wise) == {**component, "image_size": (32, 48)}
    stored = VideoVAE()  # as that of a training from stored latents: it has a scale, but no network
    assert legal_dataset(component, stored) == component
    assert legal_dataset({"type": "VariableVideoTextDataset"}, frame_wise) == {"type": "VariableVideoTextDataset"}


def test_everything_wrong_with_size_and_references_is_reported_at_once():
    with pytest.raises(UserError) as caught:
        config(
            num_frames="4 s",
            duration=3.0,
            resolution="480p",
            multi_resolution="STDiT2",
            image="a.png",
            extend="b.mp4",
            mask_strategy=["0"],
        )
    for message in (
        "num_frames='4 s' and duration=3.0 say the same; keep one",
        "image_size=(32, 48) and resolution='480p' say the same",
        "num_frames='4 s': expected a number, or seconds",
        "multi_resolution='STDiT2' does not fit model.type='STDiT'",
        "image, extend say different things of the same frames; keep one",
        "mask_strategy has no effect with image",
    ):
        assert message in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_frames": None}, "num_frames is missing; set it, or duration"),
        ({"image_size": None}, "image_size is missing; set it, or resolution"),
        ({"num_frames": 0}, "num_frames=0: must be at least 1"),
        ({"last_image": "a", "edit": "b"}, "edit, last_image say different things"),
        ({"last_image": "a", "reference_path": ["b"]}, "reference_path, last_image say different things"),
    ],
)
def test_settings_that_are_missing_or_contradict(fields, message):
    with pytest.raises(UserError, match=message):
        config(**{"num_frames": 16, "image_size": (32, 48), **fields})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"aspect_ratio": "1:1"}, "aspect_ratio='1:1' has no effect without resolution"),
        ({"aspect_ratio_order": "width:height"}, "aspect_ratio_order='width:height' has no effect without"),
        ({"text_encoder": {"type": "classes"}, "aes": 6}, "aes=6 has no effect on classes"),
        ({"edit_ratio": 0.3}, "edit_ratio=0.3 has no effect without edit"),
        ({"condition_frame_length": 5}, "condition_frame_length=5 has no effect with loop=1"),
    ],
)
def test_settings_without_effect_are_noted(caplog, fields, message):
    config(**fields)
    assert message in caplog.text
    caplog.clear()
    config(**fields, verbose=0)
    assert not caplog.records


@pytest.mark.parametrize(
    ("name", "model"),
    [("PixArtMS", "PixArtMS-XL/2"), (True, "PixArtMS-XL/2"), ("STDiT2", "STDiT2-XL/2"), ("OpenSora", "STDiT3-XL/2")],
)
def test_models_conditioned_on_the_size(name, model):
    assert config(multi_resolution=name, model={"type": model}).multi_resolution == name


# ------------------------------------------------------------------------------------------------ the command line


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", (16, None, (32, 48), None, None)),
        ("--duration 3", (None, 3.0, (32, 48), None, None)),
        ("--num-frames 4s", ("4s", None, (32, 48), None, None)),
        ("--num-frames 51", (51, None, (32, 48), None, None)),
        ("--resolution 480p --aspect-ratio 9:16", (16, None, None, "480p", "9:16")),
    ],
)
def test_the_command_line_takes_the_place_of_what_the_file_says_otherwise(tmp_path, line, expected):
    file = tmp_path / "c.py"
    file.write_text(
        "".join(f"{k} = {v!r}\n" for k, v in {**PARTS, "num_frames": 16, "fps": 24, "image_size": (32, 48)}.items())
    )
    cfg = parse_config(InferenceConfig, argv=[str(file), *line.split()])
    assert (cfg.num_frames, cfg.duration, cfg.image_size, cfg.resolution, cfg.aspect_ratio) == expected
    assert config_from_dict(InferenceConfig, json.loads(json.dumps(to_dict(cfg)))) == cfg


def test_the_other_way_round(tmp_path):
    file = tmp_path / "c.py"
    fields = {**PARTS, "duration": 2.0, "fps": 24, "resolution": "480p", "aspect_ratio": "9:16"}
    file.write_text("".join(f"{k} = {v!r}\n" for k, v in fields.items()))
    cfg = parse_config(InferenceConfig, argv=[str(file), "--num-frames", "8", "--image-size", "32", "32"])
    assert (cfg.num_frames, cfg.duration, cfg.image_size, cfg.resolution, cfg.aspect_ratio) == (
        8,
        None,
        (32, 32),
        None,
        None,
    )
    with pytest.raises(UserError, match="say the same; keep one"):
        parse_config(InferenceConfig, argv=[str(file), "--num-frames", "8", "--duration", "2"])


def test_changes_from_python_do_the_same():
    cfg = inference_config("configs/quickstart/inference.py", {"resolution": "96x96", "duration": 2.0})
    assert (cfg.num_frames, cfg.duration, cfg.image_size, cfg.resolution) == (None, 2.0, None, "96x96")


# ------------------------------------------------------------------------------------------------ trained sizes


def checkpoint(folder, **fields):
    trained = config_from_dict(TrainConfig, {**PARTS, "data_path": "clips.csv", **fields})
    folder.mkdir()
    (folder / "manifest.json").write_text(json.dumps({"step": 1, "config": to_dict(trained)}))
    return str(folder)


def test_a_checkpoint_of_one_size(tmp_path, caplog):
    path = checkpoint(tmp_path / "epoch0-global_step1", num_frames=16, image_size=(256, 256))
    assert trained_sizes(path) == trained_sizes(f"{path}/model") == {(16, 256, 256)}
    warn_outside_training(VideoSize(16, (256, 256), 8, 8), path)
    assert not caplog.records
    warn_outside_training(VideoSize(16, (252, 260), 8, 8), path)  # as a VAE moves a size, in training too
    assert not caplog.records
    warn_outside_training(VideoSize(16, (248, 256), 8, 8), path)
    assert "16 frames of 248x256 is no size that" in caplog.text
    warn_outside_training(VideoSize(32, (256, 256), 8, 8), path)
    assert "32 frames of 256x256 is no size that" in caplog.text
    assert "The nearest is 16 frames of 256x256, the only size" in caplog.text


def test_a_checkpoint_of_buckets(tmp_path, caplog):
    buckets = {"240x424": {1: (1.0, 4), "1x": (1.0, 2), 102: (0.0, None)}, "96px": {16: (0.5, 8)}}
    path = checkpoint(
        tmp_path / "c", bucket_config=buckets, dataset={"type": "VariableVideoTextDataset", "size_multiple": 32}
    )
    sizes = trained_sizes(path)
    assert {(1, 240, 424), (51, 240, 424), (16, 96, 96)} < sizes
    assert {num_frames for num_frames, _, _ in sizes} == {1, 16, 51}
    assert all(height % 32 == 0 for num_frames, height, _ in sizes if num_frames == 16)
    warn_outside_training(VideoSize(51, (240, 424), 24, 24), path)
    assert not caplog.records
    warn_outside_training(VideoSize(51, (480, 848), 24, 24), path)
    assert "The nearest is 51 frames of 240x424, one of" in caplog.text


def test_what_is_not_known_is_not_warned_of(tmp_path, caplog):
    (tmp_path / "weights.pth").touch()
    for path in (None, str(tmp_path / "weights.pth"), "PixArt/none", "STDiT"):
        assert trained_sizes(path) == set()
        warn_outside_training(VideoSize(16, (32, 32), 8, 8), path)
    (tmp_path / "manifest.json").write_text('{"step": 3}')
    assert trained_sizes(str(tmp_path)) == set()
    assert trained_sizes(checkpoint(tmp_path / "records", dataset={"type": "RecordVideoTextDataset"})) == set()
    assert not caplog.records


@pytest.mark.parametrize(
    ("config", "model", "said"),
    [
        ({"mask_ratios": None}, "STDiT3-XL/2", True),
        ({"mask_ratios": {"identity": 0.7, "image_head": 0.3}}, "STDiT3-XL/2", False),
        ({"mask_ratios": None}, "NOVA-d48w768", False),
        ({}, "STDiT3-XL/2", False),  # of a version that did not know them
    ],
)
def test_frames_are_kept_by_a_model_that_has_never_seen_conditioning_frames(tmp_path, caplog, config, model, said):
    (tmp_path / "manifest.json").write_text(json.dumps({"config": config}))
    warn_of_conditioning_frames(str(tmp_path), model)
    assert ("was trained without mask_ratios" in caplog.text) == said
    warn_of_conditioning_frames(None, model)  # weights from elsewhere
