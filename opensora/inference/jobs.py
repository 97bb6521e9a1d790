"""What a sampling run makes: every sample with its name and its record, and batches of those that can be made together.

The record of a sample holds a config for this sample alone: sizes as numbers, the prompt's own references, mask strategy,
negative prompt, seed and guidance. So it says how to make it again, whatever list the prompt came from.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from opensora.inference.manifest import describe_checkpoint, sidecar
from opensora.inference.output import sample_file_name
from opensora.inference.pipeline import Defaults, VideoPipeline
from opensora.inference.prompts import PromptItem, load_items
from opensora.inference.references import conditioning, refuse_missing
from opensora.inference.request import Request
from opensora.inference.sizes import saved_rate
from opensora.utils.config import InferenceConfig, to_dict
from opensora.utils.run import environment


class Job(NamedTuple):
    """One sample to make."""

    item: PromptItem
    sample_index: int
    path: Path  # without extension


def jobs(cfg: InferenceConfig) -> list[Job]:
    """Every sample that the config asks for: all prompts, then all of them again for the next of `num_sample`.

    Raises:
        UserError: the prompts cannot be read, or a file that one starts from is not there.
    """
    items = load_items(cfg)
    refuse_missing(cfg, items)
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
        yield sidecar(
            config | own_settings(cfg, job.item, size),
            prompt=prompt_of(job.item),
            prompt_index=job.item.index,
            sample_index=job.sample_index,
            save_fps=size.save_fps,
            checkpoint=checkpoint,
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


def _name(cfg: InferenceConfig, item: PromptItem, sample_index: int) -> str:
    return sample_file_name(
        item.text,
        item.index,
        sample_index,
        num_sample=cfg.num_sample,
        sample_name=cfg.sample_name,
        prompt_as_path=cfg.prompt_as_path,
    )
