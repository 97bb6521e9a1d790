"""Samples of the size of their bucket, from videos and images, with true numbers; stand-ins from the same bucket."""

from fractions import Fraction

import numpy as np
import pytest
import torch

from opensora.datasets.buckets.bucket import NONE, DropReason
from opensora.datasets.dataloader import build_loader, build_sampler
from opensora.datasets.sampler import BucketKey, DataPosition
from opensora.datasets.summary import summarise
from opensora.datasets.variable_dataset import VariableVideoTextDataset
from opensora.registry import DATASETS
from opensora.utils.errors import UserError
from tests.datasets.video.videos import frame_numbers, numbered_frames

CONFIG = {"32x48": {1: (1.0, 2), 4: (1.0, 2), 8: (1.0, 1)}, "16x16": {1: (1.0, 2), 4: (1.0, 4)}}


@pytest.fixture
def table(write_video, write_image, write_table):
    write_video("long.mp4", numbered_frames(30), rate=Fraction(24000, 1001))
    write_video("short.mp4", numbered_frames(10))
    write_image("wide.png", np.full((40, 60, 3), 200, np.uint8))
    write_image("tiny.png", np.full((8, 8, 3), 200, np.uint8))
    return write_table([{"path": name, "text": name} for name in ("long.mp4", "short.mp4", "wide.png", "tiny.png")])


def key_of(dataset: VariableVideoTextDataset, row: int, epoch: int = 0) -> BucketKey:
    bucket = dataset.buckets[int(dataset.assign(epoch).bucket[row])]
    return BucketKey(epoch, row, bucket.num_frames, bucket.height, bucket.width)


def test_a_sample_has_the_size_of_its_bucket_and_true_numbers(table):
    dataset = VariableVideoTextDataset(str(table), CONFIG, frame_interval=3)
    long, short, wide = (dataset[key_of(dataset, row)] for row in range(3))
    assert long["video"].shape == (3, 8, 32, 48)
    assert short["video"].shape == (3, 4, 32, 48)
    assert wide["video"].shape == (3, 1, 32, 48)
    assert long["fps"] == torch.tensor(24000 / 1001 / 3)
    assert wide["fps"] == 120
    for item in (long, short, wide):
        assert item["ar"] == torch.tensor(32 / 48)
        assert (item["height"], item["width"], item["num_frames"]) == (32, 48, item["video"].shape[1])
        assert {item[name].dtype for name in ("ar", "fps", "height", "width", "num_frames")} == {torch.float32}
    assert dataset.assign(0).drop_reason[3] == DropReason.SMALL


def test_the_older_spelling_is_the_same_dataset(table):
    old, new = (
        DATASETS.build({"type": name, "data_path": str(table), "bucket_config": CONFIG})
        for name in ("VariableVideoText", "VariableVideoTextDataset")
    )
    assert type(old) is type(new) is VariableVideoTextDataset
    assert old.fingerprint() == new.fingerprint()
    assert torch.equal(old[key_of(old, 0)]["video"], new[key_of(new, 0)]["video"])


def test_every_frame_interval_is_exact_and_the_last_start_is_used(table):
    dataset = VariableVideoTextDataset(str(table), {"16x16": {8: (1.0, 1)}}, frame_interval=3)
    starts = set()
    for epoch in range(60):
        item = dataset[BucketKey(epoch, 0, 8, 16, 16)]
        numbers = frame_numbers(((item["video"] + 1) * 127.5).permute(1, 2, 3, 0))
        assert np.diff(numbers).tolist() == [3] * 7
        starts.add(numbers[0])
    assert starts == set(range(30 - 21))


def test_what_the_table_says_saves_opening_the_files(table, write_table):
    stated = write_table(
        [{"path": "long.mp4", "text": "", "num_frames": 30, "height": 400, "width": 600},
         {"path": "short.mp4", "text": "", "num_frames": "", "height": "", "width": ""}], "stated.csv"
    )  # fmt: skip
    dataset = VariableVideoTextDataset(str(stated), CONFIG)
    assert dataset.num_frames.tolist() == [30, 10]
    assert (dataset.height[1], dataset.width[1]) != (0, 0)


def test_unreadable_files_are_in_no_bucket_and_said(table, tmp_path, write_table, caplog):
    (tmp_path / "no.mp4").write_bytes(b"no video at all")
    rows = write_table([{"path": name, "text": ""} for name in ("no.mp4", "long.mp4")], "bad.csv")
    dataset = VariableVideoTextDataset(str(rows), CONFIG)
    assert dataset.assign(0).drop_reason.tolist() == [DropReason.UNKNOWN, DropReason.KEPT]
    assert "1 files cannot be read" in caplog.text
    assert dataset.assign(0).bucket[0] == NONE
    sampler = build_sampler(dataset, 1, seed=1)
    assert "1 left out: no size is known" in str(summarise(dataset, sampler, 1, 1))


@pytest.fixture
def partly_broken(tmp_path, write_image, write_table):
    """Twelve images of two shapes; the table knows their sizes, and one file is broken."""
    rows = []
    for i in range(12):
        height, width = ((32, 48), (48, 32))[i % 2]
        write_image(f"{i}.png", np.full((height, width, 3), i, np.uint8))
        rows.append({"path": f"{i}.png", "text": str(i), "num_frames": 1, "height": height, "width": width})
    (tmp_path / "4.png").write_bytes((tmp_path / "4.png").read_bytes()[:40])
    return write_table(rows, "broken.csv")


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stand_in_is_of_the_same_bucket_and_the_same_in_every_run(partly_broken, num_workers):
    dataset = VariableVideoTextDataset(str(partly_broken), {"40px": {1: (1.0, 3)}}, size_multiple=8)
    assert {bucket[3:5] for bucket in dataset.buckets} >= {(32, 48), (48, 32)}
    sampler = build_sampler(dataset, 1, seed=1)
    sampler.seek(DataPosition(), 3 * sampler.batches_in(0))
    loader = build_loader(dataset, sampler, num_workers=num_workers)
    batches = list(loader)
    assert loader.bad_files.substituted == 3
    assert "4.png" in loader.bad_files.summary()
    order = [index for batch in batches for index in batch["index"].tolist()]
    assert 4 not in order
    assert all(len({int(i) % 2 for i in batch["index"]}) == 1 for batch in batches)
    again = build_loader(dataset, sampler)
    assert [i for batch in again for i in batch["index"].tolist()] == order


def test_errors_when_asked(partly_broken):
    dataset = VariableVideoTextDataset(str(partly_broken), {"32px": {1: (1.0, 3)}}, bad_files="error")
    sampler = build_sampler(dataset, 1, seed=1)
    sampler.seek(DataPosition(), sampler.batches_in(0))
    with pytest.raises(UserError, match=r"broken.csv, row 5: .*4.png"):
        list(build_loader(dataset, sampler))


def test_the_fingerprint_is_of_table_sizes_and_buckets(table):
    make = lambda **more: VariableVideoTextDataset(str(table), **{"bucket_config": CONFIG, **more}).fingerprint()  # noqa: E731
    assert make() == make()
    others = [
        make(frame_interval=2), make(seed=1), make(transform_name="random_crop"),
        make(bucket_config={**CONFIG, "16x16": {1: (0.5, 2), 4: (1.0, 4)}}),
        make(bucket_config={**CONFIG, "16x16": {1: (1.0, 3), 4: (1.0, 4)}}),
    ]  # fmt: skip
    assert len({make(), *others}) == 6


def test_mistakes(table):
    with pytest.raises(UserError, match="a bucket needs one"):
        VariableVideoTextDataset(str(table), CONFIG, transform_name="none")
    with pytest.raises(UserError, match="frame_interval=0"):
        VariableVideoTextDataset(str(table), CONFIG, frame_interval=0)


def test_a_rate_of_its_own(tmp_path, table, write_video, write_table):
    write_video("slow.mp4", numbered_frames(20), rate=Fraction(5))
    write_video("ten.mp4", numbered_frames(10), rate=Fraction(24))
    names = ("long.mp4", "ten.mp4", "wide.png", "slow.mp4")  # 30 frames at 23.976, 10 at 24, an image, 20 at 5
    rows = write_table([{"path": name, "text": ""} for name in names], "rates.csv")
    dataset = VariableVideoTextDataset(str(rows), CONFIG, target_fps=8)
    assert dataset.assign(0).drop_reason.tolist() == [
        DropReason.KEPT,
        DropReason.KEPT,
        DropReason.KEPT,
        DropReason.SLOW,
    ]
    assert [key_of(dataset, row).num_frames for row in range(3)] == [8, 4, 1]  # 1.21 s and 0.375 s of 0.875 and 0.375
    item = dataset[key_of(dataset, 0)]
    numbers = frame_numbers(((item["video"] + 1) * 127.5).permute(1, 2, 3, 0))
    assert np.diff(numbers).tolist() == [3] * 7  # 23.976 / 8 = 2.997, by time
    assert (item["fps"], dataset[key_of(dataset, 2)]["fps"]) == (8, 120)
    summary = str(summarise(dataset, build_sampler(dataset, 1, seed=1), 1, 1))
    assert "1 left out: slower than target_fps=8" in summary
    long_step = str(summarise(dataset, build_sampler(dataset, 1, seed=1), 1, 8))
    assert "an epoch: a part of a step, which goes on in the next epoch; 3 batches" in long_step
    assert dataset.fingerprint() != VariableVideoTextDataset(str(rows), CONFIG, target_fps=7.5).fingerprint()
    with pytest.raises(UserError, match=r"frame_interval=3 and target_fps=8 exclude one another"):
        VariableVideoTextDataset(str(rows), CONFIG, frame_interval=3, target_fps=8)


def test_what_rates_and_decoding_decide_is_in_the_fingerprint(write_table):
    stated = {"path": "gone.mp4", "text": "", "num_frames": 100, "height": 32, "width": 48}

    def fingerprint(fps: float, **more: object) -> str:
        rows = write_table([{**stated, "fps": fps}], "rates.csv")
        (rows.parent / "gone.mp4").write_bytes(b"never opened")
        return VariableVideoTextDataset(str(rows), {"32x48": {17: (1.0, 1)}}, target_fps=10, **more).fingerprint()

    assert len({fingerprint(30), fingerprint(60), fingerprint(6), fingerprint(30, decode={"interlaced": "keep"})}) == 4


def test_an_image_needs_no_rate(write_table):
    stated = {"path": "gone.png", "text": "", "num_frames": 1, "height": 32, "width": 48, "fps": ""}
    rows = write_table([stated], "rates.csv")
    (rows.parent / "gone.png").write_bytes(b"never opened")
    dataset = VariableVideoTextDataset(str(rows), {"32x48": {1: (1.0, 1)}}, target_fps=10)
    assert dataset.assign(0).drop_reason.tolist() == [DropReason.KEPT]


def test_a_table_that_states_rates_saves_opening_the_files(write_table):
    stated = {"path": "gone.mp4", "text": "", "num_frames": 100, "height": 32, "width": 48}
    rows = write_table([{**stated, "fps": 30}, {**stated, "fps": 6}], "rates.csv")
    (rows.parent / "gone.mp4").write_bytes(b"never opened")
    dataset = VariableVideoTextDataset(str(rows), {"32x48": {17: (1.0, 1), 33: (1.0, 1)}}, target_fps=10)
    assert [dataset.buckets[i].num_frames for i in dataset.assign(0).bucket[:1]] == [33]  # 3.3 s hold 34 frames
    assert dataset.assign(0).drop_reason.tolist() == [DropReason.KEPT, DropReason.SLOW]
