"""Images as conditions of Wan, in training and in sampling, against whole pipelines of diffusers with random parts of tiny size."""

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanImageToVideoPipeline, WanTransformer3DModel
from PIL import Image

from opensora.inference.mask_strategy import FrameCondition
from opensora.inference.pipeline import Request, VideoPipeline
from opensora.inference.prompts import as_items
from opensora.inference.references import Conditioning, first_and_last
from opensora.models.image_encoder import check_image_encoder
from opensora.models.wan.condition import condition_latents, image_features
from opensora.registry import MODELS, SCHEDULERS
from opensora.schedulers.mask_ratios import MaskRatios
from opensora.training.batch_encoder import BatchEncoder, condition_settings, mask_ratios_of, pixel_frames
from opensora.utils.errors import UserError
from opensora.utils.seed import generator, generators, randn_like
from tests.models.wan.toys import VARIANTS as WAN
from tests.models.wan.toys import build

SIZE = {"num_frames": 9, "image_size": (32, 48)}
TWO_SCALES = {"schedule": "stages", "boundary": 0.9, "low_scale": 3.5}
VARIANTS = {  # arguments of our model, of diffusers' pipeline, and of our sampler
    "i2v": ({}, {}, {}),
    "flf2v": ({}, {}, {}),
    "i2v-a14b": ({"boundary": 0.9}, {"boundary_ratio": 0.9}, {"guidance": TWO_SCALES}),
    "ti2v": ({"in_channels": 4}, {"expand_timesteps": True}, {}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A pipeline's folder without a transformer, as `save_pretrained` writes it."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import (
        CLIPImageProcessor,
        CLIPVisionConfig,
        CLIPVisionModel,
        PreTrainedTokenizerFast,
        UMT5Config,
        UMT5EncoderModel,
    )

    torch.manual_seed(0)
    words = Tokenizer(models.WordLevel({w: i for i, w in enumerate(["<pad>", "</s>", "<unk>", "a", "cat"])}, "<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    vision = CLIPVisionConfig(
        hidden_size=20, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, patch_size=14
    )
    pipe = WanImageToVideoPipeline(
        tokenizer=PreTrainedTokenizerFast(
            tokenizer_object=words, pad_token="<pad>", eos_token="</s>", unk_token="<unk>",
            model_input_names=["input_ids", "attention_mask"],
        ),
        text_encoder=UMT5EncoderModel(
            UMT5Config(vocab_size=5, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
        ),
        vae=AutoencoderKLWan(
            base_dim=4, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True],
            latents_mean=[0.1, -0.2, 0.3, 0.0], latents_std=[2.0, 1.5, 1.0, 0.5],
        ),
        scheduler=UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0),
        image_processor=CLIPImageProcessor(),
        image_encoder=CLIPVisionModel(vision),
    )  # fmt: skip
    pipe.save_pretrained(path := tmp_path_factory.mktemp("pipeline"))
    return path


@pytest.fixture(scope="module")
def parts(folder):
    """Our VAE, text encoder and image encoder, of that folder."""
    text = {"from_pretrained": str(folder / "text_encoder"), "tokenizer": str(folder / "tokenizer")}
    return {
        "vae": MODELS.build({"type": "DiffusersVideoVAE", "from_pretrained": str(folder), "subfolder": "vae"}),
        "text_encoder": MODELS.build({"type": "t5", **text, "model_max_length": 512}),
        "image_encoder": MODELS.build({"type": "clip-vision", "from_pretrained": str(folder)}),
    }


def theirs(folder, model, **options):
    """diffusers' pipeline of the folder, with the weights of our model."""
    nets = [
        None if net is None else WanTransformer3DModel.from_config(dict(net.config)).eval()
        for net in (model.net, model.net_2)
    ]
    for net, ours in zip(nets, (model.net, model.net_2), strict=True):
        if net is not None:
            net.load_state_dict(ours.state_dict())
    pipe = WanImageToVideoPipeline.from_pretrained(folder, transformer=nets[0], transformer_2=nets[1], **options)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def ours(parts, model, **scheduler):
    own = {"type": "rflow", "num_sampling_steps": 4, "cfg_scale": 5.0, "sampler": "unipc", "shift": 3.0, **scheduler}
    image_encoder = parts["image_encoder"] if model.image_dim else None
    return VideoPipeline(model, parts["vae"], parts["text_encoder"], SCHEDULERS.build(own), image_encoder=image_encoder)


def clip(seed=0, frames=9):
    """A clip [3, F, 32, 48] in [-1, 1] of whole numbers from 0 to 255, as files hold them."""
    values = torch.randint(256, (3, frames, 32, 48), generator=torch.Generator().manual_seed(seed))
    return values / 127.5 - 1


def to_image(frame):
    return Image.fromarray(np.uint8((frame * 127.5 + 127.5).round().permute(1, 2, 0)))


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_a_sample_is_that_of_diffusers_pipeline(folder, parts, variant):
    changes, options, scheduler = VARIANTS[variant]
    model, video = build(variant, **changes), clip()
    pair = variant == "flf2v"
    start = first_and_last(video[:, :1], video[:, -1:] if pair else None)
    items = as_items(["a cat"], None, ["a"])
    request = Request(items=items, conditioning=[start], fps=16, seed=1, **SIZE)
    made = ours(parts, model, **scheduler).sample(request, decode=False).latents[0]
    images = {"image": to_image(video[:, 0]), **({"last_image": to_image(video[:, -1])} if pair else {})}
    scales = {"guidance_scale": 5.0, **({"guidance_scale_2": 3.5} if model.boundary else {})}
    expected = theirs(folder, model, **options)(
        prompt="a cat",
        negative_prompt="a",
        **images,
        **scales,
        height=32,
        width=48,
        num_frames=9,
        num_inference_steps=4,
        latents=randn_like(torch.empty(1, 4, 3, 4, 6), [generator(1, "inference", 0, 0)]),
        output_type="latent",
    ).frames
    torch.testing.assert_close(made, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("variant", ["i2v", "flf2v", "i2v-a14b"])
@torch.no_grad()
def test_training_conditions_on_what_the_pipeline_makes_of_the_clips_frames(folder, parts, variant):
    model = build(variant, **({"boundary": 0.9, "expert": "high"} if variant == "i2v-a14b" else {}))
    masks = MaskRatios(mask_ratios_of({"type": "Wan", **WAN[variant]}, None))
    image_encoder = parts["image_encoder"] if model.image_dim else None
    encode = BatchEncoder(
        parts["vae"], parts["text_encoder"], model, torch.device("cpu"), image_encoder=image_encoder, masks=masks
    )
    videos = torch.stack([clip(1), clip(2)])
    rngs = generators(0, "train", ids=[0, 1])
    z, cond = encode({"video": videos, "text": ["a", "cat"]}, rngs)
    assert encode.conditioning_frames(z, rngs) is None  # all frames are noised
    pipe = theirs(folder, model)
    sizes = (1, 4, 32, 48, 9, torch.float32, torch.device("cpu"), None, None)
    for video, condition in zip(videos.split(1), cond["condition"].split(1), strict=True):
        last = video[:, :, -1] if variant == "flf2v" else None
        expected = pipe.prepare_latents(video[:, :, 0], *sizes, last)[1]
        torch.testing.assert_close(condition, expected, atol=1e-5, rtol=1e-5)
    if model.image_dim:
        frames = [0, 8] if variant == "flf2v" else [0]
        features = [pipe.encode_image([to_image(video[:, i]) for i in frames]).flatten(0, 1) for video in videos]
        torch.testing.assert_close(cond["image_features"], torch.stack(features), atol=1e-5, rtol=1e-5)


def test_latent_frames_are_the_clip_that_ends_with_them():
    given = torch.tensor([[1, 0, 1, 1, 0, 1], [1, 1, 0, 0, 0, 0]], dtype=torch.bool)
    frames = pixel_frames(given, 4)
    assert frames.shape == (2, 21)
    assert frames[0].nonzero().flatten().tolist() == [0, 8, 9, 10, 11, 12, 20]
    assert frames[1].nonzero().flatten().tolist() == [0, 1, 2, 3, 4]


def test_clips_are_given_in_their_places(parts):
    """References of several frames, from inside of them too, and a segment that goes on from the one before."""
    model, video = build("i2v-a14b"), clip(3)
    pipeline, seen = ours(parts, model), []
    model.register_forward_pre_hook(lambda _, __, kwargs: seen.append(kwargs["condition"][:1]), with_kwargs=True)
    inside = FrameCondition(ref_start=1, target_start=2)
    start = Conditioning([video, clip(4, 1)], [FrameCondition(reference=1), inside])
    options = {"items": as_items(["a cat"]), "fps": 16, "seed": 1, "guidance_scale": 1.0, **SIZE}
    made = pipeline.sample(Request(conditioning=[start], loop=2, condition_frame_length=2, **options))
    expected, given = torch.zeros(1, 3, 9, 32, 48), torch.zeros(1, 9, dtype=torch.bool)
    expected[:, :, :1], expected[:, :, 5:] = clip(4, 1), video[:, 1:5]
    given[:, [0, 5, 6, 7, 8]] = True
    torch.testing.assert_close(seen[0], model.image_condition(parts["vae"], expected, given)["condition"])
    expected[:, :, :5], given[:] = made.video[:, :, 4:9], torch.arange(9) < 5
    torch.testing.assert_close(seen[4], model.image_condition(parts["vae"], expected, given)["condition"])
    assert made.video.shape[2] == 2 * (9 - 5) + 5
    edit = Conditioning([video], [FrameCondition(length=3, edit_ratio=0.5)])
    with pytest.raises(UserError, match="cannot edit them"):
        pipeline.sample(Request(conditioning=[edit], **options))
    with pytest.raises(UserError, match="condition_frame_edit"):
        pipeline.sample(Request(conditioning=[start], loop=2, condition_frame_edit=0.5, **options))


@pytest.mark.parametrize(
    ("variant", "start", "loop", "message"),
    [
        ("i2v", first_and_last(None), 1, "makes videos from images"),
        ("i2v-a14b", first_and_last(None), 1, "makes videos from images"),
        ("i2v", first_and_last(None, clip(0, 1)), 1, "from a first image, and a video lacks it"),
        ("flf2v", first_and_last(clip(0, 1)), 1, "from a first and a last image, and a video lacks it"),
        ("flf2v", first_and_last(clip(0, 1), clip(1, 1), loop=2), 2, "a video lacks it, or a segment of --loop"),
    ],
)
def test_missing_images_are_told_before_anything_is_sampled(parts, variant, start, loop, message):
    pipeline, phases = ours(parts, build(variant)), []
    request = Request(items=as_items(["a"]), conditioning=[start], fps=16, seed=1, loop=loop, **SIZE)
    with pytest.raises(UserError, match=message):
        pipeline.sample(request, on_phase=phases.append)
    assert not phases


def test_parts_that_do_not_fit_are_told(parts, folder):
    for changes, message in (
        ({"condition_channels": 20}, "condition_channels=20 does not fit the VAE: a mask of 4"),
        ({"image_dim": 24}, "model.image_dim=24, but the image encoder's features have 20 channels"),
    ):
        with pytest.raises(UserError, match=message):
            ours(parts, build("i2v", **changes))
    clip_vision = {"type": "clip-vision", "from_pretrained": str(folder)}
    for model, image_encoder, message in (
        ("Wan2.1-I2V-14B", None, "reads CLIP's features of the first image: set image_encoder="),
        ("Wan2.2-I2V-A14B", clip_vision, "image_encoder has no effect on a Wan2.2-I2V-A14B"),
        ("STDiT-XL/2", clip_vision, "image_encoder has no effect on a STDiT-XL/2"),
    ):
        with pytest.raises(UserError, match=message):
            check_image_encoder({"type": model}, image_encoder)


def test_masks_that_do_not_give_what_a_model_needs_are_told():
    i2v, flf2v = {"type": "Wan2.1-I2V-14B"}, {"type": "Wan2.1-FLF2V-14B"}
    assert mask_ratios_of({"type": "STDiT-XL/2"}, None) is None
    assert mask_ratios_of({"type": "Wan2.2-I2V-A14B"}, {"image_tail": 0.5}) == {"image_tail": 0.5}
    mixed = {"image_head": 0.5, "image_head_tail": 0.5}
    assert mask_ratios_of(i2v, mixed) == mixed
    with pytest.raises(UserError, match="needs head of every clip: only quarter_head, quarter_head_tail, image_head, "):
        mask_ratios_of(i2v, {"image_head": 0.9})
    with pytest.raises(UserError, match="needs head and tail of every clip: only quarter_head_tail, image_head_tail "):
        mask_ratios_of(flf2v, mixed)
    with pytest.raises(UserError, match="'imag_head' is unknown"):
        mask_ratios_of(i2v, {"imag_head": 1})
    with pytest.raises(UserError, match="I2V-14B makes videos from images, and cannot train on single images"):
        mask_ratios_of(i2v, None, {17, 1})
    assert mask_ratios_of({"type": "Wan2.2-TI2V-5B"}, mixed, {17, 1}) == mask_ratios_of(i2v, mixed, {17, 5}) == mixed


def test_stored_latents_are_not_enough(parts):
    encode = BatchEncoder(parts["vae"], None, build("i2v-a14b"), torch.device("cpu"), class_dropout_prob=0.0)
    batch = {"moments": torch.randn(1, 8, 3, 4, 6), "y": torch.zeros(1, 1, 4, 16), "mask": torch.ones(1, 4)}
    with pytest.raises(UserError, match="train from the videos, with data_path naming their table"):
        encode(batch, generators(0, "train", ids=[0]))


@pytest.mark.parametrize("variant", ["i2v", "flf2v", "i2v-a14b"])
@torch.no_grad()
def test_stored_conditions_are_those_of_the_videos(parts, variant):
    """Whichever of the masks is drawn; of a mask that was not stored there is nothing."""
    model = build(variant, **({"boundary": 0.9, "expert": "high"} if variant == "i2v-a14b" else {}))
    ends = ("image_head_tail",) if variant == "flf2v" else ("image_head", "image_head_tail")
    masks = MaskRatios(dict.fromkeys(ends, 1 / len(ends)))
    image_encoder = parts["image_encoder"] if model.image_dim else None
    options = {"image_encoder": image_encoder, "masks": masks, "class_dropout_prob": 0.0}
    encode = BatchEncoder(parts["vae"], None, model, torch.device("cpu"), **options)
    settings = condition_settings({"type": "Wan", **WAN[variant]}, masks, image_encoder)
    videos, given = torch.stack([clip(i) for i in range(4)]), masks.given_frames(3)
    assert (settings["kinds"], len(given)) == (sorted(ends), len(ends))
    frames = pixel_frames(given, 4)
    batch = {
        "moments": parts["vae"].moments(videos), "y": torch.zeros(4, 1, 4, 16), "mask": torch.ones(4, 4),
        "condition_given": given.expand(4, -1, -1),
        "condition_latents": torch.stack(
            [condition_latents(parts["vae"], videos, each.expand(4, -1)) for each in frames], dim=1
        ),
    }  # fmt: skip
    if image_encoder is not None:
        batch["image_features"] = image_features(image_encoder, videos, settings["frames"])
    rngs = generators(0, "train", ids=range(4))
    stored, expected = encode(batch, rngs), encode({**batch, "video": videos}, rngs)
    torch.testing.assert_close(stored[1], expected[1], atol=1e-6, rtol=1e-6)
    if len(ends) == 2:
        assert len({tuple(mask.flatten().tolist()) for mask in stored[1]["condition"][:, :4, :, 0, 0]}) == 2
    other = {**batch, "condition_given": ~batch["condition_given"]}
    with pytest.raises(UserError, match="no latents of the conditioning frames that mask_ratios drew"):
        encode(other, rngs)
    if image_encoder is not None:
        with pytest.raises(UserError, match=r"takes \d+ tokens of features of a clip's images, and there are 0"):
            encode({name: value for name, value in batch.items() if name != "image_features"}, rngs)
