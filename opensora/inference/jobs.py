"""What a sampling run makes: every sample with its name and its sidecar, and batches that can be made together.

A sidecar holds a config for its sample alone: sizes as numbers, the prompt's own references, mask strategy, negative prompt,
seed and guidance. So `remake` needs nothing else, whatever list the prompt came from.
"""

import dataclasses
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from opensora.config.load import InferenceConfig, config_from_dict, to_dict
from opensora.inference.build import COMPONENTS
from opensora.inference.manifest import OF_A_BATCH, describe_checkpoint, hardware, inputs_of, sidecar
from opensora.inference.output import check_rate, sample_file_name
from opensora.inference.pipeline import Request, VideoPipeline, needs_null
from opensora.inference.prompts import PromptItem, load_items
from opensora.inference.references import check_files_exist, check_has_images, check_shortcuts, conditioning, sources_of
from opensora.inference.refine import refine_prompts
from opensora.inference.sizes import VideoSize, saved_rate
from opensora.models.image_encoder import check_image_encoder
from opensora.registry import SAMPLERS, TEXT_ENCODERS, build_module
from opensora.utils.environment import environment
from opensora.utils.errors import UserError, first_few

logger = logging.getLogger(__name__)


class Job(NamedTuple):
    """One sample to make."""

    item: PromptItem
    sample_index: int
    path: Path  # without extension


def jobs(cfg: InferenceConfig) -> list[Job]:
    """Every sample that the config asks for: all prompts, then all of them again for the next of `num_sample`.

    What is wrong with any of them is found here, as far as it can be without weights.

    Raises:
        UserError: the prompts cannot be read, a reference file does not exist, or a prompt's settings have no effect.
    """
    items = load_items(cfg)
    check_files_exist(cfg, items)
    check_shortcuts(cfg, items)
    check_image_encoder(cfg.model, cfg.image_encoder)
    check_has_images(cfg, items)
    if cfg.align is not None and not any(sources_of(cfg, item) for item in items):
        logger.info("note: align=%d has no effect: no prompt has references that could be moved.", cfg.align)
    if cfg.mask_strategy_format != "six-fields" and all(item.mask_strategy is None for item in items):
        logger.info("note: mask_strategy_format=%r has no effect without mask_strategy.", cfg.mask_strategy_format)
    check_rate(cfg.save_format, saved_rate(cfg))
    if cfg.condition_frame_edit == 1:
        raise UserError("condition_frame_edit=1 would make the shared frames anew: use less than 1, or 0 to keep them.")
    _check_texts(cfg, items)
    if cfg.llm_refine:
        items = refine_prompts(items, Path(cfg.save_dir))
    naming: Any = {name: getattr(cfg, name) for name in ("num_sample", "sample_name", "prompt_as_path")}
    return [
        Job(item, k, Path(cfg.save_dir) / sample_file_name(item.text, item.index, k, **naming))
        for k in range(cfg.num_sample)
        for item in items
    ]


def records(cfg: InferenceConfig, made: Sequence[Job], size: VideoSize) -> Iterator[dict[str, Any]]:
    """The sidecar of each job; see the module's docstring."""
    checkpoint, made_with, config = describe_checkpoint(cfg.model.get("from_pretrained")), environment(), to_dict(cfg)
    config |= {"num_frames": size.num_frames, "image_size": size.image_size, "save_fps": size.save_fps}
    config |= {"duration": None, "resolution": None, "aspect_ratio": None, "aspect_ratio_order": "height:width"}
    config["llm_refine"] = False  # `prompt` is what the language model wrote
    for job in made:
        item, overrides = job.item, job.item.overrides
        own = {
            "seed": int(overrides.get("seed", cfg.seed)),
            "scheduler": {**cfg.scheduler, **{key: overrides[key] for key in ("cfg_scale",) if key in overrides}},
            "reference_path": [";".join(item.references)] if item.references else None,
            "mask_strategy": None if item.mask_strategy is None else [item.mask_strategy],
            "negative_prompt": None if item.negative_prompt is None else [item.negative_prompt],
        }
        yield sidecar(
            config | own,
            prompt=prompt_of(item),
            prompt_index=item.index,
            sample_index=job.sample_index,
            save_fps=size.save_fps,
            checkpoint=checkpoint,
            inputs=inputs_of(config, sources_of(cfg, item)),
            made_with=made_with,
        )


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
    cfg: InferenceConfig, batch: Sequence[Job], pipeline: VideoPipeline, size: VideoSize | None = None
) -> Request:
    """The request for a batch of jobs, of `size` where `cfg` differs from the pipeline's config; reads the references.

    Raises:
        UserError: a reference cannot be had, or does not fit.
    """
    size, items = size or pipeline.defaults, [job.item for job in batch]
    return Request(
        items=items,
        num_frames=size.num_frames,
        image_size=size.image_size,
        fps=size.model_fps,
        seed=cfg.seed,
        conditioning=[conditioning(cfg, item, pipeline.vae, size.num_frames, size.image_size) for item in items],
        align=cfg.align,
        sample_index=batch[0].sample_index,
        guidance_scale=items[0].overrides.get("cfg_scale"),
        loop=cfg.loop,
        condition_frame_length=cfg.condition_frame_length if cfg.loop > 1 else None,
        condition_frame_edit=cfg.condition_frame_edit,
    )


def remake(record: Mapping[str, Any], device: torch.device | str | None = None, *, progress: bool = False) -> Tensor:
    """The video [3, T, H, W] in [-1, 1] of a sidecar's sample, fp32, on the CPU: the same bits, if `differences` finds none.

    The batch that the sidecar names is sampled completely, on `device` (None: the config's); `progress`: show a bar.

    Raises:
        UserError: the sidecar does not name its batch, or a part or a reference is no longer there.
    """
    if "batch" not in record:
        raise UserError("the sidecar does not name the batch of its sample: an older version wrote it.")
    whole_list = dict.fromkeys(("prompt_path", "start_index", "end_index"))
    one_process = {"num_sample": 1, "sp_size": 1, "cfg_parallel": False}
    values = {**record["config"], **whole_list, **one_process, "prompt": [record["prompt"]]}
    cfg = config_from_dict(InferenceConfig, values, COMPONENTS)
    batch = []
    try:
        for entry in record["batch"]:
            own = {name: entry[name] for name in OF_A_BATCH if name != "seed"}
            (item,) = load_items(dataclasses.replace(cfg, prompt=[entry["prompt"]], **own))
            item = dataclasses.replace(item, index=entry["prompt_index"], overrides={"seed": entry["seed"]})
            batch.append(Job(item, entry["sample_index"], Path()))
        _ = batch[record["place"]]
    except (LookupError, TypeError) as error:
        raise UserError(f"the sidecar does not describe its batch ({error!r}): was it edited?") from error
    pipeline = VideoPipeline.from_config(cfg, device)
    for difference in differences(record, pipeline.device):
        logger.warning("%s; the bits may differ.", difference)
    video = pipeline.sample(request_of(cfg, batch, pipeline), progress=progress).video
    assert video is not None, "decoding is asked for"
    return video[record["place"]]


def differences(record: Mapping[str, Any], device: torch.device | str) -> list[str]:
    """What has changed since the sample was made, as far as its sidecar shows: hardware, versions, files, processes."""
    config, versions = record["config"], environment()["versions"]
    inputs: Mapping[str, Any] = record.get("inputs", {})  # older sidecars have none
    inputs_now = inputs_of(config, list(inputs.get("references", ())))
    pairs = {
        "hardware": (record.get("hardware"), hardware(device)),
        "checkpoint": (record["checkpoint"], describe_checkpoint(config["model"].get("from_pretrained"))),
        **{
            name: (was, inputs_now.get(kind, {}).get(name))
            for kind, each in inputs.items()
            for name, was in each.items()
        },
        **{name: (was, versions.get(name)) for name, was in record.get("versions", {}).items()},
        **{name: (config[name], now) for name, now in (("sp_size", 1), ("cfg_parallel", False)) if name in config},
    }
    return [f"{name} was {was}, now {now}" for name, (was, now) in pairs.items() if was != now]


def _check_texts(cfg: InferenceConfig, items: Sequence[PromptItem]) -> None:
    """Check that prompts are classes where the model knows classes, and that negative prompts have an effect."""
    negative = [item for item in items if item.negative_prompt is not None]
    problems = []
    if cfg.text_encoder["type"] == "classes":
        problems += [
            f"prompt {item.index}: negative_prompt has no effect on classes; leave it out." for item in negative
        ]
        classes = build_module(cfg.text_encoder, TEXT_ENCODERS)
        for item in items:
            try:
                classes.encode([segment.text for segment in item.segments])
            except UserError as error:
                problems.append(f"prompt {item.index}: {error}")
    elif negative:
        scheduler = build_module(cfg.scheduler, SAMPLERS)
        problems += [
            f"prompt {item.index}: negative_prompt has no effect with cfg_scale=1; raise --cfg-scale, or leave it out."
            for item in negative
            if not needs_null(scheduler, item.overrides.get("cfg_scale"))
        ]
    if problems:
        raise UserError("\n".join(first_few(problems)))
