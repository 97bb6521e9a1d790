"""A training run's place in the data, and its folder: what is needed to run it again is written into it."""

import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from opensora.config.schema import LoopConfig
from opensora.datasets.sampler import BatchSampler, DataPosition
from opensora.utils.environment import command_line, environment, git_changes
from opensora.utils.errors import UserError
from opensora.utils.folders import make_writable

logger = logging.getLogger(__name__)

BATCHES_VARY = 0  # a `global_batch`: each step has its own number of samples


@dataclass(frozen=True)
class Ahead:
    """From where on the end of a run is counted: its beginning, or where the steps or the epochs got another length.

    Attributes:
        step: Optimizer steps done there.
        epoch: The epoch that the next batch was of.
        rest: Batches of it that were left, for each rank.
        length: Batches of each rank in an epoch after that; of buckets the first's.
        accumulation: Batches of a step.
    """

    step: int
    epoch: int
    rest: int
    length: int
    accumulation: int

    def total_steps(self, epochs: int) -> int:
        """Optimizer steps of the whole run; `step`, or fewer, where so many epochs were over before."""
        return self.step + (self.rest + (epochs - self.epoch - 1) * self.length) // self.accumulation


@dataclass
class RunState:
    """Where a run stands.

    Attributes:
        data: Fingerprint of the dataset.
        global_batch: Samples of one batch of all ranks, or BATCHES_VARY.
        world: Data-parallel ranks: processes that share their samples (sequence parallelism) count as one.
        step: Optimizer steps done.
        micro_batch: Batches that each rank has taken from the loader.
        epoch: The epoch that the next batch is of.
        epoch_start: `micro_batch` at the beginning of that epoch.
        segments: (ranks, batches) of the parts of that epoch that ran on other numbers of ranks.
        steps_before: Optimizer steps of the runs that this one took its averaged weights from.
        ahead: What the number of steps is counted from, see `count_ahead`.
        plan: What else decides the order inside of an epoch, in words.
    """

    data: str
    global_batch: int
    world: int = 1
    step: int = 0
    micro_batch: int = 0
    epoch: int = 0
    epoch_start: int = 0
    segments: list[tuple[int, int]] = field(default_factory=list)
    steps_before: int = 0
    ahead: Ahead | None = None
    plan: str = ""

    @property
    def folder_name(self) -> str:
        """Of a checkpoint that is made here."""
        return f"epoch{self.epoch}-global_step{self.step}"

    @property
    def batch_in_epoch(self) -> int:
        """Batches that each rank has taken of the epoch."""
        return self.micro_batch - self.epoch_start

    @property
    def steps_averaged(self) -> int:
        """Optimizer steps that the averaged weights have seen."""
        return self.steps_before + self.step

    def count_ahead(self, batches_in: Callable[[int], int], accumulation: int) -> Ahead:
        """What the number of steps is to be counted from; anew where epochs or steps have another length than before.

        `batches_in`: batches of each rank in an epoch, with those of its earlier segments.
        """
        length = batches_in(0)
        if self.ahead is None or (self.ahead.length, self.ahead.accumulation) != (length, accumulation):
            rest = batches_in(self.epoch) - self.batch_in_epoch
            self.ahead = Ahead(self.step, self.epoch, rest, length, accumulation)
        return self.ahead

    def advance(self, micro_batches: int, batches_in: int | Callable[[int], int]) -> None:
        """One optimizer step is done, from so many micro-batches.

        `batches_in`: batches of each rank in an epoch, one number or a function of the epoch.
        """
        self.step += 1
        self.micro_batch += micro_batches
        while self.batch_in_epoch >= (length := batches_in if isinstance(batches_in, int) else batches_in(self.epoch)):
            self.epoch_start += length
            self.epoch += 1
            self.segments = []

    def resumed(
        self, saved: Mapping[str, Any], source: str, *, other_data: Literal["refuse", "next_epoch"] = "refuse"
    ) -> "RunState":
        """The saved place, if it means the same here.

        With other data, or another fixed number of samples in a batch of all ranks, a place has no meaning:
        "next_epoch" then goes on with the first batch of the next epoch.

        Raises:
            UserError: it means something else, and `other_data` is "refuse".
        """
        done = replace(self, **{key: saved[key] for key in ("step", "micro_batch", "epoch")})
        done.steps_before = saved.get("steps_before", 0)
        # versions before buckets had epochs of one length and did not save where they began
        begun = done.epoch * (done.micro_batch // done.epoch) if done.epoch else 0
        begun = saved.get("epoch_start", begun)
        for key, what in (
            ("data", "the dataset (its table or its settings)"),
            ("global_batch", "batch_size x ranks"),
            ("plan", "the order of batches"),
        ):
            is_same = saved.get(key, self.plan) == getattr(self, key)
            if is_same or (key == "plan" and done.micro_batch == begun):  # an epoch may begin in any order
                continue
            change = f"{what} was {saved[key]}, now {getattr(self, key)}"
            if other_data == "next_epoch":
                logger.warning("%s: %s; going on with epoch %d from its start.", source, change, done.epoch + 1)
                return replace(done, epoch=done.epoch + 1, epoch_start=done.micro_batch)
            raise UserError(
                f"{source} cannot be continued here: {change}, so its place in the data has no meaning. Restore that "
                "setting; or go on with a new epoch with --other-data next_epoch; or keep weights and optimizer and "
                "begin at step 0 with --start-from-scratch True."
            )
        done = replace(done, epoch_start=begun)
        segments = [(int(ranks), int(batches)) for ranks, batches in saved.get("segments", [])]
        here = done.batch_in_epoch - sum(batches for _, batches in segments)
        if saved.get("world", self.world) != self.world and here:
            segments.append((saved["world"], here))
        ahead = saved.get("ahead")
        return replace(done, segments=segments, ahead=None if ahead is None else Ahead(**ahead))

    def after(self, saved: Mapping[str, Any]) -> "RunState":
        """A run that begins at step 0 with the weights, the average and the optimizer that were saved there."""
        return replace(self, steps_before=saved.get("steps_before", 0) + saved["step"])


def seek(cfg: LoopConfig, sampler: BatchSampler, state: RunState, *, may_be_done: bool = False) -> int:
    """Let the sampler begin where the run stands, and end where it ends.

    Returns:
        Optimizer steps of the whole run: those done, and those that `epochs` leave; `max_steps` at most.

    Raises:
        UserError: there is nothing to train, and the run may not be done.
    """
    position = DataPosition(state.epoch, state.batch_in_epoch, tuple(state.segments))
    sampler.seek(position, None)
    ahead = state.count_ahead(sampler.batches_in, cfg.accumulation_steps)
    total = ahead.total_steps(cfg.epochs)
    if cfg.max_steps is not None:
        total = min(total, cfg.max_steps)
    if not ahead.length and not may_be_done:
        raise UserError(
            "nothing to train: an epoch has no batch, whatever --epochs is. --dry-run prints what becomes of the rows, and "
            "python -m tools.datasets.doctor what is wrong with them."
        )
    if total <= state.step and not may_be_done:
        raise UserError(
            f"nothing to train: {cfg.epochs} epochs of {ahead.length} batches, accumulation_steps="
            f"{cfg.accumulation_steps} and max_steps={cfg.max_steps} make {max(total, 0)} steps, and {state.step} are done. "
            "Raise --epochs or --max-steps."
        )
    sampler.seek(position, max(total - state.step, 0) * cfg.accumulation_steps)
    return total


class Throughput:
    """Samples per second since the last call."""

    def __init__(self, samples_per_step: int = 0) -> None:
        self.samples_per_step = samples_per_step
        self._last: tuple[int, int, float] | None = None

    def __call__(self, step: int, samples: int | None = None) -> dict[str, float]:
        """The figures for the log; nothing on the first call, which would measure the warm-up.

        `samples`: How many were seen so far, where steps differ.
        """
        now = time.perf_counter()
        seen = step * self.samples_per_step if samples is None else samples
        last, self._last = self._last, (step, seen, now)
        if last is None or step == last[0]:
            return {}
        seconds = now - last[2]
        return {"samples_per_s": (seen - last[1]) / seconds, "s_per_step": seconds / (step - last[0])}


def due(step: int, every: int) -> bool:
    """Whether something done every so many steps is done after this one; 0 = never."""
    return every > 0 and step % every == 0


def make_run_folder(outputs: str, name: str | None, model: str, config: dict[str, Any], *, go_on: bool = False) -> Path:
    """Make `outputs/<name>`, or `outputs/<NNN>-<model>` with the next free number, and say in it how it was started.

    Args:
        go_on: the folder `name` may be there already: this is another start of that run.

    Raises:
        UserError: a folder of that name is there already, and `go_on` is False; or nothing can be written to `outputs`.
    """
    root = check_run_folder(outputs, name, go_on=go_on)
    if go_on and name:
        run = root / name
        run.mkdir(parents=True, exist_ok=True)
    else:
        run = _new_folder(root, name) if name else _next_folder(root, model.replace("/", "-"))
    record_start(run, config)
    return run


def check_run_folder(outputs: str, name: str | None, *, go_on: bool = False) -> Path:
    """See that `make_run_folder` will work, before what a run needs is loaded; returns the folder of all runs.

    Raises:
        UserError: see `make_run_folder`.
    """
    if name and (Path(name).is_absolute() or ".." in Path(name).parts):
        raise UserError(
            f"exp_name={name!r}: it names a folder inside of outputs={outputs}; set --outputs for another place."
        )
    root = make_writable(outputs, "outputs")
    if name and not go_on and (root / name).exists():
        raise _taken(root / name)
    return root


def record_start(run: Path, config: dict[str, Any]) -> None:
    """Write what starts this run again: config, command line, commit with its differences, and versions.

    The files are config.json, command.txt, changes.diff (where the source tree differs from its commit) and
    environment.json; those of the second start in the same folder are config-2.json and so on.
    """
    number = 1 + len(list(run.glob("config*.json")))
    tail = f"-{number}" if number > 1 else ""
    (run / f"config{tail}.json").write_text(json.dumps(config, indent=1, default=str) + "\n")
    (run / f"command{tail}.txt").write_text(command_line() + "\n")
    (run / f"environment{tail}.json").write_text(json.dumps(environment(), indent=1) + "\n")
    if changes := git_changes():
        (run / f"changes{tail}.diff").write_text(changes)


def _new_folder(root: Path, name: str) -> Path:
    run = root / name
    try:
        run.mkdir(parents=True)
    except FileExistsError as error:
        raise _taken(run) from error
    return run


def _taken(run: Path) -> UserError:
    return UserError(
        f"{run} is there already, and a run never writes into another run's folder. Choose another --exp-name, "
        "remove it, or go on with it: --load latest."
    )


def _next_folder(root: Path, model: str) -> Path:
    taken = [int(path.name[:3]) for path in root.iterdir() if path.name[:3].isdigit()]
    number = max(taken, default=-1) + 1
    while True:  # another run may take the number first
        try:
            run = root / f"{number:03d}-{model}"
            run.mkdir()
            return run
        except FileExistsError:
            number += 1
