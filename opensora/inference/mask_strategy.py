"""Which frames of a video come from references, and how much they may change: strings, conditions, latents.

A string lists what a video takes from its references, in groups joined by ";":

    six fields    "loop,reference,ref_start,target_start,length,edit_ratio", as Open-Sora 1.1 and 1.2; fields left out at the
                  end are 0,0,0,0,1,0. "0" keeps the first reference as the first frame, "0;0,1,0,-1,1" also puts the second
                  reference at the end.
    five fields   "reference,loop,ref_start,length,target_start", the order of the oldest documents. Nothing in such a
                  string tells the two orders apart, so that only `format="five-fields"` reads it.
    named fields  "ref=0, at=-1, length=1, edit=0.4", in any order, in either format.

Starts and lengths count LATENT frames, negative starts from the end. Latents that a VAE makes in chunks fit only where a chunk
begins: starts move to the nearest such frame, and a length that does not fit is shortened; both are logged. (Open-Sora 1.2 also
kept starts from moving up to a last chunk that is not full.)
"""

import logging
import math
import re
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, get_args

from torch import Tensor

from opensora.registry import did_you_mean
from opensora.utils.errors import UserError

logger = logging.getLogger(__name__)

Format = Literal["six-fields", "five-fields"]


class FrameCondition(NamedTuple):
    """Frames of a reference that a video keeps or edits; frames are latent frames."""

    loop: int = 0  # the part of a long video, counted from 0
    reference: int = 0  # which of the references
    ref_start: int = 0  # negative: from the reference's end
    target_start: int = 0  # negative: from the video's end
    length: int = 1
    edit_ratio: float = 0.0  # 0 keeps the frames, 1 makes them anew, between them: how far into the noise they go


class ConditionedNoise(NamedTuple):
    """What a sampler starts from."""

    z: Tensor  # [B, C, T, h, w]: noise with the latents of the conditioning frames
    mask: (
        Tensor | None
    )  # [B, T]: None = all generated; bool, True = generated; fp32 where frames are edited (`FrameMask`)


ORDERS: Mapping[str, tuple[str, ...]] = {
    "six-fields": FrameCondition._fields,
    "five-fields": ("reference", "loop", "ref_start", "length", "target_start"),
}
SHORT_NAMES = {"ref": "reference", "from": "ref_start", "at": "target_start", "edit": "edit_ratio"}
NAMES = (*FrameCondition._fields, *SHORT_NAMES)
LEAST = {"length": 1, "loop": 0, "reference": 0}


def parse_mask_strategy(
    text: str | None, format: Format = "six-fields", where: str = "mask_strategy"
) -> list[FrameCondition]:
    """The conditions of a string, which errors call `where`; none for an empty one. `format`: the order of fields without names.

    Raises:
        UserError: it is malformed; the message names the group and the field.
    """
    if format not in ORDERS:
        raise UserError(f"mask_strategy_format={format!r} is not one of {', '.join(get_args(Format))}.")
    if text is None or not text.strip():
        return []
    groups = text.split(";")
    if not groups[-1].strip():
        groups.pop()  # a ";" at the end
    return [
        _parse_group(group, ORDERS[format], f"{where}={text!r}, group {number} ({group.strip()!r})")
        for number, group in enumerate(groups, 1)
    ]


def _parse_group(group: str, order: Sequence[str], where: str) -> FrameCondition:
    parts = [part.strip() for part in group.split(",")]
    texts: dict[str, str] = {}
    if "=" not in group:
        if len(parts) > len(order):
            raise UserError(f"{where}: {len(parts)} fields; there are at most {len(order)}: {','.join(order)}.")
        texts = dict(zip(order, parts, strict=False))
    for part in parts if "=" in group else ():
        name, equals, text = (side.strip() for side in part.partition("="))
        if not equals:
            raise UserError(f"{where}: {part!r} has no name; name all fields of a group or none, such as ref=0,at=-1.")
        if name not in NAMES:
            raise UserError(
                f"{where}: {name!r} is no field.{did_you_mean(name, list(NAMES))} Fields: {', '.join(NAMES)}."
            )
        field = SHORT_NAMES.get(name, name)
        if field in texts:
            raise UserError(f"{where}: {field} is set twice; keep one.")
        texts[field] = text
    return FrameCondition(**{field: _number(field, text, where) for field, text in texts.items()})  # type: ignore[arg-type]


def _number(field: str, text: str, where: str) -> int | float:
    if field == "edit_ratio":
        try:
            ratio = float(text)
        except ValueError:
            ratio = math.nan
        if not 0 <= ratio <= 1:  # nor NaN
            raise UserError(f"{where}: edit_ratio={text!r}; expected a number from 0 (keep) to 1 (make anew).")
        return ratio
    # int() of very long strings raises, and no video has 10^9 frames
    if not re.fullmatch(r"-?[0-9]{1,9}", text):
        raise UserError(f"{where}: {field}={text!r}; expected a whole number.")
    if int(text) < LEAST.get(field, -math.inf):
        raise UserError(f"{where}: {field}={text}; must be at least {LEAST[field]}.")
    return int(text)


def apply(
    conditions: Sequence[Sequence[FrameCondition]],
    references: Sequence[Sequence[Tensor]],
    z: Tensor,
    mask: Tensor | None = None,
    *,
    loop: int = 0,
    align: int = 1,
) -> ConditionedNoise:
    """Put the conditioning frames of one loop into noise.

    Args:
        conditions: for each of B samples; those of other loops are left alone.
        references: for each of B samples, the scaled latents [C, t, h, w] of its references.
        z: [B, C, T, h, w], noise; it is not changed.
        mask: [B, T] to begin with, where z has conditioning frames already, which no condition makes anew; None = all are
            generated.
        loop: the part of a long video that is about to be made.
        align: latent frames of a chunk that the VAE makes by itself (`vae.chunk_latent_frames`, or 1).

    Raises:
        UserError: a condition names a reference or a frame that is not there.
    """
    if not len(conditions) == len(references) == len(z):
        raise ValueError(
            f"{len(conditions)} samples' conditions, {len(references)} samples' references for {len(z)} samples."
        )
    if align < 1:
        raise UserError(f"align={align}: expected a number of latent frames, at least 1.")
    chosen = [[c for c in sample if c.loop == loop] for sample in conditions]
    if not any(chosen):
        return ConditionedNoise(z, mask)
    noise, z = z, z.clone()
    values = z.new_ones(z.shape[0], z.shape[2]).float() if mask is None else mask.float().clone()
    for b, sample in enumerate(chosen):
        check_references(sample, len(references[b]), f"mask_strategy of sample {b}", all_used=False)
        for condition in sample:
            reference = references[b][condition.reference]
            if reference.shape[0] != z.shape[1] or reference.shape[2:] != z.shape[3:]:
                raise ValueError(
                    f"latents of a reference have shape {tuple(reference.shape)}, the video's {tuple(z.shape[1:])}."
                )
            fixed = _resolve_and_log(condition, reference.shape[1], z.shape[2], align)
            target = slice(fixed.target_start, fixed.target_start + fixed.length)
            if fixed.edit_ratio == 1:  # generated from what is in z: noise, also where another group has written
                if mask is not None and not (mask[b, target] == 1).all():
                    raise ValueError(f"{describe(condition)}: frames that the mask keeps have no noise in z.")
                z[b, :, target] = noise[b, :, target]
            else:
                z[b, :, target] = reference[:, fixed.ref_start : fixed.ref_start + fixed.length].to(z)
            values[b, target] = fixed.edit_ratio
    fractional = any(0 < c.edit_ratio < 1 for sample in chosen for c in sample)
    if not fractional and (mask is None or not mask.is_floating_point()):
        values = values.bool()
    return ConditionedNoise(z, values)


def resolve(condition: FrameCondition, reference_frames: int, target_frames: int, align: int = 1) -> FrameCondition:
    """A condition with starts counted from 0 and moved to the nearest chunk of `align` latent frames, and a length that fits.

    `reference_frames` and `target_frames` are the latent frames of the reference and of the video.

    Raises:
        UserError: it begins outside the reference or the video.
    """
    starts = {}
    for name, frames, of in (
        ("ref_start", reference_frames, f"reference {condition.reference}"),
        ("target_start", target_frames, "the video"),
    ):
        start = getattr(condition, name)
        if not -frames <= start < frames:
            raise UserError(
                f"mask_strategy {describe(condition)}: {name}={start} is outside {of}, which has {frames} latent frames: use "
                f"{-frames} to {frames - 1}."
            )
        start %= frames
        down = start // align * align
        up = down + align
        starts[name] = up if up < frames and up - start < start - down else down
    room = min(reference_frames - starts["ref_start"], target_frames - starts["target_start"])
    return condition._replace(**starts, length=min(condition.length, room))


def _resolve_and_log(
    condition: FrameCondition, reference_frames: int, target_frames: int, align: int
) -> FrameCondition:
    fixed = resolve(condition, reference_frames, target_frames, align)
    asked = condition.ref_start % reference_frames, condition.target_start % target_frames
    if (fixed.ref_start, fixed.target_start) != asked:
        message = "mask_strategy %s: moved to where chunks of %d latent frames begin: %s."
        logger.info(message, describe(condition), align, describe(fixed))
    if fixed.length < condition.length:
        logger.info("mask_strategy %s: shortened to the %d latent frames that fit.", describe(condition), fixed.length)
    return fixed


def check_conditions(
    conditions: Sequence[FrameCondition],
    reference_frames: Sequence[int],
    target_frames: int,
    align: int,
    where: str,
    *,
    shared: int = 0,
) -> None:
    """Check that the conditions of one prompt fit together, before anything is sampled; see `resolve` for the arguments.

    Each loop but the first takes over `shared` latent frames from the one before, whatever its conditions.

    Raises:
        UserError: one is outside its reference or the video, or in what is taken over, or nothing is left to be made.
    """
    for loop in sorted({condition.loop for condition in conditions}):
        kept: dict[int, float] = {}
        for condition in (condition for condition in conditions if condition.loop == loop):
            fixed = resolve(condition, reference_frames[condition.reference], target_frames, align)
            text, taken = describe(fixed), f"loop {loop} begins with {shared} latent frames of the one before"
            lost = min(shared - fixed.target_start, fixed.length) if loop else 0
            if lost == fixed.length:
                raise UserError(
                    f"{where}: {text} has no effect, for {taken}; use at={shared} or later, or lower condition_frame_length."
                )
            if lost > 0:
                logger.warning("%s: the first %d latent frames of %s have no effect, for %s.", where, lost, text, taken)
            frames = range(fixed.target_start, fixed.target_start + fixed.length)
            if both := sorted(kept.keys() & set(frames)):
                logger.warning("%s: latent frame %d is set twice; %s wins.", where, both[0], text)
            kept.update(dict.fromkeys(frames, fixed.edit_ratio))
        if len(kept) == target_frames and not any(kept.values()):
            raise UserError(
                f"{where}: all {target_frames} latent frames of the video are kept from references, so that nothing is left to be "
                "made; lower length, raise num_frames, or edit with an edit_ratio above 0."
            )


def check_references(
    conditions: Sequence[FrameCondition], num_references: int, where: str = "mask_strategy", *, all_used: bool = True
) -> None:
    """Raise a `UserError` unless every condition has its reference, and (`all_used`) every reference a condition."""
    used = {condition.reference for condition in conditions}
    if missing := sorted(used - set(range(num_references))):
        raise UserError(
            f"{where}: reference={missing[0]} does not exist; there {'is' if num_references == 1 else 'are'} "
            f"{num_references}, counted from 0."
        )
    if all_used and (idle := sorted(set(range(num_references)) - used)):
        raise UserError(
            f"{where}: reference {idle[0]} has no effect, since no group uses it; add one such as 'ref={idle[0]},at=0', or "
            "take the file out of reference_path."
        )


def describe(condition: FrameCondition) -> str:
    """A condition in named fields, as `parse_mask_strategy` reads it."""
    short = {field: name for name, field in SHORT_NAMES.items()}
    return ",".join(f"{short.get(field, field)}={value:g}" for field, value in condition._asdict().items())
