"""Images and videos as references: size, length, rate, and what the video takes from them."""

import logging
from dataclasses import replace
from fractions import Fraction

import av
import numpy as np
import pytest
import torch
from PIL import Image

from opensora.config.load import InferenceConfig, config_from_dict
from opensora.inference.mask_strategy import FrameCondition, apply
from opensora.inference.prompts import load_items
from opensora.inference.references import (
    NO_CONDITIONING,
    alignment,
    check_files_exist,
    conditioning,
    edit,
    encode_references,
    extension,
    first_and_last,
    read_reference,
)
from opensora.utils.errors import UserError
from tests.models.vaes import build

SIZE = (32, 48)
CONFIG = config_from_dict(
    InferenceConfig,
    {
        "num_frames": 51,
        "fps": 24,
        "image_size": SIZE,
        "prompt": ["a lake"],
        "model": {"type": "STDiT"},
        "vae": {"type": "VideoAutoencoderKL"},
        "text_encoder": {"type": "t5"},
        "scheduler": {"type": "iddpm"},
    },
)


@pytest.fixture(scope="module")
def frame_wise():
    return build("VideoAutoencoderKL")


@pytest.fixture(scope="module")
def in_chunks():
    """17 frames are a chunk of 5 latent frames, as in Open-Sora 1.2."""
    return build("OpenSoraVAE_V1_2", micro_frame_size=17)


@pytest.fixture(scope="module")
def causal():
    """4 k + 1 frames, one chunk."""
    return build("KLWan")


@pytest.fixture
def video(tmp_path):
    """`video(count, rate)`: an mp4 whose frame i has grey level 4 i + 8."""

    def write(count, rate=24, name="clip.mp4", times=None):
        path = tmp_path / name
        with av.open(str(path), "w") as container:
            stream = container.add_stream("libx264", rate=rate, options={"qp": "4"})
            stream.height, stream.width, stream.pix_fmt = 48, 64, "yuv420p"
            stream.codec_context.thread_count = 1
            for i in range(count):
                frame = av.VideoFrame.from_ndarray(np.full((48, 64, 3), 4 * i + 8, np.uint8), format="rgb24")
                frame.pts, frame.time_base = (times or range(count))[i], 1 / Fraction(rate)
                container.mux(stream.encode(frame))
            container.mux(stream.encode())
        return path

    return write


@pytest.fixture
def image(tmp_path):
    """`image(name, grey)`: a PNG of one grey level."""

    def write(name="first.png", grey=128, size=(100, 60)):
        path = tmp_path / name
        Image.new("RGB", size, (grey,) * 3).save(path)
        return path

    return write


def numbers(x):
    """The numbers of the frames of `video`."""
    return [round(((float(frame.mean()) + 1) * 127.5 - 8) / 4) for frame in x.unbind(1)]


def given(vae, num_frames=51, **changes):
    cfg = replace(CONFIG, **{"num_frames": num_frames, **{k: str(v) if k in PATHS else v for k, v in changes.items()}})
    (item,) = load_items(cfg)
    return conditioning(cfg, item, vae, num_frames, SIZE)


PATHS = ("image", "last_image", "extend", "edit")


def test_images_are_covered_and_cropped_in_the_middle(tmp_path, frame_wise):
    pixels = np.zeros((60, 200, 3), np.uint8)
    pixels[:, 90:110] = 255  # at 32 x 107 columns 48 to 58.7; 29 are cut off on the left
    Image.fromarray(pixels).save(tmp_path / "wide.png")
    x = read_reference(tmp_path / "wide.png", frame_wise, SIZE)
    assert x.shape == (3, 1, *SIZE)
    assert x.dtype == torch.float32
    bright = (x[0, 0] > 0).float().mean(dim=0)
    assert bright.nonzero().flatten().tolist() == list(range(19, 30))
    assert (x.min(), x.max()) == (-1, 1)


def test_a_video_keeps_its_frames(video, frame_wise):
    x = read_reference(video(40), frame_wise, SIZE)
    assert x.shape == (3, 40, *SIZE)
    assert numbers(x) == list(range(40))  # more than are decoded at a time
    assert numbers(read_reference(video(40), frame_wise, SIZE, 5)) == [0, 1, 2, 3, 4]
    assert numbers(read_reference(video(40), frame_wise, SIZE, 5, end=True)) == [35, 36, 37, 38, 39]
    assert numbers(read_reference(video(4), frame_wise, SIZE, 99)) == [0, 1, 2, 3]


def test_lengths_are_the_vaes_and_what_is_left_out_is_reported(video, image, causal, caplog):
    caplog.set_level(logging.INFO)
    assert numbers(read_reference(video(8), causal, SIZE)) == [0, 1, 2, 3, 4]
    assert "5 of 8 frames are used; it takes 4k + 1 frames" in caplog.text
    assert numbers(read_reference(video(8), causal, SIZE, end=True)) == [3, 4, 5, 6, 7]
    whole_groups = build("KLAllegro")  # 4 k frames: an image is repeated
    assert read_reference(image(), whole_groups, SIZE).shape[1] == whole_groups.legal_num_frames(1) > 1
    short = read_reference(video(2), whole_groups, SIZE)
    assert numbers(short) == [0, 1, *[1] * (short.shape[1] - 2)]


@pytest.mark.parametrize(
    ("rate", "end", "expected"),
    [
        (24, False, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]),
        (8, False, [0, 3, 6, 9]),
        (8, True, [2, 5, 8, 11]),
        (12, True, [1, 3, 5, 7, 9, 11]),
        (16, False, [0, 1, 3, 4, 6, 7, 9, 10]),
        (48, False, [i // 2 for i in range(23)]),
    ],
)
def test_frames_at_the_rate_of_the_result(video, frame_wise, caplog, rate, end, expected):
    assert numbers(read_reference(video(12), frame_wise, SIZE, rate=rate, end=end)) == expected
    assert ("are repeated" in caplog.text) is (rate == 48)


def test_a_video_of_variable_rate_at_a_steady_one(video, frame_wise):
    path = video(6, times=[0, 1, 2, 10, 11, 12])
    assert numbers(read_reference(path, frame_wise, SIZE, rate=12)) == [0, 2, 2, 2, 2, 3, 5]


def test_files_that_cannot_be_used(tmp_path, video, frame_wise, monkeypatch):
    with pytest.raises(UserError, match=r"none\.png cannot be read"):
        read_reference(tmp_path / "none.png", frame_wise, SIZE)
    (tmp_path / "text.mp4").write_text("404")
    with pytest.raises(UserError, match=r"text\.mp4"):
        read_reference(tmp_path / "text.mp4", frame_wise, SIZE)
    monkeypatch.setattr("opensora.inference.references.MAX_FRAMES", 10)
    with pytest.raises(UserError, match="has 12 frames, more than 10: cut out the part"):
        read_reference(video(12), frame_wise, SIZE)
    assert read_reference(video(12), frame_wise, SIZE, 10).shape[1] == 10


# ------------------------------------------------------------------------------------------------ what a video takes


def test_nothing_is_given(frame_wise):
    assert given(frame_wise) == NO_CONDITIONING
    assert first_and_last(None) == NO_CONDITIONING


def test_a_first_image_and_a_last_one(image, frame_wise, in_chunks):
    first, last = image("a.png", 50), image("b.png", 200)
    for vae in (frame_wise, in_chunks):
        both = given(vae, image=first, last_image=last)
        assert both.conditions == [FrameCondition(), FrameCondition(reference=1, target_start=-1)]
        assert [round((float(x.mean()) + 1) * 127.5) for x in both.references] == [50, 200]
    assert given(frame_wise, image=first).conditions == [FrameCondition()]
    end = given(frame_wise, last_image=last)
    assert end.conditions == [FrameCondition(target_start=-1)]
    assert len(end.references) == 1


@pytest.mark.parametrize(
    ("name", "num_frames", "length", "frames", "latent"),
    [
        ("VideoAutoencoderKL", 16, None, 4, 4),  # a quarter, as in Open-Sora 1.1
        ("VideoAutoencoderKL", 16, 6, 6, 6),
        ("OpenSoraVAE_V1_2", 51, None, 17, 5),  # a chunk, as in 1.2
        ("OpenSoraVAE_V1_2", 102, 10, 34, 10),
        ("KLWan", 33, None, 5, 2),
        ("KLWan", 33, 3, 9, 3),
    ],
)
def test_extending_a_video_by_its_end(video, name, num_frames, length, frames, latent):
    vae = build(name, **({"micro_frame_size": 17} if name == "OpenSoraVAE_V1_2" else {}))
    extended = given(vae, num_frames, extend=video(40), condition_frame_length=length)
    assert extended.conditions == [FrameCondition(length=latent)]
    assert numbers(extended.references[0]) == list(range(40))[-frames:]
    assert vae.latent_frames(frames) == latent


def test_extending_at_the_rate_of_the_result_and_towards_an_image(video, image, frame_wise):
    extended = given(frame_wise, 16, extend=video(40), last_image=image("end.png", 200), frame_interval=3)
    assert numbers(extended.references[0]) == [30, 33, 36, 39]
    assert extended.conditions == [FrameCondition(length=4), FrameCondition(reference=1, target_start=-1)]


def test_editing_a_video(video, in_chunks, frame_wise, caplog):
    edited = given(in_chunks, 34, edit=video(40), edit_ratio=0.3)
    assert edited.conditions == [FrameCondition(length=10, edit_ratio=0.3)]
    assert numbers(edited.references[0]) == list(range(34))
    assert not caplog.records
    short = given(frame_wise, 16, edit=video(10))
    assert short.conditions == [FrameCondition(length=10, edit_ratio=0.5)]
    assert "the video has 10 frames; the rest of 16 is made anew" in caplog.text
    assert edit(short.references[0], frame_wise, 10, 0.2).conditions == [FrameCondition(length=10, edit_ratio=0.2)]


def test_a_last_image_ends_the_last_of_several_segments(video, image, frame_wise, in_chunks):
    end = image("b.png", 200)
    for vae, num_frames in ((frame_wise, 16), (in_chunks, 51)):
        both = given(vae, num_frames, image=image(), last_image=end, loop=3)
        assert both.conditions == [FrameCondition(), FrameCondition(loop=2, reference=1, target_start=-1)]
        alone = given(vae, num_frames, last_image=end, loop=3)
        assert alone.conditions == [FrameCondition(loop=2, target_start=-1)]
        extended = given(vae, num_frames, extend=video(40), last_image=end, loop=2)
        assert extended.conditions[1] == FrameCondition(loop=1, reference=1, target_start=-1)


def test_several_segments_have_no_video_to_be_edited(video, frame_wise):
    with pytest.raises(UserError, match=r"edit has no effect on loops 1 to 2.*--loop 1"):
        given(frame_wise, 16, edit=video(40), loop=3)


def test_what_a_segment_takes_over_is_no_frame_for_a_reference(image, frame_wise, in_chunks, caplog):
    path = [str(image())]
    for vae, num_frames in ((frame_wise, 16), (in_chunks, 51)):
        with pytest.raises(
            UserError, match=r"prompt 0: mask_strategy: loop=1,ref=0,.* has no effect, for loop 1 begins with"
        ):
            given(vae, num_frames, reference_path=path, mask_strategy=["1,0,0,0,1"], loop=2)
        given(vae, num_frames, reference_path=path, mask_strategy=["1,0,0,5,1"], loop=2)
    given(frame_wise, 16, reference_path=path, mask_strategy=["1,0,0,5,1"], loop=2, condition_frame_length=5)
    with pytest.raises(UserError, match="begins with 6 latent frames"):
        given(frame_wise, 16, reference_path=path, mask_strategy=["1,0,0,5,1"], loop=2, condition_frame_length=6)
    assert not caplog.records


def test_references_of_a_prompt(video, image, frame_wise):
    files = f"{image('a.png', 50)};{video(20)}"
    found = given(frame_wise, 16, reference_path=[files], mask_strategy=["0;0,1,-4,-4,4"])
    assert found.conditions == [FrameCondition(), FrameCondition(reference=1, ref_start=-4, target_start=-4, length=4)]
    assert [x.shape[1] for x in found.references] == [1, 20]
    old = given(
        frame_wise, 16, reference_path=[files], mask_strategy=["0;1,0,-4,4,-4"], mask_strategy_format="five-fields"
    )
    assert old.conditions == found.conditions


@pytest.mark.parametrize(
    ("num_frames", "changes", "message"),
    [
        (
            16,
            {"reference_path": ["PNG;PNG"], "mask_strategy": ["0"]},
            "prompt 0: mask_strategy: reference 1 has no effect",
        ),
        (16, {"reference_path": ["PNG"]}, "prompt 0: mask_strategy: reference 0 has no effect"),
        (16, {"reference_path": ["PNG"], "mask_strategy": ["0,1"]}, "reference=1 does not exist; there is 1"),
        (16, {"reference_path": ["PNG"], "mask_strategy": ["0,0,1"]}, "ref_start=1 is outside reference 0"),
        (16, {"reference_path": ["PNG"], "mask_strategy": ["0,0,0,16"]}, "target_start=16 is outside the video"),
        (1, {"image": "PNG"}, "prompt 0: --image: all 1 latent frames of the video are kept"),
        (
            16,
            {"prompt": ['x{"reference_path": "PNG", "mask_strategy": "0"}'], "image": "PNG"},
            "reference_path and --image both",
        ),
        (16, {"extend": "PNG", "condition_frame_length": 16}, "cannot share 16 latent frames"),
    ],
)
def test_what_does_not_fit_together(image, frame_wise, num_frames, changes, message):
    path = str(image())

    def named(value):
        return [named(v) for v in value] if isinstance(value, list) else value.replace("PNG", path)

    changes = {k: v if isinstance(v, int) else named(v) for k, v in changes.items()}
    with pytest.raises(UserError, match=message):
        given(frame_wise, num_frames, **changes)


def test_chunks(frame_wise, in_chunks, causal):
    assert [alignment(vae) for vae in (frame_wise, in_chunks, causal)] == [1, 5, 1]
    assert alignment(in_chunks, 1) == 1


def test_latents_depend_on_seed_prompt_and_index_alone(video, image, in_chunks):
    references = [read_reference(video(17), in_chunks, SIZE), read_reference(image(), in_chunks, SIZE)]
    latents = encode_references(in_chunks, references, 1, 0)
    assert [z.shape[1] for z in latents] == [5, 1]
    again = encode_references(in_chunks, references[:1], 1, 0)
    assert torch.equal(latents[0], again[0])
    for seed, index in ((2, 0), (1, 1)):
        assert not torch.equal(latents[0], encode_references(in_chunks, references, seed, index)[0])


def test_kept_frames_come_back_as_the_vae_gives_them(video, in_chunks):
    """The decoded beginning of an extension equals the reference's own reconstruction."""
    vae = in_chunks
    extended = given(vae, 51, extend=video(40))
    latents = encode_references(vae, extended.references, 1, 0)
    z = torch.randn(1, vae.out_channels, *vae.latent_size((51, *SIZE)), generator=torch.Generator().manual_seed(0))
    placed = apply([extended.conditions], [latents], z, align=alignment(vae))
    assert placed.mask.tolist() == [[False] * 5 + [True] * 10]
    with torch.no_grad():
        whole, alone = vae.decode(placed.z, 51), vae.decode(latents[0][None], 17)
    torch.testing.assert_close(whole[:, :, :17], alone, atol=1e-4, rtol=1e-4)


def test_missing_files_are_named_before_anything_is_loaded(tmp_path):
    (tmp_path / "there.png").touch()
    prompts = [f'a{{"reference_path": "{tmp_path}/{name}.png", "mask_strategy": "0"}}' for name in ("there", "gone")]
    cfg = replace(CONFIG, prompt=[*prompts, 'b{"reference_path": "http://x.invalid/a.png", "mask_strategy": "0"}'])
    with pytest.raises(UserError) as caught:
        check_files_exist(cfg, load_items(cfg))
    assert str(caught.value) == f"prompt 1: reference_path: there is no file {tmp_path}/gone.png."
    with pytest.raises(UserError, match=r"^--last-image: there is no file nope.png.$"):
        check_files_exist(replace(CONFIG, last_image="nope.png"), load_items(CONFIG))


# ------------------------------------------------------------------------------------------------ chunks that are not whole


@pytest.fixture
def in_causal_chunks():
    """Without the group norms, which look at all frames of a chunk, a chunk's beginning is decoded as it would be alone."""
    vae = build("OpenSoraVAE_V1_2", micro_frame_size=17, posterior="mode")
    for module in list(vae.temporal_vae.modules()):
        for name, child in module.named_children():
            if isinstance(child, torch.nn.GroupNorm):
                setattr(module, name, torch.nn.Identity())
    return vae


def decoded(vae, start, num_frames):
    """[3, T, H, W]: what the references are decoded to in a video of noise; and each of them alone."""
    latents = encode_references(vae, start.references, 1, 0)
    z = torch.randn(
        1, vae.out_channels, *vae.latent_size((num_frames, *SIZE)), generator=torch.Generator().manual_seed(0)
    )
    placed = apply([start.conditions], [latents], z, align=alignment(vae))
    with torch.no_grad():
        alone = [vae.decode(x[None], ref.shape[1])[0] for x, ref in zip(latents, start.references, strict=True)]
        return vae.decode(placed.z, num_frames)[0], alone


@pytest.mark.parametrize(
    ("count", "num_frames", "kept"), [(10, 51, 9), (9, 51, 9), (16, 51, 13), (3, 51, 1), (17, 51, 17), (40, 17 * 8, 34)]
)
def test_the_end_of_a_short_clip_is_extended_without_a_shift(video, in_causal_chunks, caplog, count, num_frames, kept):
    caplog.set_level(logging.INFO)
    extended = given(in_causal_chunks, num_frames, extend=video(count))
    assert numbers(extended.references[0]) == list(range(count))[-kept:]
    assert extended.conditions == [FrameCondition(length=in_causal_chunks.latent_frames(kept))]
    whole, (alone,) = decoded(in_causal_chunks, extended, num_frames)
    torch.testing.assert_close(whole[:, :kept], alone, atol=1e-4, rtol=1e-4)
    assert ("frames in front are left out" in caplog.text) is (kept not in (count, 34))


@pytest.mark.parametrize(
    ("count", "num_frames", "kept"),
    [
        (40, 51, 39),  # two chunks, and five of six frames
        (20, 51, 18),
        (24, 25, 21),  # the video's last chunk has 8 frames, as many as fill two latent frames
        (25, 25, 25),
        (30, 25, 25),
        (21, 25, 21),
    ],
)
@pytest.mark.parametrize("how", ["edit", "reference_path"])
def test_a_clip_that_ends_with_a_part_of_a_chunk_is_shortened_to_what_fits(
    video, in_causal_chunks, caplog, how, count, num_frames, kept
):
    caplog.set_level(logging.INFO)
    vae, path = in_causal_chunks, video(count)
    start = (
        given(vae, num_frames, edit=path, edit_ratio=0.5)
        if how == "edit"
        else given(vae, num_frames, reference_path=[str(path)], mask_strategy=["0,0,0,0,99,0.5"])
    )
    assert numbers(start.references[0]) == list(range(kept))
    whole, (alone,) = decoded(vae, start, num_frames)
    torch.testing.assert_close(whole[:, :kept], alone, atol=1e-4, rtol=1e-4)
    if how == "reference_path":
        assert (f"{count - kept} are left out" in caplog.text) is (count != kept)


def test_an_image_at_a_last_chunk_that_is_filled_up_otherwise(image, in_causal_chunks, caplog):
    """The last 8 of 25 frames begin with a latent frame that stands for four, so that the image is shown four times."""
    caplog.set_level(logging.INFO)
    start = given(in_causal_chunks, 25, last_image=image())
    assert start.references[0].shape[1] == 4
    assert "--last_image: reference 0 has 1 frames, and the last is repeated: with 4" in caplog.text
    whole, (alone,) = decoded(in_causal_chunks, start, 25)
    torch.testing.assert_close(whole[:, 17:21], alone, atol=1e-4, rtol=1e-4)
    assert given(in_causal_chunks, 26, last_image=image()).references[0].shape[1] == 1


def test_one_chunk_that_is_filled_up_in_front(video):
    whole = build("OpenSoraVAE_V1_2", micro_frame_size=None)  # 51 frames: the first latent frame stands for three
    assert numbers(given(whole, 51, extend=video(40)).references[0]) == list(range(29, 40))
    assert numbers(given(whole, 51, edit=video(40)).references[0]) == list(range(39))
    assert numbers(given(whole, 51, edit=video(2)).references[0]) == [0, 1, 1]
    assert numbers(given(whole, 52, edit=video(40)).references[0]) == list(range(40))


def test_starts_from_the_end_are_those_of_the_whole_file(video, in_chunks):
    """4 frames in a last chunk of 8: where 7 of a reference's last chunk cannot fit, fewer latent frames are left."""
    start = given(in_chunks, 25, reference_path=[str(video(24))], mask_strategy=["0,0,-2,-2,2"])
    assert numbers(start.references[0]) == list(range(21))
    assert in_chunks.latent_frames(21) == 6 < in_chunks.latent_frames(24)
    assert start.conditions == [FrameCondition(ref_start=5, target_start=-2, length=2)]


def test_groups_that_need_a_reference_at_two_lengths(video, in_chunks):
    path, strategy = str(video(24)), "0,0,-2,0,2;0,0,-2,-2,2"  # into a whole chunk, and into one of 8 frames
    with pytest.raises(
        UserError, match=r"groups take 24 frames of one reference.*name its file twice in reference_path"
    ):
        given(in_chunks, 25, reference_path=[path], mask_strategy=[strategy])
    twice = given(in_chunks, 25, reference_path=[f"{path};{path}"], mask_strategy=["0,0,-2,0,2;0,1,-2,-2,2"])
    assert [x.shape[1] for x in twice.references] == [22, 21]
    fine = given(in_chunks, 25, reference_path=[path], mask_strategy=["0,0,0,0,5;0,0,-2,-2,2"])
    assert [x.shape[1] for x in fine.references] == [21]


def test_plain_functions_shorten_too(in_chunks):
    clip = torch.rand(3, 10, *SIZE)
    assert torch.equal(extension(clip, in_chunks).references[0], clip[:, 1:])
    assert torch.equal(extension(clip, in_chunks, num_frames=8).references[0], clip[:, 2:])
    assert torch.equal(edit(clip, in_chunks, 51, 0.5).references[0], clip[:, :9])
