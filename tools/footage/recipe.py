"""Recipes: a .py of literals or a .yaml with `stages`, a list of dicts with a `type` each.

stages = [
    dict(type="find", folder="videos"),
    dict(type="probe"),
    dict(type="unique", column="digest"),
    dict(type="cut", detector="auto", min_seconds=2, max_seconds=20, shorter_side=720),
    dict(type="score", scorers=dict(flow=dict(), sharpness=dict())),
    dict(type="filter", flowmin=1.0, equals=dict(black=0)),
    dict(type="caption", model="Qwen/Qwen2.5-VL-7B-Instruct"),
    dict(type="table", output="train.csv"),
]
"""

import hashlib
import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opensora.registry import did_you_mean
from opensora.utils.errors import UserError

Settings = dict[str, Any]


@dataclass(frozen=True)
class Planned:
    """A stage of a recipe.

    Attributes:
        number: from 1.
        type: its name in the recipe.
        settings: all else that the recipe says of it.
        name: of its files: number, type, and a hash of its settings and of all stages before it, so that a changed recipe
            keeps the results of unchanged stages.
    """

    number: int
    type: str
    settings: Settings
    name: str


def read_recipe(
    path: Path,
    stages: Mapping[str, Callable[..., Any]],
    checks: Mapping[str, Callable[[Mapping[str, Any]], None]] | None = None,
) -> list[Planned]:
    """The stages of a recipe, checked against the functions that carry them out, and by `checks` of their own.

    Raises:
        UserError: all that is wrong with it.
    """
    listed = _stages_in(path)
    problems: list[str] = []
    planned: list[Planned] = []
    digest = ""
    for number, stage in enumerate(listed, start=1):
        settings = dict(stage)
        kind = settings.pop("type", None)
        if kind not in stages:
            problems.append(f"stage {number}: type={kind!r} is unknown.{did_you_mean(str(kind), list(stages))}")
            continue
        parameters = dict(list(inspect.signature(stages[kind]).parameters.items())[1:])
        named = [name for name, p in parameters.items() if p.kind is not p.VAR_KEYWORD]
        wrong = [f"{name!r} is unknown.{did_you_mean(name, named)}" for name in settings if name not in named]
        if len(named) < len(parameters):  # it takes others too
            wrong = []
        needed = (name for name in named if parameters[name].default is inspect.Parameter.empty)
        wrong += [f"{name!r} is needed" for name in needed if name not in settings]
        if not wrong and kind in (checks or {}):
            try:
                (checks or {})[kind](settings)
            except UserError as error:
                wrong.append(str(error).rstrip("."))
        problems += [f"stage {number} ({kind}): {problem}" for problem in wrong]
        digest = hashlib.blake2b(
            json.dumps([digest, kind, settings], sort_keys=True).encode(), digest_size=4
        ).hexdigest()
        planned.append(Planned(number, kind, settings, f"{number:02d}-{kind}-{digest}"))
    if listed and listed[0].get("type") not in ("find", "read"):
        problems.append("the first stage finds files (type 'find') or reads a table (type 'read')")
    if any(stage.get("type") in ("find", "read") for stage in listed[1:]):
        problems.append("only the first stage finds files or reads a table")
    if problems or not planned:
        raise UserError(f"{path}: " + ("; ".join(problems) or "`stages` is empty") + ".")
    return planned


def _stages_in(path: Path) -> list[Settings]:
    from mmengine.config import Config

    if not path.is_file() or path.suffix not in (".py", ".yaml", ".yml", ".json"):
        raise UserError(f"{path} is no recipe: a .py or .yaml file with `stages`, see docs/how-to/data-processing.md.")
    found: Settings = Config.fromfile(str(path)).to_dict()
    if unknown := sorted(set(found) - {"stages"}):
        raise UserError(f"{path}: {unknown[0]!r} is unknown; a recipe holds `stages` and nothing else.")
    stages = found.get("stages")
    if not isinstance(stages, list | tuple) or not all(isinstance(stage, dict) for stage in stages):
        raise UserError(f"{path}: `stages` must be a list of dicts, each with a `type`.")
    return list(stages)
