"""A training run's folder, its place in the data, and its checkpoints."""

import json
import platform
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from opensora.utils.ckpt import save_checkpoint
from opensora.utils.errors import UserError


@dataclass
class RunState:
    """Where a run stands. `step` counts optimizer steps, `micro_batch` batches taken from the loader."""

    data: str
    global_batch: int
    step: int = 0
    micro_batch: int = 0
    epoch: int = 0

    def advance(self, micro_batches: int, batches_per_epoch: int) -> None:
        """One optimizer step is done, from so many micro-batches."""
        self.step += 1
        self.micro_batch += micro_batches
        self.epoch = self.micro_batch // batches_per_epoch

    def resumed(self, saved: Mapping[str, Any], source: str) -> "RunState":
        """The saved place, if it means the same here.

        Raises:
            UserError: the data or the number of samples in a batch of all ranks is not what it was.
        """
        for key, what in (("data", "the dataset (its table or its settings)"), ("global_batch", "batch_size x ranks")):
            if saved[key] != getattr(self, key):
                raise UserError(
                    f"{source} cannot be continued here: {what} was {saved[key]}, now {getattr(self, key)}, so its "
                    "place in the data has no meaning. Restore that setting, or keep weights and optimizer and begin "
                    "at step 0 with --start-from-scratch True."
                )
        return replace(self, step=saved["step"], micro_batch=saved["micro_batch"], epoch=saved["epoch"])


class Throughput:
    """Samples per second since the last call."""

    def __init__(self, samples_per_step: int) -> None:
        self.samples_per_step = samples_per_step
        self._last: tuple[int, float] | None = None

    def __call__(self, step: int) -> dict[str, float]:
        """The figures for the log; nothing on the first call, which would measure the warm-up."""
        now = time.perf_counter()
        last, self._last = self._last, (step, now)
        if last is None or step == last[0]:
            return {}
        seconds = (now - last[1]) / (step - last[0])
        return {"samples_per_s": self.samples_per_step / seconds, "s_per_step": seconds}


def due(step: int, every: int) -> bool:
    """Whether something done every so many steps is done after this one; 0 = never."""
    return every > 0 and step % every == 0


def make_run_folder(outputs: str, name: str | None, model: str, config: dict[str, Any]) -> Path:
    """Make `outputs/<name>`, or `outputs/<NNN>-<model>` with the next free number, and write the config into it.

    Raises:
        UserError: a folder of that name is there already.
    """
    root = Path(outputs)
    root.mkdir(parents=True, exist_ok=True)
    run = _new_folder(root, name) if name else _next_folder(root, model.replace("/", "-"))
    (run / "config.json").write_text(json.dumps(config, indent=1, default=str) + "\n")
    (run / "environment.json").write_text(json.dumps(environment(), indent=1) + "\n")
    return run


def save_run(
    run: Path, state: RunState, parts: Mapping[str, Mapping[str, Any]], model: str, config: dict[str, Any]
) -> Path:
    """Write `run/epoch{E}-global_step{S}`; call it in the main process only."""
    manifest = {"step": state.step, "model": model, "data": state.data, "config": config}
    path = run / f"epoch{state.epoch}-global_step{state.step}"
    return save_checkpoint(path, parts, state=asdict(state), manifest={**manifest, **environment()})


def environment() -> dict[str, Any]:
    """The command, the commit and the versions in use."""
    packages = ("opensora", "torch", "diffusers", "transformers", "numpy")
    return {
        "command": sys.argv,
        "git_commit": git_commit(),
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in packages}},
    }


def git_commit() -> str | None:
    """The commit of this source tree, with `-dirty` when files differ from it; None outside a repository."""
    describe = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(describe, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.strip() or None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _new_folder(root: Path, name: str) -> Path:
    run = root / name
    try:
        run.mkdir(parents=True)
    except FileExistsError as error:
        raise UserError(
            f"{run} is there already, and a run never writes into another run's folder. Choose another --exp-name, "
            "or remove it."
        ) from error
    return run


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
