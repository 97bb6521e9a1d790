"""Another sample in place of one whose file cannot be read: rarely, counted, and the same in every run.

A dataset that allows it has two things beside `dataset[key]`, which itself never substitutes:

    bad_files              a `BadFiles`: what the user wants
    another(key, rng)      the key of another sample of the same size and length, drawn with `rng`; None if there is none

The loader reads through `read_or_substitute`, in its workers, and counts with a `BadFileCount` in the process that trains.
What stands in for a sample is f(seed, epoch, sample, attempt): worker, rank and what was read before do not matter, and a
resumed run gets the same. Nothing is made up: a stand-in is a sample with its own caption, path and row.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from opensora.datasets.video.files import BadFile
from opensora.utils.errors import UserError
from opensora.utils.seed import generator

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 8  # stand-ins that are tried for one sample; so many bad files in a row are no accident
MIN_SAMPLES = 100  # a share of less than this says little: below it, the limit is that of this many samples
SHOWN = 10  # bad files that are named one by one


K = TypeVar("K", bound=Any)


@dataclass(frozen=True)
class BadFiles:
    """What to do with samples whose file cannot be read.

    Args:
        policy: "substitute" another sample of the same size and length, or raise the "error".
        max_share: The share of bad samples above which a run ends, in each process; of the first 100 at least.
        seed: Of the choice of stand-ins.
    """

    policy: Literal["substitute", "error"] = "substitute"
    max_share: float = 0.05
    seed: int = 0

    @property
    def at_start(self) -> float:
        """The share of a table's rows that may be left out before training because their file is missing or broken."""
        return self.max_share if self.policy == "substitute" else 0.0

    def __post_init__(self) -> None:
        if self.policy not in ("substitute", "error"):
            raise UserError(f"bad_files={self.policy!r} is not one of substitute, error.")
        if not 0 <= self.max_share <= 1:
            raise UserError(f"max_bad_share={self.max_share} is no share: give a number from 0 to 1, such as 0.05.")


def read_or_substitute(dataset: Any, key: K) -> dict[str, Any]:
    """A sample, or one in its place; `bad_files` of it lists what was wrong with the files that were tried before.

    A dataset without `bad_files`, or with policy "error", is simply read. One with `bad_files` (a `BadFiles`) has
    `another(key, rng)`: the key of another sample of the same size and length, or None.

    Raises:
        BadFile: policy "error".
        UserError: none of the stand-ins could be read either, or there is none.
    """
    wanted: BadFiles | None = getattr(dataset, "bad_files", None)
    if wanted is None or wanted.policy == "error":
        return dataset[key]
    problems: list[str] = []
    tried: K | None = key
    while tried is not None and len(problems) <= MAX_ATTEMPTS:
        try:
            return {**dataset[tried], "bad_files": problems}
        except BadFile as error:
            problems.append(str(error))
        rng = generator(wanted.seed, "substitute", key.epoch, key.index, len(problems))
        tried = dataset.another(key, rng)
    if tried is None:
        raise UserError(f"{problems[0]}\nNo other sample has its size and length, so nothing can stand in for it.")
    raise UserError(
        f"{len(problems)} samples that were tried one after another could not be read; is the storage there? The first:\n"
        + "\n".join(problems[:3])
    )


class BadFileCount:
    """Counts the bad files of batches, names them in the log, and ends a run that has too many.

    It counts this process' samples from its start, and is counted anew after a resume.
    """

    def __init__(self, wanted: BadFiles | None) -> None:
        self.max_share = wanted.max_share if wanted else 0.0
        self.samples = 0
        self.substituted = 0
        self.problems: dict[str, int] = {}  # what was wrong -> how often

    def add(self, batch: Mapping[str, Any]) -> None:
        """Count a batch.

        Raises:
            UserError: more than `max_share` of the samples so far needed a stand-in.
        """
        of_samples: list[list[str]] = batch.get("bad_files", [])
        self.samples += len(of_samples)
        for problems in of_samples:
            self.substituted += bool(problems)
            for problem in problems:
                known = self.problems.get(problem, 0)
                self.problems[problem] = known + 1
                if not known and len(self.problems) <= SHOWN:
                    logger.warning("another sample is taken instead: %s", problem)
                if not known and len(self.problems) == SHOWN:
                    logger.warning("further bad files are counted, and named at the end.")
        if self.substituted > self.max_share * max(self.samples, MIN_SAMPLES):
            raise UserError(
                f"{self.summary()}\nThis is more than max_bad_share={self.max_share:g} of "
                f"{max(self.samples, MIN_SAMPLES)}: mend the table, or raise dataset.max_bad_share."
            )

    def summary(self) -> str:
        """How many samples had a stand-in, and why; empty when none had."""
        if not self.problems:
            return ""
        named = sorted(self.problems.items(), key=lambda item: -item[1])
        lines = [f"  {times} x {problem}" for problem, times in named[:SHOWN]]
        more = [f"  and {len(named) - SHOWN} more"] if len(named) > SHOWN else []
        head = f"{self.substituted} of {self.samples} samples were replaced by others. What is wrong with {len(named)} files:"
        return "\n".join([head, *lines, *more])
