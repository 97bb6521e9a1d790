"""The tools that measure speed run at toy size, say where and with what, and compare fast paths with slow ones in the same run."""

import re
import sys

import pytest
import torch

from tools.benchmark import activation_memory, attention, compile_modes, dataloader, sample, train_step, vae
from tools.benchmark.heading import heading

TINY = "--latent 1 4 4 --batch 1 --text-len 4 --warmup 1 --steps 2 --peak-tflops 1"
# the tool, its arguments, lines of its table, the column that compares, and what may stand there
TOOLS = {
    "train_step": (train_step, f"{TINY} --models DiT-S/2 --blocks eager --checkpoint none block", 2, "error", 1e-5),
    "train_step bf16": (train_step, f"{TINY} --models DiT-S/2 --blocks eager --dtype bf16", 1, "error", 0.05),
    "sample": (sample, "--cases toy --ways eager offload-model --steps 2 --dtype fp32", 2, None, None),
    "attention": (attention, "--toy --repeats 1", 21, "error", 1e-5),
    "attention bf16": (attention, "--toy --repeats 1 --dtype bf16 --cases text --kernels auto", 1, "of the gradient", 0.02),
    "vae": (vae, "--vaes sd --ways eager --formats fp32 bf16 --size 16 16 --frames 1 --seconds 0", 2, "error decode", 0.05),
    "dataloader": (dataloader, "--toy --workers 0 1 --epochs 2", 2, None, None),
    "compile_modes": (compile_modes, "--toy --model DiT-XL/2 --modes jit:freezing", 3, None, None),
    "activation_memory": (activation_memory, "--model DiT-S/2 --depth 2 --latent 1 8 8 --levels none block", 2, None, None),
}  # fmt: skip


@pytest.mark.usefixtures("without_code")
@pytest.mark.slow
@pytest.mark.parametrize("name", TOOLS)
def test_a_tool_prints_its_table(name, monkeypatch, capsys):
    tool, options, lines, column, largest = TOOLS[name]
    monkeypatch.setattr(sys, "argv", ["tool", *options.split()])
    threads = torch.get_num_threads()
    tool.main()
    torch.set_num_threads(threads)
    printed = capsys.readouterr().out
    head = printed.splitlines()[0]
    assert head.startswith(f"`python -m {tool.__name__} {options}`, ")
    assert f"torch {torch.__version__}" in head
    assert re.search(r"\d{4}-\d\d-\d\d", head)
    table = [
        [cell.strip() for cell in line.strip("| ").split(" | ")]
        for line in printed.splitlines()
        if line.startswith("|")
    ]
    rows = table[2:]
    assert len(rows) == lines
    if column is not None:
        found = [float(row[table[0].index(column)]) for row in rows]
        assert all(0 <= error < largest for error in found)
        assert name not in ("train_step bf16", "attention bf16") or min(found) > 1e-5  # it is no fp32 that was compared


@pytest.mark.nightly
@pytest.mark.slow
def test_a_step_cache_samples_something_else(monkeypatch, capsys):
    """The column tells a way that computes something else from one that does not."""
    monkeypatch.setattr(
        sys, "argv", ["tool", *["--cases", "toy", "--ways", "eager", "pab", "--steps", "8", "--dtype", "fp32"]]
    )
    sample.main()
    psnr = [line.rsplit("|", 2)[1].strip() for line in capsys.readouterr().out.splitlines() if line.startswith("| toy")]
    assert psnr[0] == "-"
    assert 10 < float(psnr[1]) < 100


def test_a_heading_names_device_versions_date_and_command():
    line = heading(torch.device("cpu"), "tools.benchmark.vae", ["--frames", "4"])
    assert line.startswith("`python -m tools.benchmark.vae --frames 4`, ")
    assert f", {torch.get_num_threads()} thread" in line
