"""A training run: its position in the data, its folder with what is needed to run it again, and what it logs first."""

import errno
import fcntl
import importlib.util
import json
import logging
import os
import shlex
import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, Literal

import torch
from torch import nn

from opensora.acceleration.distributed import World
from opensora.config.schema import LoopConfig, TrainConfig
from opensora.datasets.buckets.bucket import Bucket
from opensora.datasets.sampler import BatchSampler, DataPosition
from opensora.models.image_encoder import argument, required_frames_of
from opensora.models.loading import released_weights
from opensora.registry import SCHEDULERS, build_module
from opensora.utils.environment import command_line, environment, git_changes
from opensora.utils.errors import UserError
from opensora.utils.folders import make_writable

logger = logging.getLogger(__name__)

BATCHES_VARY = 0  # a `global_batch`: each step has its own number of samples
SHOWN_CLASSES = 20
_held: dict[tuple[int, Path], IO[str]] = {}  # the open files of `hold_folder`


@dataclass(frozen=True)
class Ahead:
    """Where the count of the run's steps begins: at its start, or where the steps or the epochs got another length."""

    step: int  # optimizer steps done there
    epoch: int  # that the next batch was of
    rest: int  # batches of it that were left, for each rank
    length: int  # batches of each rank in an epoch after that; of buckets the first's
    accumulation: int  # batches of a step


@dataclass
class RunState:
    """Where a run stands."""

    data: str  # fingerprint of the dataset
    global_batch: int  # samples of one batch of all ranks, or BATCHES_VARY
    world: int = 1  # data-parallel ranks: processes that share their samples (sequence parallelism) count as one
    step: int = 0  # optimizer steps done
    micro_batch: int = 0  # batches that each rank has taken from the loader
    epoch: int = 0  # that the next batch is of
    epoch_start: int = 0  # `micro_batch` at the beginning of that epoch
    # (ranks, batches) of the parts of that epoch that ran on other numbers of ranks
    segments: list[tuple[int, int]] = field(default_factory=list)
    steps_before: int = 0  # optimizer steps of the runs that this one took its EMA weights from
    ahead: Ahead | None = None  # what the number of steps is counted from, see `seek`
    plan: str = ""  # what else decides the order inside of an epoch, in words

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
        """Optimizer steps that the EMA weights have seen."""
        return self.steps_before + self.step

    def advance(self, micro_batches: int, batches_in: Callable[[int], int]) -> None:
        """One optimizer step is done, from so many micro-batches; `batches_in(epoch)` of each rank are in an epoch."""
        self.step += 1
        self.micro_batch += micro_batches
        while self.batch_in_epoch >= (length := batches_in(self.epoch)):
            self.epoch_start += length
            self.epoch += 1
            self.segments = []

    def resumed(
        self, saved: Mapping[str, Any], source: str, *, other_data: Literal["refuse", "next_epoch"] = "refuse"
    ) -> "RunState":
        """The saved position.

        With other data, or another fixed number of samples in a batch of all ranks, it has no meaning: "next_epoch" then
        continues with the first batch of the next epoch.

        Raises:
            UserError: it has no meaning, and `other_data` is "refuse"; or `saved` is no position, as after a mistake in editing it.
        """
        _check(saved, source, ("step", "micro_batch", "epoch"))
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
                logger.warning("%s: %s; continuing at the start of epoch %d.", source, change, done.epoch + 1)
                return replace(done, epoch=done.epoch + 1, epoch_start=done.micro_batch)
            raise UserError(
                f"{source} cannot be continued here: {change}, so its position in the data has no meaning. Restore that "
                "setting; or begin a new epoch with --other-data next_epoch; or keep weights and optimizer and "
                "begin at step 0 with --start-from-scratch True."
            )
        done = replace(done, epoch_start=begun)
        segments = [(int(ranks), int(batches)) for ranks, batches in saved.get("segments", [])]
        here = done.batch_in_epoch - sum(batches for _, batches in segments)
        if saved.get("world", self.world) != self.world and here:
            segments.append((saved["world"], here))
        ahead = saved.get("ahead")
        return replace(done, segments=segments, ahead=None if ahead is None else Ahead(**ahead))

    def after(self, saved: Mapping[str, Any], source: str) -> "RunState":
        """A run that begins at step 0 with the weights, EMA and optimizer that were saved there."""
        _check(saved, source, ("step",))
        return replace(self, steps_before=saved.get("steps_before", 0) + saved["step"])


def _check(saved: Mapping[str, Any], source: str, required: Sequence[str]) -> None:
    least = {"step": 0, "micro_batch": 0, "epoch": 0, "epoch_start": 0, "steps_before": 0, "world": 1}
    counts = {name: saved.get(name, None if name in required else low) for name, low in least.items()}
    wrong = [name for name, count in counts.items() if type(count) is not int or count < least[name]]
    try:
        numbers = [number for ranks, batches in saved.get("segments", []) for number in (ranks, batches)]
        numbers += vars(Ahead(**(saved.get("ahead") or vars(Ahead(0, 0, 0, 0, 0))))).values()
        wrong += [] if set(map(type, numbers)) == {int} else ["segments or ahead"]
    except (TypeError, ValueError):
        wrong.append("segments or ahead")
    if wrong:
        raise UserError(
            f"{source}: its state.json does not hold the position of a run ({', '.join(wrong)}). Load another checkpoint."
        )


def seek(cfg: LoopConfig, sampler: BatchSampler, state: RunState, *, may_be_done: bool = False) -> int:
    """Set the sampler's first and last batch from the position of the run.

    Returns:
        Optimizer steps of the whole run: those done, and those that `epochs` leave; `max_steps` at most.

    Raises:
        UserError: there is nothing to train, and the run may not be done.
    """
    position = DataPosition(state.epoch, state.batch_in_epoch, tuple(state.segments))
    sampler.seek(position, None)
    length, ahead = sampler.batches_in(0), state.ahead
    if ahead is None or (ahead.length, ahead.accumulation) != (length, cfg.accumulation_steps):
        rest = sampler.batches_in(state.epoch) - state.batch_in_epoch
        ahead = state.ahead = Ahead(state.step, state.epoch, rest, length, cfg.accumulation_steps)
    total = ahead.step + (ahead.rest + (cfg.epochs - ahead.epoch - 1) * ahead.length) // ahead.accumulation
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
    if cfg.ema_every > total:
        logger.warning(
            "ema_every=%d is more than the run's %d steps: the EMA weights, which sampling takes, will be those that it "
            "begins with.", cfg.ema_every, total,
        )  # fmt: skip
    sampler.seek(position, max(total - state.step, 0) * cfg.accumulation_steps)
    return total


def due(step: int, every: int) -> bool:
    """Whether something done every so many steps is done after this one; 0 = never."""
    return every > 0 and step % every == 0


def hold_folder(folder: Path) -> None:
    """Keep other processes out of a run's folder until this one ends, in whatever way; a second call of it has no effect.

    It is a record lock (POSIX `fcntl`) on `.lock` in there, which names the holder. The kernel releases it, and no child inherits
    it. NFS passes it to the server, which may keep it for a machine that has died.

    Raises:
        UserError: another process has it.
    """
    key = (os.getpid(), folder.resolve())
    if key in _held:  # closing any other handle of the file would release it
        return
    file = (folder / ".lock").open("a+")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            file.seek(0)
            raise UserError(
                f"{folder} is in use by another run ({file.read().strip()}): wait for it, end it, or choose another name. If that "
                f"machine has died, and its file server keeps the lock, delete {folder / '.lock'}."
            ) from error
        logger.warning(
            "%s: no locks here (%s), so nothing keeps a second run out of this folder.", folder, error.strerror
        )
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
    _held[key] = file


def check_wandb() -> None:
    """Check that `wandb=True` will work, before anything large is loaded.

    Raises:
        UserError: the package is not installed.
    """
    if importlib.util.find_spec("wandb") is None:
        raise UserError("wandb=True, but the package is not installed: pip install -e '.[wandb]'.")


def check_run_folder(outputs: str, name: str | None, *, resume: bool = False) -> Path:
    """See that `make_run_folder` will raise no error, before anything is loaded; returns the folder of all runs."""
    if name and (Path(name).is_absolute() or ".." in Path(name).parts):
        raise UserError(
            f"exp_name={name!r}: it names a folder inside of outputs={outputs}; set --outputs for another one."
        )
    root = make_writable(outputs, "outputs")
    if name and not resume and (root / name).exists():
        raise UserError(
            f"{root / name} is there already, and a run never writes into another run's folder. Choose another --exp-name, "
            "remove it, or resume it: --load latest."
        )
    if name and (root / name).is_dir():
        hold_folder(root / name)  # from here on: what is read of it now must not change until it is written
    return root


def make_run_folder(
    outputs: str, name: str | None, model: str, config: dict[str, Any], *, resume: bool = False
) -> Path:
    """Make `outputs/<name>`, or `outputs/<NNN>-<model>` with the next free number, and write what starts the run again.

    The files are config.json, command.txt, changes.diff (where the source tree differs from its commit) and
    environment.json; those of the second start in the same folder are config-2.json and so on.

    Args:
        resume: the folder `name` may be there already: this is another start of that run.

    Raises:
        UserError: a folder of that name is there already, and `resume` is False; another run writes there; or nothing can be
            written to `outputs`.
    """
    root = check_run_folder(outputs, name, resume=resume)
    if name:
        run = root / name
        run.mkdir(parents=True, exist_ok=resume)
    else:
        number = 1 + max((int(path.name[:3]) for path in root.iterdir() if path.name[:3].isdigit()), default=-1)
        while True:  # another run may take the number first
            try:
                run = root / f"{number:03d}-{model.replace('/', '-')}"
                run.mkdir()
                break
            except FileExistsError:
                number += 1
    hold_folder(run)
    start = 1 + len(list(run.glob("config*.json")))
    tail = f"-{start}" if start > 1 else ""
    (run / f"config{tail}.json").write_text(json.dumps(config, indent=1, default=str) + "\n")
    (run / f"command{tail}.txt").write_text(command_line() + "\n")
    (run / f"environment{tail}.json").write_text(json.dumps(environment(), indent=1) + "\n")
    if changes := git_changes():
        (run / f"changes{tail}.diff").write_text(changes)
    return run


@contextmanager
def oom_report(world: World) -> Iterator[None]:
    """Turn running out of a GPU's memory into a `UserError` with the command that finds settings which fit."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        gpu = world.device.type == "cuda"
        total = round(torch.cuda.get_device_properties(world.device).total_memory / 2**30) if gpu else 24
        words = [*sys.argv[1:], "--gpus", str(world.size), "--gpu-memory", str(total)]
        raise UserError(
            f"out of memory: {(str(error) or 'OutOfMemoryError').splitlines()[0]} "
            f"Settings that fit: python -m tools.estimate {shlex.join(words)}"
        ) from error


def what_to_do_next(cfg: LoopConfig, reason: str, checkpoint: Path) -> str:
    """What follows the last line of a run: the command that resumes it if a signal ended it, for that `reason`, else one that samples."""
    if reason:
        arguments, left_out, is_value = [], ("--load", "--start-from-scratch", "--other-data"), False
        for argument in sys.argv:
            is_value = argument in left_out or (is_value and not argument.startswith("--"))
            if not is_value and not argument.startswith(tuple(f"{name}=" for name in left_out)):
                arguments.append(argument)
        load = "latest" if cfg.exp_name else str(checkpoint)
        return f"\nto resume: {command_line([*arguments, '--load', load])}"
    if not isinstance(cfg, TrainConfig):
        return ""
    program = ["opensora", "sample"] if sys.argv[0].startswith("opensora ") else ["python", "scripts/inference.py"]
    words = [*program, str(checkpoint), *image_options(cfg.model), "--prompt", "..."]
    if cfg.bucket_config is not None and None in (cfg.val_num_frames, cfg.val_image_size):
        words += ["--num-frames", "N", "--image-size", "H", "W"]
    if cfg.imports:
        words += ["--imports", *cfg.imports]
    return f"\nto sample: {shlex.join(words)}"


def with_expert_interval(cfg: TrainConfig) -> TrainConfig:
    """`scheduler.interval` filled in, where one of a model's two experts is trained (`boundary`, `expert`): its own noise levels.

    Raises:
        UserError: no expert is chosen, or the interval that is set goes beyond the expert's.
    """
    boundary, expert = (argument(cfg.model, name) for name in ("boundary", "expert"))
    if boundary is None:
        return cfg
    if expert not in ("high", "low"):
        raise UserError(
            f"model.expert={expert!r}: the experts of {cfg.model['type']} are trained one at a time, in a run each: set "
            "--model.expert high, or low."
        )
    own = (boundary, 1.0) if expert == "high" else (0.0, boundary)
    scheduler = {"interval": own, **cfg.scheduler}
    low, high = build_module(scheduler, SCHEDULERS).interval
    if not own[0] <= low < high <= own[1]:
        raise UserError(
            f"scheduler.interval={low, high}: the expert {expert!r} of {cfg.model['type']} works at noise levels {own}; leave "
            "the interval out, or set a part of it."
        )
    logger.info("the %s-noise expert is trained at noise levels from %g to %g.", expert, low, high)
    return replace(cfg, scheduler=scheduler)


def image_options(model: Mapping[str, Any]) -> list[str]:
    """The options of scripts/inference.py that give a config's denoiser the frames that it needs."""
    ends = required_frames_of(model)
    return [] if ends is None else ["--image", "...", *(["--last-image", "..."] if -1 in ends else [])]


def warn_of_random_weights(model: Mapping[str, Any]) -> str:
    """A line for the log of a run that begins with random weights where released ones fit the model's config; else nothing."""
    released = () if model.get("from_pretrained") else released_weights(model)
    if not released:
        return ""
    return (
        f"\nwarning: {model['type']} starts from random weights. To start from released ones: --ckpt-path "
        f"{' or '.join(released)}, see docs/how-to/weights.md"
    )


def parameter_table(model: nn.Module) -> str:
    """The parameters of each top-level module, trained and frozen; a parameter that two share is counted once."""
    counts: dict[str, list[int]] = {}
    for name, parameter in model.named_parameters():
        top = counts.setdefault(name.partition(".")[0], [0, 0])
        top[not parameter.requires_grad] += parameter.numel()
    rows = [*counts.items(), ("total", [sum(count[i] for count in counts.values()) for i in (0, 1)])]
    width = max(len(name) for name, _ in rows)
    lines = [f"  {'parameters':<{width}} {'trained':>14} {'frozen':>14}"]
    lines += [f"  {name:<{width}} {trained:>14,} {frozen:>14,}" for name, (trained, frozen) in rows]
    return "\n".join(lines)


def effective_batch(
    batch_size: int, ranks: int, accumulation: int, *, sp_size: int = 1, buckets: Iterable[Bucket] = ()
) -> str:
    """Samples of an optimizer step: batch of a process x data-parallel processes x accumulated batches, for each bucket.

    The processes of a step may have different buckets; a line is about a step of that bucket alone.
    """
    sizes = {f"{bucket.name}: ": bucket.batch_size for bucket in buckets if bucket.batch_size is not None}
    shared = f", each sample on {sp_size} processes" if sp_size > 1 else ""
    lines = [f"samples of a step (batch x data-parallel processes x accumulation{shared}):"]
    for name, size in (sizes or {"": batch_size}).items():
        lines.append(f"  {name}{size} x {ranks} x {accumulation} = {size * ranks * accumulation}")
    return "\n".join(lines)


def class_list(names: Sequence[str]) -> str:
    """The number of each class, for prompts are numbers; nothing where classes have no names."""
    if not names:
        return ""
    shown = ", ".join(f"{number} = {name}" for number, name in enumerate(names[:SHOWN_CLASSES]))
    more = len(names) - SHOWN_CLASSES
    return f"\nclasses: {shown}" + (f" and {more} more, in the order of the folders' names" if more > 0 else "")
