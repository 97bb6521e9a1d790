"""What a sampling run makes: every sample with its name and its record, and batches of those that can be made together.

The record of a sample holds a config for this sample alone: sizes as numbers, the prompt's own references, mask strategy,
negative prompt, seed and guidance. So it says how to make it again, whatever list the prompt came from.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from opensora.config.load import InferenceConfig, to_dict
from opensora.inference.manifest import describe_checkpoint, sidecar
from opensora.inference.manifest_inputs import inputs_of
from opensora.inference.output import check_rate, sample_file_name
from opensora.inference.pipeline import Defaults, VideoPipeline, needs_null
from opensora.inference.prompts import PromptItem, load_items
from opensora.inference.references import conditioning, refuse_contradictions, refuse_missing, sources_of
from opensora.inference.request import Request
from opensora.inference.sizes import saved_rate
from opensora.registry import MODELS, SCHEDULERS, Registry, build_module
from opensora.utils.environment import environment
from opensora.utils.errors import UserError, first_few


class Job(NamedTuple):
    """One sample to make."""

    item: PromptItem
    sample_index: int
    path: Path  # without extension


def jobs(cfg: InferenceConfig) -> list[Job]:
    """Every sample that the config asks for: all prompts, then all of them again for the next of `num_sample`.

    What is wrong with any of them is found here, as far as it can be without weights.

    Raises:
        UserError: the prompts cannot be read, a file that one starts from is not there, or settings have no effect.
    """
    items = load_items(cfg)
    refuse_missing(cfg, items)
    refuse_contradictions(cfg, items)
    check_rate(cfg.save_format, saved_rate(cfg))
    if cfg.condition_frame_edit == 1:
        raise UserError("condition_frame_edit=1 would make the shared frames anew: use less than 1, or 0 to keep them.")
    _check_texts(cfg, items)
    return [Job(item, k, Path(cfg.save_dir) / _name(cfg, item, k)) for k in range(cfg.num_sample) for item in items]


def stated_size(cfg: InferenceConfig) -> Defaults | None:
    """The size of the videos, if the config says it in numbers; a name means what the VAE makes of it."""
    if not isinstance(cfg.num_frames, int) or cfg.image_size is None:
        return None
    return Defaults(cfg.num_frames, cfg.image_size, float(cfg.fps), saved_rate(cfg), cfg.seed)


def records(cfg: InferenceConfig, made: Sequence[Job], size: Defaults) -> Iterator[dict[str, Any]]:
    """The sidecar of each job; see the module's docstring."""
    checkpoint, made_with, config = describe_checkpoint(cfg.model.get("from_pretrained")), environment(), to_dict(cfg)
    for job in made:
        sources = sources_of(cfg, job.item)
        yield sidecar(
            config | own_settings(cfg, job.item, size),
            prompt=prompt_of(job.item),
            prompt_index=job.item.index,
            sample_index=job.sample_index,
            save_fps=size.save_fps,
            checkpoint=checkpoint,
            inputs=inputs_of(config, sources),
            made_with=made_with,
        )


def own_settings(cfg: InferenceConfig, item: PromptItem, size: Defaults) -> dict[str, Any]:
    """The fields of the config as they are for one prompt."""
    overrides = item.overrides
    scheduler = {**cfg.scheduler, "cfg_scale": overrides["cfg_scale"]} if "cfg_scale" in overrides else cfg.scheduler
    return {
        "num_frames": size.num_frames,
        "duration": None,
        "image_size": size.image_size,
        "resolution": None,
        "aspect_ratio": None,
        "aspect_ratio_order": "height:width",
        "save_fps": size.save_fps,
        "seed": int(overrides.get("seed", cfg.seed)),
        "scheduler": scheduler,
        "reference_path": [";".join(item.references)] if item.references else None,
        "mask_strategy": None if item.mask_strategy is None else [item.mask_strategy],
        "negative_prompt": None if item.negative_prompt is None else [item.negative_prompt],
    }


def prompt_of(item: PromptItem) -> str:
    """The prompt as `load_items` would read it: with marks where there are several texts."""
    if len(item.segments) == 1:
        return item.text
    return "".join(f"|{segment.loop}|{segment.text}" for segment in item.segments)


def batches(todo: Iterable[Job], batch_size: int) -> list[list[Job]]:
    """Jobs that one request can make: of one sample number and one guidance, at most `batch_size` at a time."""
    groups: dict[tuple[int, float | None], list[Job]] = {}
    for job in todo:
        groups.setdefault((job.sample_index, job.item.overrides.get("cfg_scale")), []).append(job)
    return [group[i : i + batch_size] for group in groups.values() for i in range(0, len(group), batch_size)]


def request_of(
    cfg: InferenceConfig, batch: Sequence[Job], pipeline: VideoPipeline, size: Defaults | None = None
) -> Request:
    """What a batch of jobs asks of a pipeline that was built from `cfg`; reads the references.

    `size`: what `cfg` asks for, where the pipeline was built from a config of another size.

    Raises:
        UserError: a reference cannot be had, or does not fit.
    """
    size, items = size or pipeline.defaults, [job.item for job in batch]
    return Request(
        items=items,
        num_frames=size.num_frames,
        image_size=size.image_size,
        fps=size.fps,
        seed=cfg.seed,
        conditioning=[conditioning(cfg, item, pipeline.vae, size.num_frames, size.image_size) for item in items],
        align=cfg.align,
        sample_index=batch[0].sample_index,
        guidance_scale=items[0].overrides.get("cfg_scale"),
        loop=cfg.loop,
        condition_frame_length=cfg.condition_frame_length if cfg.loop > 1 else None,
        condition_frame_edit=cfg.condition_frame_edit,
    )


def _check_texts(cfg: InferenceConfig, items: Sequence[PromptItem]) -> None:
    """See that prompts are classes where the model knows classes, and that negative prompts have an effect."""
    negative = [item for item in items if item.negative_prompt is not None]
    problems = []
    if cfg.text_encoder["type"] == "classes":
        problems += [
            f"prompt {item.index}: negative_prompt has no effect on classes; leave it out." for item in negative
        ]
        classes = _built(cfg.text_encoder, MODELS)
        for item in items:
            try:
                classes.encode([segment.text for segment in item.segments])
            except UserError as error:
                problems.append(f"prompt {item.index}: {error}")
    elif negative:
        scheduler = _built(cfg.scheduler, SCHEDULERS)
        problems += [
            f"prompt {item.index}: negative_prompt has no effect with cfg_scale=1; raise --cfg-scale, or leave it out."
            for item in negative
            if not needs_null(scheduler, item.overrides.get("cfg_scale"))
        ]
    if problems:
        raise UserError("\n".join(first_few(problems)))


def _built(component: Mapping[str, Any], registry: Registry) -> Any:
    """A part that has no weights and is made at once."""
    try:
        return build_module(component, registry)
    except UserError:
        raise
    except ValueError as error:  # how a constructor refuses an argument
        raise UserError(f"{component['type']}: {error}") from error


def _name(cfg: InferenceConfig, item: PromptItem, sample_index: int) -> str:
    return sample_file_name(
        item.text,
        item.index,
        sample_index,
        num_sample=cfg.num_sample,
        sample_name=cfg.sample_name,
        prompt_as_path=cfg.prompt_as_path,
    )
