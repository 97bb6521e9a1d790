"""Raw values of a file and of a command line are merged, typed and checked; all problems are reported together."""

import copy
import inspect
import json
import logging
import os
import types
import typing
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from opensora.config.command_line import FLAGS, Command, Setting, dashed, parse_bool
from opensora.config.schema import (
    REQUIRED,
    InferenceConfig,
    NoEffect,
    RunConfig,
    Schema,
    TrainConfig,
    VAEInferenceConfig,
    VAETrainConfig,
    coerce,
    describe,
    members,
    schema_fields,
)
from opensora.config.upgrade import replaced_by, translate, upgrade
from opensora.registry import Registry
from opensora.utils.errors import UserError

logger = logging.getLogger(__name__)
Origins = dict[tuple[str, ...], str]  # (field,) or (field, key) -> where its value was set

COMMAND_LINE = "command line"
PLAIN = {bool, int, float, str, types.NoneType, Literal, Sequence}  # annotations of arguments that are checked
SCRIPTS: dict[Schema, str] = {
    TrainConfig: "scripts/train.py",
    InferenceConfig: "scripts/inference.py",
    VAETrainConfig: "scripts/train_vae.py",
    VAEInferenceConfig: "scripts/inference_vae.py",
}
DEFAULT_DATASET = "VideoTextDataset"
NEAR = 0.75  # of a field's name; with less, bin_size is near sp_size, and batch_size near image_size
VERY_NEAR = 0.85  # of other codes' names, of which there are many
REPLACED_BY_BUCKETS = ("num_frames", "image_size", "batch_size")
# fields that a dataset component takes over when it does not set them itself
DATASET_FIELDS = (
    "data_path", "root", "num_frames", "frame_interval", "image_size", "use_image_transform", "bucket_config",
)  # fmt: skip


class Draft:
    """A config in the making: raw values, where each was set, all that is wrong so far, and what is only worth a note.

    Args:
        schema: the kind of config.
        registries: for each component field, where its type is registered.
        options: flags of a tool, which are not fields.
    """

    def __init__(self, schema: Schema, registries: Mapping[str, Registry], options: Sequence[str] = ()) -> None:
        self.schema, self.registries, self.options = schema, registries, options
        self.fields = schema_fields(schema)
        self.values: dict[str, Any] = {}
        self.origins: Origins = {}
        self.problems: list[str] = []
        self.notes: list[str] = []

    def take_file(self, values: Mapping[str, Any], origins: Origins) -> None:
        """Take over the values of a file.

        Raises:
            UserError: it is one for another script, or Open-Sora's with a setting that there is none for.
        """
        given = values
        values, self.notes = translate(self.schema.__name__, given)
        schema, has_buckets = self.schema, values.get("bucket_config") is not None
        unknown = [key for key in values if key not in self.fields and key not in schema.removed]
        for other, script in SCRIPTS.items() if len(unknown) >= 3 else ():  # one or two may be slips
            if set(unknown) <= schema_fields(other).keys() | other.removed.keys():
                raise UserError(
                    f"this is a config for {script}: {', '.join(map(repr, unknown[:3]))} and others are fields of "
                    f"{other.__name__}, not of {schema.__name__}."
                )
        self.origins.update(origins)
        for name in values.keys() - given.keys():
            self.origins[name,] = (
                origins.get(("model",), "") if name == "vae" else "from Open-Sora's keys, see the notes"
            )
        for key, value in values.items():
            if key in schema.removed:
                if value not in schema.removed[key].accepted:
                    text = f"{key}={value!r}: {schema.removed[key].why}"
                    self._complain((key,), text, changes_nothing=schema.removed[key].harmless)
            elif key in schema.aliases:
                path = ".".join(schema.aliases[key].path)
                self._complain((key,), f"{key!r} is a name for the command line; in a file set {path}.")
            elif key not in self.fields:
                self._complain((key,), f"{key!r} is not a field of {schema.__name__}.{self._hint(key)}")
            elif not (has_buckets and key == "batch_size" and value is None):  # Open-Sora: buckets have their own
                try:
                    json.dumps(value)
                except (TypeError, ValueError) as error:
                    self._complain((key,), f"{key} holds what is no plain data: {error}.")
                self.values[key] = {} if key == "dataset" and value is None else value
        dataset = self.values.get("dataset")
        if has_buckets and isinstance(dataset, dict):
            unset = (None, (None, None), [None, None])
            kept = {key: v for key, v in dataset.items() if key not in REPLACED_BY_BUCKETS or v not in unset}
            self.values["dataset"] = kept
        self._upgrade()

    def take_command(self, command: Command) -> None:
        """Write what the command line sets over what the file set."""
        self.problems += command.problems
        self.notes += command.notes
        for flag, key in command.unknown:
            owners = [name for name in self.values if key in self._arguments(name, self.values[name])]
            text = f"{flag} is not a field of {self.schema.__name__}.{self._hint(key, typed=True)} --help lists all."
            if owners:
                flags = " or ".join(f"--{dashed(owner)}.{key}" for owner in owners)
                text = f"{flag} is not a field, but {' and '.join(owners)} take{'s' * (len(owners) == 1)} it: write {flags}."
            self.problems.append(text)
        # whole fields first, wherever they stand: `--model.depth 2 --model "{...}"` means both
        for setting in sorted(command.settings, key=lambda setting: len(setting.path) > 1):
            if len(setting.path) == 1:
                name = setting.path[0]
                self.origins = {path: origin for path, origin in self.origins.items() if path[0] != name}
                self.origins[name,] = f"{COMMAND_LINE} {setting.flag}"
                self.values[name] = setting.value
            else:
                self._set_key(setting)
        chosen = {setting.path[0] for setting in command.settings if setting.value is not None}
        replaced = {other for name in chosen for other in self.schema.replaces.get(name, ())}
        # `--val-every 0` switches off all of the file's validation; in one file the two contradict each other
        if any(setting.path == ("val_every",) and setting.value == 0 for setting in command.settings):
            replaced |= {name for name in self.fields if name.startswith("val_")}
        for name in replaced - chosen:
            self.values.pop(name, None)
            self.origins.pop((name,), None)
        self._upgrade()

    def finish(self) -> Any:
        """Type every field, complete the dataset, check everything, and build the config.

        Raises:
            UserError: lists everything that is wrong.
        """
        self._share_with_dataset()
        typed = self._typed()
        if typed.get("bucket_config") is not None:
            self._leave_to_buckets(typed)
        if "dataset" in typed:
            typed["dataset"] = self._complete_dataset(typed)
        for name, registry in self.registries.items():
            if isinstance(typed.get(name), dict):
                self._check_component(name, typed[name], registry)
        config: RunConfig | None = self.schema(**typed) if len(typed) == len(self.fields) else None
        for problem in config.problems() if config else ():
            if isinstance(problem, NoEffect):
                self._complain(problem.path, problem, changes_nothing=True)
            else:
                self.problems.append(problem)
        if self.problems:
            raise UserError(listing(self.problems))
        if os.environ.get("RANK", "0") == "0" and getattr(config, "verbose", True):  # once, of torchrun's processes
            for note in self.notes:
                logger.warning("note: %s", note)
        return config

    def _typed(self) -> dict[str, Any]:
        """The values of all fields that are right by themselves."""
        typed: dict[str, Any] = {}
        for name, f in self.fields.items():
            value = self.values.get(name, f.default)
            if value is REQUIRED:
                self.problems.append(f"{name} is missing; expected {describe(f.annotation)}: {f.doc}.")
                continue
            try:
                value = copy.deepcopy(value) if name not in self.values else coerce(value, f.annotation)
                problem = f.problem(value)
            except TypeError as error:
                problem = str(error)
            if problem:
                self._complain((name,), f"{name}={value!r}: {problem.removesuffix('.')}.")
            else:
                typed[name] = value
        return typed

    def _leave_to_buckets(self, typed: dict[str, Any]) -> None:
        """Take back what a bucket_config replaces, or the bucket_config itself from a dataset without buckets."""
        dataset = typed.get("dataset", {})
        taken = self._arguments("dataset", dataset) if "type" in dataset else {}
        names, reason = [*REPLACED_BY_BUCKETS], "with bucket_config, which has its own"
        if taken and "bucket_config" not in taken:
            names, reason = ["bucket_config"], f"with a {dataset['type']}: a VariableVideoTextDataset has buckets"
        for name in names:
            if name in typed and typed[name] != self.fields[name].default:  # a dumped config holds the default
                value = "" if name == "bucket_config" else f"={typed[name]!r}"
                self._complain((name,), f"{name}{value} has no effect {reason}.", changes_nothing=True)
                typed[name] = self.fields[name].default

    def _complain(self, path: tuple[str, ...], text: str, *, changes_nothing: bool = False) -> None:
        """Add a problem, if any, with where the value was set; one that changes no result is a note if a file has it."""
        origin, found = self.origins.get(path) or self.origins.get(path[:1]), self.problems
        if changes_nothing:
            set_at = [
                origin or "",
                *(self.origins[key] for key in self.origins if key[:1] == path),
            ]  # it, or a key in it
            origin = next((place for place in set_at if place.startswith(COMMAND_LINE)), origin)
            found = self.problems if (origin or "").startswith(COMMAND_LINE) else self.notes
        text = f"{text} ({origin})" if text and origin else text
        if text and text not in found:
            found.append(text)

    def _hint(self, name: str, *, typed: bool = False) -> str:
        """What a name that is no field may mean; the command line has more names than a file."""
        schema = self.schema
        if name in schema.open_names:
            return f" Instead: {schema.open_names[name]}."
        more = (*schema.aliases, *FLAGS, *self.options) if typed else ()
        ours = {known.replace("-", "_"): known for known in (*self.fields, *more)}
        near = get_close_matches(name, ours, n=1, cutoff=NEAR)
        other = get_close_matches(name, schema.other_names, n=1, cutoff=VERY_NEAR)
        found = [schema.other_names[theirs] for theirs in other] or [ours[known] for known in near]
        if not found:
            return ""
        meant = found[0]
        if typed:
            meant = f"--{dashed(meant)}"
        elif meant in schema.aliases:
            meant = ".".join(schema.aliases[meant].path)
        return f" Did you mean {meant!r}?"

    def _upgrade(self) -> None:
        """Replace older spellings by the current ones."""
        for name, value in self.values.items():
            try:
                self.values[name] = upgrade(name, value)
            except UserError as error:
                self._complain((name,), str(error))

    def _set_key(self, setting: Setting) -> None:
        """Set a key inside a component, or deeper."""
        name, *keys = setting.path
        default = self.fields[name].default
        target = self.values.setdefault(name, copy.deepcopy(default) if isinstance(default, dict) else {})
        if target is None:
            target = self.values[name] = {}
        for current in replaced_by(name, keys[0]):
            if isinstance(target, dict) and not self.origins.get((name, current), "").startswith(COMMAND_LINE):
                target.pop(current, None)  # of the file: an older spelling on the command line replaces it
        for key in keys[:-1]:
            target = target.setdefault(key, {}) if isinstance(target, dict) else target
        if not isinstance(target, dict):
            self.problems.append(f"{setting.flag}: {'.'.join([name, *keys[:-1]])} is {target!r} and has no keys.")
            return
        # a nested value has no declared type, so it takes that of what it replaces, or of the argument's default
        before, value = target.get(keys[-1]), setting.value
        if before is None and len(keys) == 1 and (argument := self._arguments(name, target).get(keys[0])):
            before = argument.default
        if setting.text is not None and value is not None and isinstance(before, bool | str):
            try:
                value = parse_bool(setting.text) if isinstance(before, bool) else setting.text
            except ValueError as error:
                self.problems.append(f"{setting.flag}: {error}.")
        if isinstance(value, str) and isinstance(before, list | tuple):
            value = [value]  # a list of one
        target[keys[-1]] = value
        self.origins[name, keys[0]] = f"{COMMAND_LINE} {setting.flag}"

    def _arguments(self, name: str, component: Any) -> Mapping[str, inspect.Parameter]:
        """Arguments of the constructor that a component names; none when it is not known."""
        registry = self.registries.get(name)
        if registry is None or not isinstance(component, dict):
            return {}
        kind = component.get("type", DEFAULT_DATASET if name == "dataset" else None)
        return inspect.signature(registry.get(kind)).parameters if kind in registry.choices() else {}

    def _check_component(self, name: str, component: dict[str, Any], registry: Registry) -> None:
        """One key at a time, so that each problem can say where the key was set."""
        kind = {"type": component["type"]} if "type" in component else component
        if wrong := registry.problems(kind):
            for problem in wrong:
                self._complain((name, "type"), f"{name}: {problem}")
            return
        arguments = self._arguments(name, component)
        for key, value in component.items():
            for problem in registry.problems({**kind, key: value}):
                self._complain((name, key), f"{name}: {problem}")
            if key in arguments and (expected := wrong_type(value, arguments[key].annotation)):
                self._complain((name, key), f"{name}.{key}={value!r}: expected {expected}.")

    def _share_with_dataset(self) -> None:
        """A field and the dataset's key of the same name are one setting; the command line wins over the file."""
        dataset = self.values.get("dataset")
        if not isinstance(dataset, dict):
            return
        for name in [name for name in DATASET_FIELDS if name in self.fields and name in dataset]:
            outer, inner = self.values.get(name), dataset[name]
            outer_origin = self.origins.get((name,), "")
            inner_origin = self.origins.get(("dataset", name)) or self.origins.get(("dataset",), "")
            from_command = [origin.startswith(COMMAND_LINE) for origin in (outer_origin, inner_origin)]
            if outer is None or from_command == [False, True]:
                self.values[name], self.origins[name,] = inner, inner_origin
            elif inner is None or from_command == [True, False]:
                dataset[name], self.origins["dataset", name] = outer, outer_origin
            elif outer != inner and not (isinstance(outer, list | tuple) and [*outer] == [*inner]):
                text = f"{name}={outer!r} and dataset.{name}={inner!r} contradict each other; keep one."
                self._complain(("dataset", name), text)

    def _complete_dataset(self, typed: Mapping[str, Any]) -> dict[str, Any]:
        """The dataset component with a type, and with those fields of the top level that its constructor takes."""
        dataset = {"type": DEFAULT_DATASET, **typed["dataset"]}
        if "type" not in typed["dataset"]:
            self.origins["dataset", "type"] = "default"
        if "dataset" in self.registries:
            taken = set(
                self._arguments("dataset", dataset)
            )  # empty for an unknown type, which `_check_component` reports
        else:
            taken = set(DATASET_FIELDS) if dataset["type"] == DEFAULT_DATASET else set()
        for name in [name for name in DATASET_FIELDS if name in typed]:
            if name == "use_image_transform" and typed[name] is not True:
                continue
            if name in taken and typed[name] is not None:
                dataset[name] = typed[name]
                if name == "data_path" and str(dataset["type"]).startswith("Cached") and Path(typed[name]).is_dir():
                    text = f"{name}={typed[name]!r} is a folder (*.bin are not read): name the table, and its cache"
                    self._complain((name,), f"{text} of tools.cache_features as --dataset.cache_dir.")
                self.origins.setdefault(("dataset", name), self.origins.get((name,), "default"))
            elif name in taken and name == "data_path":
                self.problems.append("data_path is not set: name the data file, for example --data-path clips.csv.")
            elif name == "use_image_transform" and taken:
                text = f"{name}=True has no effect: {dataset['type']} does not take it."
                self._complain((name,), text, changes_nothing=True)
        return dataset


def listing(problems: Sequence[str]) -> str:
    """One problem as it is; several, numbered."""
    if len(problems) == 1:
        return problems[0]
    return f"{len(problems)} problems in the config:\n" + "\n".join(f"  {i}. {p}" for i, p in enumerate(problems, 1))


def wrong_type(value: Any, annotation: Any) -> str:
    """What a constructor's argument should be, where `value` is not; annotations of richer types are not looked into."""
    kinds = {typing.get_origin(member) or member for member in members(annotation)}
    is_flag = bool in kinds and value in (0, 1)  # 0 and 1 may stand for False and True
    if is_flag or not kinds <= PLAIN or (Sequence in kinds and isinstance(value, list | tuple)):
        return ""
    try:
        coerce(value, annotation)
    except TypeError:
        return describe(annotation)
    return ""
