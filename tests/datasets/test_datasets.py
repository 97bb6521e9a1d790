"""Samples: their keys and numbers, exact strides, choices that follow from (seed, epoch, index), and named mistakes."""

import av
import numpy as np
import pytest
import torch

from opensora.datasets.dataloader import build_sampler, read_or_substitute
from opensora.datasets.datasets import VideoTextDataset
from opensora.datasets.sampler import SampleKey
from opensora.datasets.summary import summarise
from opensora.datasets.video.files import BadFile
from opensora.datasets.video.read_video import count_frames
from opensora.registry import DATASETS
from opensora.utils.errors import UserError
from tests.datasets.video.videos import CLIPS, frame_numbers, numbered_frames

SIZE = (16, 24)


def numbers_in(item) -> list[int]:
    """What `numbered_frames` numbered, of a sample."""
    return frame_numbers(((item["video"] + 1) * 127.5).permute(1, 2, 3, 0))


@pytest.fixture
def table(write_video, write_table):
    """Two clips: 40 frames at 30 frames a second, and 22 at 10."""
    write_video("a.mp4", numbered_frames(40), rate=30, options={"g": "8"})
    write_video("b.mp4", numbered_frames(22), rate=10)
    return write_table(
        [{"path": "a.mp4", "text": "first", "short": "1"}, {"path": "b.mp4", "text": "second", "short": ""}]
    )


def test_a_sample(table):
    dataset = DATASETS.build(
        {"type": "VideoTextDataset", "data_path": str(table), "num_frames": 5, "frame_interval": 3, "image_size": SIZE}
    )
    assert len(dataset) == 2
    item = dataset[SampleKey(0, 1)]
    assert item["video"].shape == (3, 5, *SIZE)
    assert item["text"] == "second"
    assert item["path"] == str(table.parent / "b.mp4")
    assert item["index"] == 1
    assert item["index"].dtype == torch.int64
    expected = {"fps": 10 / 3, "height": 16, "width": 24, "num_frames": 5}
    for name, value in expected.items():
        assert item[name].dtype == torch.float32
        assert float(item[name]) == pytest.approx(value)


def test_the_stride_is_exact_and_every_start_is_drawn(table):
    dataset = VideoTextDataset(str(table), num_frames=7, frame_interval=3, image_size=SIZE)  # spans 19 frames of 22
    starts = set()
    for epoch in range(40):
        numbers = numbers_in(dataset[SampleKey(epoch, 1)])
        assert numbers == [numbers[0] + 3 * i for i in range(7)]
        starts.add(numbers[0])
    assert starts == {0, 1, 2, 3}


def test_sixteen_frames_at_interval_three_need_forty_six(write_video, write_table):
    write_video("a.mp4", [np.zeros((16, 16, 3), np.uint8)] * 46)
    table = write_table([{"path": "a.mp4", "text": "x", "num_frames": 46}])
    assert VideoTextDataset(str(table), 16, 3, SIZE)[SampleKey(0, 0)]["video"].shape[1] == 16


def test_choices_follow_from_seed_epoch_and_index_alone(table):
    def draw(seed: int, epoch: int, **more):
        dataset = VideoTextDataset(str(table), num_frames=2, image_size=SIZE, seed=seed, **more)
        return numbers_in(dataset[SampleKey(epoch, 0)])

    before = torch.random.get_rng_state()
    first = [draw(1, epoch) for epoch in range(8)]
    torch.manual_seed(99)
    assert [draw(1, epoch) for epoch in reversed(range(8))] == first[::-1]
    assert [draw(2, epoch) for epoch in range(8)] != first
    assert len({numbers[0] for numbers in first}) > 3
    torch.random.set_rng_state(before)


def test_one_caption_is_drawn_and_empty_ones_are_skipped(table):
    dataset = VideoTextDataset(str(table), num_frames=2, image_size=SIZE, text_columns=("text", "short"))
    assert {dataset[SampleKey(epoch, 0)]["text"] for epoch in range(20)} == {"first", "1"}
    assert {dataset[SampleKey(epoch, 1)]["text"] for epoch in range(20)} == {"second"}


def test_random_frames_for_training_a_vae(table):
    dataset = VideoTextDataset(str(table), num_frames=1, image_size=SIZE, text_columns=(), transform_name="random_crop")
    items = [dataset[SampleKey(epoch, 0)] for epoch in range(10)]
    assert {item["text"] for item in items} == {""}
    assert items[0]["video"].shape == (3, 1, *SIZE)
    assert len({numbers_in(item)[0] for item in items}) > 4


def test_images(write_image, write_table, write_video):
    pixels = np.random.default_rng(0).integers(0, 256, (64, 96, 3), np.uint8)
    write_image("a.png", pixels)
    write_video("b.mp4", numbered_frames(3))
    table = str(write_table([{"path": "a.png", "text": "image"}, {"path": "b.mp4", "text": "video"}]))
    plain = VideoTextDataset(table, num_frames=1, image_size=SIZE)
    item = plain[SampleKey(0, 0)]
    assert item["video"].shape == (3, 1, *SIZE)
    assert item["fps"] == 120
    assert plain[SampleKey(0, 1)]["fps"] == 25
    adm = VideoTextDataset(table, num_frames=1, image_size=SIZE, use_image_transform=True)
    assert not torch.equal(adm[SampleKey(0, 0)]["video"], item["video"])
    assert torch.equal(adm[SampleKey(0, 1)]["video"], plain[SampleKey(0, 1)]["video"])
    with pytest.raises(
        UserError, match=r"1 of 2 rows are images, which cannot give 4 frames:\n  row 1: .*\n.*num_frames=1"
    ):
        VideoTextDataset(table, num_frames=4, image_size=SIZE)


def test_images_among_videos_are_left_out_as_short_clips_are(write_image, write_table, write_video, caplog):
    write_image("a.png", np.zeros((64, 96, 3), np.uint8))
    write_video("b.mp4", numbered_frames(4))
    write_video("c.mp4", numbered_frames(3))
    table = str(write_table([{"path": name, "text": "t"} for name in ("a.png", "b.mp4", "c.mp4")]))
    dataset = VideoTextDataset(table, num_frames=4, image_size=SIZE, short_clips="drop")
    assert dataset.rows.tolist() == [1]
    assert {reason: count for reason, (count, _) in dataset.clips.dropped.items()} == {"images": 1, "too short": 1}
    assert "they are images, which cannot give 4 frames (a.png)" in caplog.text


def test_fingerprint_changes_with_what_changes_samples(table):
    def fingerprint(**more):
        return VideoTextDataset(str(table), **{"num_frames": 4, "image_size": SIZE, **more}).fingerprint()

    changes = [
        {}, {"num_frames": 5}, {"frame_interval": 2}, {"image_size": (16, 16)}, {"transform_name": "random_crop"},
        {"text_columns": ("short",)}, {"seed": 1}, {"use_image_transform": True},
    ]  # fmt: skip
    assert len({fingerprint(**change) for change in changes}) == len(changes)
    assert fingerprint() == fingerprint()


# ------------------------------------------------------------------------------------------------- short clips


def short_table(write_table, *, stated: bool):
    rows = [{"path": "a.mp4", "text": "a", "num_frames": 40}, {"path": "b.mp4", "text": "b", "num_frames": 22}]
    return str(write_table([row if stated else {**row, "num_frames": ""} for row in rows], "short.csv"))


def test_short_clips_are_an_error(table, write_table):
    message = (
        r"1 of 2 rows are shorter than the 24 frames that num_frames=24 at frame_interval=1 needs:\n  row 2: .*b.mp4"
    )
    with pytest.raises(UserError, match=message):
        VideoTextDataset(short_table(write_table, stated=True), num_frames=24, image_size=SIZE)
    dataset = VideoTextDataset(str(table), num_frames=24, image_size=SIZE)  # not known before it is read
    with pytest.raises(
        UserError, match=r"row 2: .*b.mp4 has 22 frames, but num_frames=24 at frame_interval=1 needs 24"
    ):
        dataset[SampleKey(0, 1)]
    with pytest.raises(UserError, match=r"2 of 2 rows are shorter than the 99 frames"):
        VideoTextDataset(short_table(write_table, stated=True), num_frames=99, image_size=SIZE, short_clips="drop")


@pytest.mark.parametrize("stated", [True, False])
def test_short_clips_can_be_dropped_and_are_counted(table, write_table, caplog, stated):
    path = short_table(write_table, stated=stated)
    with caplog.at_level("INFO"):
        dataset = VideoTextDataset(path, num_frames=24, image_size=SIZE, short_clips="drop")
    assert len(dataset) == 1
    assert "1 of 2 rows are dropped: they are shorter than the 24 frames" in caplog.text
    assert ("counting frames" in caplog.text) != stated


def test_dropping_leaves_the_choices_of_other_rows_alone(table, write_table):
    rows = [{"path": name, "text": name, "num_frames": n} for name, n in (("b.mp4", 22), ("a.mp4", 40))]
    dataset = VideoTextDataset(str(write_table(rows, "d.csv")), num_frames=24, image_size=SIZE, short_clips="drop")
    whole = VideoTextDataset(str(write_table([rows[1], rows[1]], "w.csv")), num_frames=24, image_size=SIZE)
    item = dataset[SampleKey(3, 0)]
    assert item["index"] == 1
    assert numbers_in(item) == numbers_in(whole[SampleKey(3, 1)])


def rates(write_table, **fps: object) -> str:
    """A table of the clips a and b, with such rates: true are 30 and 10."""
    rows = [{"path": f"{name}.mp4", "text": name, "num_frames": 22, "fps": rate} for name, rate in fps.items()]
    return str(write_table(rows, "rates.csv"))


def test_clips_slower_than_the_target_rate_are_reported_at_start(table, write_table):
    """A run ended in the middle of training when the first of them came up."""
    settings = {"num_frames": 4, "image_size": SIZE, "target_fps": 15}
    message = (
        r"1 of 2 rows have fewer than the 15 frames a second of target_fps.*:\n  row 2: .*b.mp4\n.*short_clips='drop'"
    )
    with pytest.raises(UserError, match=message):
        VideoTextDataset(rates(write_table, a=30, b=10), **settings)
    with pytest.raises(UserError, match=r"1 of 1 rows have fewer than the 15"):
        VideoTextDataset(rates(write_table, b=10), short_clips="drop", **settings)
    assert len(VideoTextDataset(rates(write_table, a=30, b=10), **{**settings, "target_fps": 10})) == 2


def test_clips_slower_than_the_target_rate_are_dropped_and_counted(table, write_table, caplog):
    path = rates(write_table, a=30, b=10)
    settings = {"num_frames": 4, "image_size": SIZE, "target_fps": 15, "short_clips": "drop"}
    dataset = VideoTextDataset(path, **settings)
    assert [dataset.path_of(index).name for index in range(len(dataset))] == ["a.mp4"]
    assert "1 of 2 rows are dropped: they have fewer than the 15 frames a second" in caplog.text
    sampler = build_sampler(dataset, 1, seed=0, world_size=1)
    assert "1 left out: slower than target_fps=15. Lower dataset.target_fps." in str(summarise(dataset, sampler, 1, 1))


def test_the_shipped_clips_at_24_frames_a_second(clips_csv, caplog):
    """Two of 21 have 15 frames a second."""
    dataset = VideoTextDataset(str(clips_csv), num_frames=8, image_size=SIZE, target_fps=24, short_clips="drop")
    assert len(dataset) == 19
    for index in range(19):
        assert float(read_or_substitute(dataset, SampleKey(0, index))["fps"]) == 24


@pytest.mark.parametrize("stated", ["", 30])
@pytest.mark.parametrize("short_clips", ["error", "drop"])
def test_a_clip_that_turns_out_to_be_too_slow_is_a_bad_file(table, write_table, stated, short_clips):
    path = rates(write_table, a=30, b=stated)
    dataset = VideoTextDataset(path, 4, image_size=SIZE, target_fps=15, short_clips=short_clips)
    with pytest.raises(BadFile, match=r"row 2: .*b.mp4: target_fps=15 is more than the 10 frames a second"):
        dataset[SampleKey(0, 1)]
    item = read_or_substitute(dataset, SampleKey(0, 1))
    assert item["text"] == "a"
    assert len(item["bad_files"]) == 1


def test_images_have_no_rate_that_could_be_too_low(write_image, write_table):
    write_image("a.png", numbered_frames(1)[0])
    path = write_table([{"path": "a.png", "text": "", "fps": 1}])
    assert len(VideoTextDataset(str(path), num_frames=1, image_size=SIZE, target_fps=24)) == 1


@pytest.fixture
def padded(write_video, write_table, tmp_path):
    """A video of 10 frames whose last two of 12 packets hold no image."""
    source, path = (
        write_video("whole.mkv", numbered_frames(10), codec="mpeg2video", options={"g": "1"}),
        tmp_path / "padded.mkv",
    )
    with av.open(str(source)) as reader, av.open(str(path), "w") as writer:
        stream = writer.add_stream_from_template(reader.streams.video[0])
        packets = [packet for packet in reader.demux(reader.streams.video[0]) if packet.size]
        for i in range(2):
            end_code = av.Packet(b"\0\0\1\xb7")  # the code for the end of a sequence, alone
            end_code.pts = end_code.dts = packets[-1].pts + packets[1].pts * (i + 1)
            end_code.time_base = packets[-1].time_base
            packets.append(end_code)
        for packet in packets:
            packet.stream = stream
            writer.mux(packet)
    return str(write_table([{"path": "padded.mkv", "text": "p"}], "padded.csv"))


def test_a_clip_with_less_than_its_index_says_gives_its_last_frames(padded):
    dataset = VideoTextDataset(padded, num_frames=4, frame_interval=2, image_size=SIZE)
    assert count_frames(dataset.table.path(0)) == 12
    starts = {tuple(numbers_in(dataset[SampleKey(epoch, 0)])) for epoch in range(40)}
    assert starts == {(i, i + 2, i + 4, i + 6) for i in range(4)}
    with pytest.raises(UserError, match=r"padded.csv, row 1: .*padded.mkv has 10 frames, but num_frames=11"):
        VideoTextDataset(padded, num_frames=11, image_size=SIZE)[SampleKey(0, 0)]


# ---------------------------------------------------------------------------------------------------- mistakes


def test_a_table_that_overstates_a_clip(table, write_table):
    path = write_table([{"path": "b.mp4", "text": "b", "num_frames": 40}], "wrong.csv")
    dataset = VideoTextDataset(str(path), num_frames=4, image_size=SIZE)
    with pytest.raises(UserError, match=r"wrong.csv, row 1: the table says num_frames=40, but .*b.mp4 has 22; correct"):
        dataset[SampleKey(0, 0)]


def test_a_damaged_clip_is_named_with_its_row(table, write_table):
    (table.parent / "bad.mp4").write_bytes(b"no video" * 100)
    path = write_table([{"path": "a.mp4", "text": ""}, {"path": "bad.mp4", "text": ""}], "bad.csv")
    dataset = VideoTextDataset(str(path), num_frames=4, image_size=SIZE)
    with pytest.raises(UserError, match=r"bad.csv, row 2: .*bad.mp4 cannot be opened as a video"):
        dataset[SampleKey(0, 1)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_frames": 0}, "num_frames=0 and frame_interval=1 must be at least 1"),
        ({"frame_interval": 0}, "frame_interval=0 must be at least 1"),
        ({"short_clips": "pad"}, "short_clips='pad' is not one of error, drop"),
        ({"transform_name": "middle"}, "transform_name='middle' is unknown"),
        ({"text_columns": ("caption",)}, "no column 'caption'"),
    ],
)
def test_wrong_arguments(table, arguments, message):
    with pytest.raises(UserError, match=message):
        VideoTextDataset(str(table), **{"num_frames": 4, **arguments})


def test_the_clips_of_the_repository():
    dataset = VideoTextDataset(str(CLIPS / "clips.csv"), num_frames=8, frame_interval=3, image_size=(48, 80))
    item = dataset[SampleKey(0, len(dataset) - 1)]
    assert item["video"].shape == (3, 8, 48, 80)
    assert item["text"]
