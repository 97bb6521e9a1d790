"""What the form of the page holds, from and to configs and sidecars.

The form has a field for what is changed most. References and a mask strategy, for which it has none, stand at the end of its
prompt as JSON, where every prompt may have its settings: they are seen, they can be changed, and none is lost.
"""

import json
import textwrap
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

from opensora.config.upgrade import upgrade
from opensora.inference.jobs import prompt_of
from opensora.inference.manifest import Finished
from opensora.inference.prompts import PromptItem
from opensora.inference.sizes import frames_of
from opensora.registry import SCHEDULERS, PartError, build_module
from opensora.utils.errors import UserError

LONGEST_CAPTION = 100  # characters of a prompt in the gallery


class FormValues(NamedTuple):
    """What the form of the page holds."""

    prompt: str
    negative_prompt: str = ""
    image: str | None = None  # an image that is the first frame
    height: float = 256
    width: float = 256
    num_frames: float = 16
    steps: float | None = 30
    guidance: float | None = 1.0
    seed: float | None = None  # None: any


class StepsAndGuidance(NamedTuple):
    """What a scheduler's component comes to; None where it cannot be built here, so that nobody knows."""

    steps: int | None
    guidance: float | None


def steps_and_guidance(scheduler: Mapping[str, Any]) -> StepsAndGuidance:
    """Steps and guidance of a component, its own or, where it leaves them to the scheduler, the scheduler's."""
    steps, guidance = scheduler.get("num_sampling_steps"), scheduler.get("cfg_scale")
    if steps is None or guidance is None:
        built = _built(json.dumps(scheduler, sort_keys=True))
        steps, guidance = built.steps if steps is None else steps, built.guidance if guidance is None else guidance
    return StepsAndGuidance(None if steps is None else int(steps), None if guidance is None else float(guidance))


def with_steps_and_guidance(scheduler: Mapping[str, Any], steps: int, guidance: float) -> dict[str, Any]:
    """The component with steps and guidance of a form. What is as it was stays in the component's own words."""
    before, changed = steps_and_guidance(scheduler), dict(scheduler)
    if steps != before.steps:
        changed.pop("timestep_respacing", None)  # iddpm's other way to say how many
        changed["num_sampling_steps"] = steps
    if guidance != before.guidance:
        changed["cfg_scale"] = guidance
    return changed


def prompt_in_form(text: str, references: str | None, mask_strategy: str | None) -> str:
    """A prompt with its references, joined by ";", and its mask strategy at the end."""
    settings = {"reference_path": references, "mask_strategy": mask_strategy}
    given = {name: value for name, value in settings.items() if value}
    return text + json.dumps(given, ensure_ascii=False) if given else text


def prompt_of_item(item: PromptItem) -> str:
    """The prompt of a run as the form shows it; the form has fields for its other settings."""
    return prompt_in_form(prompt_of(item), ";".join(item.references), item.mask_strategy)


def form_of(record: Mapping[str, Any]) -> FormValues:
    """The form that makes a sample again."""
    config = record["config"]
    settings = {name: (config.get(name) or [""])[0] for name in ("negative_prompt", "reference_path", "mask_strategy")}
    height, width = record["image_size"]
    return FormValues(
        prompt_in_form(record["prompt"], settings["reference_path"], settings["mask_strategy"]),
        settings["negative_prompt"],
        config.get("image"),
        height,
        width,
        record["num_frames"],
        *steps_and_guidance(config["scheduler"]),
        record["seed"],
    )


def caption(sample: Finished) -> str:
    """The settings of a sample that somebody who looks at it wants to know, on a line or two."""
    record, config = sample.record, sample.record["config"]
    height, width = record["image_size"]
    steps, guidance = steps_and_guidance(config["scheduler"])
    parts = [
        frames_of((record["num_frames"], height, width)),
        *([] if steps is None else [f"{steps} steps"]),
        *([] if guidance is None else [f"guidance {guidance:g}"]),
        f"seed {record['seed']}",
        *(["from an image"] if config.get("image") else []),
    ]
    return f"{textwrap.shorten(record['prompt'], LONGEST_CAPTION, placeholder=' ...')} ({', '.join(parts)})"


def label(sample: Finished) -> str:
    """The caption and the file's name: no two samples of a folder have the same, whatever the caption leaves out."""
    return f"{caption(sample)} [{sample.path.name}]"


@cache
def _built(scheduler: str) -> StepsAndGuidance:
    """What a component, as JSON, comes to. A sidecar may name a scheduler that is none of this process."""
    try:
        built = build_module(upgrade("scheduler", json.loads(scheduler)), SCHEDULERS)
    except (PartError, UserError):
        return StepsAndGuidance(None, None)
    return StepsAndGuidance(built.num_sampling_steps, built.cfg_scale)
