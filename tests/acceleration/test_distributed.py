"""Where a process of a world stands."""

from datetime import timedelta

import pytest
import torch

from opensora.acceleration.distributed import STEP_TIMEOUT, init_world, local_gpu
from opensora.utils.errors import UserError


def test_the_gpu_is_that_of_the_local_rank(monkeypatch):
    """The second process of the second machine of eight GPUs: by its rank it would take one that is not there."""
    monkeypatch.setenv("RANK", "9")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert local_gpu(8) == torch.device("cuda", 1)
    assert local_gpu(2) == torch.device("cuda", 1)


def test_more_processes_than_gpus(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(UserError, match=r"process 3 of its machine.* sees 2 GPUs.*--nproc_per_node"):
        local_gpu(2)


def test_without_torchrun_there_is_one(monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert local_gpu(1) == torch.device("cuda", 0)
    world = init_world("cpu", timeout=timedelta(hours=3))
    assert (world.rank, world.size, world.timeout) == (0, 1, STEP_TIMEOUT)
