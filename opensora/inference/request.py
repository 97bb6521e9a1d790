"""A request to a pipeline: a batch of prompts, each with its references, and one size for all."""

from collections.abc import Sequence
from dataclasses import dataclass

from opensora.inference.prompts import PromptItem, Segment
from opensora.inference.references import NO_CONDITIONING, Conditioning
from opensora.utils.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Request:
    """A batch of videos of one size.

    Attributes:
        items: B prompts; their order does not matter for what is made of each.
        conditioning: what each starts from; empty: from noise alone.
        align: latent frames to whose multiples references are moved; None: the VAE's chunks.
        num_frames: of a segment, which the VAE takes.
        image_size: (height, width) in pixels, multiples of the VAE's factor.
        fps: frame rate that conditions the model.
        seed: with an item's index and `sample_index` it fixes the noise; an item's own seed wins.
        sample_index: which of several videos of the same prompts.
        guidance_scale: None = the scheduler's own.
        loop: segments of a long video, each continuing the one before.
        condition_frame_length: latent frames that they share; None: about a quarter, see `opensora.inference.long_video`.
        condition_frame_edit: from which noise level on the shared frames are edited; 0 keeps them.
    """

    items: Sequence[PromptItem]
    num_frames: int
    image_size: tuple[int, int]
    fps: float
    seed: int
    conditioning: Sequence[Conditioning] = ()
    align: int | None = None
    sample_index: int = 0
    guidance_scale: float | None = None
    loop: int = 1
    condition_frame_length: int | None = None
    condition_frame_edit: float = 0.0

    def __post_init__(self) -> None:
        if not self.items or (self.conditioning and len(self.conditioning) != len(self.items)):
            raise ValueError(f"{len(self.items)} prompts with {len(self.conditioning)} sets of references.")
        if self.loop < 1 or not 0 <= self.condition_frame_edit < 1:
            raise UserError(
                f"loop={self.loop}, condition_frame_edit={self.condition_frame_edit}: loop is at least 1, the other in [0, 1)."
            )
        for item, start in zip(self.items, self.starts, strict=True):
            loops = [("a text", segment.loop) for segment in item.segments]
            loops += [("a condition", condition.loop) for condition in start.conditions]
            late = [name for name, loop in loops if loop >= self.loop]
            if late:
                raise UserError(
                    f"prompt {item.index}: {late[0]} of a loop that is not made: there are {self.loop}, counted from 0; raise "
                    "--loop, or take it out."
                )

    @property
    def starts(self) -> Sequence[Conditioning]:
        """The conditioning of each item."""
        return self.conditioning or [NO_CONDITIONING] * len(self.items)

    @property
    def indices(self) -> list[int]:
        """The index of each prompt in the complete list."""
        return [item.index for item in self.items]

    @property
    def seeds(self) -> list[int]:
        """The seed of each item."""
        return [int(item.overrides.get("seed", self.seed)) for item in self.items]

    def texts(self, loop: int) -> list[str]:
        """The prompts of a segment."""
        return [item.text_at(loop) for item in self.items]


def as_items(
    prompts: Sequence[str | PromptItem],
    indices: Sequence[int] | None = None,
    negative_prompts: Sequence[str | None] | str | None = None,
) -> list[PromptItem]:
    """Prompts from Python: strings get an index and, if given, a negative prompt each.

    Args:
        prompts: strings, or complete items.
        indices: of the strings; None: 0, 1, ...
        negative_prompts: one for all strings, or one for each.
    """
    if isinstance(prompts, str) or not prompts or (indices is not None and len(indices) != len(prompts)):
        raise ValueError(f"expected a list of prompts, one index for each; got {prompts!r}, {indices!r}.")
    negatives = (
        [negative_prompts] * len(prompts) if isinstance(negative_prompts, str | None) else list(negative_prompts)
    )
    if len(negatives) != len(prompts):
        raise ValueError(f"{len(negatives)} negative prompts for {len(prompts)} prompts.")
    items = []
    for i, (prompt, negative) in enumerate(zip(prompts, negatives, strict=True)):
        if isinstance(prompt, PromptItem):
            if indices is not None or negative is not None:
                raise ValueError("a PromptItem has its own index and negative prompt; give those of strings only.")
            items.append(prompt)
            continue
        index = i if indices is None else int(indices[i])
        items.append(PromptItem(index=index, segments=(Segment(0, prompt),), negative_prompt=negative))
    return items
