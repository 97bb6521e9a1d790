"""Which frames make a clip: inclusive ends, exact strides, and steady times in files of unsteady rate."""

import numpy as np
import pytest

from opensora.datasets.video.read_video import FrameRule, frames_needed
from opensora.utils.errors import UserError


def steady(num_frames: int, fps: float) -> np.ndarray:
    return np.arange(num_frames) / fps


@pytest.mark.parametrize(("num_frames", "interval"), [(51, 1), (51, 3), (16, 3), (1, 1), (1, 9), (17, 2)])
def test_both_ends_count(num_frames, interval):
    rule = FrameRule(num_frames, interval)
    needed = (num_frames - 1) * interval + 1
    assert rule.needed == frames_needed(num_frames, interval) == needed
    for available in (needed - 1, needed, needed + 1, needed + 30):
        assert rule.num_starts(steady(available, 25)) == max(0, available - needed + 1)
    last = rule.indices(steady(needed + 30, 25), 30)
    assert last.tolist() == list(range(30, needed + 30, interval))  # ends with the last frame


def test_rates_are_true_divisions():
    assert FrameRule(8, 1).fps(24000 / 1001) == 24000 / 1001  # upstream: 23.0
    assert FrameRule(8, 3).fps(30000 / 1001) == 10000 / 1001
    assert FrameRule(8, target_fps=8).fps(30000 / 1001) == 8


def test_at_the_files_own_rate_every_frame_is_taken():
    for fps in (24, 24000 / 1001, 29.97, 12.5):
        # times as containers round them
        for seconds in (steady(40, fps), np.round(steady(40, fps), 3), np.floor(steady(40, fps) * 90000) / 90000):
            rule = FrameRule(16, target_fps=fps)
            assert rule.num_starts(seconds) == 25
            assert rule.indices(seconds, 24).tolist() == list(range(24, 40))


def test_a_steady_rate_from_another_steady_rate():
    rule = FrameRule(9, target_fps=8)
    assert rule.indices(steady(40, 24), 5).tolist() == list(range(5, 30, 3))
    assert rule.num_starts(steady(25, 24)) == 1  # 8 steps of 1/8 s are 24 of 1/24 s
    assert rule.num_starts(steady(24, 24)) == 0
    # 30 to 24 frames a second: one of five is left out
    assert FrameRule(9, target_fps=24).indices(steady(40, 30), 0).tolist() == [0, 1, 2, 3, 5, 6, 7, 8, 10]


def test_unsteady_times_become_steady():
    """What is taken at second s is what a player shows then: the latest frame that has begun."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        seconds = np.concatenate([[0], np.cumsum(rng.uniform(0.01, 0.2, 60))])
        rule = FrameRule(8, target_fps=float(rng.uniform(2, 9)))
        starts = rule.num_starts(seconds)
        assert starts == np.sum(seconds + rule.span <= seconds[-1] + 1e-3)
        start = int(rng.integers(starts))
        for step, index in enumerate(rule.indices(seconds, start)):
            wanted = seconds[start] + step / rule.target_fps
            assert seconds[index] <= wanted + 1e-3
            assert index == len(seconds) - 1 or seconds[index + 1] > wanted + 1e-3


def test_frames_are_not_repeated_unsaid():
    with pytest.raises(UserError, match=r"target_fps=24 is more than the 8 frames a second .* would be repeated"):
        FrameRule(4, target_fps=24).fps(8)
    assert FrameRule(4, target_fps=24).fps(23.976) == 24


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ((0, 1), "at least 1"),
        ((1, 0), "at least 1"),
        ((0, 1, 8), "at least 1"),
        ((2, 1, 0), "above 0"),
        ((2, 3, 8), "exclude"),
    ],
)
def test_out_of_range(settings, message):
    with pytest.raises(UserError, match=message):
        FrameRule(*settings)
