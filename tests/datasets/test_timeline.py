"""What is remembered of files, by many threads at once."""

import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from fractions import Fraction

import pytest

from opensora.datasets import timeline
from opensora.datasets.timeline import NO_TIMES, Timeline, open_timeline


@pytest.fixture
def busy_threads():
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize("most", [1, 4])
def test_threads_may_open_files_at_once(monkeypatch, busy_threads, most):
    """Two threads forgot the same file: KeyError in one of them, or a dict that changed while it was looked at."""

    @contextmanager
    def no_file(path):
        yield None, None

    monkeypatch.setattr(timeline, "MAX_KNOWN", most)
    monkeypatch.setattr(timeline, "open_video", no_file)
    monkeypatch.setattr(timeline, "_from_header", lambda *_: Timeline(1, 25.0, NO_TIMES, NO_TIMES, True, Fraction(1)))
    monkeypatch.setattr(timeline, "_known", type(timeline._known)())

    def open_many(thread: int) -> None:
        for i in range(3000):
            with open_timeline((f"{thread}.mp4", i, 0)) as (known, _):
                assert known.num_frames == 1

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(open_many, range(8)))
    assert len(timeline._known) <= most
