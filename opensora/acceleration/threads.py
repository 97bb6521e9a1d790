"""How many threads PyTorch computes with on a CPU. How they wait for each other is set in `opensora/__init__.py`."""

import functools
import logging
import os
from contextlib import suppress
from pathlib import Path

import torch

logger = logging.getLogger(__name__)


@functools.cache  # once in a process
def limit_cpu_threads() -> None:
    """Compute with no more threads than this process has CPUs, and log how many they are.

    PyTorch takes one for each physical core that the process may run on (`taskset`, cpuset), but does not know of a container's
    quota of CPU time, which threads beyond it spend waiting. Processes of one machine share its CPUs. `OMP_NUM_THREADS` or
    `MKL_NUM_THREADS`, where set, is left as it is (torchrun sets the former to 1).
    """
    threads = torch.get_num_threads()
    if given := next((name for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS") if name in os.environ), None):
        logger.info("CPU: %d threads (%s)", threads, given)
        return
    share = min(threads, cpu_quota() or threads) / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    torch.set_num_threads(max(int(share), 1))
    limited = f", limited from {threads}" if torch.get_num_threads() < threads else ""
    logger.info("CPU: %d threads%s (OMP_NUM_THREADS sets another number)", torch.get_num_threads(), limited)


def cpu_quota(root: Path = Path("/sys/fs/cgroup"), processes: Path = Path("/proc/self/cgroup")) -> float | None:
    """The CPUs' worth of time that Linux' control groups allow this process; None: no limit, or no Linux.

    Args:
        root: where version 2 of the control groups, or version 1's folder `cpu`, is mounted.
        processes: file that names this process' group; its parents limit it too.
    """
    own = ""
    with suppress(OSError, StopIteration):
        own = next(line[3:] for line in processes.read_text().splitlines() if line.startswith("0::"))
    group = root / own.strip("/")
    files = [[folder / "cpu.max"] for folder in (group, *group.parents) if folder.is_relative_to(root)]
    files.append([root / "cpu" / f"cpu.cfs_{name}_us" for name in ("quota", "period")])  # version 1
    quotas = []
    for of_one in files:
        with suppress(OSError, ValueError):  # no such file, or "max"
            quota, period = (int(word) for file in of_one for word in file.read_text().split())
            if quota > 0:  # -1 is version 1's "max"
                quotas.append(quota / period)
    return min(quotas, default=None)
