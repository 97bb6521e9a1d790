"""Training on given frames: which frames of a clip a model is shown clean, so that it learns to continue, join and fill in.

As in Open-Sora 1.1 and 1.2, each sample gets one kind of mask with a stated probability:

    identity                          nothing is given; what the other probabilities leave
    random                            each frame is given with one probability, drawn from 0.1 to 0.9
    interpolate                       every second frame is given, from the first or from the second
    quarter_random, quarter_head, quarter_tail, quarter_head_tail       up to a quarter of the frames
    image_random, image_head, image_tail, image_head_tail               one frame, or one at each end

Their spellings "intepolate", "mask_no" and "mask_quarter_head" (with "mask_" in front) are read too. Deviations: masks exist
for clips of any length from 1 (theirs crashed below four latent frames), and always leave a frame to learn from; they are
functions of seed, step and sample instead of a global generator.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from opensora.registry import did_you_mean
from opensora.utils.errors import UserError
from opensora.utils.seed import generator

Rule = Callable[[int, torch.Generator], Tensor]  # (T >= 2 frames, rng) -> [T] bool, True where a frame is generated

GIVEN_SHARE = (0.1, 0.9)  # of the frames that "random" gives
ALIASES = {"intepolate": "interpolate", "no": "identity"}


class MaskRatios:
    """Draws the masks of a batch.

    Args:
        ratios: kind of mask -> its probability; None = no masks at all.

    Raises:
        UserError: a kind is unknown or there twice, or the probabilities are none.
    """

    def __init__(self, ratios: Mapping[str, float] | None) -> None:
        self.ratios = {} if ratios is None else _checked(ratios)

    def __call__(self, z: Tensor, generators: Sequence[torch.Generator]) -> Tensor | None:
        """The masks of a batch.

        Args:
            z: latents [B, C, T, h, w].
            generators: one for each sample. Their seeds are used, and nothing is drawn from them: with and without masks, and
                on any device, a step has the same noise and the same masks.

        Returns:
            [B, T] bool, True at frames to be learnt and False at given ones; None where nothing is given in the batch.
        """
        if not self.ratios or z.shape[2] == 1:
            return None
        masks = torch.stack([self.draw(z.shape[2], generator(g.initial_seed(), "frames given")) for g in generators])
        return None if masks.all() else masks.to(z.device, non_blocking=True)

    def draw(self, num_frames: int, rng: torch.Generator) -> Tensor:
        """One mask [T] bool, of a CPU generator; at least one frame is True."""
        if num_frames == 1:
            return torch.ones(1, dtype=torch.bool)
        mask = RULES[self._kind(rng)](num_frames, rng)
        if not mask.any():
            mask[-1] = True  # something must be left to learn: the loss would be a mean of nothing
        return mask

    def _kind(self, rng: torch.Generator) -> str:
        left = float(torch.rand(1, generator=rng, dtype=torch.float64))
        for kind, ratio in self.ratios.items():
            left -= ratio
            if left < 0:
                return kind
        return "identity"


def _identity(num_frames: int, rng: torch.Generator) -> Tensor:
    return torch.ones(num_frames, dtype=torch.bool)


def _random(num_frames: int, rng: torch.Generator) -> Tensor:
    low, high = GIVEN_SHARE
    share, *frames = torch.rand(1 + num_frames, generator=rng).tolist()
    return torch.tensor([frame >= low + (high - low) * share for frame in frames])


def _interpolate(num_frames: int, rng: torch.Generator) -> Tensor:
    mask = _identity(num_frames, rng)
    mask[_integer(0, 1, rng) :: 2] = False
    return mask


def _ends(*, head: bool, tail: bool, share: int | None) -> Rule:
    """Frames at one end or both; up to one in `share`, or one frame."""

    def rule(num_frames: int, rng: torch.Generator) -> Tensor:
        mask, count = _identity(num_frames, rng), _count(num_frames, share, rng)
        if head:
            mask[:count] = False
        if tail:
            mask[num_frames - count :] = False
        return mask

    return rule


def _somewhere(share: int | None) -> Rule:
    """Frames in a row, anywhere."""

    def rule(num_frames: int, rng: torch.Generator) -> Tensor:
        mask, count = _identity(num_frames, rng), _count(num_frames, share, rng)
        start = _integer(0, num_frames - count, rng)
        mask[start : start + count] = False
        return mask

    return rule


def _count(num_frames: int, share: int | None, rng: torch.Generator) -> int:
    return 1 if share is None else _integer(1, max(num_frames // share, 1), rng)


def _integer(low: int, high: int, rng: torch.Generator) -> int:
    """In [low, high]."""
    return int(torch.randint(low, high + 1, (1,), generator=rng))


RULES: dict[str, Rule] = {"identity": _identity, "random": _random, "interpolate": _interpolate}
for _prefix, _share in (("quarter", 4), ("image", None)):
    RULES |= {
        f"{_prefix}_random": _somewhere(_share),
        f"{_prefix}_head": _ends(head=True, tail=False, share=_share),
        f"{_prefix}_tail": _ends(head=False, tail=True, share=_share),
        f"{_prefix}_head_tail": _ends(head=True, tail=True, share=_share),
    }


def _checked(ratios: Mapping[str, float]) -> dict[str, float]:
    """Under their own names."""
    checked: dict[str, float] = {}
    for name, ratio in ratios.items():
        short = name.removeprefix("mask_")
        kind = ALIASES.get(short, short)
        if kind not in RULES:
            raise UserError(
                f"mask_ratios: {name!r} is unknown.{did_you_mean(name, list(RULES))} Kinds: {', '.join(RULES)}."
            )
        if kind in checked:
            raise UserError(f"mask_ratios: {kind!r} is there twice, under two names; keep one.")
        if not 0 <= ratio <= 1:
            raise UserError(f"mask_ratios.{name}={ratio}: expected a probability from 0 to 1.")
        checked[kind] = float(ratio)
    total = sum(checked.values())
    if total > 1 + 1e-6 or ("identity" in checked and total < 1 - 1e-6):
        raise UserError(
            f"mask_ratios add up to {total:g}; leave 'identity' out, which gets what the others leave of 1, or make it 1."
        )
    return checked
