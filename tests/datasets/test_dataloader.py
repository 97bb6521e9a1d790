"""Batches: the same for any number of workers and processes, resumable, with errors that arrive as they were."""

import errno
import gc
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import av
import pytest
import torch

from opensora.datasets import dataloader
from opensora.datasets.dataloader import BatchLoader, bounded_prefetch, build_loader, collate
from opensora.datasets.datasets import VideoTextDataset
from opensora.datasets.sampler import BatchKeys, EpochBatchSampler, SampleKey
from opensora.utils.errors import UserError
from tests.datasets.video.videos import numbered_frames


class Counting:
    """A dataset that knows what it was asked for."""

    def __init__(self, length: int = 7) -> None:
        self.length, self.asked = length, []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, key: SampleKey):
        self.asked.append(key)
        return {"key": torch.tensor(key), "text": f"{key.epoch}/{key.index}"}


class Failing(Counting):
    def __getitem__(self, key: SampleKey):
        if key.index == 3:
            raise UserError("row 4: no such thing.\nFix it.")
        return super().__getitem__(key)


def build_dataloader(
    dataset, batch_size: int, *, num_workers: int = 0, pin_memory: bool = False, **sampler
) -> BatchLoader:
    rank = sampler.get("rank", 0)
    keys = EpochBatchSampler(len(dataset), batch_size, **sampler)
    return build_loader(dataset, keys, num_workers=num_workers, rank=rank, pin_memory=pin_memory)


def keys(loader: Iterable) -> list:
    return [batch["key"].tolist() for batch in loader]


@pytest.fixture
def dataset(write_video, write_table) -> VideoTextDataset:
    for i in range(3):
        write_video(f"{i}.mp4", numbered_frames(10 + i))
    table = write_table([{"path": f"{i}.mp4", "text": f"clip {i}", "more": "m"} for i in range(3)])
    return VideoTextDataset(str(table), 3, 2, (16, 16), transform_name="random_crop", text_columns=("text", "more"))


def test_a_batch(dataset):
    batch = next(iter(build_dataloader(dataset, 2, seed=1, stop=1)))
    assert batch["video"].shape == (2, 3, 3, 16, 16)
    assert batch["video"].dtype == torch.float32
    for name in ("fps", "height", "width", "num_frames"):
        assert batch[name].shape == (2,)
        assert batch[name].dtype == torch.float32
    assert batch["index"].dtype == torch.int64
    assert isinstance(batch["text"], list)
    assert [path[-5] for path in batch["path"]] == [str(i) for i in batch["index"].tolist()]


def test_any_number_of_workers_gives_the_same_batches(dataset):
    before = torch.random.get_rng_state()
    alone = list(build_dataloader(dataset, 2, seed=1, stop=5))
    shared = list(build_dataloader(dataset, 2, seed=1, stop=5, num_workers=2))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert len(alone) == len(shared) == 5
    for one, other in zip(alone, shared, strict=True):
        assert one.keys() == other.keys()
        for name, value in one.items():
            same = torch.equal(value, other[name]) if isinstance(value, torch.Tensor) else value == other[name]
            assert same, name


def test_two_ranks_see_what_one_sees():
    whole = keys(build_dataloader(Counting(), 4, seed=1, stop=6))
    ranks = [keys(build_dataloader(Counting(), 2, seed=1, rank=r, world_size=2, stop=6)) for r in (0, 1)]
    assert [a + b for a, b in zip(*ranks, strict=True)] == whole


@pytest.mark.parametrize("start", range(6))
def test_resuming_reads_nothing_that_was_read_before(start):
    whole = keys(build_dataloader(Counting(), 2, seed=1, stop=6))
    dataset = Counting()
    loader = build_dataloader(dataset, 2, seed=1, start=start, stop=6)
    assert len(loader) == 6 - start
    assert keys(loader) == whole[start:]
    assert len(dataset.asked) == 2 * (6 - start)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_users_mistake_arrives_as_it_was(num_workers):
    with pytest.raises(UserError) as caught:
        list(build_dataloader(Failing(), 2, seed=1, stop=9, num_workers=num_workers))
    assert str(caught.value) == "row 4: no such thing.\nFix it."


def test_sizes_must_agree():
    items = [{"video": torch.zeros(3, 1, 4, n), "path": f"{n}.mp4"} for n in (4, 6)]
    with pytest.raises(
        UserError, match=r"4.mp4 gives video \(3, 1, 4, 4\) and 6.mp4 gives \(3, 1, 4, 6\); use a transf"
    ):
        collate(items)


class Deadly(Counting):
    def __getitem__(self, key: SampleKey):
        if key.index == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(key)


def test_a_killed_worker_is_named_with_what_it_was_reading():
    with pytest.raises(UserError) as caught:
        list(build_dataloader(Deadly(), 2, seed=1, stop=9, num_workers=2, rank=0))
    message = str(caught.value)
    assert "process 0: a worker of the data loader was killed" in message
    assert "was reading sample 3 of epoch" in message
    assert "--num-workers" in message


class DeadlyFile:
    """The clips, of which reading one ends the worker; the rest of `VideoTextDataset`."""

    def __init__(self, dataset: VideoTextDataset) -> None:
        self.dataset, self.path_of = dataset, dataset.path_of

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, key: SampleKey):
        if key.index == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.dataset[key]


@pytest.mark.slow
def test_a_killed_worker_is_named_with_the_file_it_was_reading(dataset):
    loader = build_dataloader(DeadlyFile(dataset), 2, seed=1, stop=99, num_workers=1)
    with pytest.raises(UserError, match="a worker of the data loader was killed") as caught:
        list(loader)
    assert f"was reading {dataset.path_of(1)}, sample 1 of epoch" in str(caught.value)
    assert str(dataset.path_of(1)) in loader.reading()


class Exhausted(Counting):
    def __getitem__(self, key: SampleKey):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), "a.mp4")


@pytest.mark.slow
def test_too_many_open_files_come_with_advice():
    with pytest.raises(UserError, match=r"ulimit -n 65536.*--num-workers"):
        list(build_dataloader(Exhausted(), 2, seed=1, stop=9, num_workers=1))


@pytest.mark.nightly
@pytest.mark.slow
def test_the_limit_of_open_files_is_raised_as_far_as_it_may():
    code = (
        "import resource; from opensora.datasets.dataloader import _allow_open_files\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (256, 512)); _allow_open_files()\n"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "(512, 512)"


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(100)
def test_a_worker_does_not_wait_for_threads_of_the_process_it_came_from(dataset):
    """PyAV 19 converts all frames of a thread in one context; the threads that it begins there are not forked."""
    for size in (64, 96):
        av.VideoFrame(32, 32, "yuv420p").reformat(width=size, height=size, format="rgb24")
    assert len(list(build_dataloader(dataset, 2, seed=1, stop=2, num_workers=1))) == 2


def test_workers_touch_no_gpu(dataset, monkeypatch):
    """They are forked, which a process that has used CUDA may do only if they never use it."""
    monkeypatch.setattr(torch.cuda, "_lazy_init", _refuse)
    monkeypatch.setattr(torch.cuda, "init", _refuse)
    assert len(list(build_dataloader(dataset, 2, seed=1, stop=3, num_workers=2))) == 3


def _refuse() -> None:
    raise AssertionError("a worker begins to use CUDA")


class Garbage:
    """In a cycle, so that only the collector ends it; it tells in which process."""

    def __init__(self, log: Path) -> None:
        self.log, self.me = log, self

    def __del__(self) -> None:
        with self.log.open("a") as file:
            file.write(f"{os.getpid()}\n")


class Collecting(Counting):
    """Collects garbage with every sample."""

    def __getitem__(self, key):
        gc.collect()
        return super().__getitem__(key)


@pytest.mark.slow
def test_a_worker_leaves_the_garbage_of_the_process_it_came_from(tmp_path):
    """The end of a process group, for one, waits for threads that a forked process does not have."""
    log = tmp_path / "log"
    gc.disable()
    try:
        Garbage(log)
        assert len(list(build_dataloader(Collecting(), 2, seed=0, num_workers=2, stop=4))) == 4
        assert not log.exists()
        gc.collect()
    finally:
        gc.enable()
    assert log.read_text() == f"{os.getpid()}\n"


def test_reading_ahead_keeps_within_its_memory():
    assert bounded_prefetch(4, 2**30, float("inf")) == (4, 2)
    assert bounded_prefetch(4, 2**30, 8) == (4, 2)
    assert bounded_prefetch(4, 2**30, 5) == (4, 1)
    assert bounded_prefetch(4, 2**30, 3) == (3, 1)
    assert bounded_prefetch(4, 2**30, 0.1) == (1, 1)
    assert bounded_prefetch(0, 2**30, 0.1)[0] == 0


def test_batches_have_their_indices_in_the_global_batch():
    ranks = [list(build_dataloader(Counting(), 2, seed=1, rank=r, world_size=2, stop=3)) for r in (0, 1)]
    assert [batch["sample_index"].tolist() for batch in ranks[0]] == [[0, 1]] * 3
    assert [batch["sample_index"].tolist() for batch in ranks[1]] == [[2, 3]] * 3
    assert {batch["global_batch_size"] for batch in ranks[0] + ranks[1]} == {4}


def test_datasets_can_be_pickled(dataset):
    copy = pickle.loads(pickle.dumps(dataloader._Batches(dataset)))
    assert torch.equal(copy[BatchKeys([SampleKey(0, 1)], 0, 1)]["video"][0], dataset[SampleKey(0, 1)]["video"])


@pytest.mark.slow
def test_three_epochs_with_workers_and_the_loader_ends():
    """17 batches an epoch; pages of pinned memory, where there is a GPU, and workers are given back at the end."""
    gc.collect()  # loaders in the traceback of an error that an earlier test caught
    options = {"seed": 1, "stop": 51, "pin_memory": torch.cuda.is_available()}
    with_workers = build_dataloader(Counting(34), 2, num_workers=2, **options)
    assert keys(with_workers) == keys(build_dataloader(Counting(34), 2, **options))
    assert multiprocessing.active_children() == []


FEW_FILES = """
import resource, sys, torch
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
from opensora.datasets.dataloader import build_loader
from opensora.datasets.sampler import EpochBatchSampler
class Many:
    def __len__(self): return 4096
    def __getitem__(self, key): return {f"t{i}": torch.tensor([float(key.index)]) for i in range(12)}
batches = list(build_loader(Many(), EpochBatchSampler(4096, 128, seed=1, stop=16), num_workers=4))
print(len(batches))
"""


@pytest.mark.nightly
@pytest.mark.slow
def test_four_workers_and_large_batches_with_few_open_files(repo_root):
    """A batch's tensors are stacked in the worker, so the files that pass them on do not grow with the batch."""
    done = subprocess.run(
        [sys.executable, "-c", FEW_FILES], cwd=repo_root, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == "16"
