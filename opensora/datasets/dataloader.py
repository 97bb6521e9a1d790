"""Batches for a whole run, read by worker processes, the same for any number of them.

Another sample stands in for one whose file cannot be read: rarely, counted, and the same in every run. A dataset that allows it
has two things next to `dataset[key]`, which itself never substitutes:

    bad_files              a `BadFiles`: what the user wants
    another(key, rng)      the key of another sample of the same size and length, drawn with `rng`; None if there is none

What stands in for a sample is f(seed, epoch, sample, attempt): worker, rank and what was read before do not matter, and a
resumed run gets the same. Nothing is made up: a stand-in is a sample with its own caption, path and row.
"""

import gc
import logging
import os
import re
import resource
import signal
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from opensora.datasets.buckets.sampler import BucketBatchSampler, Order, Tail
from opensora.datasets.sampler import BatchKeys, BatchSampler, EpochBatchSampler
from opensora.datasets.video.files import BadFile, BadFiles
from opensora.utils.errors import UserError
from opensora.utils.seed import generator

logger = logging.getLogger(__name__)

Batch = dict[str, Any]
PREFETCH = 2  # batches that each worker reads ahead, where memory allows
GIB = 2**30
OPEN_FILES = 65536  # what is asked for; each tensor that a worker hands over is an open file of both processes
NO_FILES_LEFT = "Too many open files|received 0 items of ancdata"
MAX_ATTEMPTS = 8  # stand-ins that are tried for one sample; so many bad files in a row are no accident
MIN_SAMPLES = 100  # a share of less than this says little: below it, the limit is that of this many samples
SHOWN = 10  # bad files that are named one by one


class BatchLoader:
    """An iterable over a sampler's batches; its length is their number.

    Each batch also holds `sample_index` [B] int64, the indices of its samples in the global batch, which all processes share
    in this step, and `global_batch_size`.
    """

    def __init__(self, loader: DataLoader, sampler: BatchSampler, batches: "_Batches", rank: int) -> None:
        self.loader, self.sampler = loader, sampler
        self._rank, self.reading = rank, batches.reading
        self.bad_files = BadFileCount(getattr(batches.dataset, "bad_files", None))

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Batch]:
        try:
            for batch in self.loader:
                if isinstance(batch, str):
                    raise UserError(batch)
                self.bad_files.add(batch)
                yield batch
            if summary := self.bad_files.summary():
                logger.warning("%s", summary)
        except (RuntimeError, OSError) as error:
            if re.search(NO_FILES_LEFT, str(error)):
                raise UserError(
                    f"process {self._rank}: too many open files, for every tensor on its way from a worker is one. Raise the limit "
                    "(`ulimit -n 65536` before the start), or use fewer --num-workers."
                ) from error
            if "DataLoader worker" not in str(error):  # how PyTorch says that a worker is gone
                raise
            raise UserError(
                f"process {self._rank}: a worker of the data loader was killed ({error}). {self.reading()}. When the "
                "machine ran out of memory (dmesg says so), use fewer --num-workers or a smaller --prefetch-gib; when it is "
                "always the same file, remove its row."
            ) from error


def build_sampler(
    dataset: Any,
    batch_size: int,
    *,
    seed: int,
    rank: int = 0,
    world_size: int = 1,
    tail: Tail = "keep",
    order: Order = "mixed",
) -> EpochBatchSampler | BucketBatchSampler:
    """The sampler for a dataset: over buckets where it has them; `batch_size`, or `tail` and `order`, are for the other kind. Rank and
    world size are those of data parallelism: processes that share one sample have one rank."""
    if hasattr(dataset, "buckets"):
        return BucketBatchSampler(dataset, seed=seed, rank=rank, world_size=world_size, tail=tail, order=order)
    return EpochBatchSampler(len(dataset), batch_size, seed=seed, rank=rank, world_size=world_size)


def build_loader(
    dataset: Any,
    sampler: BatchSampler,
    *,
    num_workers: int = 0,
    rank: int = 0,
    pin_memory: bool = False,
    batch_bytes: int = 0,
    prefetch_gib: float = float("inf"),
) -> BatchLoader:
    """The batches that a sampler names. The sampler is read from `__iter__` on, so it may be moved until then.

    A `UserError` of the dataset is raised here as it was there, whatever process it came from. Batches read ahead, of at most
    `batch_bytes` each, take at most `prefetch_gib`: fewer of them, then fewer workers, keep to it.
    """
    if num_workers:
        _allow_open_files()
    num_workers, prefetch = bounded_prefetch(num_workers, batch_bytes, prefetch_gib)
    batches = _Batches(dataset, num_workers)
    loader: DataLoader = DataLoader(
        batches,
        batch_size=None,  # the sampler's items are whole batches
        sampler=sampler,
        collate_fn=lambda batch: batch,
        num_workers=num_workers,
        prefetch_factor=prefetch if num_workers else None,
        pin_memory=pin_memory,
        worker_init_fn=_start_worker if num_workers else None,
        # forked, PyTorch's default: forkserver and spawn import the whole script again in every worker, which took more
        # than a minute for 12 of them. Workers never touch CUDA or the process group of the process they leave.
        multiprocessing_context="fork" if num_workers else None,
        # never used; without it torch would draw the workers' seed from the global generator
        generator=torch.Generator().manual_seed(0),
    )
    return BatchLoader(loader, sampler, batches, rank)


def batch_bytes(dataset: Any, batch_size: int) -> int:
    """Of the largest batch of a dataset, as fp32 videos; 0 where it is not known, or they are latents, which take little."""
    if hasattr(dataset, "buckets") and not hasattr(dataset, "pixels"):
        return max(bucket.num_bytes for bucket in dataset.buckets)
    return batch_size * getattr(dataset, "sample_bytes", 0)


def bounded_prefetch(num_workers: int, batch_bytes: int, prefetch_gib: float) -> tuple[int, int]:
    """How many workers, and batches ahead of each, keep within `prefetch_gib`; at least one of each where there are workers."""
    if num_workers == 0 or batch_bytes == 0:
        return num_workers, PREFETCH
    batches = int(min(prefetch_gib * GIB / batch_bytes, num_workers * PREFETCH))
    workers = max(1, min(num_workers, batches))
    if workers < num_workers:
        logger.warning(
            "the largest batch takes %.1f GiB, so %d of %d workers are used to keep within prefetch_gib=%g.",
            batch_bytes / GIB, workers, num_workers, prefetch_gib,
        )  # fmt: skip
    return workers, max(1, min(PREFETCH, batches // workers))


def collate(items: Sequence[dict[str, Any]]) -> Batch:
    """Stack tensors along a new first dimension, and list everything else; a `UserError` where tensors differ in shape."""
    batch: Batch = {}
    for name, first in items[0].items():
        values = [item[name] for item in items]
        if not isinstance(first, torch.Tensor):
            batch[name] = values
            continue
        for item in items:
            if item[name].shape != first.shape:
                raise UserError(
                    f"one batch needs one size, but {items[0].get('path')} gives {name} {tuple(first.shape)} and "
                    f"{item.get('path')} gives {tuple(item[name].shape)}; use a transform that resizes, or batch size 1."
                )
        batch[name] = torch.stack(values)
    return batch


def read_or_substitute(dataset: Any, key: Any) -> dict[str, Any]:
    """A sample, or one in its place; `bad_files` of it lists what was wrong with the files that were tried before. A `UserError`
    where none of the stand-ins could be read either, or there is none; a `BadFile` with policy "error"."""
    wanted: BadFiles | None = getattr(dataset, "bad_files", None)
    if wanted is None or wanted.policy == "error":
        return dataset[key]
    problems: list[str] = []
    tried = key
    while tried is not None and len(problems) <= MAX_ATTEMPTS:
        try:
            return {**dataset[tried], "bad_files": problems}
        except BadFile as error:
            problems.append(str(error))
        tried = dataset.another(key, generator(wanted.seed, "substitute", key.epoch, key.index, len(problems)))
    if tried is None:
        raise UserError(f"{problems[0]}\nNo other sample has its size and length, so nothing can stand in for it.")
    raise UserError(
        f"{len(problems)} samples that were tried one after another could not be read; is the storage there? The first:\n"
        + "\n".join(problems[:3])
    )


class BadFileCount:
    """Counts the bad files of this process' batches, names them in the log, and ends a run that has too many."""

    def __init__(self, wanted: BadFiles | None) -> None:
        self.max_share = wanted.max_share if wanted else 0.0
        self.samples = 0
        self.substituted = 0
        self.problems: Counter[str] = Counter()

    def add(self, batch: Mapping[str, Any]) -> None:
        """Count a batch; a `UserError` where more than `max_share` of the samples so far needed a stand-in."""
        for problems in batch.get("bad_files", ()):
            self.samples += 1
            self.substituted += bool(problems)
            for problem in problems:
                if problem not in self.problems and len(self.problems) < SHOWN:
                    more = "; further ones are named at the end" if len(self.problems) == SHOWN - 1 else ""
                    logger.warning("another sample is taken instead: %s%s", problem, more)
                self.problems[problem] += 1
        least = max(self.samples, MIN_SAMPLES)
        if self.substituted > self.max_share * least:
            raise UserError(
                f"{self.summary()}\nThis is more than max_bad_share={self.max_share:g} of {least}: mend the table, or raise "
                "dataset.max_bad_share."
            )

    def summary(self) -> str:
        """How many samples had a stand-in, and why; empty when none had."""
        if not self.problems:
            return ""
        count = len(self.problems)
        lines = [f"  {times} x {problem}" for problem, times in self.problems.most_common(SHOWN)]
        more = [f"  and {count - SHOWN} more"] if count > SHOWN else []
        head = (
            f"{self.substituted} of {self.samples} samples were replaced by others. What is wrong with {count} files:"
        )
        return "\n".join([head, *lines, *more])


class _Batches(Dataset):
    """Reads whole batches; what each worker reads is noted in memory that outlives it."""

    def __init__(self, dataset: Any, num_workers: int = 0) -> None:
        self.dataset = dataset
        self._reading = torch.full((max(num_workers, 1), 2), -1, dtype=torch.int64).share_memory_()  # epoch, sample

    def __getitem__(self, batch: BatchKeys) -> Batch | str:
        """A batch, or the message of a `UserError`: an exception would gain a traceback of the worker."""
        items = []
        try:
            for key in batch.keys:
                if worker := get_worker_info():
                    self._reading[worker.id] = torch.tensor([key.epoch, key.index])
                items.append(read_or_substitute(self.dataset, key))
            collated = collate(items)
        except UserError as error:
            return str(error)
        return {
            **collated,
            "sample_index": batch.first_index + torch.arange(len(batch.keys)),
            "global_batch_size": batch.global_batch_size,
        }

    def reading(self) -> str:
        """What each worker read last or reads now: for messages about hangs."""
        path_of = getattr(self.dataset, "path_of", None)
        lines = []
        for worker, (epoch, index) in enumerate(self._reading.tolist()):
            if index >= 0:
                file = f"{path_of(index)}, " if path_of is not None else ""
                lines.append(f"worker {worker} was reading {file}sample {index} of epoch {epoch}")
        return "; ".join(lines) or "The data are read by the process itself."


def _allow_open_files() -> None:
    """Raise this process' limit of open files as far as it may; many systems begin with 1024."""
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if most == resource.RLIM_INFINITY else min(most, OPEN_FILES)
    if limit != resource.RLIM_INFINITY and limit < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def _start_worker(_worker: int) -> None:
    # What was garbage in the process that was forked is not this one's to collect: the end of a process group or of a
    # pool waits for threads that are not here, which hangs or aborts the worker.
    gc.freeze()
    torch.set_num_threads(1)
    # A signal to the whole process group asks the training to end after its step, for which it needs batches: only the
    # process that started the worker ends it. A thread waits for it, for a handler does not get the sender.
    for number in (signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    parent = os.getppid()

    def end_on_sigterm() -> None:
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
            pass
        os._exit(0)

    threading.Thread(target=end_on_sigterm, daemon=True).start()
