"""Batches for a whole run, read by worker processes, the same for any number of them."""

import gc
import logging
import os
import re
import resource
import signal
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from opensora.datasets.buckets.sampler import BucketBatchSampler, Order, Tail
from opensora.datasets.sampler import BatchKeys, BatchSampler, BucketKey, EpochBatchSampler, SampleKey
from opensora.datasets.substitute import BadFileCount, read_or_substitute
from opensora.utils.errors import UserError

logger = logging.getLogger(__name__)

Batch = dict[str, Any]
PREFETCH = 2  # batches that each worker reads ahead, where memory allows
GIB = 2**30
OPEN_FILES = 65536  # what is asked for; each tensor that a worker hands over is an open file of both processes
NO_FILES_LEFT = "Too many open files|received 0 items of ancdata"


class SampleSource(Protocol):
    """What a loader asks of a dataset."""

    def __getitem__(self, key: Any) -> dict[str, Any]: ...


class BatchLoader:
    """An iterable over a sampler's batches; its length is their number.

    Each batch also holds `sample_index` [B] int64, the indices of its samples in the global batch, which all processes share
    in this step, and `global_batch_size`.
    """

    def __init__(self, loader: DataLoader, sampler: BatchSampler, reading: torch.Tensor, rank: int) -> None:
        self.loader, self.sampler = loader, sampler
        self._reading, self._rank = reading, rank
        self.bad_files = BadFileCount(getattr(loader.dataset.dataset, "bad_files", None))  # type: ignore[attr-defined]

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Batch]:
        try:
            for batch in self.loader:
                if isinstance(batch, _Failure):
                    raise UserError(batch.message)
                self.bad_files.add(batch)
                yield batch
            if summary := self.bad_files.summary():
                logger.warning("%s", summary)
        except (RuntimeError, OSError) as error:
            if re.search(NO_FILES_LEFT, str(error)):
                limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
                raise UserError(
                    f"process {self._rank}: too many open files, of which it may have {limit}: every tensor on its way from a "
                    f"worker is one. Raise the limit (`ulimit -n 65536` before the start; the machine allows {most}), or use "
                    "fewer --num-workers."
                ) from error
            if "DataLoader worker" not in str(error):  # how PyTorch says that a worker is gone
                raise
            raise self._worker_died(error) from error

    def reading(self, pids: Sequence[int] = ()) -> str:
        """What each worker, or those with these process ids, read last or reads now: for messages about hangs."""
        path_of = getattr(self.loader.dataset.dataset, "path_of", None)  # type: ignore[attr-defined]
        rows = [(i, *row) for i, row in enumerate(self._reading.tolist()) if row[0]]
        lines = []
        for worker, pid, epoch, index in [row for row in rows if row[1] in pids] or rows:
            file = f"{path_of(index)}, " if path_of is not None else ""
            lines.append(f"worker {worker} (pid {pid}) was reading {file}sample {index} of epoch {epoch}")
        return "; ".join(lines) or "The data are read by the process itself."

    def _worker_died(self, error: Exception) -> UserError:
        """What became of a worker that a signal ended, which leaves no message of its own."""
        text = f"{error} {error.__cause__ or ''}"
        dead = [int(pid) for pid in re.findall(r"\(pid(?:\(s\))? ([\d, ]+)\)", text) for pid in pid.split(",")]
        ended_by = re.search(r"by signal: ([^.]+)", text)
        return UserError(
            f"process {self._rank}: a worker of the data loader was killed{f' ({ended_by[1]})' if ended_by else ''}. "
            f"{self.reading(dead)}. When the machine ran out of memory (dmesg says so), use fewer --num-workers or a smaller "
            "--prefetch-gib; when it is always the same file, remove its row."
        )


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
    """The sampler for a dataset: over buckets where it has them; `batch_size`, or `tail` and `order`, are for the other kind.

    Args:
        rank, world_size: Of data parallelism: processes that share one sample have one rank.
    """
    if hasattr(dataset, "buckets"):
        return BucketBatchSampler(dataset, seed=seed, rank=rank, world_size=world_size, tail=tail, order=order)
    return EpochBatchSampler(len(dataset), batch_size, seed=seed, rank=rank, world_size=world_size)


def build_loader(
    dataset: SampleSource,
    sampler: BatchSampler,
    *,
    num_workers: int = 0,
    rank: int = 0,
    pin_memory: bool = False,
    persistent_workers: bool = False,
    batch_bytes: int = 0,
    prefetch_gib: float = float("inf"),
) -> BatchLoader:
    """The batches that a sampler names.

    A `UserError` of the dataset is raised here as it was there, whatever process it came from. The sampler is read from
    `__iter__` on, so it may be moved until then.

    Args:
        persistent_workers: Keep them between passes; a train loop makes one pass over all epochs.
        batch_bytes: Of the largest batch.
        prefetch_gib: GiB that batches read ahead may take: fewer of them, then fewer workers, keep to it.
    """
    if num_workers:
        _allow_open_files()
    num_workers, prefetch = bounded_prefetch(num_workers, batch_bytes, prefetch_gib)
    reading = torch.zeros(max(num_workers, 1), 3, dtype=torch.int64).share_memory_()
    loader: DataLoader = DataLoader(
        _Batches(dataset, reading),
        batch_size=None,  # the sampler's items are whole batches
        sampler=sampler,
        collate_fn=lambda batch: batch,
        num_workers=num_workers,
        prefetch_factor=prefetch if num_workers else None,
        pin_memory=pin_memory,
        persistent_workers=persistent_workers and num_workers > 0,
        worker_init_fn=_start_worker if num_workers else None,
        # forked, PyTorch's default: forkserver and spawn import the whole script again in every worker, which took more
        # than a minute for 12 of them. Workers never touch CUDA or the process group of the process they leave.
        multiprocessing_context="fork" if num_workers else None,
        # never used; without it torch would draw the workers' seed from the global generator
        generator=torch.Generator().manual_seed(0),
    )
    return BatchLoader(loader, sampler, reading, rank)


def build_dataloader(  # noqa: PLR0913  (a run's coordinates)
    dataset: Any,
    batch_size: int,
    *,
    seed: int,
    num_workers: int = 0,
    rank: int = 0,
    world_size: int = 1,
    start: int = 0,
    stop: int | None = None,
    pin_memory: bool = False,
) -> BatchLoader:
    """This rank's batches of one size, from micro-batch `start` on; see `EpochBatchSampler` and `collate`."""
    sampler = EpochBatchSampler(
        len(dataset), batch_size, seed=seed, rank=rank, world_size=world_size, start=start, stop=stop
    )
    return build_loader(dataset, sampler, num_workers=num_workers, rank=rank, pin_memory=pin_memory)


def batch_bytes(dataset: Any, batch_size: int) -> int:
    """Of the largest batch of a dataset, as fp32 videos; 0 where it is not known."""
    if hasattr(dataset, "buckets"):
        return max(bucket.num_bytes for bucket in dataset.buckets)
    return batch_size * getattr(dataset, "sample_bytes", 0)


def bounded_prefetch(num_workers: int, batch_bytes: int, prefetch_gib: float) -> tuple[int, int]:
    """How many workers, and batches ahead of each, keep within `prefetch_gib`; at least one of each where there are workers."""
    if num_workers == 0 or batch_bytes == 0:
        return num_workers, PREFETCH
    batches = int(prefetch_gib * GIB / batch_bytes) if prefetch_gib < float("inf") else num_workers * PREFETCH
    workers = max(1, min(num_workers, batches))
    if workers < num_workers:
        logger.warning(
            "the largest batch takes %.1f GiB, so %d of %d workers are used to keep within prefetch_gib=%g.",
            batch_bytes / GIB, workers, num_workers, prefetch_gib,
        )  # fmt: skip
    return workers, max(1, min(PREFETCH, batches // workers))


def collate(items: Sequence[dict[str, Any]]) -> Batch:
    """Stack tensors along a new first dimension, and list everything else.

    Raises:
        UserError: tensors differ in shape.
    """
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


class _Failure:
    """A user's mistake on its way out of a worker, where an exception would gain a traceback of the worker."""

    def __init__(self, message: str) -> None:
        self.message = message


class _Batches(Dataset):
    """Reads whole batches; notes what it reads in `reading` [workers, (pid, epoch, sample)], which outlives a worker."""

    def __init__(self, dataset: SampleSource, reading: torch.Tensor | None = None) -> None:
        self.dataset, self.reading = dataset, reading

    def __getitem__(self, batch: BatchKeys) -> Batch | _Failure:
        try:
            items = collate([self._read(key) for key in batch.keys])
        except UserError as error:
            return _Failure(str(error))
        return {
            **items,
            "sample_index": batch.first_index + torch.arange(len(batch.keys)),
            "global_batch_size": batch.global_batch_size,
        }

    def _read(self, key: SampleKey | BucketKey) -> dict[str, Any]:
        if (worker := get_worker_info()) and self.reading is not None:
            self.reading[worker.id] = torch.tensor([os.getpid(), key.epoch, key.index])
        return read_or_substitute(self.dataset, key)


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
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_end_on_sigterm_of, args=(os.getppid(),), daemon=True).start()


def _end_on_sigterm_of(pid: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != pid:
        pass
    os._exit(0)
