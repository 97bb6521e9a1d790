"""Which bucket a sample goes to: Open-Sora's rule and figures, with a clip of exactly k frames long enough for k."""

import logging
import time
from collections import Counter

import numpy as np
import pytest

from opensora.datasets.buckets.bucket import (
    FRAME_ALIASES,
    NONE,
    Buckets,
    DropReason,
    move_to_legal_sizes,
    parse_bucket_config,
    parse_num_frames,
)
from opensora.utils.errors import UserError

LONG = {1: (1.0, 475), 51: (1.0, 51), 102: ((1.0, 0.33), 27), 204: ((1.0, 0.1), 13), 408: ((1.0, 0.1), 6)}
STAGE1 = {
    "144p": LONG,
    "256": {1: (0.4, 297), 51: (0.5, 20), 102: ((0.5, 0.33), 10), 204: ((0.5, 0.1), 5), 408: ((0.5, 0.1), 2)},
    "240p": {1: (0.3, 297), 51: (0.4, 20), 102: ((0.4, 0.33), 10), 204: ((0.4, 0.1), 5), 408: ((0.4, 0.1), 2)},
    "360p": {1: (0.2, 141), 51: (0.15, 8), 102: ((0.15, 0.33), 4), 204: ((0.15, 0.1), 2), 408: ((0.15, 0.1), 1)},
    "512": {1: (0.1, 141)},
    "480p": {1: (0.1, 89)},
    "720p": {1: (0.05, 36)},
    "1024": {1: (0.05, 36)},
    "1080p": {1: (0.1, 5)},
    "2048": {1: (0.1, 5)},
}
COUNT = 5000


def shares(buckets: Buckets, frames: int, height: int, width: int, count: int = COUNT, **more) -> Counter:
    """How often a sample of that size is in each (resolution, frames), or why it is in none."""
    columns = (np.full(count, n) for n in (frames, height, width))
    assignment = buckets.assign(*columns, seed=42, epoch=0, **more)
    return Counter(
        (buckets[i].resolution, buckets[i].num_frames) if i >= 0 else DropReason(left).name
        for i, left in zip(assignment.bucket.tolist(), assignment.drop_reason.tolist(), strict=True)
    )


def assert_near(found: Counter, expected: dict, sigmas: float = 5) -> None:
    """Both are draws of one distribution: their difference is within some of its standard deviations."""
    assert found.keys() == expected.keys()
    total = sum(expected.values())
    for key, n in expected.items():
        deviation = np.sqrt(2 * total * (n / total) * (1 - n / total))
        assert abs(found[key] * total / sum(found.values()) - n) <= sigmas * max(deviation, 1), key


class TestGolden:
    """Runs of Open-Sora 1.2's own code; its random numbers are others, so shares are compared."""

    def test_three_resolutions(self):
        buckets = Buckets({"480p": {16: (1, 8)}, "720p": {16: (0.5, 4)}, "1080p": {16: (0.2, 2)}}, size_multiple=1)
        assert len(buckets) == 51
        assert [level.resolution.name for level in buckets.levels] == ["1080p", "720p", "480p"]
        found = shares(buckets, 20, 1440, 2560, 20_000)
        assert_near(found, {("720p", 16): 8107, ("480p", 16): 8005, ("1080p", 16): 3888})
        assert_near(found, {("1080p", 16): 4000, ("720p", 16): 8000, ("480p", 16): 8000})  # .2, .8 * .5, the rest

    @pytest.mark.parametrize(
        ("size", "expected"),
        [
            ((52, 240, 426), {("240p", 51): 2056, ("256", 51): 1484, ("144p", 51): 1460}),
            ((52, 100, 100), {"SMALL": 5000}),
            ((52, 200, 300), {("256", 51): 2500, ("144p", 51): 2500}),
            (
                (1, 1024, 1024),
                {("144p", 1): 1201, ("240p", 1): 944, ("256", 1): 776, ("360p", 1): 693, ("480p", 1): 496,
                 ("512", 1): 410, ("1024", 1): 260, ("720p", 1): 220},
            ),
            ((60, 1080, 1920), {("240p", 51): 1727, ("256", 51): 1263, ("144p", 51): 1223, ("360p", 51): 787}),
        ],
    )  # fmt: skip
    def test_stage_1_of_open_sora_1_2(self, size, expected):
        buckets = Buckets(STAGE1, size_multiple=1)
        assert len(buckets) == 626
        assert_near(shares(buckets, *size), expected)

    def test_51_frames_are_long_enough_for_51(self):
        """The one rule that differs: there the clip of 51 frames is dropped."""
        buckets = Buckets(STAGE1)
        assert set(shares(buckets, 51, 240, 426)) == {("240p", 51), ("256", 51), ("144p", 51)}
        assert set(shares(buckets, 50, 240, 426)) == {"SHORT"}

    def test_long_clips_are_mostly_cut_short(self):
        found = shares(Buckets(STAGE1), 500, 720, 1280)
        by_length = Counter()
        for (_, frames), n in found.items():
            by_length[frames] += n
        assert by_length[51] > by_length[102] > max(by_length[204], by_length[408])


@pytest.mark.parametrize(("interval", "needed"), [(1, 51), (3, 151)])
def test_the_last_frame_counts(interval, needed):
    buckets = Buckets({"240p": {51: (1.0, 2)}})
    assert set(shares(buckets, needed, 240, 426, 10, frame_interval=interval)) == {("240p", 51)}
    assert set(shares(buckets, needed - 1, 240, 426, 10, frame_interval=interval)) == {"SHORT"}
    per_row = np.where(np.arange(10) % 2, interval, interval + 1)
    assert shares(buckets, needed, 240, 426, 10, frame_interval=per_row) == {("240p", 51): 5, "SHORT": 5}


def test_an_image_of_four_fifths_of_the_area_is_large_enough():
    buckets = Buckets({"100px": {1: (1.0, 1)}, "50px": {1: (1.0, 1)}})
    for size, resolution in (((80, 100), "100px"), ((79, 101), "50px"), ((40, 50), "50px")):
        assert set(shares(buckets, 1, *size, 1)) == {(resolution, 1)}
    assert set(shares(buckets, 1, 39, 51, 1)) == {"SMALL"}


def test_clips_of_several_lengths():
    """Trimmed to the longest entry that fits, never filled up."""
    buckets = Buckets({"32x48": {1: (1.0, 1), 17: (1.0, 1), 33: (1.0, 1)}})
    found = [next(iter(shares(buckets, n, 32, 48, 1))) for n in (10, 17, 32, 33, 100)]
    assert found == ["SHORT", ("32x48", 17), ("32x48", 17), ("32x48", 33), ("32x48", 33)]


def test_zero_keeps_long_clips_out_of_the_shorter_entries():
    buckets = Buckets({"480p": {16: (1.0, 4), 32: (0.0, None)}, "240p": {16: (1.0, 16), 32: (1.0, 8)}})
    assert set(shares(buckets, 20, 480, 854)) == {("480p", 16)}
    assert set(shares(buckets, 32, 480, 854)) == {("240p", 32)}
    assert 0 in buckets.batch_sizes


def test_images_go_to_entries_of_one_frame_only():
    buckets = Buckets({"480p": {16: (1.0, 4)}, "240p": {1: (0.5, 16), 16: (1.0, 2)}})
    found = shares(buckets, 1, 480, 854)
    assert set(found) == {("240p", 1), "CHANCE"}
    assert set(shares(Buckets({"480p": {16: (1.0, 4)}}), 1, 480, 854)) == {"NO_IMAGES"}
    assert set(shares(Buckets({"240p": {1: (1.0, 4)}}), 9, 480, 854)) == {"SHORT"}


def test_unknown_sizes_are_in_no_bucket():
    buckets = Buckets({"144p": {1: (1.0, 1)}})
    assignment = buckets.assign(
        np.array([0, 1, 1, 1]), np.array([200, np.nan, 0, 200]), np.array([200, 200, 200, 200]), seed=0, epoch=0
    )
    assert assignment.drop_reason.tolist() == [DropReason.UNKNOWN] * 3 + [DropReason.KEPT]


def test_the_shape_is_the_nearest():
    buckets = Buckets({"480p": {1: (1.0, 1)}}, size_multiple=1)

    def shape(height: int, width: int) -> tuple[str, int, int]:
        bucket = buckets[int(buckets.assign(*(np.array([n]) for n in (1, height, width)), seed=0, epoch=0).bucket[0])]
        return bucket.ratio, bucket.height, bucket.width

    assert shape(480, 854) == shape(1080, 1920) == ("0.56", 480, 854)
    assert shape(2000, 500) == ("2.08", 926, 444)
    sizes = np.random.default_rng(0).integers(640, 3000, (500, 2))
    found = buckets.assign(np.ones(500), *sizes.T, seed=0, epoch=0).bucket
    resolution = buckets.levels[0].resolution
    assert [buckets[i].ratio for i in found.tolist()] == [resolution.closest(h, w) for h, w in sizes.tolist()]


def test_assignment_is_a_function_of_row_seed_and_epoch():
    buckets = Buckets(STAGE1)
    rng = np.random.default_rng(0)
    frames, height, width = rng.integers(1, 500, 4000), rng.integers(100, 1200, 4000), rng.integers(100, 2000, 4000)
    whole = buckets.assign(frames, height, width, seed=1, epoch=2).bucket
    odd = np.arange(1, 4000, 2)
    others = np.where(np.arange(4000) % 2, frames, 1)  # what the other rows are makes no difference
    assert (buckets.assign(others, height, width, seed=1, epoch=2).bucket[odd] == whole[odd]).all()
    for seed, epoch in ((1, 3), (2, 2)):
        assert (buckets.assign(frames, height, width, seed=seed, epoch=epoch).bucket != whole).mean() > 0.3


def test_shapes_that_become_one_size_are_one_bucket():
    fine, coarse = (Buckets({"64px": {1: (1.0, 1)}}, size_multiple=m) for m in (1, 16))
    assert len(coarse) < len(fine) == 17
    assert len({bucket[3:5] for bucket in coarse}) == len(coarse)
    assert all(bucket.height % 16 == bucket.width % 16 == 0 for bucket in coarse)


def test_batch_sizes_from_a_cost_model():
    config = {"256": {1: (1.0, "auto"), 16: (1.0, 16), 64: (1.0, "auto")}, "512": {16: (1.0, "auto")}}
    for power in (1.0, 1.5):
        buckets = Buckets(config, cost_power=power)
        sizes = {(b.resolution, b.num_frames): b.batch_size for b in buckets}
        assert sizes["256", 16] == 16
        for (name, frames), size in sizes.items():
            cost = (frames / 16 * (4 if name == "512" else 1)) ** power
            assert size == max(1, int(16 / cost + 1e-9))


def test_aliases():
    assert {parse_num_frames(name) % 51 for name in FRAME_ALIASES} == {0}
    assert [parse_num_frames(text) for text in ("2s", "4x", "16", 16, "32s")] == [51, 204, 16, 16, 816]
    (level,) = parse_bucket_config({"240p": {"2s": (1.0, 2), "102": ((0.5, 0.3), 1)}})
    assert [entry.num_frames for entry in level.entries] == [102, 51]


def test_everything_wrong_is_reported_at_once():
    wrong = {
        "240": {16: (1.0, 1)},
        "240p": {"3s": (1.0, 1), 16: (1.5, 1), 17: (1.0, None), 18: 1.0, 19: (1.0, 0), 1: ((1.0, 0.5), 2)},
        "480p": {"2s": (1.0, 1), 51: (1.0, 1)},
        "720p": {},
    }
    with pytest.raises(UserError) as caught:
        Buckets(wrong)
    message = str(caught.value)
    for part in (
        "resolution '240' is unknown. Did you mean '240p'?", "'3s' is no number of frames", "240p, 16: (1.5, 1)",
        "240p, 17: batch size None", "240p, 18: 1.0 is not", "240p, 19: batch size 0", "240p, 1: length_prob has no effect",
        "480p: 51 frames are there twice", "720p: {} is no dict",
    ):  # fmt: skip
        assert part in message
    for empty in ({}, {"240p": {16: (0.0, None)}}, {"240p": {16: (1.0, "auto")}}):
        with pytest.raises(UserError, match=r"it is empty|nothing would be trained on|is 'auto'"):
            Buckets(empty)


class Vae:
    """The arithmetic of a VAE with factors 4 x 8 x 8."""

    def legal_size(self, size):
        return (size[0] - 1) // 4 * 4 + 1, *(round(n / 8) * 8 for n in size[1:])


def test_illegal_sizes_are_moved_to_the_nearest_legal_one(caplog):
    caplog.set_level(logging.INFO)
    buckets = Buckets({"541x960": {17: (1.0, 1), 1: (1.0, 4)}, "240x424": {1: (1.0, 1)}})
    move_to_legal_sizes(buckets, Vae())
    assert [bucket[2:5] for bucket in buckets] == [(17, 544, 960), (1, 544, 960), (1, 240, 424)]
    assert "bucket_config: moved to sizes that the VAE takes: 541x960 to 544x960." in caplog.text
    caplog.clear()
    buckets = Buckets({"240p": {17: (1.0, 1)}}, size_multiple=1)
    move_to_legal_sizes(buckets, Vae())
    assert (240, 424) in {bucket[3:5] for bucket in buckets}
    assert "240x426 to 240x424" in caplog.text
    assert "and 8 more." in caplog.text
    caplog.clear()
    move_to_legal_sizes(buckets, Vae())
    assert not caplog.records


def test_illegal_lengths_are_reported_with_the_nearest_legal_one():
    with pytest.raises(UserError, match=r"512: 20 frames; the VAE takes 17\n  240p: 18 frames; the VAE takes 17"):
        move_to_legal_sizes(Buckets({"240p": {18: (1.0, 1)}, "512": {20: (1.0, 1)}}), Vae())


@pytest.mark.slow
def test_a_million_rows_need_little_time_and_memory():
    """`python -m tools.benchmark table` measures ten million; here a bound so wide that only a fall back to Python loops breaks it."""
    rng = np.random.default_rng(0)
    columns = (rng.integers(1, high, 1_000_000).astype(np.int32) for high in (600, 1200, 2000))
    start = time.process_time()
    assignment = Buckets(STAGE1).assign(*columns, seed=1, epoch=0)
    assert time.process_time() - start < 30
    assert set(np.unique(assignment.drop_reason)) <= set(DropReason)


def test_reachable_buckets_are_those_that_many_epochs_draw():
    config = {
        "48x64": {16: ((0.5, 0.5), 1), 8: (0.0, 1), 4: (1.0, 1), 1: (0.5, 1)},
        "32x48": {16: ((1.0, 0.0), 1), 8: ((0.5, 0.5), 1), 2: ((1.0, 0.5), 1)},
        "16x24,24x16": {8: (1.0, 1), 4: (1.0, 1), 1: (1.0, 1)},
    }
    buckets = Buckets(config)
    sizes = [(48, 64), (64, 48), (40, 40), (32, 48), (20, 20), (10, 10), (0, 0)]
    rows = [(frames, *size) for frames in (0, 1, 2, 3, 4, 7, 8, 15, 16, 40) for size in sizes]
    columns = np.array(rows).T
    for interval in (1, 2):
        drawn = [set() for _ in rows]
        for epoch in range(60):
            for row, bucket in enumerate(buckets.assign(*columns, seed=1, epoch=epoch, frame_interval=interval).bucket):
                drawn[row] |= {int(bucket)} - {NONE}
        found = buckets.reachable(*columns, frame_interval=interval)
        assert [set(row.tolist()) - {NONE} for row in found] == drawn
    sizes_in_order = [buckets[i].num_frames * buckets[i].height * buckets[i].width for i in found[-7] if i != NONE]
    assert sizes_in_order == sorted(sizes_in_order, reverse=True)
