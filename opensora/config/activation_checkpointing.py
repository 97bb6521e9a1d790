"""Activation checkpointing: the values of `grad_checkpoint`, and which parts of a denoiser each checkpoints.

    "none"              nothing
    "block"             every block
    "every:k"           blocks 0, k, 2k, ...
    "mlp"               the MLP of every block
    "mlp:1/3", "mlp:2/3"  the MLPs of the first, of the first two of a model's three stacks; of one stack, of its first thirds
    "selective"         in every block all but matrix products and attention, whose results are kept
    "selective:k"       the same in blocks 0, k, 2k, ..., and the other blocks whole: between "selective" and "block"
    "selective+every:k" the other way round: blocks 0, k, 2k, ... whole, the others "selective", where that alone is a little too much

The thirds are levels 1 and 2 of NOVA (Deng et al. 2024, `gradient_checkpointing`), where each adds the MLPs of one more stack: video
encoder, image encoder, decoder. Of MLP levels, attention is never checkpointed. Other denoisers are one stack; a level adds a third of it.

Numbers, False and True are older spellings, see `upgrade.py`.
"""

from collections.abc import Sequence
from typing import NamedTuple

from opensora.config.upgrade import translate_level
from opensora.utils.errors import UserError

THIRDS = 3
WORDS = ("none", "block", "every:k", "mlp", "mlp:1/3", "mlp:2/3", "selective", "selective:k", "selective+every:k")
NUMBERED = {"every": "block", "selective": "selective", "selective+every": "selective"}  # word before a ":k" -> part


class CheckpointLevel(NamedTuple):
    """Which parts are checkpointed.

    Attributes:
        part: "nothing", the whole "block", its "mlp", or by operation ("selective").
        every: Every n-th block; of "selective", the others are checkpointed whole.
        whole: Of "selective", every n-th block is checkpointed whole; 0 = none.
        thirds: Of the blocks, so many thirds, or of three stacks so many, from the first on.
    """

    part: str
    every: int = 1
    thirds: int = THIRDS
    whole: int = 0

    def chosen(self, depth: int, stacks: Sequence[int] | None = None) -> range:
        """The blocks it concerns, of `depth`; `stacks`: how many of them are in each of three stacks, where a model has these."""
        if self.part == "nothing":
            return range(0)
        end = -(-depth * self.thirds // THIRDS) if stacks is None else sum(stacks[: self.thirds])
        return range(0, end, self.every)

    def parts(self, depth: int, stacks: Sequence[int] | None = None) -> list[str]:
        """What is checkpointed of each of the blocks: a value of `part`."""
        chosen = self.chosen(depth, stacks)
        others = "block" if self.part == "selective" else "nothing"
        whole = range(0, depth, self.whole) if self.whole else range(0)
        return [self.part if i in chosen and i not in whole else others for i in range(depth)]


def parse_level(value: str) -> CheckpointLevel:
    """What a value of `grad_checkpoint` means.

    Raises:
        UserError: it is not such a value.
    """
    word, _, number = value.partition(":")
    if word in NUMBERED and number.isdecimal() and int(number) >= 1:
        k, part = int(number), NUMBERED[word]
        return CheckpointLevel(part, whole=k) if "+" in word else CheckpointLevel(part, every=k)
    if word == "mlp" and number in ("1/3", "2/3"):
        return CheckpointLevel("mlp", thirds=int(number[0]))
    names = {"none": "nothing", "block": "block", "mlp": "mlp", "selective": "selective"}
    if value not in names:
        raise UserError(f"grad_checkpoint={value!r} is not one of {', '.join(WORDS)} (k from 1).")
    return CheckpointLevel(names[value])


def level_problems(value: str) -> list[str]:
    """What is wrong with a value of `grad_checkpoint`."""
    try:
        parse_level(value)
    except UserError as error:
        return [str(error)]
    return []


def level_of(text: str) -> str:
    """A value of `grad_checkpoint` from a command line.

    Raises:
        UserError: it is not such a value.
    """
    level: str = translate_level(text)
    parse_level(level)
    return level
