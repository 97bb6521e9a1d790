"""A process that cannot write its part says so, though nothing may fit on the disk any more: rank 0 ends at once."""

import multiprocessing
import resource
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch

from opensora.acceleration.distributed import World
from opensora.checkpoint.load import open_checkpoint
from opensora.checkpoint.save import Writing
from opensora.checkpoint.tensors import Shard
from opensora.config.schema import LoopConfig
from opensora.training.run import RunState
from opensora.training.saver import Saver
from opensora.utils.errors import UserError
from tests.forks import forked

MANY = 500_000  # numbers, 2 MB
SHORT_S = 5.0  # far less than TIMEOUT_S: a failure that is noted ends the wait at once


def part_of(rank: int, count: int) -> dict[str, dict[str, Shard]]:
    """The part "model" with a tensor of which each of two ranks has `count` numbers."""
    return {"model": {"w": Shard(torch.full((count,), float(rank)), (2 * count,), (rank * count,), writes=True)}}


def both(path: Path) -> tuple[Writing, Writing]:
    return Writing(path, "t", 0, 2), Writing(path, "t", 1, 2)


def files_of(writing: Writing) -> list[str]:
    return sorted(str(file.relative_to(writing.partial)) for file in writing.partial.rglob("*") if file.is_file())


@contextmanager
def mounted(folder: Path, options: str) -> Iterator[Path]:
    """A small file system; without the right to mount one, the test is skipped."""
    folder.mkdir()
    try:
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"a tmpfs cannot be mounted here: {error}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def fill(disk: Path) -> None:
    """Leave no block of it free."""
    with (disk / "ballast").open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))


def in_a_process(target: Callable[..., None], *args: object) -> None:
    process = multiprocessing.get_context("fork").Process(target=forked, args=(target, *args))
    process.start()
    process.join(60)
    assert process.exitcode == 0


def test_what_a_full_disk_refused_is_deleted_and_told(tmp_path):
    with mounted(tmp_path / "disk", "size=1m") as disk:
        first, second = both(disk / "a")
        first.write_own(part_of(0, 10), {})
        with pytest.raises(OSError, match="No space left on device"):
            second.write_own(part_of(1, MANY), {})
        assert "model/model-00001-of-00002.safetensors" not in files_of(second)
        with pytest.raises(UserError, match=r"rank 1: OSError: .*No space left on device"):
            first.commit({}, {}, timeout_s=SHORT_S)


def test_a_disk_that_stays_full_is_told_without_a_byte(tmp_path):
    """What the process gives back may be taken at once by another that writes."""
    with mounted(tmp_path / "disk", "size=1m") as disk:
        first, second = both(disk / "a")
        first.write_own(part_of(0, 10), {})
        fill(disk)
        with pytest.raises(OSError, match="No space left on device"):
            second.write_own(part_of(1, MANY), {})
        with pytest.raises(UserError, match=r"rank 1: ENOSPC: No space left on device"):
            first.commit({}, {}, timeout_s=SHORT_S)


def test_a_disk_without_room_for_a_further_file(tmp_path):
    inodes = 6  # its root, the checkpoint's folder, `model`, rank 0's file and note; one for rank 1
    with mounted(tmp_path / "disk", f"size=1m,nr_inodes={inodes}") as disk:
        first, second = both(disk / "a")
        first.write_own(part_of(0, 10), {})
        with pytest.raises(OSError, match="No space left on device"):
            second.write_own(part_of(1, 10), {})
        with pytest.raises(UserError, match=r"rank 1: OSError: .*No space left on device"):
            first.commit({}, {}, timeout_s=SHORT_S)


def write_with_limit(writing: Writing, limit: int) -> None:
    """The kernel refuses what makes a file longer than `limit` bytes: EFBIG, without any privilege needed to set it up."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    with pytest.raises(OSError, match="File too large"):
        writing.write_own(part_of(writing.rank, MANY), {})


@pytest.mark.parametrize(
    ("limit", "message"),
    [(4096, r"rank 1: OSError: .*File too large"), (0, r"rank 1: EFBIG: File too large")],
    ids=["a note fits", "nothing fits"],
)
def test_what_the_system_refuses_to_write(tmp_path, limit, message):
    first, second = both(tmp_path / "a")
    first.write_own(part_of(0, 10), {})
    in_a_process(write_with_limit, second, limit)
    assert "model/model-00001-of-00002.safetensors" not in files_of(second)
    with pytest.raises(UserError, match=message):
        first.commit({}, {}, timeout_s=SHORT_S)


def test_rank_0_tells_of_its_own(tmp_path):
    in_a_process(write_with_limit, Writing(tmp_path / "a", "t", 0, 2), 0)
    assert not (tmp_path / "a").exists()


def test_nothing_but_the_checkpoint_is_left_when_all_goes_well(tmp_path):
    first, second = both(tmp_path / "a")
    second.write_own(part_of(1, 10), {})
    first.write_own(part_of(0, 10), {})
    opened = open_checkpoint(first.commit({}, {}, timeout_s=SHORT_S), check="checksum")
    assert opened.tensors("model")["w"].tolist() == [0.0] * 10 + [1.0] * 10
    there = {str(file.relative_to(opened.path)) for file in opened.path.rglob("*") if file.is_file()}
    assert there == {"manifest.json", *opened.manifest["files"]}


def all_hear_of_it(rank: int, world_size: int, tmp_path: Path) -> None:
    saver = Saver(tmp_path, World(rank, world_size, torch.device("cpu")), LoopConfig(), {"model": "toy"})
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    saver.save(RunState("d", 1, step=1), {"model": {"w": torch.ones(4)}})
    with pytest.raises(UserError, match=r"a checkpoint could not be written to .*: rank 1: EFBIG: File too large"):
        saver.wait()
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    saver.save(RunState("d", 1, step=2), {"model": {"w": torch.ones(4)}})
    saver.wait()
    open_checkpoint(tmp_path / "epoch0-global_step2")


@pytest.mark.slow
@pytest.mark.multiprocess
def test_the_next_save_ends_in_all_processes(spawn, tmp_path):
    """Well within the limit of `spawn`, which is a fraction of the time that is given to a slow disk."""
    spawn(all_hear_of_it, 2, tmp_path)
