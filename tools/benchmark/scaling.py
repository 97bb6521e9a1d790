"""Training steps over 1, 2, 4, 8 GPUs of one host: weak and strong scaling, engines, sequence parallelism; one table.

    python -m tools.benchmark.scaling [--gpus 1 2 4] [--sets weak strong ...] [--parallel] [--results FILE] [--peak-tflops 790]

Not under torchrun: it starts the processes itself, those of all rows of a number of GPUs and a group of sets together, so that PyTorch
is imported once for them. Each row is what tools/benchmark/sequence_parallel.py measures. A row that runs out of memory, fails or takes
longer than --row-timeout is a line that says so, and the rows after it are measured by new processes. Figures are appended to --results as they
come; rows that have figures there are not measured again, so that a stopped run goes on, and the table has them all.

--parallel starts whatever fits on the GPUs that are free: rows of 1 and 2 GPUs beside each other. Such rows are marked with *: they share
the host's processors, so where the host is the bottleneck, they are slower than alone.

"recorded" is `cuda_graphs=True`. "efficiency" is samples/s over N times that of one GPU on the same samples: for `weak` of the same batch for each GPU, for `strong` of the
same batch for all, for the others of one sample. Without a GPU, or with --toy, the same rows are shrunk to what a laptop does.
"""

import argparse
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any

import torch

from opensora.acceleration.distributed import init_world, shutdown
from opensora.training.meter import device_peak
from opensora.utils.dtype import to_torch_dtype
from opensora.utils.errors import UserError, exit_on_user_error
from tools.benchmark.heading import device_name, quiet, versions
from tools.benchmark.sequence_parallel import Result, Work, figures, measured

COLUMNS = (
    "set", "GPUs", "layout", "batch/GPU", "ms/step", "samples/s", "tokens/s", "MFU", "exposed ms/step", "idle ms/step", "sent MiB/forward",
    "peak GiB", "efficiency", "set-up s",
)  # fmt: skip
MODULE = "tools.benchmark.scaling"
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
POLL_S, DUMP_S = 0.2, 3.0


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


@dataclass
class Job:
    """Rows that the same processes measure, one after the other.

    Attributes:
        rows: those that are left.
        gpus: numbers of the GPUs they run on; empty while they do not.
        beside: whether another job ran at any time while they did.
        log: where the processes' messages go.
        processes: one for each GPU.
        done: lines of the results that these processes had written when it was last looked.
        since: when the last row ended, or the processes began.
    """

    rows: list[Row]
    gpus: list[str] = field(default_factory=list)
    beside: bool = False
    log: Path = Path()
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    done: int = 0
    since: float = 0.0

    @property
    def size(self) -> int:
        """GPUs, one for each process."""
        return self.rows[0].gpus


@exit_on_user_error
def main() -> None:
    """The command line; in a process that it started, a part of the work."""
    args = parse_args()
    if args.worker:
        work_off(args)
        return
    if args.table:
        write_table(args, read_results(args.results))
        return
    args.results.parent.mkdir(parents=True, exist_ok=True)
    visible = devices(args)
    rows = [row for row in plan(args) if row.gpus <= len(visible)]
    if not rows:
        raise UserError(f"--gpus {args.gpus}: there are {len(visible)} GPUs here. Choose fewer.")
    measured_before = [key for key, entry in read_results(args.results).items() if "result" in entry]
    Runner(args, visible, [row for row in rows if row.key not in measured_before]).run()
    write_table(args, read_results(args.results))


def parse_args() -> argparse.Namespace:
    """Options, with defaults that suit the device."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 2, 4, 8], help="numbers of GPUs; of those there are")
    parser.add_argument("--sets", nargs="+", default=list(BASES), choices=tuple(BASES))
    parser.add_argument("--layouts", nargs="+", help="only rows whose layout is one of these, such as ddp 'sp 4 dsp'")
    parser.add_argument("--parallel", action="store_true", help="rows of few GPUs beside each other")
    parser.add_argument("--results", type=Path, default=Path("outputs/scaling.jsonl"))
    parser.add_argument("--row-timeout", type=float, default=120.0, help="seconds of a row, its compilation included")
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds of all; rows that are left are said")
    parser.add_argument("--blocks", default="compiled", choices=("eager", "compiled"))
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--peak-tflops", type=float, help="of one GPU in bf16, for MFU; default: by its name")
    parser.add_argument("--toy", action="store_true", help="tiny models and latents; always so on a CPU")
    parser.add_argument("--table", action="store_true", help="measure nothing: the table of --results, on any machine")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)  # rows to measure, in JSON
    args = parser.parse_args()
    args.toy = args.toy or (args.device == "cpu" and not args.table)
    return args


# --------------------------------------------------------------------------------------------------------- what is run


def plan(args: argparse.Namespace) -> list[Row]:
    """All rows that are asked for, the most telling first."""
    rows = [row for name in args.sets for n in sorted(args.gpus, reverse=True) for row in rows_of(name, n)]
    if args.layouts:
        rows = [row for row in rows if row.layout in args.layouts or row.gpus == 1]
    different = {row.key: row for row in rows}.values()
    return [replace(row, work=sized(row.work, row.set, args)) for row in different]


def rows_of(name: str, n: int) -> list[Row]:
    """The rows of a set on n GPUs; `strong` on one GPU is `weak`."""
    base = BASES[name]
    if GROUPS[name] == "sequence":
        if n == 1:
            return [Row(name, 1, "one", base)]
        shared = replace(base, sp_size=n, method="dsp")
        rows = [Row(name, n, f"sp {n} dsp recorded", replace(shared, settings=RECORDED))]
        rows += [Row(name, n, f"sp {n} dsp", shared)]
        rows += [Row(name, n, f"sp {n} ulysses", replace(shared, method="ulysses"))]
        rows += [Row(name, n, f"dp 2 x sp {n // 2} dsp", replace(shared, sp_size=n // 2))] * (n > 2)
        return rows
    if n == 1:
        return [Row("weak" if name == "strong" else name, 1, "ddp", base)]
    engines: list[tuple[str, dict[str, Any]]] = [
        ("ddp recorded", {"settings": RECORDED}), ("ddp", {}), ("fsdp2", {"engine": "fsdp2"})
    ]  # fmt: skip
    if name == "strong":
        return [Row(name, n, layout, replace(base, batch=base.batch // n, **way)) for layout, way in engines]
    if n > 2:
        engines += [(f"hsdp {n // 2}", {"engine": "fsdp2", "settings": {"shard_size": n // 2}})]
    engines += [("ddp hybrid recorded", {"settings": RECORDED | {"hybrid_zero": True}})]
    engines += [("fsdp2 zero3", {"engine": "fsdp2", "settings": {"fsdp_reshard": "zero3"}})]
    engines += [("zero2", {"engine": "zero2"})]
    return [Row(name, n, layout, replace(base, **way)) for layout, way in engines]


def sized(work: Work, name: str, args: argparse.Namespace) -> Work:
    """With the steps that are asked for; on a laptop, of a small model."""
    if not args.toy:
        return replace(work, blocks=args.blocks, warmup=args.warmup, steps=args.steps)
    case = TOYS[name]
    return replace(work, case=case, text_len=8, dtype="fp32", blocks="eager", warmup=1, steps=2)


def devices(args: argparse.Namespace) -> list[str]:
    """The GPUs that this process sees; on a CPU as many places as are asked for."""
    if args.device == "cpu":
        return [str(i) for i in range(max(args.gpus))]
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = torch.cuda.device_count()
    return named.split(",")[:count] if named else [str(i) for i in range(count)]


# --------------------------------------------------------------------------------------------------- the one that starts


class Runner:
    """Starts processes for all rows, watches them, and notes what did not end well.

    Args:
        args: of the command line.
        visible: the GPUs, by the numbers that CUDA_VISIBLE_DEVICES takes.
        rows: to be measured.
    """

    def __init__(self, args: argparse.Namespace, visible: list[str], rows: list[Row]) -> None:
        self.args, self.free, self.started = args, list(visible), 0
        groups: dict[tuple[int, str], list[Row]] = {}
        for row in rows:
            groups.setdefault((-row.gpus, GROUPS[row.set]), []).append(row)
        self.waiting = [Job(groups[key]) for key in sorted(groups)]
        self.running: list[Job] = []
        self.end = time.monotonic() + args.timeout

    def run(self) -> None:
        """Until all is measured, or the time is over."""
        try:
            while self.waiting or self.running:
                if time.monotonic() > self.end:
                    left = [row.key for job in self.running + self.waiting for row in job.rows]
                    say(f"--timeout {self.args.timeout:g} s is over; not measured: {'; '.join(left)}")
                    return
                for job in list(self.waiting):
                    if len(self.free) >= job.size and (self.args.parallel or not self.running):
                        self.waiting.remove(job)
                        self.begin(job)
                for job in list(self.running):
                    self.look_at(job)
                time.sleep(POLL_S)
        finally:
            for job in self.running:
                kill(job)

    def begin(self, job: Job) -> None:
        """Start the processes of a job."""
        job.gpus, self.free = self.free[: job.size], self.free[job.size :]
        stem = self.args.results.with_suffix("")
        while not job.log.name or job.log.exists():  # of an earlier run
            self.started += 1
            job.log = stem.with_name(f"{stem.name}-{self.started}.log")
        todo, own = job.log.with_suffix(".todo.json"), job.log.with_suffix(".done.jsonl")
        todo.write_text(json.dumps([asdict(row) for row in job.rows]))
        own.unlink(missing_ok=True)
        command = [sys.executable, "-m", MODULE, "--worker", str(todo), "--device", self.args.device]
        shared = {
            **os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(job.size), "LOCAL_WORLD_SIZE": str(job.size),
        }  # fmt: skip
        if self.args.device == "cuda":
            shared["CUDA_VISIBLE_DEVICES"] = ",".join(job.gpus)
        with job.log.open("ab") as log:
            job.processes = [
                subprocess.Popen(
                    command, env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}, stdout=log, stderr=log
                )
                for rank in range(job.size)
            ]
        job.done, job.since, job.beside = 0, time.monotonic(), bool(self.running)
        for other in self.running:
            other.beside = True
        self.running.append(job)
        say(f"{job.size} GPUs ({','.join(job.gpus)}): {len(job.rows)} rows, {job.log}")

    def look_at(self, job: Job) -> None:
        """Take over the rows that ended; give up the running one where it takes too long or its processes died."""
        lines = complete_lines(job.log.with_suffix(".done.jsonl"))
        for line in lines[job.done :]:
            self.note(job, json.loads(line))
        job.done = len(lines)
        codes = [process.poll() for process in job.processes]
        if all(code == 0 for code in codes):
            if complete_lines(job.log.with_suffix(".done.jsonl"))[job.done :]:
                return  # written since they were read: the next time
            self.leave(job)
        elif any(codes):
            time.sleep(1.0)  # the others may still be saying what went wrong
            self.give_up(job, f"failed: {last_error(job.log)}")
        elif time.monotonic() - job.since > self.args.row_timeout:
            dump(job)
            self.give_up(job, f"took longer than {self.args.row_timeout:g} s: {last_error(job.log)}")

    def note(self, job: Job, entry: dict[str, Any]) -> None:
        """Keep what became of the first row that is left."""
        row = job.rows.pop(0)
        entry |= {"key": row.key, "beside": job.beside}
        with self.args.results.open("a") as file:
            file.write(json.dumps(entry) + "\n")
        job.since = time.monotonic()
        told = entry.get("said") or f"{entry['result']['seconds'] * 1e3:.1f} ms/step"
        say(f"{row.key}: {told}")

    def give_up(self, job: Job, why: str) -> None:
        """End the processes, note the row that they were at, and let others do the rest."""
        kill(job)
        if job.rows:  # else they only did not end as they should
            self.note(job, {"said": why})
        self.leave(job)

    def leave(self, job: Job) -> None:
        """The processes have ended: their GPUs are free, and what is left waits."""
        self.running.remove(job)
        self.free = sorted(self.free + job.gpus)
        if job.rows:
            self.waiting.insert(0, Job(job.rows))


def dump(job: Job) -> None:
    """Let the processes write to their log where they are."""
    for process in job.processes:
        if process.poll() is None:
            process.send_signal(signal.SIGUSR1)
    time.sleep(DUMP_S)


def kill(job: Job) -> None:
    """End the processes of a job."""
    for process in job.processes:
        process.kill()
    for process in job.processes:
        process.wait()


def free_port() -> int:
    """One at which the processes of a job can meet."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def last_error(log: Path) -> str:
    """What the first process that died said last, of a Python error."""
    lines = [re.sub(r"^\[rank\d+\]: *", "", line.strip()) for line in log.read_text(errors="replace").splitlines()]
    said = [line for line in lines if "Error" in line.partition(":")[0] and not line.startswith(("W", "[W"))]
    return (said[0] if said else f"see {log}").replace("|", "/")[:120]


def complete_lines(path: Path) -> list[str]:
    """The lines of a file that somebody may be writing."""
    if not path.exists():
        return []
    return [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def say(text: str) -> None:
    """Beside the table."""
    print(text, file=sys.stderr, flush=True)


# ------------------------------------------------------------------------------------------------ those that are started


def work_off(args: argparse.Namespace) -> None:
    """Measure the rows of a job, in each of its processes; the first of them writes what came of it."""
    import faulthandler

    faulthandler.register(signal.SIGUSR1)
    rows = [Row(**{**row, "work": Work(**row["work"])}) for row in json.loads(args.worker.read_text())]
    out = args.worker.with_name(args.worker.name.replace(".todo.json", ".done.jsonl"))
    world = init_world(args.device)
    where = f"{device_name(world.device)}, {versions(world.device)}, {date.today().isoformat()}"
    with quiet():
        for row in rows:
            try:
                result = measured(row.work, args.device)
                entry: dict[str, Any] = {"said": "out of memory"} if result is None else {"result": asdict(result)}
            except UserError as error:
                entry = {"said": f"refused: {str(error).splitlines()[0]}"}
            if world.is_main:
                with out.open("a") as file:
                    file.write(json.dumps(entry | {"on": where, "work": asdict(row.work)}) + "\n")
    shutdown()


# ---------------------------------------------------------------------------------------------------------- the table


def read_results(path: Path) -> dict[str, dict[str, Any]]:
    """Key of a row -> what became of it, the last time."""
    entries = [json.loads(line) for line in complete_lines(path)]
    return {entry["key"]: entry for entry in entries}


def write_table(args: argparse.Namespace, entries: dict[str, dict[str, Any]]) -> None:
    """What is in the results of the rows that are asked for, one GPU first."""
    rows = [row for row in plan(args) if row.key in entries]
    if not rows:
        raise UserError(f"{args.results} has none of the rows that are asked for.")
    peak = device_peak(torch.device(args.device), to_torch_dtype("bf16"), args.peak_tflops)
    where = sorted({entry["on"] for entry in entries.values() if "on" in entry})
    told = [
        f"`python -m {MODULE} {' '.join(sys.argv[1:])}`",
        *where,
        f"{rows[0].work.dtype}, {rows[0].work.blocks} blocks, {rows[0].work.warmup} + {rows[0].work.steps} steps",
        "no MFU: the peak is not known" if peak is None else f"MFU of {peak.tflops:g} TFLOP/s a GPU",
    ]
    told += ["rows with * ran beside rows of other GPUs"] * any(entry.get("beside") for entry in entries.values())
    print(f"{'; '.join(told)}\n\n| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    order = {name: number for number, name in enumerate(BASES)}
    for row in sorted(rows, key=lambda row: (order[row.set], row.gpus)):
        entry = entries[row.key]
        star = "*" if entry.get("beside") else ""
        begin = f"| {row.set} | {row.gpus}{star} | {row.layout} | {row.work.batch / row.work.sp_size:g}"
        print(f"{begin} | {' | '.join(cells(row, entry, entries, None if peak is None else peak.tflops))} |")


def cells(row: Row, entry: dict[str, Any], entries: dict[str, dict[str, Any]], peak_tflops: float | None) -> list[str]:
    """The cells from ms/step on, or why there are none."""
    if "result" not in entry:
        return [entry["said"], *["-"] * (len(COLUMNS) - 5)]
    result = Result(**entry["result"])
    alone = entries.get(rows_of(row.set, 1)[0].key)
    efficiency = "-"
    if row.gpus > 1 and alone is not None and "result" in alone:
        one = Result(**alone["result"])
        efficiency = f"{result.samples / result.seconds / (row.gpus * one.samples / one.seconds):.1%}"
    return [*figures(result, row.gpus, peak_tflops), efficiency, f"{result.setup_s:.0f}"]


if __name__ == "__main__":
    main()
