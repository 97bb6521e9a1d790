"""Videos as the world has them: HDR, interlaced, of non-square pixels, unsteady, animated images, damaged in the middle."""

import struct
import zlib
from contextlib import suppress
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from PIL import Image

from opensora.datasets.datasets import VideoTextDataset
from opensora.datasets.sampler import SampleKey
from opensora.datasets.video.color import nits_to_pq, to_rgb
from opensora.datasets.video.files import BadFile, Decoding
from opensora.datasets.video.read_video import FrameRule, open_clip, probe, read_frames, read_indices
from opensora.datasets.video.timeline import _from_header, _from_packets, open_video
from opensora.utils.errors import UserError
from tests.datasets.video.videos import CLIPS, combs, frame_numbers, numbered_frames, write_interlaced

QUICK = {"preset": "ultrafast"}


# -------------------------------------------------------------------------------------------------------- HDR


def write_hdr(path: Path, levels: np.ndarray, transfer: int) -> Path:
    """Grey frames of these 10-bit code values in full range, tagged BT.2020."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream(
            "libx265", rate=25, options={"x265-params": "log-level=none:pools=1:bframes=0", **QUICK}
        )
        stream.height, stream.width, stream.pix_fmt = 64, 64, "yuv420p10le"
        context = stream.codec_context
        context.color_trc, context.color_primaries, context.colorspace, context.color_range = transfer, 9, 9, 2
        for i, level in enumerate(levels):
            planes = [np.full((64, 64), level), np.full((32, 32), 512), np.full((32, 32), 512)]
            frame = av.VideoFrame(64, 64, "yuv420p10le")
            for plane, values in zip(frame.planes, planes, strict=True):
                padded = np.zeros((plane.height, plane.line_size // 2), "<u2")
                padded[:, : plane.width] = values
                plane.update(padded.tobytes())
            frame.pts, frame.time_base = i, Fraction(1, 25)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def test_hdr_is_tone_mapped(tmp_path):
    nits = np.array([0.0, 26, 60, 203, 1000])
    path = write_hdr(tmp_path / "hdr.mp4", np.rint(1023 * nits_to_pq(nits)), 16)
    grey = [float(frame.float().mean()) for frame in read_frames(path, 0, 5)]
    expected = 255 * (nits[:3] / 203) ** (1 / 2.4)
    assert np.abs(grey[:3] - expected).max() < 2
    assert 220 < grey[3] < 240  # a white page is nearly white, and leaves room
    assert grey[4] > 253


@pytest.mark.parametrize(("transfer", "name"), [(16, "PQ"), (18, "HLG")])
def test_hdr_can_be_refused(tmp_path, transfer, name):
    path = write_hdr(tmp_path / "hdr.mkv", np.array([300, 300]), transfer)
    with pytest.raises(BadFile, match=rf"hdr.mkv is HDR \({name}\), and decode\['hdr'\] is 'refuse'; tone-map it"):
        read_frames(path, 0, 1, decoding=Decoding(hdr="refuse"))
    assert probe(path)[:3] == (2, 64, 64)  # a table can be made of it all the same


# -------------------------------------------------------------------------------------------------- interlaced


def test_interlaced_videos_are_deinterlaced(tmp_path):
    path = write_interlaced(tmp_path / "i.mpg")
    kept = read_frames(path, 0, 20, decoding=Decoding(interlaced="keep"))
    made = read_frames(path, 0, 20)
    assert made.shape == kept.shape
    assert combs(made) < 0.3 * combs(kept)
    # frame i is still frame i: the bar is where the first field has it
    for i in (3, 10, 19):
        middle = made[i, 32, :, 0].float()
        assert abs(float((middle * torch.arange(96)).sum() / middle.sum()) - (4 * i + 5.5)) < 1.5
    for start in (0, 1, 4, 5, 6, 11, 14):
        assert torch.equal(read_frames(path, start, 3, 2), made[start::2][:3])
    with pytest.raises(BadFile, match=r"i.mpg is interlaced, and decode\['interlaced'\] is 'refuse'"):
        read_frames(path, 0, 1, decoding=Decoding(interlaced="refuse"))


def test_progressive_videos_are_no_concern(write_video):
    path = write_video("p.mp4", numbered_frames(6))
    plain = read_frames(path, 1, 3)
    for interlaced in ("refuse", "keep"):
        assert torch.equal(read_frames(path, 1, 3, decoding=Decoding(interlaced=interlaced)), plain)


# ----------------------------------------------------------------------------------------------------- colours


def yuv_to_rgb(frame: av.VideoFrame) -> np.ndarray:
    """The equations of BT.601 in limited range, chroma bilinear and sited as in MPEG-2: [H, W, 3] float64."""

    def plane(i: int) -> np.ndarray:
        p = frame.planes[i]
        return np.frombuffer(p, np.uint8).reshape(p.height, p.line_size)[:, : p.width].astype(float)

    def full(chroma: np.ndarray) -> np.ndarray:
        y, x = np.arange(2 * chroma.shape[0]) / 2 - 0.25, np.arange(2 * chroma.shape[1]) / 2
        wide = np.stack([np.interp(x, np.arange(len(row)), row) for row in chroma])
        return np.stack([np.interp(y, np.arange(len(column)), column) for column in wide.T], axis=1)

    luma, cb, cr = (plane(0) - 16) / 219, (full(plane(1)) - 128) / 224, (full(plane(2)) - 128) / 224
    red, blue = luma + 1.402 * cr, luma + 1.772 * cb
    green = (luma - 0.299 * red - 0.114 * blue) / 0.587
    return np.clip(np.stack([red, green, blue], -1), 0, 1) * 255


def test_colours_are_those_of_the_equations():
    path = CLIPS / "bird_branch.mp4"
    with av.open(str(path)) as container:
        container.streams.video[0].codec_context.thread_count = 1
        frame = next(container.decode(video=0))
        assert frame.colorspace == 6
        expected = yuv_to_rgb(frame)
    exact = read_frames(path, 0, 1)[0].numpy() - expected
    fast = read_frames(path, 0, 1, decoding=Decoding(colors="fast"))[0].numpy() - expected
    assert np.abs(exact).max() < 1
    assert abs(exact.mean()) < 0.05
    assert 0.5 < np.abs(fast).mean() < 2


# ------------------------------------------------------------------------------------------------ pixel shapes


@pytest.mark.parametrize(("aspect", "size"), [
    (Fraction(128, 117), (48, 70)), (Fraction(64, 45), (48, 91)), (Fraction(8, 9), (54, 64)), (Fraction(1001, 1000), (48, 64)),
])  # fmt: skip
@pytest.mark.parametrize("name", ["a.mp4", "a.mkv"])
def test_pixels_become_square(write_video, name, aspect, size):
    path = write_video(name, numbered_frames(3), sample_aspect_ratio=aspect)
    assert read_frames(path, 0, 3).shape == (3, *size, 3)
    assert frame_numbers(read_frames(path, 0, 3)) == [0, 1, 2]
    assert (probe(path).height, probe(path).width) == size


# ------------------------------------------------------------------------------------------------ unsteady times


def test_a_video_of_variable_rate_at_a_steady_one(write_video):
    """Frames at 0, 1, 2, 10, 11, 12, ... thirtieths: what is shown at every fifth."""
    times = [0, 1, 2, 10, 11, 12, 13, 14, 40, 41, 42, 43]
    path = write_video("vfr.mp4", numbered_frames(12), times=times, rate=30, options={"g": "4"})
    rule = FrameRule(9, target_fps=6)  # 0, 5, 10, ... 40 thirtieths
    with open_clip(path) as clip:
        assert clip.seconds() == pytest.approx(np.array(times) / 30, abs=1e-3)
        assert rule.num_starts(clip.seconds()) == 3  # 40 thirtieths after frame 2 there is still one
        frames = read_indices(path, clip, rule.indices(clip.seconds(), 0))
    assert frame_numbers(frames) == [0, 2, 3, 7, 7, 7, 7, 7, 8]


def test_times_in_the_header_are_those_of_the_packets(write_video):
    files = [
        write_video("b.mp4", numbered_frames(30), options={"bf": "3", "g": "8"}, rate=Fraction(30000, 1001)),
        write_video("b.mov", numbered_frames(30), codec="mpeg4", options={"g": "8"}),
        *sorted(CLIPS.glob("*.mp4"))[:6],
    ]
    for path in files:
        with open_video(str(path)) as opened:
            header = _from_header(*opened)
            packets = _from_packets(str(path), *opened)
        assert header is not None
        assert (header.num_frames, header.fps) == (packets.num_frames, packets.fps)
        assert np.array_equal(header.times, packets.times)
        assert (header.keyframes <= packets.keyframes).all()
    unsteady = write_video("vfr.mp4", numbered_frames(6), times=[0, 1, 2, 10, 11, 12])
    with open_video(str(unsteady)) as opened:
        assert _from_header(*opened) is None


@pytest.mark.parametrize("name", ["a.mkv", "a.webm"])
def test_a_header_without_a_number_of_frames(write_video, name):
    codec, options = (
        ("libx264", {}) if name.endswith("mkv") else ("libvpx-vp9", {"deadline": "realtime", "cpu-used": "8"})
    )
    path = write_video(name, numbered_frames(9), codec=codec, options=options)
    with open_video(str(path)) as (_, stream):
        assert stream.frames == 0
    assert probe(path).num_frames == 9


def test_backward_steps_in_the_times(write_video, tmp_path):
    """Two frames exchange their times after encoding, as broken phones write them: order falls back to counting."""
    source, path = write_video("fine.mkv", numbered_frames(12), codec="ffv1", pix_fmt="yuv444p"), tmp_path / "back.mkv"
    with av.open(str(source)) as reader, av.open(str(path), "w") as writer:
        stream = writer.add_stream_from_template(reader.streams.video[0])
        packets = [packet for packet in reader.demux(reader.streams.video[0]) if packet.size]
        step = packets[1].pts - packets[0].pts
        packets[5].pts, packets[6].pts = packets[6].pts, packets[5].pts
        for i, packet in enumerate(packets):
            packet.dts, packet.stream = (i - 2) * step, stream
            writer.mux(packet)
    assert frame_numbers(read_frames(path, 0, 12)) == list(range(12))
    assert torch.equal(read_frames(path, 4, 2, 3), read_frames(path, 0, 12)[4::3][:2])


# ----------------------------------------------------------------------------------------------- other files


def test_animated_images(tmp_path):
    frames = [Image.new("RGB", (40, 24), (20 * i + 10,) * 3) for i in range(10)]
    for name, options in [
        ("a.gif", {"duration": 100}), ("a.webp", {"duration": 100, "lossless": True}), ("a.apng", {"duration": 100}),
    ]:  # fmt: skip
        path = tmp_path / name
        frames[0].save(
            path, save_all=True, append_images=frames[1:], **({"format": "PNG"} if name == "a.apng" else {}), **options
        )
        info = probe(path)
        assert info == (10, 24, 40, pytest.approx(10))
        levels = [int(frame.float().mean().round()) for frame in read_frames(path, 2, 3, 3)]
        assert levels == pytest.approx([50, 110, 170], abs=1)


def test_a_webp_that_does_not_move_is_an_image(tmp_path):
    Image.new("RGB", (40, 24), "red").save(tmp_path / "a.webp", exif=Image.Exif())
    assert probe(tmp_path / "a.webp") == (1, 24, 40, 120.0)


def test_transparent_animated_images_are_laid_on_white(tmp_path):
    frames = []
    for i in range(3):
        pixels = np.zeros((24, 40, 4), np.uint8)
        pixels[..., 2] = 40 * i  # PIL writes a WebP without transparency where all of it has one colour
        pixels[:, : 10 * (i + 1)] = (255, 0, 0, 255)
        frames.append(Image.fromarray(pixels))
    for name in ("a.webp", "a.gif", "a.apng"):
        more = {"format": "PNG"} if name == "a.apng" else {"lossless": True} if name == "a.webp" else {}
        frames[0].save(tmp_path / name, save_all=True, append_images=frames[1:], duration=100, **more)
        frame = read_frames(tmp_path / name, 1, 1)[0].numpy().astype(int)
        assert np.abs(frame[:, :20] - (255, 0, 0)).max() <= 2, name
        assert (frame[:, 20:] == 255).all(), name


def test_names_in_capitals(write_video):
    path = write_video("clip.mp4", numbered_frames(5))
    upper = path.rename(path.with_name("CLIP.MP4"))
    assert frame_numbers(read_frames(upper, 1, 3)) == [1, 2, 3]


@pytest.mark.parametrize("seconds", [0.1, 3.0])
def test_sound_is_left_alone(write_video, tmp_path, seconds):
    """Sound that is shorter or longer than the video."""
    source, path = write_video("silent.mp4", numbered_frames(25)), tmp_path / "sound.mp4"
    with av.open(str(source)) as reader, av.open(str(path), "w") as writer:
        video = writer.add_stream_from_template(reader.streams.video[0])
        sound = writer.add_stream("aac", rate=16000)
        for i in range(int(seconds * 16000 / 1024)):
            frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
            frame.sample_rate, frame.pts = 16000, 1024 * i
            writer.mux(sound.encode(frame))
        for packet in [*reader.demux(reader.streams.video[0])]:
            if packet.size:
                packet.stream = video
                writer.mux(packet)
        writer.mux(sound.encode())
    assert probe(path) == probe(source)
    assert torch.equal(read_frames(path, 3, 4, 5), read_frames(source, 3, 4, 5))


# a track of one still for the whole length, beside a video of 20 frames; which comes first is up to the file
@pytest.mark.parametrize(("name", "codec"), [
    ("a.mp4", "mjpeg"), ("a.mp4", "png"), ("a.mov", "libx264"), ("a.mkv", "mjpeg"), ("a.mkv", "libx264"), ("a.avi", "png"), ("a.ts", "libx264"),
])  # fmt: skip
@pytest.mark.parametrize("still_is_first", [True, False])
def test_a_still_without_the_flag_of_a_cover_is_not_the_video(tmp_path, name, codec, still_is_first):
    path = tmp_path / name
    numbered, red = numbered_frames(20), np.full((48, 64, 3), (255, 0, 0), np.uint8)
    with av.open(str(path), "w") as container:
        tracks = [(codec, [red]), ("mpeg4", numbered)][:: 1 if still_is_first else -1]
        streams = [container.add_stream(kind, rate=25) for kind, _ in tracks]
        for stream, (kind, _) in zip(streams, tracks, strict=True):
            stream.height, stream.width = 48, 64
            stream.pix_fmt = {"mjpeg": "yuvj420p", "png": "rgb24"}.get(kind, "yuv420p")
        for stream, (_, frames) in zip(streams, tracks, strict=True):
            for i, rgb in enumerate(frames):
                frame = av.VideoFrame.from_ndarray(rgb, format="rgb24")
                frame.pts, frame.time_base = i, Fraction(1, 25)
                container.mux(stream.encode(frame))
            container.mux(stream.encode())
    assert probe(path).num_frames == 20
    assert frame_numbers(read_frames(path, 0, 20)) == list(range(20))
    assert frame_numbers(read_frames(path, 13, 3)) == [13, 14, 15]


# ------------------------------------------------------------------------------------- transport streams


TS_CODECS = [
    ("libx264", {"g": "8", "bf": "2"}), ("libx264", {"g": "8", "bf": "0"}), ("mpeg2video", {"g": "8", "bf": "2"}),
    ("libx265", {"x265-params": "log-level=none:pools=1:keyint=8"}),
]  # fmt: skip


@pytest.mark.parametrize(("codec", "options"), TS_CODECS)
# times begin anew, go back into those of the first, behind all of them, or go on
@pytest.mark.parametrize("starts", [(0, 0), (0, 7), (30, 0), (0, 20)])
def test_joined_transport_streams_are_read_one_after_the_other(write_video, tmp_path, codec, options, starts):
    frames = numbered_frames(40)
    one, two = (
        write_video(f"{i}.ts", frames[20 * i :][:20], codec=codec, options=options, times=range(start, start + 20))
        for i, start in enumerate(starts)
    )
    path = tmp_path / "joined.ts"
    path.write_bytes(one.read_bytes() + two.read_bytes())
    full = read_frames(path, 0, 40)
    assert torch.equal(full, torch.cat([read_frames(one, 0, 20), read_frames(two, 0, 20)]))
    assert probe(path)[0::3] == (40, 25)
    for start in (1, 12, 18, 19, 20, 30, 36):
        assert torch.equal(read_frames(path, start, 4), full[start : start + 4])


def test_cut_transport_streams_are_refused(write_video, tmp_path):
    """Within a packet of 188 bytes, or between two: then the last frame is damaged. A packet that was lost damages what follows."""
    noise = np.random.default_rng(0).integers(0, 256, (20, 48, 64, 3), np.uint8)
    content = write_video("whole.ts", list(noise), options={"g": "8", "bf": "0", **QUICK}).read_bytes()
    middle = len(content) // 188 // 2 * 188
    path = tmp_path / "cut.ts"
    for cut in (content[: middle + 90], content[:middle] + content[middle + 188 :]):
        path.write_bytes(cut)
        with pytest.raises(BadFile, match=r"cut\.ts is truncated"):
            probe(path)
    path.write_bytes(content[:middle])
    last = probe(path).num_frames - 1
    assert len(read_frames(path, 0, last)) == last
    with pytest.raises(BadFile, match=r"cut\.ts is damaged: the frame at"):
        read_frames(path, last, 1)


def test_a_cut_gif_is_refused(tmp_path):
    noise = np.random.default_rng(0).integers(0, 256, (5, 24, 32, 3), np.uint8)
    frames = [Image.fromarray(frame) for frame in noise]
    path = tmp_path / "a.gif"
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=40)
    content = path.read_bytes()
    for size in range(len(content) // 2, len(content) - 2, len(content) // 20):
        path.write_bytes(content[:size])
        with pytest.raises(BadFile, match=r"a\.gif is truncated"):
            probe(path)
    for whole in (
        content,
        content[:-1],
        content + b";",
        content + bytes(3),
    ):  # the last byte says only that no frame follows
        path.write_bytes(whole)
        assert probe(path).num_frames == 5


def test_the_packets_of_cameras_are_longer(write_video, tmp_path):
    """M2TS has a time of 4 bytes in front of each packet."""
    source, path = write_video("a.ts", numbered_frames(6)), tmp_path / "a.m2ts"
    content = source.read_bytes()
    path.write_bytes(b"".join(bytes(4) + content[i : i + 188] for i in range(0, len(content), 188)))
    assert torch.equal(read_frames(path, 0, 6), read_frames(source, 0, 6))


# ---------------------------------------------------------------------------------------------------- damage


def test_damage_in_the_middle_is_found_when_it_is_read(write_video):
    noise = np.random.default_rng(0).integers(0, 256, (40, 48, 64, 3), np.uint8)
    path = write_video("hurt.mp4", list(noise), options={"g": "10", "bf": "0"})
    whole = read_frames(path, 0, 40)
    content = bytearray(path.read_bytes())
    with open_video(str(path)) as (_, stream):
        entry = stream.index_entries[25]
        content[entry.pos + 40 : entry.pos + entry.size] = bytes(entry.size - 40)
    path.write_bytes(content)
    with pytest.raises(BadFile, match=r"hurt.mp4 is damaged"):
        read_frames(path, 22, 6)
    assert torch.equal(read_frames(path, 0, 8), whole[:8])  # what is whole is usable


# --------------------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(("settings", "message"), [
    ({"hdr": "clip"}, "hdr='clip' is not one of tonemap, refuse"),
    ({"interlaced": True}, "interlaced=True is not one of"),
    ({"backend": "decord"}, "backend='decord' is not one of pyav"),
    ({"hdrs": "refuse"}, r"'hdrs' is unknown. Did you mean 'hdr'\?"),
    ({"backend": "torchcodec"}, "'torchcodec' is gone, .*leave it out"),
])  # fmt: skip
def test_wrong_settings(settings, message):
    with pytest.raises(UserError, match=message):
        Decoding.of(settings)


# ------------------------------------------------------------------------------------------------- huge images


def huge_png(width: int, height: int, pixels: bool = True) -> bytes:
    """A black PNG of 1 bit a pixel, of some kilobytes; without its pixels a header alone."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    data = zlib.compress(bytes(1 + (width + 7) // 8) * height if pixels else b"", 1)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize(("name", "side"), [("a.png", 13300), ("a.png", 30000), ("a.apng", 13300), ("a.mov", 13300)])
def test_a_small_file_of_many_pixels_is_refused(tmp_path, name, side):
    path = tmp_path / name
    image = huge_png(side, side, pixels=name == "a.mov")
    if name == "a.mov":
        with av.open(str(path), "w") as container:
            stream = container.add_stream("png", rate=25)
            stream.height = stream.width = side
            stream.pix_fmt = "monob"
            packet = av.Packet(image)
            packet.pts, packet.time_base, packet.stream = 0, Fraction(1, 25), stream
            container.mux(packet)
    else:
        path.write_bytes(image)
    size = "has 13300 x 13300 pixels, more" if side == 13300 else "has more pixels"
    for read in (probe, lambda path: read_frames(path, 0, 1)):
        with pytest.raises(BadFile, match=rf"{name} {size} than the limit of 89,478,485.*; shrink it"):
            read(path)


def test_pixels_of_a_wild_shape_are_refused():
    """64 x 48 pixels, each 60,000 times as wide as high."""
    frame = av.VideoFrame(64, 48, "rgb24")
    with pytest.raises(BadFile, match=r"a\.mkv has 3840000 x 48 pixels, more than the limit"):
        to_rgb("a.mkv", frame, 60_000.0, Decoding())


# ------------------------------------------------------------------------------------------- in the data set


def test_a_dataset_at_a_steady_rate(write_video, write_table):
    """24, 30 and 12 frames a second, all seen at 6; what is too short is reported or dropped, what is too slow is reported."""
    for name, rate, count in (("a.mp4", 24, 40), ("b.mp4", 30, 40), ("c.mp4", 12, 7), ("d.mp4", 3, 40)):
        write_video(name, numbered_frames(count), rate=rate, options={"g": "8"})
    table = str(write_table([{"path": f"{n}.mp4", "text": n} for n in "abcd"]))
    settings = {"num_frames": 5, "image_size": (16, 24), "target_fps": 6.0}
    dataset = VideoTextDataset(table, **settings)
    for index, step in ((0, 4), (1, 5)):
        starts = set()
        for epoch in range(30):
            item = dataset[SampleKey(epoch, index)]
            numbers = frame_numbers(((item["video"] + 1) * 127.5).permute(1, 2, 3, 0))
            assert numbers == [numbers[0] + step * i for i in range(5)]
            assert item["fps"] == 6
            starts.add(numbers[0])
        assert max(starts) <= 39 - 4 * step
        assert len(starts) > 8
    with pytest.raises(UserError, match=r"row 3: .*c.mp4 has 7 frames, but num_frames=5 at target_fps=6 needs 0.67 s"):
        dataset[SampleKey(0, 2)]
    with pytest.raises(UserError, match=r"row 4: .*target_fps=6 is more than the 3 frames a second"):
        dataset[SampleKey(0, 3)]
    stated = [{"path": f"{n}.mp4", "text": n, "num_frames": c, "fps": f} for n, c, f in (("a", 40, 24), ("c", 7, 12))]
    dropped = VideoTextDataset(str(write_table(stated, "s.csv")), short_clips="drop", **settings)
    assert dropped.clips.kept.tolist() == [0]
    assert dropped.fingerprint() != VideoTextDataset(str(table), num_frames=5, image_size=(16, 24)).fingerprint()
    with pytest.raises(UserError, match=r"frame_interval=2 and target_fps=6.0 exclude one another"):
        VideoTextDataset(table, frame_interval=2, **settings)


def test_a_dataset_passes_on_how_to_decode(tmp_path, write_table):
    write_hdr(tmp_path / "hdr.mp4", np.array([300, 300]), 16)
    table = str(write_table([{"path": "hdr.mp4", "text": ""}]))
    assert VideoTextDataset(table, 2, image_size=(16, 16))[SampleKey(0, 0)]["video"].shape == (3, 2, 16, 16)
    with pytest.raises(BadFile, match=r"row 1: .*hdr.mp4 is HDR"):
        VideoTextDataset(table, 2, image_size=(16, 16), decode={"hdr": "refuse"})[SampleKey(0, 0)]
    with pytest.raises(UserError, match="decode: 'hdrr' is unknown"):
        VideoTextDataset(table, 2, image_size=(16, 16), decode={"hdrr": "refuse"})


# ------------------------------------------------------------------------------------------- what FFmpeg cannot open


def test_a_codec_that_ffmpeg_does_not_know(tmp_path, write_video):
    path = write_video("a.mp4", numbered_frames(4))
    path.write_bytes(path.read_bytes().replace(b"avc1", b"zzz1"))
    for read in (probe, lambda file: read_frames(file, 0, 2)):
        with pytest.raises(BadFile, match=r"a\.mp4: its video has a codec that this FFmpeg does not know"):
            read(path)


def test_a_name_with_a_colon(tmp_path, write_video, monkeypatch):
    write_video("00:01:02.mp4", numbered_frames(4))
    monkeypatch.chdir(tmp_path)
    assert probe("00:01:02.mp4").num_frames == 4


@pytest.mark.skipif(
    av.__version__ < "18", reason="the FFmpeg of PyAV 17, the last for Python 3.10, crashes on one of the files"
)
def test_bytes_that_lie(tmp_path, write_video, write_image):
    """Damage of any kind is a `BadFile` or goes unnoticed; a decoder's own errors would end a training."""
    rng = np.random.default_rng(0)
    sound = [write_video(f"a.{kind}", numbered_frames(6), codec=codec) for kind, codec in CONTAINERS.items()]
    sound += [write_image(f"a.{kind}", numbered_frames(1)[0]) for kind in ("avif", "webp", "png", "jpg", "tiff", "bmp")]
    for path in sound:
        data = np.frombuffer(path.read_bytes(), np.uint8)
        for trial in range(12):
            damaged = data.copy()
            offsets = rng.integers(0, len(data), 1 + len(data) // 200)
            damaged[offsets] ^= rng.integers(1, 256, len(offsets)).astype(np.uint8)
            bad = tmp_path / f"bad{trial}{path.suffix}"
            bad.write_bytes(damaged.tobytes())
            with suppress(BadFile), open_clip(bad) as clip:
                clip.read([0, clip.num_frames - 1])
            with suppress(BadFile):
                probe(bad)


CONTAINERS = {
    "mp4": "libx264",
    "mkv": "libx264",
    "ts": "mpeg2video",
    "avi": "mpeg4",
    "webm": "libvpx",
    "mpg": "mpeg2video",
}
