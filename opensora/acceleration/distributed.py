"""Processes: one without torchrun, or those that torchrun started."""

import atexit
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar, cast
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn

from opensora.acceleration.threads import limit_cpu_threads
from opensora.utils.errors import UserError

T = TypeVar("T")
STEP_TIMEOUT = timedelta(minutes=30)


@dataclass(frozen=True)
class World:
    """This process: `rank` of `size`, on `device`.

    With `sp_size` > 1, that many neighbours share each sample (sequence parallelism): ranks 0 ... sp_size - 1 are the
    first `sp_group`, and a process's data are those of its `dp_rank`.
    """

    rank: int
    size: int
    device: torch.device
    sp_size: int = 1
    sp_group: dist.ProcessGroup | None = field(default=None, compare=False)  # None with sp_size=1
    timeout: timedelta = field(default=STEP_TIMEOUT, compare=False)  # of collective calls

    @property
    def dp_rank(self) -> int:
        """Which of the data-parallel groups this process belongs to; it alone decides what data it reads."""
        return self.rank // self.sp_size

    @property
    def dp_size(self) -> int:
        """How many samples (or batches) are worked on at once."""
        return self.size // self.sp_size

    @property
    def sp_rank(self) -> int:
        """Which part of a sample this process has."""
        return self.rank % self.sp_size

    @property
    def is_main(self) -> bool:
        """True in the one process that writes logs and checkpoints."""
        return self.rank == 0


def init_world(device: str = "auto", sp_size: int = 1, timeout: timedelta = STEP_TIMEOUT) -> World:
    """Join the processes of torchrun (NCCL on GPUs, gloo on CPUs), or be the only one; set the threads of a CPU.

    Args:
        device: "cpu", "cuda", or "auto" = a GPU if there is one.
        sp_size: processes that share a sample.
        timeout: of a collective call that waits for another process.

    Raises:
        UserError: a GPU is asked for and there is none, there are fewer than processes on this machine, `sp_size` does
            not divide the number of processes, or srun started processes that know nothing of each other.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise UserError(f"device={device!r} is not one of auto, cpu, cuda.")
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("device='cuda', but PyTorch sees no GPU here. Use --device cpu, or check the driver.")
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS", "1")
    if "WORLD_SIZE" not in os.environ and "SLURM_PROCID" in os.environ and tasks.isdecimal() and int(tasks) > 1:
        raise UserError(  # each would train a whole run of its own
            f"srun has started {tasks} processes that do not know of each other. Start them with torchrun, or export MASTER_ADDR, "
            "MASTER_PORT and WORLD_SIZE=$SLURM_NTASKS, and in each RANK=$SLURM_PROCID, LOCAL_RANK=$SLURM_LOCALID and "
            "LOCAL_WORLD_SIZE=$SLURM_NTASKS_PER_NODE: docs/how-to/multi-node.md."
        )
    use_cuda = device != "cpu" and torch.cuda.is_available()
    own = local_gpu(torch.cuda.device_count()) if use_cuda else torch.device("cpu")
    if use_cuda:
        prefer_expandable_segments()
        torch.cuda.set_device(own)
    else:
        limit_cpu_threads()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
        dist.init_process_group(timeout=timeout, **_backend(own))
    several = dist.is_initialized()
    rank, size = (dist.get_rank(), dist.get_world_size()) if several else (0, 1)
    check_group_size("sp_size", sp_size, size)
    if not several:
        return World(0, 1, own)
    group = None if sp_size == 1 else neighbours(rank, size, sp_size, timeout)
    return World(rank, size, own, sp_size, group, timeout)


def prefer_expandable_segments() -> None:
    """Ask for expandable memory segments before a GPU is used: fragmentation took up to 8 % of an 80 GB card without
    (docs/explanation/benchmarks/goals.md)."""
    if "PYTORCH_ALLOC_CONF" not in os.environ:  # the newer name
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")


def local_gpu(count: int) -> torch.device:
    """The GPU of this process among the `count` of its machine, by torchrun's LOCAL_RANK; UserError: there is none."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if local_rank >= count:
        raise UserError(
            f"this is process {local_rank + 1} of its machine, where PyTorch sees {count} GPUs. Start as many processes as "
            "there are GPUs (torchrun --nproc_per_node), or look at CUDA_VISIBLE_DEVICES."
        )
    return torch.device("cuda", local_rank)


def own_group(groups: Iterable[Sequence[int]], rank: int, timeout: timedelta) -> dist.ProcessGroup:
    """The group of process `rank` among `groups`, which hold every process once.

    All processes must call it: every one makes every group, which would wait 10 minutes by PyTorch's default with NCCL.
    """
    made = [(dist.new_group(list(ranks), timeout=timeout), ranks) for ranks in groups]
    return next(cast(dist.ProcessGroup, group) for group, ranks in made if rank in ranks)


def check_group_size(name: str, group_size: int, size: int) -> None:
    """Refuse groups of neighbours that would not be of one size, with a UserError."""
    if size % group_size:
        legal = [str(n) for n in range(1, size + 1) if size % n == 0]
        raise UserError(
            f"{name}={group_size} does not divide the number of processes, {size}. Here it can be {', '.join(legal)}; or start more "
            "processes with torchrun --nproc_per_node."
        )


def neighbours(rank: int, size: int, group_size: int, timeout: timedelta) -> dist.ProcessGroup:
    """`own_group` among groups of `group_size` processes with successive ranks."""
    return own_group([range(first, first + group_size) for first in range(0, size, group_size)], rank, timeout)


def join_alone(device: torch.device) -> None:
    """Make a process group of one where there is none, for what cannot do without (NCCL on a GPU, gloo on a CPU)."""
    if not dist.is_initialized():
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1, **_backend(device))


def _backend(device: torch.device) -> dict[str, Any]:
    """The library for communication. NCCL gets its GPU: then it connects at once, and need not guess it later."""
    if device.type != "cuda":
        return {"backend": "gloo"}
    index = torch.cuda.current_device() if device.index is None else device.index
    return {"backend": "nccl", "device_id": torch.device("cuda", index)}


def host_group(world: World, timeout: timedelta) -> dist.ProcessGroup | None:
    """A gloo group of all processes, which all must call for; None = no others. It waits for no device."""
    return None if world.size == 1 else cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=timeout))


_held: WeakSet[Any] = WeakSet()


def release_at_shutdown(holder: Any) -> None:
    """Let `shutdown`, or else the end of Python, call `holder.release()` first, if it still lives."""
    _held.add(holder)


@atexit.register  # an error may end a process without `shutdown`
def release_all() -> None:
    """What `shutdown` does before it leaves the process group."""
    for holder in list(_held):
        holder.release()


def shutdown() -> None:
    """Leave the process group, if there is one."""
    release_all()
    if dist.is_initialized():
        dist.destroy_process_group()


@torch.no_grad()
def broadcast_params(
    model: nn.Module, group: dist.ProcessGroup | None = None, device: torch.device | None = None
) -> None:
    """Broadcast the weights and buffers of a group's first process to all of it, by way of `device`; None = where they are."""
    for tensor in (*model.parameters(), *model.buffers()):
        sent = tensor.detach().to(device or tensor.device).contiguous()  # NCCL refuses channels-last kernels
        # gloo knows no float8
        sent_bytes = sent.view(torch.uint8) if sent.dtype == torch.float8_e4m3fn else sent
        dist.broadcast(sent_bytes, group=group, group_src=0)
        tensor.copy_(sent)


def mean_over_ranks(value: Tensor) -> Tensor:
    """The mean of a tensor over all processes; the same on each."""
    if not dist.is_initialized():
        return value
    value = value.clone()
    dist.all_reduce(value)
    return value / dist.get_world_size()


def broadcast_from_rank0(
    make: Callable[[], T], groups: Sequence[dist.ProcessGroup | None] = (None,), *, is_leader: bool | None = None
) -> T:
    """Run `make` in one process and give its result to all; a UserError or OSError of it is raised in all.

    Args:
        make: gives something that can be pickled.
        groups: are passed through in this order, each from its rank 0; None = all processes.
        is_leader: whether `make` is run here; None = in rank 0 of the world.
    """
    if not dist.is_initialized() or not groups:
        return make()
    box: list[Any] = [None, None]
    if dist.get_rank() == 0 if is_leader is None else is_leader:
        try:
            box[0] = make()
        except (UserError, OSError) as error:
            box[1] = error
    for group in groups:
        dist.broadcast_object_list(box, group=group, group_src=0)
    if box[1] is not None:
        raise box[1]
    return cast(T, box[0])


def refuse_different(own: str, what: str) -> None:
    """A UserError in all processes, which all call this, if `own` is not the same in them."""
    if not dist.is_initialized():
        return
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, own)
    for rank, value in enumerate(values):
        if value != values[0]:
            raise UserError(f"{what} in process 0: {values[0]}; in process {rank}: {value}.")


def barrier() -> None:
    """Wait for all processes."""
    if dist.is_initialized():
        dist.barrier()
