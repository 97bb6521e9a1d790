"""Training steps over 1, 2, 4, 8 GPUs of one host, many layouts in one table.

Where a row ends its processes, by an error or as it takes too long, new ones measure the rows after it.
"""

import argparse
import faulthandler
import json
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import torch

from opensora.acceleration.distributed import init_world, shutdown
from opensora.training.flops import device_peak
from opensora.utils.dtype import to_torch_dtype
from opensora.utils.errors import UserError
from tools.benchmark.measure import Options, Table, device_name, quiet, versions
from tools.benchmark.training import SHARED_COLUMNS, Result, Work, measure

COLUMNS = {
    "set": "",
    "GPUs": "d",
    "layout": "",
    "batch/GPU": "g",
    **SHARED_COLUMNS,
    "efficiency": ".1%",
    "set-up s": ".0f",
}
GROUPS = {"weak": "data", "strong": "data", "stdit3": "data", "long-stdit": "sequence", "long-stdit3": "sequence"}
"""Which sets are measured by the same processes."""
BASES = {
    "weak": Work("STDiT-XL/2:16x32x32", checkpoint="none", batch=8),
    "strong": Work("STDiT-XL/2:16x32x32", checkpoint="none", batch=8),
    "stdit3": Work("STDiT3-XL/2:15x60x106", text_len=300),
    "long-stdit": Work("STDiT-XL/2:64x64x64"),
    "long-stdit3": Work("STDiT3-XL/2:15x90x160", text_len=300),
}
"""16x256x256 at the default batch, twice; 51x480x848; 64x512x512; 51x720x1280: latents of their models' VAEs."""
TOYS = {
    "weak": "STDiT-XXS/2:2x8x8",
    "strong": "STDiT-XXS/2:2x8x8",
    "stdit3": "STDiT3-XS/2:3x6x10",
    "long-stdit": "STDiT-XXS/2:4x8x8",
    "long-stdit3": "STDiT3-XS/2:3x6x10",
}
RECORDED = {"cuda_graphs": True}


@dataclass(frozen=True)
class Row:
    """One line: a set's work on so many GPUs, in a layout."""

    set: str
    gpus: int
    layout: str
    work: Work

    @property
    def key(self) -> str:
        """Names it in the file of results."""
        return f"{self.set} | {self.gpus} | {self.layout}"


def scaling(argv: Sequence[str]) -> None:
    """Time training steps over 1, 2, 4, 8 GPUs of one host: weak and strong scaling, engines, sequence parallelism; one table.

    Not under torchrun: it starts the processes itself. Each row is what `sequence_parallel` measures. A row that runs out of
    memory, fails or takes longer than --row-timeout says so in the table. Figures are appended to --results as they come; rows
    that have figures there are not measured again, so a stopped run can go on, and the table has them all.

    "recorded" is `cuda_graphs=True`. "efficiency" is samples/s over N times that of one GPU on the same samples: for `weak` of the
    same batch for each GPU, for `strong` of the same batch for all, for the others of one sample.
    """
    options = Options("scaling", scaling.__doc__, argv)
    options.add_argument(
        "--gpus", type=int, nargs="+", default=[1, 2, 4, 8], help="numbers of GPUs; of those there are"
    )
    options.add_argument("--sets", nargs="+", default=list(BASES), choices=tuple(BASES))
    options.add_argument("--layouts", nargs="+", help="only rows whose layout is one of these, such as ddp 'sp 4 dsp'")
    options.add_argument("--results", type=Path, default=Path("outputs/scaling.jsonl"))
    options.add_argument("--row-timeout", type=float, default=120.0, help="seconds of a row, its compilation included")
    options.add_argument("--timeout", type=float, default=3600.0, help="seconds of all rows together")
    options.add_argument("--blocks", default="compiled", choices=("eager", "compiled"))
    options.add_argument("--warmup", type=int, default=3)
    options.add_argument("--steps", type=int, default=6)
    options.add_argument("--peak-tflops", type=float, help="of one GPU in bf16, for MFU; default: by its name")
    options.add_argument("--table", action="store_true", help="measure nothing: the table of --results, on any machine")
    options.add_argument("--rows", type=Path, help=argparse.SUPPRESS)  # to measure in this process, in JSON
    args = options.parse()
    if args.rows:
        measure_rows(args.rows, args.device, args.row_timeout, args.results)
        return
    if args.table:
        options.toy = args.toy = "--toy" in argv
    else:
        there = torch.cuda.device_count() if args.device == "cuda" else max(args.gpus)
        rows = [row for row in plan(args) if row.gpus <= there]
        if not rows:
            raise UserError(f"--gpus {' '.join(map(str, args.gpus))}: there are {there} GPUs here. Choose fewer.")
        run(rows, args)
    print_table(options, args)


def plan(args: argparse.Namespace) -> list[Row]:
    """All rows that are asked for, those of many GPUs first."""
    rows = [row for n in sorted(args.gpus, reverse=True) for name in args.sets for row in rows_of(name, n)]
    if args.layouts:
        rows = [row for row in rows if row.layout in args.layouts or row.gpus == 1]
    sizes: dict[str, Any] = {"blocks": args.blocks, "warmup": args.warmup, "steps": args.steps}
    if args.toy:
        sizes = {"text_len": 8, "dtype": "fp32", "blocks": "eager", "warmup": 1, "steps": 2}
    works = {row.key: replace(row.work, **sizes) for row in rows}
    if args.toy:
        works = {row.key: replace(works[row.key], case=TOYS[row.set]) for row in rows}
    return [replace(row, work=works[row.key]) for row in {row.key: row for row in rows}.values()]


def rows_of(name: str, n: int) -> list[Row]:
    """The rows of a set on n GPUs; `strong` on one GPU is `weak`."""
    base = BASES[name]
    if n == 1:
        layout = "one" if GROUPS[name] == "sequence" else "ddp"
        return [Row("weak" if name == "strong" else name, 1, layout, base)]
    ways: dict[str, dict[str, Any]]
    if GROUPS[name] == "sequence":
        base = replace(base, sp_size=n, method="dsp")
        ways = {
            f"sp {n} dsp recorded": {"settings": RECORDED},
            f"sp {n} dsp": {},
            f"sp {n} ulysses": {"method": "ulysses"},
        }
        if n > 2:
            ways[f"dp 2 x sp {n // 2} dsp"] = {"sp_size": n // 2}
    else:
        ways = {"ddp recorded": {"settings": RECORDED}, "ddp": {}, "fsdp2": {"engine": "fsdp2"}}
        if name == "strong":
            base = replace(base, batch=base.batch // n)
        else:
            if n > 2:
                ways[f"hsdp {n // 2}"] = {"engine": "fsdp2", "settings": {"shard_size": n // 2}}
            ways["ddp hybrid recorded"] = {"settings": RECORDED | {"hybrid_zero": True}}
            ways["fsdp2 zero3"] = {"engine": "fsdp2", "settings": {"fsdp_reshard": "zero3"}}
            ways["zero2"] = {"engine": "zero2"}
    return [Row(name, n, layout, replace(base, **way)) for layout, way in ways.items()]


def run(rows: list[Row], args: argparse.Namespace) -> None:
    """Measure all rows that have no figures in --results, in processes of torchrun."""
    args.results.parent.mkdir(parents=True, exist_ok=True)
    known = by_key(read_results(args.results))
    groups: dict[tuple[int, str], list[Row]] = {}
    for row in rows:
        if "result" not in known.get(row.key, {}):
            groups.setdefault((row.gpus, GROUPS[row.set]), []).append(row)
    end = time.monotonic() + args.timeout
    todo, log = args.results.with_suffix(".todo.json"), args.results.with_suffix(".log")
    for left in groups.values():
        while left:
            if time.monotonic() > end:
                raise UserError(f"--timeout {args.timeout:g} s is over; the same command goes on with {left[0].key}.")
            before = len(read_results(args.results))
            todo.write_text(json.dumps([asdict(row) for row in left]))
            command = [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--standalone",
                "--nproc_per_node",
                str(left[0].gpus),
            ]
            command += ["-m", "tools.benchmark", "scaling", "--device", args.device, "--rows", str(todo)]
            command += ["--results", str(args.results), "--row-timeout", str(args.row_timeout)]
            print(f"{left[0].gpus} GPUs: {len(left)} rows, {log}", file=sys.stderr, flush=True)
            with log.open("w") as file:
                code = subprocess.run(command, stdout=file, stderr=file, check=False).returncode
            done = {entry["key"] for entry in read_results(args.results)[before:]}
            left[:] = [row for row in left if row.key not in done]
            if code and left:  # else they only did not end as they should
                note(args.results, left.pop(0), {"said": f"failed: {last_error(log)}"})


def measure_rows(file: Path, device: str, row_timeout: float, results: Path) -> None:
    """Measure the rows of a file, in each of the processes; the first one writes what came of them."""
    rows = [Row(**{**row, "work": Work(**row["work"])}) for row in json.loads(file.read_text())]
    world = init_world(device)
    where = f"{device_name(world.device)}, {versions(world.device)}, {date.today().isoformat()}"
    with quiet():
        for row in rows:
            faulthandler.dump_traceback_later(row_timeout, exit=True)
            try:
                result = measure(row.work, device)
                entry = {"said": result} if isinstance(result, str) else {"result": asdict(result)}
            except UserError as error:
                entry = {"said": f"refused: {str(error).splitlines()[0]}"}
            if world.is_main:
                note(results, row, {**entry, "on": where})
    faulthandler.cancel_dump_traceback_later()
    shutdown()


def note(results: Path, row: Row, entry: dict[str, Any]) -> None:
    """Append what came of a row."""
    with results.open("a") as file:
        file.write(json.dumps({"key": row.key, **entry}) + "\n")


def read_results(path: Path) -> list[dict[str, Any]]:
    """What came of each row, in order; half a line, of a process that was killed, is left out."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def by_key(entries: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Key of a row -> what came of it the last time."""
    return {entry["key"]: entry for entry in entries}


def last_error(log: Path) -> str:
    """What the first process that died said last: a Python error, or that it took too long."""
    lines = [re.sub(r"^\[\w+\]: *", "", line.strip()) for line in log.read_text(errors="replace").splitlines()]
    errors = [
        line for line in lines if re.match(r"\w*(\.\w+)*Error\b.*:|Timeout \(", line) and not line.startswith("W")
    ]
    return (errors[0] if errors else f"see {log}").replace("|", "/")[:120]


def print_table(options: Options, args: argparse.Namespace) -> None:
    """What is in the results of the rows that are asked for, one GPU first."""
    entries = by_key(read_results(args.results))
    rows = [row for row in plan(args) if row.key in entries]
    if not rows:
        raise UserError(f"{args.results} has none of the rows that are asked for.")
    peak = device_peak(options.device, to_torch_dtype("bf16"), args.peak_tflops)
    where = sorted({entry["on"] for entry in entries.values() if "on" in entry})
    work = rows[0].work
    of = "no MFU: the peak is not known" if peak is None else f"MFU of {peak.tflops:g} TFLOP/s a GPU"
    options.heading(
        f"table of {'; '.join(where)}; {work.dtype}, {work.blocks} blocks, {work.warmup} + {work.steps} steps; {of}"
    )
    table = Table(COLUMNS)
    order = list(BASES)
    for row in sorted(rows, key=lambda row: (order.index(row.set), row.gpus)):
        entry = entries[row.key]
        start = (row.set, row.gpus, row.layout, row.work.batch / row.work.sp_size)
        if "result" not in entry:
            table.row(*start, entry["said"])
            continue
        result = Result(**entry["result"])
        alone = entries.get(rows_of(row.set, 1)[0].key, {}).get("result")
        efficiency = None
        if row.gpus > 1 and alone is not None:
            one = Result(**alone)
            efficiency = result.samples / result.seconds / (row.gpus * one.samples / one.seconds)
        table.row(*start, *result.cells(row.gpus, None if peak is None else peak.tflops), efficiency, result.setup_s)
