"""The log of a run: lines in `log.txt` and on the terminal, numbers in `metrics.jsonl`, TensorBoard and, if asked, W&B.

Only the main process writes; a `RunLog` made elsewhere accepts everything and writes nothing. A run that resumes in its
folder continues its log: entries after the checkpoint are removed, since those steps are taken again. docs/reference/log.md explains the entries.
"""

import hashlib
import json
import logging
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tqdm import tqdm

from opensora.utils.logging import LINE, progress_bar


class RunLog:
    """The log of one run.

    Args:
        folder: the run's folder; None = this process writes nothing.
        start: optimizer steps done; later entries of an older log in the folder are removed.
        wandb: also send the numbers to Weights & Biases (needs the package, and an account or WANDB_MODE=offline).
        config: shown to W&B.
    """

    def __init__(
        self, folder: Path | None, *, start: int = 0, wandb: bool = False, config: dict[str, Any] | None = None
    ) -> None:
        self.folder = folder
        self._bar: tqdm | None = None
        self._shown = 0.0  # when the last status was
        self._sinks: list[Any] = []
        self._silent: set[str] = set()  # sinks that failed, each reported once
        if folder is None:
            return
        self._lines = _line_logger(folder)
        _forget_later_steps(folder / "metrics.jsonl", start)
        self._jsonl = (folder / "metrics.jsonl").open("a", buffering=1)
        from torch.utils.tensorboard import SummaryWriter

        again = (folder / "tensorboard").is_dir()  # steps after `start`, of a run that ended without a checkpoint, go
        self._tensorboard = SummaryWriter(str(folder / "tensorboard"), purge_step=start + 1 if again else None)
        if wandb:
            self._sinks.append(_wandb_run(folder, config))

    def line(self, message: str) -> None:
        """A message for the terminal and log.txt; an empty one writes nothing."""
        if self.folder is None or not message:
            return
        with tqdm.external_write_mode(file=sys.stderr):
            self._lines.info(message)

    def metrics(self, step: int, **values: Any) -> None:
        """Numbers of optimizer step `step` (counted from 1); a value may be a dict of numbers, by name, or of such dicts."""
        if self.folder is None:
            return
        with self._report_once("metrics.jsonl"):
            self._jsonl.write(json.dumps({"step": step, **values}) + "\n")  # a whole line at once
        flat = dict(_flat(values))
        with self._report_once("TensorBoard"):
            for name, value in flat.items():
                self._tensorboard.add_scalar(name, value, step)
        for sink in self._sinks:
            sink.log(flat, step=step)
        if self._bar is not None:
            shown = {name: f"{values[name]:.4g}" for name in ("loss", "samples_per_s") if name in values}
            if shown:  # validation's numbers do not clear the bar
                self._bar.set_postfix(shown, refresh=False)

    @contextmanager
    def _report_once(self, what: str) -> Iterator[None]:
        """A full disk ends no run: the next checkpoint matters more. TensorBoard's writer raises errors of earlier writes."""
        try:
            yield
        except OSError as error:
            if what not in self._silent:
                self._silent.add(what)
                self.line(f"{what} does not have all of this run: {error}")

    def image(self, name: str, path: Path, step: int) -> None:
        """An image file, for TensorBoard and W&B."""
        if self.folder is None:
            return
        with Image.open(path) as image:
            pixels = np.asarray(image.convert("RGB"))
        with self._report_once("TensorBoard"):
            self._tensorboard.add_image(name, pixels, step, dataformats="HWC")
        for sink in self._sinks:
            sink.log({name: _wandb_image(path)}, step=step)

    def start_progress(self, start: int, total: int) -> None:
        """Show a progress bar over optimizer steps, with the time left."""
        if self.folder is not None:
            self._bar = progress_bar(initial=start, total=total, unit="step", leave=True)

    def advance(self) -> None:
        """One more step is done."""
        if self._bar is not None:
            self._bar.update()

    def status(self, text: str) -> None:
        """What is going on besides steps, in front of the progress bar; empty: nothing."""
        if self._bar is not None:
            self._bar.set_description_str(text, refresh=False)
            if not text or time.monotonic() - self._shown > 0.5:
                self._bar.refresh()
                self._shown = time.monotonic()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """For what is no training, such as a validation: the bar's speed and remaining time leave it out."""
        begin = time.time()
        try:
            yield
        finally:
            self.status("")
            if self._bar is not None:
                self._bar.start_t += time.time() - begin
                self._bar.last_print_t += time.time() - begin

    def close(self) -> None:
        """Flush everything; further calls are errors."""
        if self._bar is not None:
            self._bar.close()
        if self.folder is None:
            return
        with self._report_once("metrics.jsonl"):
            self._jsonl.close()
        with self._report_once("TensorBoard"):
            self._tensorboard.close()
        for sink in self._sinks:
            sink.finish()
        for handler in list(self._lines.handlers):
            handler.close()
            self._lines.removeHandler(handler)


def _forget_later_steps(path: Path, step: int) -> None:
    """Keep the entries of a metrics.jsonl up to `step`, and complete lines only: a crash may have cut the last one."""
    if not path.exists():
        return
    lines = path.read_text().splitlines(keepends=True)
    kept = [line for line in lines if (number := _step_of(line)) is not None and number <= step]
    if kept == lines:
        return
    new = path.with_name(path.name + ".new")
    new.write_text("".join(kept))
    new.replace(path)


def _step_of(line: str) -> int | None:
    """The step of an entry; None for an incomplete line."""
    try:
        return int(json.loads(line)["step"]) if line.endswith("\n") else None
    except (ValueError, KeyError, TypeError):
        return None


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """`{"a": {"b": 1}}` as `("a/b", 1)`."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", value


def _line_logger(folder: Path) -> logging.Logger:
    logger = logging.getLogger(f"opensora.run.{folder}")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    for handler in (logging.StreamHandler(sys.stderr), logging.FileHandler(folder / "log.txt")):
        handler.setFormatter(LINE)
        logger.addHandler(handler)
    return logger


def _wandb_image(path: Path) -> Any:
    import wandb

    return wandb.Image(str(path))


def _wandb_run(folder: Path, config: dict[str, Any] | None) -> Any:
    import wandb

    # one W&B run for one folder, also after a resume
    name = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
    return wandb.init(project="opensora", id=name, resume="allow", name=folder.name, dir=str(folder), config=config)
