"""The line above a benchmark's table: device, versions, date and the command that prints it; and silence while it measures."""

import logging
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from importlib.util import find_spec
from pathlib import Path

import torch


def heading(device: torch.device, module: str, argv: list[str] | None = None) -> str:
    """Markdown text of one line.

    Args:
        device: what is measured.
        module: as `python -m` takes it.
        argv: its arguments; None = this process'.
    """
    command = " ".join(["python -m", module, *(sys.argv[1:] if argv is None else argv)])
    return f"`{command}`, {device_name(device)}, {versions(device)}, {date.today().isoformat()}"


@contextmanager
def quiet() -> Iterator[None]:
    """Between the table's lines nothing is said but warnings."""
    before = logging.root.manager.disable
    logging.disable(logging.INFO)
    try:
        yield
    finally:
        logging.disable(before)


def device_name(device: torch.device) -> str:
    """Of the GPU; or of the processor, with the number of threads that PyTorch computes with."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{_processor()}, {threads} thread{'' if threads == 1 else 's'}"


def versions(device: torch.device) -> str:
    """Of PyTorch, and on a GPU of Triton."""
    found = f"torch {torch.__version__}"
    if device.type == "cuda" and find_spec("triton") is not None:
        import triton

        found += f", triton {triton.__version__}"
    return found


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else f"CPU {platform.machine()}"
