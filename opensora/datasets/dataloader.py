"""Batches for a whole run, read by worker processes, the same for any number of them."""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, Dataset

from opensora.datasets.sampler import EpochBatchSampler, SampleKey
from opensora.utils.errors import UserError

Batch = dict[str, Any]


class SampleSource(Protocol):
    """What a loader asks of a dataset."""

    def __len__(self) -> int: ...

    def __getitem__(self, key: SampleKey) -> dict[str, Any]: ...


class BatchLoader:
    """An iterable over the batches `start` ... `stop - 1` of a run; its length is their number."""

    def __init__(self, loader: DataLoader, sampler: EpochBatchSampler) -> None:
        self.loader, self.sampler = loader, sampler

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Batch]:
        for batch in self.loader:
            if isinstance(batch, _Failure):
                raise UserError(batch.message)
            yield batch


def build_dataloader(  # noqa: PLR0913  (a run's coordinates)
    dataset: SampleSource,
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
    """This rank's batches of the run, from micro-batch `start` on; see `EpochBatchSampler` and `collate`.

    A `UserError` of the dataset is raised here as it was there, whatever process it came from.
    """
    sampler = EpochBatchSampler(
        len(dataset), batch_size, seed=seed, rank=rank, world_size=world_size, start=start, stop=stop
    )
    loader: DataLoader = DataLoader(
        _Batches(dataset),
        batch_size=None,  # the sampler's items are whole batches
        sampler=sampler,
        collate_fn=_as_it_is,
        num_workers=num_workers,
        pin_memory=pin_memory,
        worker_init_fn=_start_worker if num_workers else None,
        # forked, PyTorch's default: forkserver and spawn import the whole script again in every worker, which took more
        # than a minute for 12 of them. Workers never touch CUDA or the process group of the process they leave.
        multiprocessing_context="fork" if num_workers else None,
        # never used; without it torch would draw the workers' seed from the global generator
        generator=torch.Generator().manual_seed(0),
    )
    return BatchLoader(loader, sampler)


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
    def __init__(self, dataset: SampleSource) -> None:
        self.dataset = dataset

    def __getitem__(self, keys: list[SampleKey]) -> Batch | _Failure:
        try:
            return collate([self.dataset[key] for key in keys])
        except UserError as error:
            return _Failure(str(error))


def _as_it_is(batch: Any) -> Any:
    return batch


def _start_worker(_worker: int) -> None:
    torch.set_num_threads(1)
