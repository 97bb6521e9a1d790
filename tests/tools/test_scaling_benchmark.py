"""The tools that measure several GPUs: what is run, what becomes of rows that fail, and efficiency; over gloo, at toy size."""

import json
import os
import subprocess
import sys
from argparse import Namespace
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from opensora.acceleration.distributed import World
from tests.tools.markdown import table_of
from tools.benchmark import sampling, scaling
from tools.benchmark.__main__ import run
from tools.benchmark.scaling import Row, by_key, read_results, rows_of
from tools.benchmark.training import Result, Work

ROOT = Path(__file__).parents[2]
ONE = Result(0.5, 8, 8192, 1e12, None, 0, 2**30, 10.0)


def test_weak_and_strong_scaling_have_the_batches_that_their_names_say():
    for n in (2, 4, 8):
        weak, strong = (row for name in ("weak", "strong") for row in rows_of(name, n) if row.layout == "ddp")
        assert weak.work.batch == rows_of("weak", 1)[0].work.batch == 8
        assert n * strong.work.batch == 8
    assert rows_of("strong", 1) == rows_of("weak", 1)


def test_every_layout_fits_its_gpus():
    for name in scaling.BASES:
        for n in (1, 2, 4, 8):
            rows = rows_of(name, n)
            assert len({row.key for row in rows}) == len(rows)
            for row in rows:
                assert n % row.work.sp_size == 0
                assert n % row.work.settings.get("shard_size", 1) == 0
    assert "hsdp 4" in [row.layout for row in rows_of("weak", 8)]
    assert [row.layout for row in rows_of("long-stdit3", 4)] == [
        "sp 4 dsp recorded", "sp 4 dsp", "sp 4 ulysses", "dp 2 x sp 2 dsp",
    ]  # fmt: skip


def test_efficiency_is_against_one_gpu(capsys, tmp_path):
    """Two GPUs with twice the samples in 1.25 times the time are 80 %; a share of MFU is of both GPUs."""
    file = tmp_path / "r.jsonl"
    two = replace(
        ONE, seconds=0.625, samples=16, tokens=16384, flops=2e12, exposed_s=0.1, sent_bytes=2**21, idle_s=0.05
    )
    entries = [
        {"key": "weak | 1 | ddp", "result": asdict(ONE), "on": "a card"},
        {"key": "weak | 2 | ddp", "result": asdict(two), "on": "a card"},
        {"key": "strong | 2 | ddp", "said": "out of memory"},
    ]
    file.write_text("".join(json.dumps(entry) + "\n" for entry in entries) + '{"key": "half a li')
    run(["scaling", "--results", str(file), "--table", "--peak-tflops", "8", "--gpus", "1", "2"])
    printed = capsys.readouterr().out
    assert "table of a card; bf16, compiled blocks, 3 + 6 steps; MFU of 8 TFLOP/s a GPU" in printed
    first, second, third = table_of(printed)
    assert (first["GPUs"], first["MFU"], first["efficiency"]) == ("1", "25.0%", "-")
    assert (second["GPUs"], second["MFU"], second["efficiency"]) == ("2", "20.0%", "80.0%")
    assert (second["samples/s"], second["exposed ms/step"], second["sent MiB/forward"]) == ("25.6", "100.0", "2")
    assert (first["idle ms/step"], second["idle ms/step"]) == ("-", "50.0")  # the first was not measured so
    assert (first["peak GiB"], third["ms/step"], third["efficiency"]) == ("1.0", "out of memory", "-")


def test_the_first_error_is_told(tmp_path):
    log = tmp_path / "log"
    log.write_text(
        "W1 Error: not this\nTraceback\n  raise\n[rank1]: ValueError: the | cause\nRuntimeError: a consequence\n"
    )
    assert scaling.last_error(log) == "ValueError: the / cause"
    log.write_text("Timeout (0:02:00)!\nThread 0x1\n")
    assert scaling.last_error(log) == "Timeout (0:02:00)!"
    log.write_text("killed")
    assert scaling.last_error(log) == f"see {log}"


@pytest.mark.nightly
@pytest.mark.multiprocess
@pytest.mark.slow
def test_a_row_that_fails_costs_no_other(tmp_path):
    """One that crashes, one that is refused, and two that are measured, by processes that are started twice."""
    args = Namespace(device="cpu", results=tmp_path / "r.jsonl", row_timeout=100.0, timeout=1000.0)
    good = Row("weak", 2, "ddp", Work("STDiT-XXS/2:2x8x8", blocks="eager", dtype="fp32", text_len=8, warmup=1, steps=2))
    bad = replace(good, layout="bad", work=replace(good.work, case="STDiT-XXS/2:2x8"))
    refused = replace(good, layout="zero2", work=replace(good.work, engine="zero2"))
    shared = replace(good, layout="sp 2", work=replace(good.work, sp_size=2, method="dsp"))
    scaling.run([bad, refused, good, shared], args)
    found = by_key(read_results(args.results))
    assert found["weak | 2 | bad"]["said"].startswith("failed: ValueError: not enough values")
    assert found["weak | 2 | zero2"]["said"].startswith("refused: plugin='zero2' needs a GPU")
    assert [found[f"weak | 2 | {name}"]["result"]["samples"] for name in ("ddp", "sp 2")] == [2, 1]
    assert found["weak | 2 | sp 2"]["result"]["sent_bytes"] > 0
    scaling.run([bad, good, shared], replace_timeout(args))  # what has figures is not measured again
    assert [entry["key"] for entry in read_results(args.results)[4:]] == ["weak | 2 | bad"]


def replace_timeout(args: Namespace) -> Namespace:
    """So short that the first row does not end."""
    return Namespace(**{**vars(args), "row_timeout": 0.001})


@pytest.mark.parametrize(
    ("way", "size"), [("compiled", 1), ("cfg", 1), ("sp", 4), ("sp2", 2), ("cfg-sp2", 2), ("dp", 1)]
)
def test_a_way_says_how_many_share_the_tokens(way, size):
    world = World(0, 4, torch.device("cpu"))
    assert sampling.sp_size(way, world) == size


@pytest.mark.nightly
@pytest.mark.multiprocess
@pytest.mark.slow
def test_four_processes_sample_what_one_does():
    """Teams of two and four, guidance in halves, and both: the same latents to rounding."""
    ways = ["compiled", "sp2", "sp4", "cfg", "cfg-sp2"]
    options = ["--cases", "toy", "--steps", "3", "--warmup-steps", "1", "--decode", "first", "--dtype", "fp32"]
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node=4",
        "-m",
        "tools.benchmark",
        "sample",
    ]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
    }  # a compiler in each process takes minutes
    done = subprocess.run(
        [*command, "--ways", *ways, *options],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [line.strip("| ").split(" | ") for line in done.stdout.splitlines() if line.startswith("| toy")]
    assert [row[1] for row in rows] == ways
    assert rows[0][2] != "-"
    for row in rows[1:]:
        assert row[-1] == "equal" or float(row[-1]) > 100, row
        assert row[2] == row[5] == "-"  # not decoded
        assert float(row[4]) > 0
