"""What the page offers for a model: example prompts, a sentence on what it knows, and limits from its training and the memory."""

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from opensora.config.load import InferenceConfig
from opensora.inference.build import calls_parts
from opensora.inference.manifest import describe_checkpoint
from opensora.inference.memory import MARGIN, available_memory, estimate
from opensora.inference.pipeline import VideoPipeline
from opensora.inference.prompts import PromptItem, load_items, load_prompts
from opensora.inference.sizes import frames_of, trained_config, trained_sizes
from opensora.models.text_encoder import HFTextEncoder
from opensora.registry import SCHEDULERS, PartError, build_module
from opensora.utils.errors import UserError
from tools.demo.form import prompt_of_item, steps_and_guidance, with_steps_and_guidance

EXAMPLES = 12  # that are shown
LARGER = (2.0, 1.75, 1.5, 1.25, 1.0)  # how far frames and sides go beyond the training, as far as the memory allows
SMALLER = 4  # the least side is that part of the training's
MORE_STEPS, MOST_STEPS, MOST_GUIDANCE = 4, 250, 20.0  # so many times the config's steps, at most so many
SHIPPED = {
    "assets/models/stdit-quickstart": "This small model has learned 21 clips and nothing else; other prompts give mixtures of them."
}


class Range(NamedTuple):
    """Of a slider."""

    least: float
    most: float
    step: float


class Offer(NamedTuple):
    """What the page says of a model and lets its visitors choose; known once the model was loaded."""

    about: str
    ranges: Mapping[str, Range]  # of height, width, num_frames, steps, guidance
    trained: set[tuple[int, int, int]]  # frames, height, width; empty where nobody knows


def offer_of(cfg: InferenceConfig, pipeline: VideoPipeline) -> Offer:
    """The offer of a loaded model."""
    weights = cfg.model.get("from_pretrained")
    trained, own = trained_sizes(weights), (pipeline.defaults.num_frames, *pipeline.defaults.image_size)
    ranges = _size_ranges(pipeline, own, trained)
    ranges["steps"] = _steps_range(cfg.scheduler)
    _, guidance = steps_and_guidance(cfg.scheduler)
    ranges["guidance"] = Range(0.0, max(MOST_GUIDANCE, guidance or 0.0), 0.1)
    return Offer(_about(weights, trained), ranges, trained)


def examples_of(cfg: InferenceConfig, items: list[PromptItem], file: str | None) -> list[str]:
    """Prompts to click: those of a file, else the command's own and those of the checkpoint's validation.

    Raises:
        UserError: the file cannot be read.
    """
    if file is not None:
        return load_prompts(None, file)
    examples = [prompt_of_item(item) for item in items[:EXAMPLES]]
    training = trained_config(cfg.model.get("from_pretrained"))
    prompts, path = training.get("val_prompts"), training.get("val_prompt_path")
    if prompts or (path and Path(path).is_file()):
        examples += load_prompts(prompts, path)
    return [*dict.fromkeys(examples)][:EXAMPLES]


def items_of(cfg: InferenceConfig) -> list[PromptItem]:
    """The command's prompts with all that belongs to them; [] where it has none."""
    return [] if cfg.prompt is None and cfg.prompt_path is None else load_items(cfg)


def cut_prompts(text_encoder: Any, item: PromptItem) -> list[str]:
    """A sentence for each text of a prompt that is longer than what the text encoder reads."""
    if not isinstance(text_encoder, HFTextEncoder):
        return []
    texts = [("prompt", segment.text) for segment in item.segments] + [("negative prompt", item.negative_prompt or "")]
    cuts = [(what, *text_encoder.cut(text_encoder.clean(text))) for what, text in texts]
    most = text_encoder.model_max_length
    return [
        f"The {what} is too long: the text encoder reads {most} of its {count} tokens. Cut off: “{unread}”"
        for what, count, unread in cuts
        if count > most
    ]


def _about(weights: str | None, trained: set[tuple[int, int, int]]) -> str:
    """What is known of the weights, in a sentence or two."""
    if weights is None:
        return "This model has random weights: its videos are noise."
    if (shipped := SHIPPED.get(weights.rstrip("/"))) is not None:
        return shipped
    training, described = trained_config(weights), describe_checkpoint(weights) or {}
    table = training.get("data_path") or (training.get("dataset") or {}).get("data_path")
    facts = [
        *([f"for {step:,} step{'s' if step > 1 else ''}"] if (step := described.get("step")) else []),
        *([f"on {Path(table).name}"] if table else []),
        *([f"with {' and '.join(map(frames_of, sorted(trained)))}"] if 0 < len(trained) < 3 else []),
        *([f"in {len(trained)} sizes"] if len(trained) > 2 else []),
    ]
    return f"Trained {' '.join(facts)}." if facts else ""


def _size_ranges(
    pipeline: VideoPipeline, own: tuple[int, int, int], trained: set[tuple[int, int, int]]
) -> dict[str, Range]:
    """Of num_frames, height and width: what VAE and patches take, up to twice the training, where all together fit in memory.

    Args:
        pipeline: the loaded model.
        own: (frames, height, width) of its config, which are always offered.
        trained: sizes of its training; where nobody knows them, `own` stands for them.
    """
    vae, known = pipeline.vae, [*trained, own]
    largest = tuple(max(size[axis] for size in known) for axis in range(3))
    sizes = (
        tuple(length if length == 1 else int(scale * length) for length in base)  # a model of images stays one
        for base in (largest, own)
        for scale in LARGER
    )
    most = next((size for size in sizes if _fits(pipeline, size)), own)
    legal = sorted({n for n in map(vae.legal_num_frames, range(1, most[0] + 1)) if n <= most[0]})
    gaps = {after - before for before, after in itertools.pairwise(legal)}
    ranges = {"num_frames": Range(legal[0], legal[-1], gaps.pop() if len(gaps) == 1 else 1)}
    for axis, name in ((1, "height"), (2, "width")):
        stride, patch = vae.strides[axis], pipeline.model.patch_size[axis]
        step = stride * patch if own[axis] % (stride * patch) == 0 else stride
        least = min(size[axis] for size in known) // SMALLER
        ranges[name] = Range(max(least // step, 1) * step, most[axis] // step * step, step)
    return ranges


def _fits(pipeline: VideoPipeline, size: tuple[int, ...]) -> bool:
    """Whether a video (frames, height, width) fits in memory with guidance; True where that is not known."""
    if calls_parts(pipeline.scheduler):
        return True
    num_frames, height, width = pipeline.vae.legal_size(size)
    return MARGIN * estimate(pipeline, 1, num_frames, (height, width), 2.0) <= available_memory(pipeline.device)


def _steps_range(scheduler: Mapping[str, Any]) -> Range:
    """The numbers of steps that the sampler takes."""
    own, guidance = steps_and_guidance(scheduler)
    assert own is not None, "the pipeline was built with it"
    assert guidance is not None
    most = max(own, min(MORE_STEPS * own, MOST_STEPS))

    def works(steps: int) -> bool:
        try:
            build_module(with_steps_and_guidance(scheduler, steps, guidance), SCHEDULERS)
        except (UserError, PartError):
            return False
        return True

    return Range(next(filter(works, range(1, own)), own), next(filter(works, range(most, own, -1)), own), 1)
