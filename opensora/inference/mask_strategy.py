"""Which frames of a video come from references, and how much they may change: strings, conditions, latents.

A string says what a video takes from its references, in groups joined by ";":

    six fields    "loop,reference,ref_start,target_start,length,edit_ratio", as Open-Sora 1.1 and 1.2; fields left out at the
                  end are 0,0,0,0,1,0. "0" keeps the first reference as the first frame, "0;0,1,0,-1,1" also puts the second
                  reference at the end.
    five fields   "reference,loop,ref_start,length,target_start", the order of the oldest documents. Nothing in such a
                  string tells the two orders apart, so that only `format="five-fields"` reads it.
    named fields  "ref=0, at=-1, length=1, edit=0.4", in any order, in either format.

Starts and lengths count LATENT frames, negative starts from the end. Latents that a VAE makes in pieces fit only where a
piece begins: starts move to the nearest such place, and a length that does not fit is cut; both are told. (Open-Sora 1.2
also kept starts from moving up to a last piece that is not whole.)
"""

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from opensora.registry import did_you_mean
from opensora.utils.errors import UserError

logger = logging.getLogger(__name__)

Format = Literal["six-fields", "five-fields"]


class Condition(NamedTuple):
    """Frames of a reference that a video keeps or edits; frames are latent frames."""

    loop: int = 0  # the part of a long video, counted from 0
    reference: int = 0  # which of the references
    ref_start: int = 0  # negative: from the reference's end
    target_start: int = 0  # negative: from the video's end
    length: int = 1
    edit_ratio: float = 0.0  # 0 keeps the frames, 1 makes them anew, between them: how far into the noise they go


class Placed(NamedTuple):
    """What a sampler starts from."""

    z: Tensor  # [B, C, T, h, w]: noise, with the latents of given frames in place
    # [B, T]: None = all frames are generated; bool, True = generated; fp32 where frames are edited, see `FrameMask`
    mask: Tensor | None


ORDERS: Mapping[str, tuple[str, ...]] = {
    "six-fields": Condition._fields,
    "five-fields": ("reference", "loop", "ref_start", "length", "target_start"),
}
SHORT_NAMES = {"ref": "reference", "from": "ref_start", "at": "target_start", "edit": "edit_ratio"}
NAMES = (*Condition._fields, *SHORT_NAMES)


def parse_mask_strategy(
    text: str | None, format: Format = "six-fields", where: str = "mask_strategy"
) -> list[Condition]:
    """The conditions that a string asks for; none for an empty one.

    Args:
        text: see above.
        format: the order of fields without names.
        where: what errors call the string.

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
        _condition(group, ORDERS[format], f"{where}={text!r}, group {number} ({group.strip()!r})")
        for number, group in enumerate(groups, 1)
    ]


def apply(
    conditions: Sequence[Sequence[Condition]],
    references: Sequence[Sequence[Tensor]],
    z: Tensor,
    mask: Tensor | None = None,
    *,
    loop: int = 0,
    align: int = 1,
) -> Placed:
    """Put what the conditions ask of one loop into noise.

    Args:
        conditions: for each of B samples; those of other loops are left alone.
        references: for each of B samples, the scaled latents [C, t, h, w] of its references.
        z: [B, C, T, h, w], noise; it is not changed.
        mask: [B, T] to begin with, where some frames are given already, which no condition makes anew; None = all are
            generated.
        loop: the part of a long video that is about to be made.
        align: latent frames of a piece that the VAE makes by itself (`vae.chunk_latent_frames`, or 1).

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
        return Placed(z, mask)
    noise, z = z, z.clone()
    values = z.new_ones(z.shape[0], z.shape[2], dtype=torch.float32) if mask is None else mask.float().clone()
    for b, sample in enumerate(chosen):
        for condition in sample:
            reference = _reference(condition, references[b], b)
            if reference.shape[0] != z.shape[1] or reference.shape[2:] != z.shape[3:]:
                raise ValueError(
                    f"latents of a reference have shape {tuple(reference.shape)}, the video's {tuple(z.shape[1:])}."
                )
            place = resolve(condition, reference.shape[1], z.shape[2], align)
            _tell(condition, place, reference.shape[1], z.shape[2], align)
            target = slice(place.target_start, place.target_start + place.length)
            if place.edit_ratio == 1:  # generated from what is in z: noise, also where another group has written
                if mask is not None and not (mask[b, target] == 1).all():
                    raise ValueError(f"{describe(condition)}: frames that the mask says are given have no noise in z.")
                z[b, :, target] = noise[b, :, target]
            else:
                z[b, :, target] = reference[:, place.ref_start : place.ref_start + place.length].to(z)
            values[b, target] = place.edit_ratio
    fractional = any(0 < c.edit_ratio < 1 for sample in chosen for c in sample)
    if fractional or (mask is not None and mask.is_floating_point()):
        return Placed(z, values)
    return Placed(z, values.bool())


def resolve(condition: Condition, reference_frames: int, target_frames: int, align: int = 1) -> Condition:
    """A condition with starts counted from 0 and at the beginning of a piece, and a length that fits.

    Args:
        condition: as it was asked for.
        reference_frames, target_frames: latent frames of the reference and of the video.
        align: latent frames of a piece.

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
        starts[name] = _nearest_piece(start % frames, frames, align)
    room = min(reference_frames - starts["ref_start"], target_frames - starts["target_start"])
    return condition._replace(**starts, length=min(condition.length, room))


def check_places(
    conditions: Sequence[Condition],
    reference_frames: Sequence[int],
    target_frames: int,
    align: int,
    where: str,
    *,
    shared: int = 0,
) -> None:
    """See that the conditions fit together, before anything is sampled.

    Args:
        conditions: of one prompt.
        reference_frames: latent frames of its references.
        target_frames: latent frames of the video.
        align: latent frames of a piece.
        where: what messages call the conditions.
        shared: latent frames that each loop but the first takes over from the one before, whatever conditions say.

    Raises:
        UserError: one is outside its reference or the video, or in what is taken over, or nothing is left to be made.
    """
    for loop in sorted({condition.loop for condition in conditions}):
        kept: dict[int, float] = {}
        for condition in conditions:
            if condition.loop != loop:
                continue
            place = resolve(condition, reference_frames[condition.reference], target_frames, align)
            _check_taken_over(place, shared if loop else 0, where)
            frames = range(place.target_start, place.target_start + place.length)
            if both := sorted(kept.keys() & set(frames)):
                logger.warning("%s: latent frame %d is set twice; %s wins.", where, both[0], describe(place))
            kept.update(dict.fromkeys(frames, place.edit_ratio))
        if len(kept) == target_frames and not any(kept.values()):
            raise UserError(
                f"{where}: all {target_frames} latent frames of the video are kept from references, so that nothing is left to be "
                "made; lower length, raise num_frames, or edit with an edit_ratio above 0."
            )


def _check_taken_over(place: Condition, shared: int, where: str) -> None:
    """Refuse a condition whose frames are all taken over from the loop before, and tell of those that some are."""
    lost = min(shared - place.target_start, place.length)
    if lost <= 0:
        return
    taken = f"loop {place.loop} begins with {shared} latent frames of the one before"
    if lost == place.length:
        raise UserError(
            f"{where}: {describe(place)} has no effect, for {taken}; use at={shared} or later, or lower "
            "condition_frame_length."
        )
    logger.warning("%s: the first %d latent frames of %s have no effect, for %s.", where, lost, describe(place), taken)


def describe(condition: Condition) -> str:
    """A condition in named fields, as `parse_mask_strategy` reads it."""
    short = {field: name for name, field in SHORT_NAMES.items()}
    return ",".join(f"{short.get(field, field)}={value:g}" for field, value in condition._asdict().items())


def check_references(conditions: Sequence[Condition], num_references: int, where: str = "mask_strategy") -> None:
    """See that every condition has its reference, and every reference a condition.

    Raises:
        UserError: one is missing, or a reference would have no effect.
    """
    used = {condition.reference for condition in conditions}
    if missing := sorted(used - set(range(num_references))):
        raise UserError(
            f"{where}: reference={missing[0]} does not exist; there {'is' if num_references == 1 else 'are'} "
            f"{num_references}, counted from 0."
        )
    if idle := sorted(set(range(num_references)) - used):
        raise UserError(
            f"{where}: reference {idle[0]} has no effect, since no group uses it; add one such as 'ref={idle[0]},at=0', or "
            "take the file out of reference_path."
        )


def _tell(asked: Condition, placed: Condition, reference_frames: int, target_frames: int, align: int) -> None:
    """Say what of a condition was changed."""
    if (placed.ref_start, placed.target_start) != (
        asked.ref_start % reference_frames,
        asked.target_start % target_frames,
    ):
        logger.info(
            "mask_strategy %s: moved to where pieces of %d latent frames begin: %s.",
            describe(asked),
            align,
            describe(placed),
        )
    if placed.length < asked.length:
        logger.info("mask_strategy %s: cut to the %d latent frames that fit.", describe(asked), placed.length)


def _condition(group: str, order: Sequence[str], where: str) -> Condition:
    """One group."""
    parts = [part.strip() for part in group.split(",")]
    if any("=" in part for part in parts):
        given = _named(parts, where)
    else:
        if len(parts) > len(order):
            raise UserError(f"{where}: {len(parts)} fields; there are at most {len(order)}: {','.join(order)}.")
        given = dict(zip(order, parts, strict=False))
    return Condition(**{field: _value(field, text, where) for field, text in given.items()})  # type: ignore[arg-type]


def _named(parts: Sequence[str], where: str) -> dict[str, str]:
    given: dict[str, str] = {}
    for part in parts:
        name, equals, text = (piece.strip() for piece in part.partition("="))
        if not equals:
            raise UserError(f"{where}: {part!r} has no name; name all fields of a group or none, such as ref=0,at=-1.")
        if name not in NAMES:
            raise UserError(
                f"{where}: {name!r} is no field.{did_you_mean(name, list(NAMES))} Fields: {', '.join(NAMES)}."
            )
        field = SHORT_NAMES.get(name, name)
        if field in given:
            raise UserError(f"{where}: {field} is set twice; keep one.")
        given[field] = text
    return given


def _value(field: str, text: str, where: str) -> int | float:
    """The number of one field."""
    if field == "edit_ratio":
        ratio = _float(text)
        if ratio is None or not 0 <= ratio <= 1:
            raise UserError(f"{where}: edit_ratio={text!r}; expected a number from 0 (keep) to 1 (make anew).")
        return ratio
    number = _integer(text)
    if number is None:
        raise UserError(f"{where}: {field}={text!r}; expected a whole number.")
    least = {"length": 1, "loop": 0, "reference": 0}.get(field)
    if least is not None and number < least:
        raise UserError(f"{where}: {field}={number}; must be at least {least}.")
    return number


def _integer(text: str) -> int | None:
    digits = text.removeprefix("-")
    # a length bound: int() of very long strings raises, and no video has 10^9 frames
    return int(text) if digits.isascii() and digits.isdecimal() and len(digits) < 10 else None


def _float(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _reference(condition: Condition, references: Sequence[Tensor], sample: int) -> Tensor:
    if condition.reference >= len(references):
        raise UserError(
            f"mask_strategy {describe(condition)}: reference={condition.reference} does not exist; sample {sample} has "
            f"{len(references)}, counted from 0."
        )
    return references[condition.reference]


def _nearest_piece(start: int, frames: int, align: int) -> int:
    """The nearest multiple of `align` in [0, frames); of two, the smaller."""
    down = start // align * align
    up = down + align
    return up if up < frames and up - start < start - down else down
