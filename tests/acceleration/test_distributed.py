"""Where a process of a world stands."""

from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from opensora.acceleration.cfg_parallel import make_parallel_plan
from opensora.acceleration.distributed import STEP_TIMEOUT, init_world, local_gpu
from opensora.acceleration.engines.ddp import DDPEngine
from opensora.acceleration.engines.fsdp2 import make_mesh
from opensora.config.schema import LoopConfig
from opensora.datasets.datasets import VideoTextDataset
from opensora.training.loop import same_data, same_settings
from opensora.utils.errors import UserError
from tests.conftest import start_ranks

ROOT = Path(__file__).parents[2]


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


def every_group_waits_as_long(rank, folder):
    dist.init_process_group("gloo", init_method=(folder / "rendezvous").as_uri(), rank=rank, world_size=4)
    world = init_world("cpu", sp_size=2, timeout=timedelta(hours=3))
    mesh, videos = make_mesh(world, 2), make_parallel_plan(world, 2, cfg_parallel=True)
    model = torch.nn.Linear(2, 2)
    hybrid = DDPEngine(model, torch.optim.SGD(model.parameters()), world, hybrid_zero=True, shard_size=2)
    groups = {
        (rank // 2 * 2, rank // 2 * 2 + 1): [
            world.sp_group,
            mesh.get_group("shard"),
            hybrid.group,
            videos.sp_group,
        ],
        (rank % 2, rank % 2 + 2): [mesh.get_group("replicate"), videos.cfg_group],
    }
    assert mesh["shard"].size() == mesh["replicate"].size() == 2
    for ranks, made in groups.items():
        for group in made:
            assert tuple(dist.get_process_group_ranks(group)) == ranks
            assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(hours=3)
    dist.destroy_process_group()


@pytest.mark.slow
def test_groups_wait_as_long_as_the_group_of_all(tmp_path):
    """PyTorch's own limit for a group of some is 10 minutes with NCCL, whatever that of all is: less than a first step may take."""
    start_ranks(every_group_waits_as_long, (tmp_path,), 4, "groups", 120)


def others_see_a_file_more(rank, world_size, folder):
    for place in (0, 1):
        mine = folder / str(place)
        clips = sorted((ROOT / "assets" / "clips").glob("*.mp4"))[: 21 - place]
        if rank == 0:
            mine.mkdir()
            (mine / "clips.csv").write_text("path,text\n" + "".join(f"{clip},a\n" for clip in clips))
    dist.barrier()
    same = VideoTextDataset(str(folder / "0" / "clips.csv"), num_frames=4)
    assert same_data(same) == same.fingerprint()
    with pytest.raises(
        UserError, match=r"other data .* in process 0: 21 samples, \w+; in process 1: 20 samples, \w+\."
    ):
        same_data(VideoTextDataset(str(folder / str(rank) / "clips.csv"), num_frames=4))


@pytest.mark.multiprocess
def test_processes_that_see_other_data_are_refused(spawn, tmp_path):
    """Such as a file that one machine's mount does not show: rows would be trained on twice or never."""
    spawn(others_see_a_file_more, 2, tmp_path)


def other_settings(rank, world_size, folder):
    same_settings(LoopConfig())
    same_settings(LoopConfig(outputs=f"/node{rank}/outputs"))  # paths may differ
    with pytest.raises(
        UserError, match=r"other settings: .* in process 0: as there; in process 1: lr was .*, now 0\.5"
    ):
        same_settings(LoopConfig(lr=0.5 if rank else 0.1))


@pytest.mark.multiprocess
def test_processes_with_other_settings_are_refused(spawn, tmp_path):
    """Such as a config that was changed on one machine: other steps hang a run, another lr lets its weights drift apart."""
    spawn(other_settings, 2, tmp_path)


def test_processes_of_srun_that_do_not_know_of_each_other_are_refused(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "8")
    assert init_world("cpu").size == 1  # in a shell of salloc
    monkeypatch.setenv("SLURM_PROCID", "3")
    with pytest.raises(UserError, match=r"srun has started 8 processes .*LOCAL_WORLD_SIZE="):
        init_world("cpu")
