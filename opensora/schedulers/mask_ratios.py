"""Training on conditioning frames: which frames of a clip a model sees clean, so that it learns to continue, join and fill in.

As in Open-Sora 1.1 and 1.2, each sample gets one kind of mask with a stated probability:

    identity                          no conditioning frames; what the other probabilities leave
    random                            each frame with one probability, drawn from 0.1 to 0.9
    interpolate                       every second frame, from the first or from the second
    quarter_random, quarter_head, quarter_tail, quarter_head_tail       up to a quarter of the frames
    image_random, image_head, image_tail, image_head_tail               one frame, or one at each end

Deviations: masks exist for clips of any length from 1 (theirs crashed below four latent frames), and always leave a frame to
learn from; they are functions of seed, step and sample instead of a global generator.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from opensora.registry import did_you_mean
from opensora.utils.errors import UserError
from opensora.utils.seed import generator

KINDS = (
    "identity", "random", "interpolate", "quarter_random", "quarter_head", "quarter_tail", "quarter_head_tail",
    "image_random", "image_head", "image_tail", "image_head_tail",
)  # fmt: skip
FIXED_KINDS = ("identity", "image_head", "image_tail", "image_head_tail")  # which draw nothing
RANDOM_SHARE = (0.1, 0.9)  # of conditioning frames in "random"


class MaskRatios:
    """Draws the masks of a batch.

    Args:
        ratios: kind of mask -> its probability; None = no masks at all.

    Raises:
        UserError: a kind is unknown, or the probabilities are none.
    """

    def __init__(self, ratios: Mapping[str, float] | None) -> None:
        self.ratios = dict(ratios or {})
        for kind, ratio in self.ratios.items():
            if kind not in KINDS:
                raise UserError(
                    f"mask_ratios: {kind!r} is unknown.{did_you_mean(kind, list(KINDS))} Kinds: {', '.join(KINDS)}."
                )
            if not 0 <= ratio <= 1:
                raise UserError(f"mask_ratios.{kind}={ratio}: expected a probability from 0 to 1.")
        total = sum(self.ratios.values())
        if total > 1 + 1e-6 or ("identity" in self.ratios and total < 1 - 1e-6):
            raise UserError(
                f"mask_ratios add up to {total:g}; leave 'identity' out, which gets what the others leave of 1, or make it 1."
            )

    def __call__(self, z: Tensor, generators: Sequence[torch.Generator]) -> Tensor | None:
        """The masks of a batch.

        Args:
            z: latents [B, C, T, h, w].
            generators: one for each sample. Their seeds are used, and nothing is drawn from them: with and without masks, and
                on any device, a step has the same noise and the same masks.

        Returns:
            [B, T] bool, False at conditioning frames; None where the batch has none.
        """
        if not self.ratios or z.shape[2] == 1:
            return None
        masks = torch.stack([self.draw(z.shape[2], generator(g.initial_seed(), "frames given")) for g in generators])
        return None if masks.all() else masks.to(z.device, non_blocking=True)

    @property
    def kinds(self) -> list[str]:
        """The kinds of masks that may be drawn."""
        rest = ["identity"] if sum(self.ratios.values()) < 1 - 1e-6 else []
        return sorted({*rest, *(kind for kind, ratio in self.ratios.items() if ratio > 0)})

    def given_frames(self, num_frames: int) -> Tensor:
        """All that the conditioning frames of a clip may be, [K, T] bool.

        Raises:
            UserError: a kind draws them, so that there is no end to them.
        """
        if drawn := [kind for kind in self.kinds if kind not in FIXED_KINDS]:
            raise UserError(
                f"mask_ratios: with {', '.join(drawn)} the conditioning frames are drawn anew in each step, so their latents cannot be "
                f"cached: train from the videos, or with {', '.join(FIXED_KINDS)} alone."
            )
        masks = [MaskRatios({kind: 1.0}).draw(num_frames, torch.Generator()) for kind in self.kinds]
        return ~torch.stack(masks).unique(dim=0)

    def draw(self, num_frames: int, rng: torch.Generator) -> Tensor:
        """One mask [T] bool, False at conditioning frames; at least one is True. `rng` is a CPU generator."""

        def integer(low: int, high: int) -> int:
            """In [low, high]."""
            return int(torch.randint(low, high + 1, (1,), generator=rng))

        mask = torch.ones(num_frames, dtype=torch.bool)
        if num_frames == 1:
            return mask
        kind = self.draw_kind(rng)
        if kind == "random":
            low, high = RANDOM_SHARE
            share, *frames = torch.rand(1 + num_frames, generator=rng).tolist()
            mask = torch.tensor([frame >= low + (high - low) * share for frame in frames])
        elif kind == "interpolate":
            mask[integer(0, 1) :: 2] = False
        elif kind != "identity":
            size, _, where = kind.partition("_")
            count = 1 if size == "image" else integer(1, max(num_frames // 4, 1))
            if where == "random":
                start = integer(0, num_frames - count)
                mask[start : start + count] = False
            if "head" in where:
                mask[:count] = False
            if "tail" in where:
                mask[num_frames - count :] = False
        if not mask.any():
            mask[-1] = True  # the loss would be a mean of nothing
        return mask

    def draw_kind(self, rng: torch.Generator) -> str:
        """The kind of one mask."""
        left = float(torch.rand(1, generator=rng, dtype=torch.float64))
        for kind, ratio in self.ratios.items():
            left -= ratio
            if left < 0:
                return kind
        return "identity"
