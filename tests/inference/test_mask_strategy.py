"""Strings of conditions, and what they do to noise and mask."""

import logging
import re

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from opensora.inference.mask_strategy import (
    FrameCondition,
    apply,
    check_conditions,
    check_references,
    describe,
    parse_mask_strategy,
    resolve,
)
from opensora.schedulers.rf.rectified_flow import RectifiedFlow
from opensora.utils.errors import UserError
from opensora.utils.seed import generators

VALID = [
    ("", []),
    (None, []),
    ("   ", []),
    # the documents of Open-Sora 1.1 and 1.2
    ("0", [(0, 0, 0, 0, 1, 0.0)]),
    ("0;0,1,0,-1,1", [(0, 0, 0, 0, 1, 0.0), (0, 1, 0, -1, 1, 0.0)]),
    ("0,0,0,-8,8", [(0, 0, 0, -8, 8, 0.0)]),
    ("0,0,0,0,8,0.3", [(0, 0, 0, 0, 8, 0.3)]),
    ("0,0,0,0,32,0.4", [(0, 0, 0, 0, 32, 0.4)]),
    ("1,0,0,0,16", [(1, 0, 0, 0, 16, 0.0)]),
    # each field
    ("3", [(3, 0, 0, 0, 1, 0.0)]),
    ("0,2", [(0, 2, 0, 0, 1, 0.0)]),
    ("0,0,-5", [(0, 0, -5, 0, 1, 0.0)]),
    ("0,0,7", [(0, 0, 7, 0, 1, 0.0)]),
    ("0,0,0,-1", [(0, 0, 0, -1, 1, 0.0)]),
    ("0,0,0,0,1,1", [(0, 0, 0, 0, 1, 1.0)]),
    ("0,0,0,0,1,1e-3", [(0, 0, 0, 0, 1, 0.001)]),
    (" 0 , 1 , 0 , -1 , 1 ", [(0, 1, 0, -1, 1, 0.0)]),
    ("0;1;2", [(0, 0, 0, 0, 1, 0.0), (1, 0, 0, 0, 1, 0.0), (2, 0, 0, 0, 1, 0.0)]),
    ("0;", [(0, 0, 0, 0, 1, 0.0)]),
    # names
    ("ref=0,at=-1,length=1,edit=0.4", [(0, 0, 0, -1, 1, 0.4)]),
    ("edit=0.4, length=3", [(0, 0, 0, 0, 3, 0.4)]),
    ("loop=1,ref=2,from=3,at=4,length=5,edit=0.6", [(1, 2, 3, 4, 5, 0.6)]),
    ("loop=1,reference=2,ref_start=3,target_start=4,length=5,edit_ratio=0.6", [(1, 2, 3, 4, 5, 0.6)]),
    ("ref=0;0,1,0,-1", [(0, 0, 0, 0, 1, 0.0), (0, 1, 0, -1, 1, 0.0)]),
    (" at = -1 ", [(0, 0, 0, -1, 1, 0.0)]),
]
INVALID = [
    ("a", "group 1 .*: loop='a'; expected a whole number"),
    ("0,b", "reference='b'; expected a whole number"),
    ("0,0,1.5", "ref_start='1.5'; expected a whole number"),
    ("0,0,0,--1", "target_start='--1'; expected a whole number"),
    ("0,0,0,0,x", "length='x'; expected a whole number"),
    ("0,0,0,0,1,y", "edit_ratio='y'; expected a number from 0"),
    ("-1", "loop=-1; must be at least 0"),
    ("0,-1", "reference=-1; must be at least 0"),
    ("0,0,0,0,0", "length=0; must be at least 1"),
    ("0,0,0,0,-3", "length=-3; must be at least 1"),
    ("0,0,0,0,1,1.5", "edit_ratio='1.5'; expected a number from 0"),
    ("0,0,0,0,1,-0.1", "edit_ratio='-0.1'"),
    ("0,0,0,0,1,nan", "edit_ratio='nan'"),
    ("0,0,0,0,1,inf", "edit_ratio='inf'"),
    ("0,0,0,0,1,0,7", "7 fields; there are at most 6: loop,reference,ref_start,target_start,length,edit_ratio"),
    ("0;;1", "group 2 .*: loop=''; expected a whole number"),
    (";0", "group 1 .*: loop=''"),
    ("0,", "reference=''; expected a whole number"),
    (",", "loop=''"),
    ("0,,0", "reference=''"),
    ("0 1", "loop='0 1'"),
    ("٣", "loop='٣'"),
    ("1" * 5000, "loop='1"),
    ("ref=0,1", "'1' has no name"),
    ("ref=", "reference=''; expected"),
    ("reff=0", "'reff' is no field.* Did you mean 'ref'"),
    ("=1", "'' is no field"),
    ("ref=0,reference=1", "reference is set twice"),
    ("at=1,at=1", "target_start is set twice"),
    ("length=0", "length=0; must be at least 1"),
    ("edit=2", "edit_ratio='2'"),
    ("0;ref=x", "group 2 .*: reference='x'"),
]
FIVE = [
    # reference, loop, start in the reference, length, start in the video
    ("0", [(0, 0, 0, 0, 1, 0.0)]),
    ("1", [(0, 1, 0, 0, 1, 0.0)]),
    ("1,0,0,1,-1", [(0, 1, 0, -1, 1, 0.0)]),
    ("2,3,4,5,6", [(3, 2, 4, 6, 5, 0.0)]),
    ("ref=1,loop=2,edit=0.5", [(2, 1, 0, 0, 1, 0.5)]),
    ("0,0,-8,8,0", [(0, 0, -8, 0, 8, 0.0)]),
]


@pytest.mark.parametrize(("text", "expected"), VALID)
def test_strings(text, expected):
    assert parse_mask_strategy(text) == [FrameCondition(*fields) for fields in expected]


@pytest.mark.parametrize(("text", "message"), INVALID)
def test_what_is_wrong_is_reported_with_its_group_and_field(text, message):
    with pytest.raises(UserError, match=message) as caught:
        parse_mask_strategy(text, where="prompt 3: mask_strategy")
    assert str(caught.value).startswith("prompt 3: mask_strategy=")


@pytest.mark.parametrize(("text", "expected"), FIVE)
def test_the_order_of_the_oldest_documents(text, expected):
    assert parse_mask_strategy(text, "five-fields") == [FrameCondition(*fields) for fields in expected]


def test_formats():
    with pytest.raises(UserError, match="6 fields; there are at most 5: reference,loop,ref_start,length,target_start"):
        parse_mask_strategy("0,0,0,1,0,0.5", "five-fields")
    with pytest.raises(UserError, match="mask_strategy_format='old' is not one of six-fields, five-fields"):
        parse_mask_strategy("0", "old")


@pytest.mark.slow
@given(st.text(st.characters(codec="utf-8")) | st.text("0123456789,;=-. abefglmnoprt_", max_size=40))
@example("9" * 10_000)
@example("0,0,0,0,1,1e400")
def test_any_string_is_read_or_refused_by_name(text):
    try:
        conditions = parse_mask_strategy(text)
    except UserError as error:
        assert re.search(r"mask_strategy=.*group \d+ ", str(error), re.DOTALL)  # noqa: PT017  (some inputs are right)
    else:
        again = parse_mask_strategy(";".join(describe(c) for c in conditions))
        assert [c[:5] for c in again] == [c[:5] for c in conditions]
        assert [c.edit_ratio for c in again] == pytest.approx([c.edit_ratio for c in conditions], rel=1e-5)


# ------------------------------------------------------------------------------------------------ starts and lengths


def resolved(text: str, reference: int, target: int, align: int = 1) -> tuple[int, int, int]:
    (condition,) = parse_mask_strategy(text)
    found = resolve(condition, reference, target, align)
    return found.ref_start, found.target_start, found.length


@pytest.mark.parametrize(
    ("text", "reference", "target", "align", "expected"),
    [
        ("0", 1, 16, 1, (0, 0, 1)),
        ("0,0,0,-1", 1, 16, 1, (0, 15, 1)),
        ("0,0,-8,0,8", 20, 16, 1, (12, 0, 8)),
        ("0,0,0,-8,8", 20, 16, 1, (0, 8, 8)),
        ("0,0,0,0,99", 20, 16, 1, (0, 0, 16)),  # what does not fit into the video
        ("0,0,-4,0,8", 20, 16, 1, (16, 0, 4)),  # or goes beyond the reference
        ("0,0,0,-4,8", 20, 16, 1, (0, 12, 4)),
        # chunks of 5 latent frames, as the VAE of Open-Sora 1.2 makes: the nearest beginning
        ("0,0,0,-1", 1, 15, 5, (0, 10, 1)),
        ("0,0,0,2", 1, 15, 5, (0, 0, 1)),
        ("0,0,0,3", 1, 15, 5, (0, 5, 1)),
        ("0,0,0,12", 1, 15, 5, (0, 10, 1)),
        ("0,0,0,13", 1, 15, 5, (0, 10, 1)),  # 15 is not in the video
        ("0,0,0,14", 1, 16, 5, (0, 15, 1)),  # a last chunk that is not whole
        ("0,0,-5,0,5", 15, 15, 5, (10, 0, 5)),
        ("0,0,-4,0,5", 15, 15, 5, (10, 0, 5)),
        ("0,0,0,0,7", 15, 15, 5, (0, 0, 7)),
        ("0,0,0,3", 1, 8, 6, (0, 0, 1)),  # half-way: down
    ],
)
def test_starts_and_lengths_in_the_video(text, reference, target, align, expected):
    assert resolved(text, reference, target, align) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0,0,5", "ref_start=5 is outside reference 0, which has 5 latent frames: use -5 to 4"),
        ("0,1,-6", "ref_start=-6 is outside reference 1"),
        ("0,0,0,16", "target_start=16 is outside the video, which has 16 latent frames: use -16 to 15"),
        ("0,0,0,-17", "target_start=-17 is outside the video"),
    ],
)
def test_starts_that_are_nowhere(text, message):
    with pytest.raises(UserError, match=message):
        resolved(text, 5, 16)


@pytest.mark.slow
@given(
    st.builds(
        FrameCondition,
        ref_start=st.integers(-40, 40),
        target_start=st.integers(-40, 40),
        length=st.integers(1, 60),
        edit_ratio=st.floats(0, 1),
    ),
    st.integers(1, 30),
    st.integers(1, 30),
    st.integers(1, 9),
)
def test_any_place_is_inside_or_refused(condition, reference, target, align):
    try:
        found = resolve(condition, reference, target, align)
    except UserError:
        assert not (-reference <= condition.ref_start < reference and -target <= condition.target_start < target)
        return
    assert found.ref_start % align == found.target_start % align == 0
    assert 1 <= found.length <= condition.length
    assert found.ref_start + found.length <= reference
    assert found.target_start + found.length <= target
    assert abs(found.target_start - condition.target_start % target) < align
    # once it is moved, it stays
    assert resolve(found, reference, target, align) == found


def test_references_and_conditions_need_each_other():
    conditions = parse_mask_strategy("0;0,2")
    with pytest.raises(UserError, match="x: reference=2 does not exist; there are 2, counted from 0"):
        check_references(conditions, 2, "x")
    with pytest.raises(UserError, match=r"x: reference 1 has no effect.*ref=1,at=0"):
        check_references(conditions, 3, "x")
    check_references(parse_mask_strategy("0;0,1,0,-1"), 2)
    check_references([], 0)


def test_a_video_that_is_all_given_is_refused_and_overlaps_are_reported(caplog):
    with pytest.raises(UserError, match="p: all 4 latent frames of the video are kept"):
        check_conditions(parse_mask_strategy("0,0,0,0,2;0,0,0,2,2"), [9], 4, 1, "p")
    check_conditions(parse_mask_strategy("0,0,0,0,2;0,0,0,2,2,0.5"), [9], 4, 1, "p")  # the end is edited
    check_conditions(parse_mask_strategy("0,0,0,0,3;1,0,0,0,3"), [9], 4, 1, "p")
    assert not caplog.records
    check_conditions(parse_mask_strategy("0;0,1,0,-1"), [1, 1], 5, 5, "p")  # one chunk: both begin at its beginning
    assert "latent frame 0 is set twice; loop=0,ref=1,from=0,at=0" in caplog.text


# ------------------------------------------------------------------------------------------------ noise and mask


def latents(*lengths: int, base: float = 100.0) -> list[torch.Tensor]:
    """References [2, t, 1, 1] whose frames are 100, 101, ...; 200, 201, ..."""
    return [(base * (i + 1) + torch.arange(float(n))).expand(2, n).reshape(2, n, 1, 1) for i, n in enumerate(lengths)]


def test_frames_are_put_where_the_strings_say():
    z = torch.zeros(2, 2, 6, 1, 1)
    conditions = [parse_mask_strategy("0;0,1,-2,-2,2,0.4"), []]
    placed = apply(conditions, [latents(1, 5), []], z)
    assert placed.z[0, 0, :, 0, 0].tolist() == [100, 0, 0, 0, 203, 204]
    assert torch.equal(placed.z[0, 0], placed.z[0, 1])
    assert placed.mask[0].tolist() == pytest.approx([0, 1, 1, 1, 0.4, 0.4])
    assert not placed.z[1].any()
    assert placed.mask[1].tolist() == [1] * 6
    assert not z.any()  # the noise that was given is not changed


def test_other_loops_are_left_alone():
    z = torch.zeros(1, 2, 4, 1, 1)
    conditions = [parse_mask_strategy("1;0,0,0,-1,1")]
    assert apply(conditions, [latents(1)], z, loop=2) == (z, None)
    assert apply(conditions, [latents(1)], z, loop=0).mask.tolist() == [[True, True, True, False]]
    assert apply(conditions, [latents(1)], z, loop=1).mask.tolist() == [[False, True, True, True]]
    assert apply([[]], [[]], z).mask is None


def test_a_mask_is_boolean_until_something_is_edited():
    z = torch.zeros(1, 2, 4, 1, 1)
    keep = apply([parse_mask_strategy("0")], [latents(1)], z)
    assert keep.mask.dtype == torch.bool
    more = apply([parse_mask_strategy("0,0,0,-1,1")], [latents(1)], keep.z, keep.mask)
    assert more.mask.tolist() == [[False, True, True, False]]
    assert more.z[0, 0, :, 0, 0].tolist() == [100, 0, 0, 100]
    edit = apply([parse_mask_strategy("0,0,0,1,1,0.5")], [latents(1)], more.z, more.mask)
    assert edit.mask.dtype == torch.float32
    assert edit.mask.tolist() == [[0, 0.5, 1, 0]]
    assert apply([parse_mask_strategy("0")], [latents(1)], edit.z, edit.mask).mask.dtype == torch.float32
    anew = apply([parse_mask_strategy("0,0,0,0,1,1")], [latents(1)], z)
    assert anew.mask.tolist() == [[True] * 4]


def test_chunks_are_kept_together_and_changes_are_reported(caplog):
    caplog.set_level(logging.INFO)
    placed = apply([parse_mask_strategy("0,0,-4,0,9")], [latents(15)], torch.zeros(1, 2, 15, 1, 1), align=5)
    assert placed.z[0, 0, :5, 0, 0].tolist() == [110, 111, 112, 113, 114]
    assert "moved to where chunks of 5 latent frames begin: loop=0,ref=0,from=10,at=0" in caplog.text
    assert "shortened to the 5 latent frames that fit" in caplog.text
    caplog.clear()
    apply([parse_mask_strategy("0,0,-5,0,5")], [latents(15)], torch.zeros(1, 2, 15, 1, 1), align=5)
    assert not caplog.records


def test_a_sample_does_not_depend_on_its_batch():
    z = torch.randn(2, 2, 6, 1, 1)
    conditions = [parse_mask_strategy("0,0,0,0,2,0.5"), parse_mask_strategy("0")]
    references = [latents(3), latents(1, base=7.0)]
    both = apply(conditions, references, z)
    for b in range(2):
        alone = apply(conditions[b : b + 1], references[b : b + 1], z[b : b + 1])
        assert torch.equal(both.z[b], alone.z[0])
        assert torch.equal(both.mask[b].float(), alone.mask[0].float())


def test_what_does_not_fit_is_refused():
    z, one = torch.zeros(1, 2, 4, 1, 1), parse_mask_strategy("0")
    with pytest.raises(UserError, match="sample 0: reference=0 does not exist; there are 0"):
        apply([one], [[]], z)
    with pytest.raises(UserError, match="align=0"):
        apply([one], [latents(1)], z, align=0)
    with pytest.raises(ValueError, match="latents of a reference have shape"):
        apply([one], [[torch.zeros(2, 1, 3, 3)]], z)
    with pytest.raises(ValueError, match="2 samples' conditions"):
        apply([one, one], [latents(1)], z)


def test_a_sampler_keeps_what_is_kept_and_edits_what_is_edited():
    """Against the closed form: of a model that predicts velocity 0, x stays what it was put to."""
    z = torch.randn(1, 2, 4, 1, 1)
    placed = apply([parse_mask_strategy("0;0,0,1,-1,1,0.5")], [latents(2)], z)
    sampled = RectifiedFlow(num_sampling_steps=4).sample(
        lambda x, t, **cond: torch.zeros_like(x),
        placed.z,
        {},
        null=None,
        mask=placed.mask,
        generators=generators(0, ids=[0]),
    )
    assert torch.equal(sampled[:, :, 0], placed.z[:, :, 0])
    assert torch.equal(sampled[:, :, 1:3], z[:, :, 1:3])
    edited = sampled[0, :, 3].flatten()
    assert ((edited - 0.5 * 101).abs() < 3).all()  # half-way into the noise: (1 - 0.5) * 101 + 0.5 * noise


def test_frames_that_are_made_anew_are_noise():
    """A sampler generates from what is in z: a reference there would come out as garbage."""
    z = torch.randn(1, 2, 6, 1, 1)
    anew = apply([parse_mask_strategy("0,0,0,0,4,1")], [latents(4)], z)
    assert torch.equal(anew.z, z)
    assert anew.mask.tolist() == [[True] * 6]
    over = apply([parse_mask_strategy("0,0,0,0,3;0,0,0,1,2,1;0,0,0,4,1,0.5")], [latents(3)], z)
    assert over.mask.tolist() == [[0, 1, 1, 1, 0.5, 1]]
    assert over.z[0, 0, :, 0, 0].tolist() == [100, *z[0, 0, 1:4, 0, 0].tolist(), 100, z[0, 0, 5, 0, 0]]
    with pytest.raises(ValueError, match="frames that the mask keeps have no noise"):
        apply([parse_mask_strategy("0,0,0,0,1,1")], [latents(1)], over.z, over.mask)


def test_what_a_loop_takes_over_is_no_frame_for_a_reference(caplog):
    with pytest.raises(UserError, match=r"p: loop=1,ref=0,from=0,at=0,length=1,edit=0 has no effect.*begins with 4"):
        check_conditions(parse_mask_strategy("1,0,0,0,1"), [1], 16, 1, "p", shared=4)
    with pytest.raises(UserError, match="at=5 or later"):
        check_conditions(parse_mask_strategy("1,0,0,2,1"), [1], 15, 5, "p", shared=5)  # moved to where a chunk begins
    with pytest.raises(UserError, match="loop=2"):
        check_conditions(parse_mask_strategy("0;2,0,0,-16,3"), [3], 16, 1, "p", shared=4)
    check_conditions(parse_mask_strategy("0;1,0,0,4,1;1,0,0,-1,1"), [1], 16, 1, "p", shared=4)
    check_conditions(parse_mask_strategy("1,0,0,0,1"), [1], 16, 1, "p")
    assert not caplog.records
    check_conditions(parse_mask_strategy("1,0,0,2,5"), [5], 16, 1, "p", shared=4)
    assert "p: the first 2 latent frames of loop=1,ref=0,from=0,at=2,length=5,edit=0 have no effect" in caplog.text
