"""References, long videos, negative prompts and classes through the whole pipeline, with real parts at toy size."""

import pytest
import torch

from opensora.inference.mask_strategy import FrameCondition
from opensora.inference.pipeline import Request, VideoPipeline
from opensora.inference.prompts import PromptItem, Segment, as_items
from opensora.inference.references import Conditioning, encode_references, first_and_last
from opensora.models.stdit.stdit3 import STDiT3
from opensora.models.text_encoder.classes import ClassEncoder
from opensora.registry import MODELS, SCHEDULERS
from opensora.utils.errors import UserError
from tests.models.vaes import build

A, B = "a white dog on the floor", "a city street at night, seen from above"
SIZE = {"num_frames": 4, "image_size": (32, 48), "fps": 8}


@pytest.fixture
def pipeline(cfg):
    return VideoPipeline.from_config(cfg)


def images(frames: int, seed: int) -> torch.Tensor:
    """[3, frames, 32, 48] in [-1, 1]."""
    return torch.rand(3, frames, 32, 48, generator=torch.Generator().manual_seed(seed)) * 2 - 1


FIRST = Conditioning([images(1, 0)], [FrameCondition()])
FIRST_AND_LAST = Conditioning(
    [images(1, 1), images(1, 2)], [FrameCondition(), FrameCondition(reference=1, target_start=-1)]
)
EXTENSION = Conditioning([images(3, 3)], [FrameCondition(ref_start=-2, length=2)])
EDIT = Conditioning([images(4, 4)], [FrameCondition(length=4, edit_ratio=0.6)])
NOTHING = Conditioning([], [])


def sample(pipeline, prompts, conditioning=(), **options):
    options = {"seed": 1, **SIZE, **options}
    indices = options.pop("prompt_indices", None)
    negative = options.pop("negative_prompts", None)
    return pipeline.sample(Request(items=as_items(prompts, indices, negative), conditioning=conditioning, **options))


@pytest.mark.parametrize(
    ("given", "kept"),
    [(FIRST, [(0, 0, 0)]), (FIRST_AND_LAST, [(0, 0, 0), (1, 0, 3)]), (EXTENSION, [(0, 1, 0), (0, 2, 1)])],
)
def test_kept_frames_are_the_vaes_latents_bit_for_bit(pipeline, given, kept):
    latents = sample(pipeline, [A], [given]).latents[0]
    expected = encode_references(pipeline.vae, given.references, 1, 0)
    for reference, frame, index in kept:
        assert torch.equal(latents[0, :, index], expected[reference][:, frame])
    free = [t for t in range(4) if t not in {index for *_, index in kept}]
    plain = sample(pipeline, [A]).latents[0]
    assert not torch.equal(latents[:, :, free], plain[:, :, free])  # the kept frames are seen by the others


def test_an_edit_stays_near_its_video(pipeline):
    reference = encode_references(pipeline.vae, EDIT.references, 1, 0)[0]
    edited = sample(pipeline, [A], [EDIT]).latents[0][0]
    anew = sample(pipeline, [A]).latents[0][0]
    assert not torch.equal(edited, reference)
    assert (edited - reference).abs().mean() < (anew - reference).abs().mean()


def test_an_edit_of_ratio_1_is_the_plain_sample(pipeline):
    anew = Conditioning(EDIT.references, [FrameCondition(length=4, edit_ratio=1.0)])
    over = Conditioning(EDIT.references, [FrameCondition(length=2), FrameCondition(length=4, edit_ratio=1.0)])
    plain = sample(pipeline, [A]).latents[0]
    for given in (anew, over):
        torch.testing.assert_close(sample(pipeline, [A], [given]).latents[0], plain)


def test_a_last_image_ends_the_last_segment(pipeline):
    given = first_and_last(images(1, 1), images(1, 2), loop=3)
    made = sample(pipeline, [A], [given], loop=3, condition_frame_length=1)
    first, last = encode_references(pipeline.vae, given.references, 1, 0)
    assert torch.equal(made.latents[0][0, :, 0], first[:, 0])
    ends = [torch.equal(z[0, :, -1], last[:, 0]) for z in made.latents]
    assert ends == [False, False, True]


def test_samples_of_one_batch_with_different_references_are_as_alone(pipeline):
    given = [NOTHING, FIRST, EDIT, FIRST_AND_LAST]
    together = sample(pipeline, [A, B, A, B], given, negative_prompts=[None, "blurry", None, ""])
    for b, (prompt, start, negative) in enumerate(zip([A, B, A, B], given, [None, "blurry", None, ""], strict=True)):
        alone = sample(pipeline, [prompt], [start], prompt_indices=[b], negative_prompts=[negative])
        torch.testing.assert_close(together.video[b : b + 1], alone.video, atol=1e-4, rtol=0)


def test_three_segments_have_the_length_of_the_formula_and_follow_each_other(pipeline):
    made = sample(pipeline, [A, B], loop=3, condition_frame_length=1)
    assert made.video.shape == (2, 3, 3 * (4 - 1) + 1, 32, 48)
    for before, after in zip(made.latents[:-1], made.latents[1:], strict=True):
        assert torch.equal(before[:, :, -1], after[:, :, 0])
        assert not torch.equal(before[:, :, 1:], after[:, :, 1:])
    torch.testing.assert_close(made.video[:, :, :4], sample(pipeline, [A, B]).video, atol=1e-4, rtol=0)


def test_16_frames_three_times(pipeline):
    made = sample(pipeline, [A], loop=3, condition_frame_length=4, num_frames=16, image_size=(16, 16))
    assert made.video.shape[2] == 3 * (16 - 4) + 4


def test_shared_frames_can_be_edited(pipeline):
    made = sample(pipeline, [A], loop=2, condition_frame_length=2, condition_frame_edit=0.5)
    assert made.video.shape[2] == 2 * (4 - 2) + 2
    assert not torch.equal(made.latents[0][:, :, -2:], made.latents[1][:, :, :2])


def test_conditions_do_not_leak_from_sample_to_sample_nor_into_the_references(pipeline):
    given = Conditioning([images(1, 0)], [FrameCondition()])
    items = as_items([A])
    first, second = (
        pipeline.sample(Request(items=items, conditioning=[given], loop=2, sample_index=k, seed=1, **SIZE))
        for k in (0, 1)
    )
    assert (len(given.references), len(given.conditions)) == (1, 1)
    alone = sample(pipeline, [A], [given], loop=2, sample_index=1)
    assert torch.equal(second.video, alone.video)
    assert not torch.equal(first.video, second.video)
    assert torch.equal(first.latents[0][:, :, 0], second.latents[0][:, :, 0])  # the reference
    assert not torch.equal(first.latents[1], second.latents[1])


def test_each_segment_has_its_own_text_and_conditions(pipeline):
    item = PromptItem(index=0, segments=(Segment(0, A), Segment(1, B)))
    one, two = (pipeline.sample(Request(items=[i], loop=2, seed=1, **SIZE)).latents for i in (*as_items([A]), item))
    assert torch.equal(one[0], two[0])
    assert not torch.equal(one[1], two[1])
    late = Conditioning([images(1, 5)], [FrameCondition(loop=1, target_start=-1)])
    made = sample(pipeline, [A], [late], loop=2).latents
    assert torch.equal(made[0], one[0])
    assert torch.equal(made[1][0, :, -1], encode_references(pipeline.vae, late.references, 1, 0)[0][:, 0])
    with pytest.raises(UserError, match="a condition of a loop that is not made"):
        sample(pipeline, [A], [late])
    with pytest.raises(UserError, match="a text of a loop"):
        pipeline.sample(Request(items=[item], seed=1, **SIZE))


def test_segments_of_a_causal_vae_are_encoded_anew(pipeline):
    """Wan's VAE takes 4k + 1 frames, in one chunk."""
    wan = build("KLWan", posterior="mode")
    causal = VideoPipeline(pipeline.model, wan, pipeline.text_encoder, pipeline.scheduler)
    options = {"num_frames": 13, "image_size": (16, 24), "fps": 8, "seed": 1, "loop": 3, "condition_frame_length": 2}
    made = causal.sample(Request(items=as_items([A, B]), **options))
    assert made.video.shape[2] == 3 * (13 - 5) + 5
    for before, after in zip(range(2), range(1, 3), strict=True):
        end = made.video[:, :, 8 * after : 8 * after + 5]  # the last five frames of the segment before
        assert end.shape[2] == 5
        torch.testing.assert_close(made.latents[after][:, :, :2], wan.encode(end), atol=1e-4, rtol=1e-4)
        assert not torch.equal(made.latents[before][:, :, -2:], made.latents[after][:, :, :2])
    alone = causal.sample(Request(items=as_items([B], [1]), **options))
    torch.testing.assert_close(made.video[1:], alone.video, atol=1e-3, rtol=0)
    undecoded = causal.sample(Request(items=as_items([A, B]), **options), decode=False)
    assert undecoded.video is None
    assert all(torch.equal(a, b) for a, b in zip(made.latents, undecoded.latents, strict=True))


def test_negative_prompts_steer(pipeline):
    own, empty, blurry = (sample(pipeline, [A], negative_prompts=text).video for text in (None, "", "blurry"))
    assert not torch.equal(own, empty)
    assert not torch.equal(empty, blurry)
    with pytest.raises(UserError, match="negative_prompt has no effect with cfg_scale=1"):
        sample(pipeline, [A], negative_prompts="blurry", guidance_scale=1.0)


def test_a_prompts_own_seed_wins(pipeline):
    item = PromptItem(index=0, segments=(Segment(0, A),), overrides={"seed": 7})
    own = pipeline.sample(Request(items=[item], seed=1, **SIZE)).video
    assert torch.equal(own, sample(pipeline, [A], seed=7).video)


def test_classes_have_no_negative_prompt(pipeline):
    model = MODELS.build({"type": "DiT-S/2", "condition": "label_10", "depth": 1, "hidden_size": 32, "num_heads": 2})
    scheduler = SCHEDULERS.build({"type": "iddpm", "num_sampling_steps": 2, "cfg_scale": 2.0})
    classes = VideoPipeline(model, pipeline.vae, ClassEncoder(10), scheduler)
    assert classes(["3", "7"], seed=1, **SIZE).shape == (2, 3, 4, 32, 48)
    with pytest.raises(UserError, match="knows classes"):
        classes(["3"], negative_prompts="7", seed=1, **SIZE)


def test_models_that_look_at_numbers_get_them(pipeline):
    """STDiT3 modulates conditioning frames as at timestep 0 and is conditioned on the frame rate."""
    torch.manual_seed(0)
    model = STDiT3(caption_channels=384, model_max_length=16, hidden_size=32, depth=1, num_heads=2)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(0.1 * torch.randn(weight.shape))
    flow = SCHEDULERS.build({"type": "rflow", "num_sampling_steps": 3, "cfg_scale": 2.0})
    stdit3 = VideoPipeline(model.requires_grad_(False), pipeline.vae, pipeline.text_encoder, flow)
    slow, fast = (stdit3([A], seed=1, conditioning=[FIRST], **{**SIZE, "fps": fps}) for fps in (8, 24))
    assert not torch.equal(slow, fast)
    latents = sample(stdit3, [A], [FIRST]).latents[0]
    assert torch.equal(latents[0, :, 0], encode_references(pipeline.vae, FIRST.references, 1, 0)[0][:, 0])
