"""What a run says: lines in `log.txt` and on the terminal, numbers in `metrics.jsonl`, TensorBoard and, if asked, W&B.

Only the main process writes; a `RunLog` made elsewhere accepts everything and writes nothing.
"""

import json
import logging
import sys
from pathlib import Path
from typing import Any

from tqdm import tqdm

LINE = logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S")


def show_messages() -> None:
    """Show on the terminal what the package reports of itself, such as the weights that were loaded.

    That is the logger "opensora", INFO and above. A program calls it once it knows that it is the main process. The lines of a `RunLog` come by another way, once.
    """
    logger = logging.getLogger("opensora")
    logger.setLevel(logging.INFO)
    if not any(isinstance(handler, _Terminal) for handler in logger.handlers):
        handler = _Terminal()
        handler.setFormatter(LINE)
        logger.addHandler(handler)


class _Terminal(logging.Handler):
    """Lines on stderr, above a progress bar if there is one."""

    def emit(self, record: logging.LogRecord) -> None:
        tqdm.write(self.format(record), file=sys.stderr)


class RunLog:
    """The log of one run.

    Args:
        folder: the run's folder; None = this process writes nothing.
        wandb: also send the numbers to Weights & Biases (needs the package and an account).
        config: shown to W&B.
    """

    def __init__(self, folder: Path | None, *, wandb: bool = False, config: dict[str, Any] | None = None) -> None:
        self.folder = folder
        self._bar: tqdm | None = None
        self._sinks: list[Any] = []
        if folder is None:
            return
        self._lines = _line_logger(folder)
        self._jsonl = (folder / "metrics.jsonl").open("a", buffering=1)
        from torch.utils.tensorboard import SummaryWriter

        self._tensorboard = SummaryWriter(str(folder / "tensorboard"))
        if wandb:
            self._sinks.append(_wandb_run(folder, config))

    def line(self, message: str) -> None:
        """A line for the terminal and log.txt."""
        if self.folder is None:
            return
        with tqdm.external_write_mode(file=sys.stderr):
            self._lines.info(message)

    def metrics(self, step: int, **values: float) -> None:
        """Numbers of optimizer step `step` (counted from 1)."""
        if self.folder is None:
            return
        self._jsonl.write(json.dumps({"step": step, **values}) + "\n")
        for name, value in values.items():
            self._tensorboard.add_scalar(name, value, step)
        for sink in self._sinks:
            sink.log(values, step=step)
        if self._bar is not None:
            shown = {name: f"{values[name]:.4g}" for name in ("loss", "samples_per_s") if name in values}
            self._bar.set_postfix(shown, refresh=False)

    def start_progress(self, start: int, total: int) -> None:
        """Show a progress bar over optimizer steps, with the time left."""
        if self.folder is not None:
            self._bar = tqdm(initial=start, total=total, unit="step", dynamic_ncols=True, mininterval=0.5)

    def advance(self) -> None:
        """One more step is done."""
        if self._bar is not None:
            self._bar.update()

    def close(self) -> None:
        """Flush everything; further calls are errors."""
        if self._bar is not None:
            self._bar.close()
        if self.folder is None:
            return
        self._jsonl.close()
        self._tensorboard.close()
        for sink in self._sinks:
            sink.finish()
        for handler in list(self._lines.handlers):
            handler.close()
            self._lines.removeHandler(handler)


def _line_logger(folder: Path) -> logging.Logger:
    logger = logging.getLogger(f"opensora.run.{folder}")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    for handler in (logging.StreamHandler(sys.stderr), logging.FileHandler(folder / "log.txt")):
        handler.setFormatter(LINE)
        logger.addHandler(handler)
    return logger


def _wandb_run(folder: Path, config: dict[str, Any] | None) -> Any:
    from opensora.utils.errors import UserError

    try:
        import wandb
    except ImportError as error:
        raise UserError("wandb=True, but the package is not installed: pip install 'opensora[wandb]'.") from error
    return wandb.init(project="opensora", name=folder.name, dir=str(folder), config=config)
