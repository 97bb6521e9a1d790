"""The values of `grad_checkpoint`, and what each means: which parts of a denoiser are computed again in the backward pass.

    False, 0, "none"    nothing
    True, "block"       every block
    "every:k"           blocks 0, k, 2k, ...
    "mlp", 3            the MLP of every block
    1, 2                the MLPs of the first, of the first two of a model's three stacks; of one stack, of its first thirds
    "selective"         in every block all but matrix products and attention, whose results are kept
    "selective:k"       the same in blocks 0, k, 2k, ..., and the other blocks whole: between "selective" and "block"
    "selective+every:k" the other way round: blocks 0, k, 2k, ... whole, the others "selective", where that alone is a little too much

Levels 0 to 3 are NOVA's (Deng et al. 2024, `gradient_checkpointing`), where each adds the MLPs of one more stack: video
encoder, image encoder, decoder. Attention is never computed again. Other denoisers are one stack; a level adds a third of it.
"""

from collections.abc import Sequence
from typing import NamedTuple

from opensora.utils.errors import UserError

LEVELS = (0, 1, 2, 3)
THIRDS = 3
WORDS = ("none", "block", "every:k", "mlp", "selective", "selective:k", "selective+every:k")
NUMBERED = {"every": "block", "selective": "selective", "selective+every": "selective"}  # word before a ":k" -> part


class Recompute(NamedTuple):
    """Which parts are computed again.

    Attributes:
        part: "nothing", the whole "block", its "mlp", or by operation ("selective").
        every: Of the blocks, every so manieth; of "selective", the others are computed again whole.
        whole: Of "selective", every so manieth block is computed again whole; 0 = none.
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
        """What is computed again of each of the blocks: a value of `part`."""
        chosen = self.chosen(depth, stacks)
        others = "block" if self.part == "selective" else "nothing"
        whole = range(0, depth, self.whole) if self.whole else range(0)
        return [self.part if i in chosen and i not in whole else others for i in range(depth)]


def parse_recompute(value: bool | int | str) -> Recompute:  # noqa: FBT001  (a config's value)
    """What a value of `grad_checkpoint` means.

    Raises:
        UserError: it is no such value.
    """
    if isinstance(value, bool):
        return Recompute("block") if value else Recompute("nothing")
    if isinstance(value, int):
        if value not in LEVELS:
            raise UserError(f"grad_checkpoint={value} is no level: they are 0 to 3, by MLPs. Or {', '.join(WORDS)}.")
        return Recompute("mlp", thirds=value) if value else Recompute("nothing")
    word, _, number = value.partition(":")
    if word in NUMBERED and number.isdecimal() and int(number) >= 1:
        k, part = int(number), NUMBERED[word]
        return Recompute(part, whole=k) if "+" in word else Recompute(part, every=k)
    names = {"none": "nothing", "block": "block", "mlp": "mlp", "selective": "selective"}
    if value not in names:
        raise UserError(f"grad_checkpoint={value!r} is not one of {', '.join(WORDS)} (k from 1), True, False, 0 to 3.")
    return Recompute(names[value])


def recompute_problems(value: bool | int | str) -> list[str]:  # noqa: FBT001  (a config's value)
    """What is wrong with a value of `grad_checkpoint`."""
    try:
        parse_recompute(value)
    except UserError as error:
        return [str(error)]
    return []


def level_of(text: str) -> int | str:
    """A value of `grad_checkpoint` from a command line.

    Raises:
        UserError: it is no such value.
    """
    level = int(text) if text.isdecimal() else text
    parse_recompute(level)
    return level
