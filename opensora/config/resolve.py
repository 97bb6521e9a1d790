"""Raw values of a file and of a command line are merged, typed and checked; all problems are reported together."""

import copy
import inspect
import logging
import os
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from opensora.config.command_line import FLAGS, Command, Setting, dashed, parse_bool
from opensora.config.schema import (
    REQUIRED,
    InferenceConfig,
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
from opensora.config.upgrade import KEY_ALIASES, LEGACY, NONE_IS_EMPTY, NOT_NEEDED
from opensora.registry import Registry, did_you_mean
from opensora.utils.errors import UserError

logger = logging.getLogger(__name__)

Origins = dict[tuple[str, ...], str]  # (field,) or (field, key) -> where its value was set

COMMAND_LINE = "command line"
# an argument's annotation -> the values that it takes; 0 and 1 may say False and True
PLAIN: dict[Any, tuple[type, ...]] = {
    bool: (bool, int),
    int: (int,),
    float: (int, float),
    str: (str,),
    types.NoneType: (types.NoneType,),
    Literal: (str, int),
    Sequence: (list, tuple),
}
SCRIPTS: dict[Schema, str] = {
    TrainConfig: "scripts/train.py",
    InferenceConfig: "scripts/inference.py",
    VAETrainConfig: "scripts/train_vae.py",
    VAEInferenceConfig: "scripts/inference_vae.py",
}
DEFAULT_DATASET = "VideoTextDataset"
# fields that a dataset component takes over when it does not set them itself
DATASET_FIELDS = (
    "data_path",
    "root",
    "num_frames",
    "frame_interval",
    "image_size",
    "use_image_transform",
    "bucket_config",
)
REPLACED_BY_BUCKETS = ("num_frames", "image_size", "batch_size")
SWITCHES = {"val_every": "val_", "eval_every": "eval_"}


@dataclass
class Draft:
    """A config in the making: raw values, where each was set, and all that is wrong so far."""

    schema: Schema
    registries: Mapping[str, Registry]
    values: dict[str, Any] = field(default_factory=dict)
    origins: Origins = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    options: Sequence[str] = ()  # of a tool, which are not fields

    def __post_init__(self) -> None:
        self.fields = schema_fields(self.schema)

    def take_file(self, values: Mapping[str, Any], origins: Origins) -> None:
        """Take over the values of a file.

        Raises:
            UserError: it is one for another script.
        """
        removed, has_buckets = self.schema.removed, values.get("bucket_config") is not None
        unknown = [key for key in values if key not in self.fields and key not in removed]
        for other, script in SCRIPTS.items() if len(unknown) >= 3 else ():  # one or two may be slips
            if other is not self.schema and set(unknown) <= schema_fields(other).keys() | other.removed.keys():
                raise UserError(
                    f"this is a config for {script}: {', '.join(map(repr, unknown[:3]))} and others are fields of "
                    f"{other.__name__}, not of {self.schema.__name__}."
                )
        self.origins.update(origins)
        for key, value in values.items():
            if key in removed:
                self._complain((key,), removed[key].problem(key, value))
            elif key not in self.fields:
                self._complain((key,), self._unknown_key(key))
            elif not (has_buckets and key == "batch_size" and value is None):  # Open-Sora: buckets have their own
                self._complain((key,), _not_plain(key, value))
                if key == "dataset":
                    value = {} if value is None else value  # None leaves the dataset to the fields of the top level
                    if has_buckets and isinstance(value, dict):
                        unset = (None, (None, None), [None, None])
                        value = {k: v for k, v in value.items() if k not in REPLACED_BY_BUCKETS or v not in unset}
                self.values[key] = self._current(key, value)

    def problems_of(self, command: Command) -> list[str]:
        """What is wrong with the command line by itself."""
        return command.problems + [self._unknown_flag(flag, key) for flag, key in command.unknown]

    def take_command(self, command: Command) -> None:
        """Write what the command line sets over what the file set."""
        self.problems += self.problems_of(command)
        # whole fields first, wherever they stand: `--model.depth 2 --model "{...}"` means both
        for setting in sorted(command.settings, key=lambda setting: len(setting.path) > 1):
            if len(setting.path) == 1:
                name = setting.path[0]
                self.origins = {path: origin for path, origin in self.origins.items() if path[0] != name}
                self.origins[name,] = f"{COMMAND_LINE} {setting.flag}"
                self.values[name] = self._current(name, setting.value)
            else:
                self._set_key(setting)
        chosen = {setting.path[0] for setting in command.settings if setting.value is not None}
        replaced = {other for name in chosen for other in self.schema.replaces.get(name, ())}
        # `--val-every 0` switches off what the file sets of validation; in the file itself the two contradict each other
        for prefix in [SWITCHES[s.path[0]] for s in command.settings if s.value == 0 and s.path[0] in SWITCHES]:
            replaced |= {name for name in self.fields if name.startswith(prefix)}
        for name in replaced - chosen:
            self.values.pop(name, None)
            self.origins.pop((name,), None)

    def finish(self) -> Any:
        """Type every field, complete the dataset, check everything, and build the config.

        Raises:
            UserError: lists everything that is wrong.
        """
        self._share_with_dataset()
        typed = self._typed()
        if "dataset" in typed:
            typed["dataset"] = self._complete_dataset(typed)
        for name in REPLACED_BY_BUCKETS if typed.get("bucket_config") is not None else ():
            if name in typed and typed[name] != self.fields[name].default:  # a dumped config holds the default
                self._complain((name,), f"{name}={typed[name]!r} has no effect with bucket_config, which has its own.")
        for name, registry in self.registries.items():
            if isinstance(typed.get(name), dict):
                self._check_component(name, typed[name], registry)
        config: RunConfig | None = self.schema(**typed) if len(typed) == len(self.fields) else None
        self.problems += config.problems() if config else []
        if self.problems:
            raise UserError(listing(self.problems))
        return config

    # --- taking values over

    def _complain(self, path: tuple[str, ...], text: str) -> None:
        """Add a problem, if any, with where the value was set."""
        origin = self.origins.get(path) or self.origins.get(path[:1])
        if text:
            self.problems.append(f"{text} ({origin})" if origin else text)

    def _unknown_key(self, key: str) -> str:
        if key in self.schema.aliases:
            return f"{key!r} is a name for the command line; in a file set {'.'.join(self.schema.aliases[key].path)}."
        if key in NOT_NEEDED:
            return f"{key!r} is not a field of {self.schema.__name__}: it is not needed here, leave it out."
        return f"{key!r} is not a field of {self.schema.__name__}.{did_you_mean(key, list(self.fields))}"

    def _unknown_flag(self, flag: str, key: str) -> str:
        if owner := next((name for name in self.values if key in self._arguments(name, self.values[name])), None):
            return f"{flag} is not a field, but {owner} takes it: write --{owner}.{key}."
        names = [dashed(name) for name in (*self.fields, *self.schema.aliases)] + [*FLAGS, *self.options]
        hint = did_you_mean(dashed(key), names).replace("mean '", "mean '--")
        return f"{flag} is not a field of {self.schema.__name__}.{hint} --help lists all."

    def _current(self, name: str, value: Any) -> Any:
        """The value with older spellings, of itself or of keys inside a component, replaced by the current ones."""
        legacy, origin = LEGACY.get(name), self.origins.get((name,))
        if legacy is not None and (new := legacy.translate(value)) is not value:
            # a checkpoint has no origins, and nobody can change it
            if origin and new != str(value) and os.environ.get("RANK", "0") == "0":
                logger.warning("%s=%r is written %r now (%s).", name, value, new, origin)
            return new
        if name in NONE_IS_EMPTY and isinstance(value, list):
            return ["" if entry in (None, "None") else entry for entry in value]
        if not isinstance(value, dict):
            return value
        for old, new in KEY_ALIASES.get(name, {}).items():
            if old not in value:
                continue
            if new in value and value[new] != value[old]:
                self._complain(
                    (name, old), f"{name}: {old}={value[old]!r} and {new}={value[new]!r} are one setting; keep {new}."
                )
            value.setdefault(new, value.pop(old))
            if (name, old) in self.origins:
                self.origins.setdefault((name, new), self.origins.pop((name, old)))
        return value

    def _set_key(self, setting: Setting) -> None:
        """Set a key inside a component, or deeper."""
        name, *keys = setting.path
        default = self.fields[name].default
        target = self.values.setdefault(name, copy.deepcopy(default) if isinstance(default, dict) else {})
        if target is None:
            target = self.values[name] = {}
        for key in keys[:-1]:
            target = target.setdefault(key, {}) if isinstance(target, dict) else target
        if not isinstance(target, dict):
            self.problems.append(f"{setting.flag}: {'.'.join([name, *keys[:-1]])} is {target!r} and has no keys.")
            return
        try:
            target[keys[-1]] = self._as_replaced(setting, target.get(keys[-1]))
        except ValueError as error:
            self.problems.append(f"{setting.flag}: {error}.")
        self.origins[name, keys[0]] = f"{COMMAND_LINE} {setting.flag}"

    def _as_replaced(self, setting: Setting, replaced: Any) -> Any:
        """A nested value has no declared type, so it takes that of what it replaces, or of the argument's default."""
        name, key = setting.path[:2]
        if (
            replaced is None
            and len(setting.path) == 2
            and key in (arguments := self._arguments(name, self.values[name]))
        ):
            replaced = arguments[key].default
        if setting.text is None or setting.value is None:
            return setting.value
        if isinstance(replaced, bool):
            return parse_bool(setting.text)
        if isinstance(replaced, str):
            return setting.text
        if isinstance(replaced, int | float) and isinstance(setting.value, str):
            raise ValueError(f"{setting.text!r} is not a number, as {replaced!r} is")
        if isinstance(replaced, list | tuple) and not isinstance(setting.value, list | tuple):
            raise ValueError(f"{setting.text!r} is not a list, as {replaced!r} is; write \"('{setting.text}',)\"")
        return setting.value

    def _arguments(self, name: str, component: Any) -> Mapping[str, inspect.Parameter]:
        """Arguments of the constructor that a component names; none when it is not known."""
        registry = self.registries.get(name)
        if registry is None or not isinstance(component, dict):
            return {}
        kind = component.get("type", DEFAULT_DATASET if name == "dataset" else None)
        return inspect.signature(registry.get(kind)).parameters if kind in registry.choices() else {}

    # --- checks

    def _typed(self) -> dict[str, Any]:
        """The fields whose values have the right type and range; the others are problems."""
        typed = {}
        for name, f in self.fields.items():
            if name not in self.values and f.default is REQUIRED:
                self.problems.append(f"{name} is missing; expected {describe(f.annotation)}: {f.doc}.")
            elif name not in self.values:
                typed[name] = copy.deepcopy(f.default)
            else:
                value = self.values[name]
                try:
                    value = coerce(value, f.annotation)
                    problem = f.problem(value)
                except TypeError as error:
                    problem = str(error)
                if problem:
                    self._complain((name,), f"{name}={value!r}: {problem.removesuffix('.')}.")
                else:
                    typed[name] = value
        return typed

    def _check_component(self, name: str, component: dict[str, Any], registry: Registry) -> None:
        """One key at a time, so that each problem can say where the key was set."""
        kind = {"type": component["type"]} if "type" in component else component
        wrong = registry.problems(kind)
        for problem in wrong:
            self._complain((name, "type"), f"{name}: {problem}")
        for key in component if not wrong else ():
            for problem in registry.problems({**kind, key: component[key]}):
                self._complain((name, key), f"{name}: {problem}")
        for key, parameter in self._arguments(name, component).items() if not wrong else ():
            if key in component and (expected := wrong_type(component[key], parameter.annotation)):
                self._complain((name, key), f"{name}.{key}={component[key]!r}: expected {expected}.")

    # --- the dataset, which shares fields with the top level

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
            elif (list(outer) if isinstance(outer, tuple) else outer) != (
                list(inner) if isinstance(inner, tuple) else inner
            ):
                self._complain(
                    ("dataset", name), f"{name}={outer!r} and dataset.{name}={inner!r} contradict each other; keep one."
                )

    def _complete_dataset(self, typed: Mapping[str, Any]) -> dict[str, Any]:
        """The dataset component with a type, and with those fields of the top level that its constructor takes."""
        dataset = {"type": DEFAULT_DATASET, **typed["dataset"]}
        if "type" not in typed["dataset"]:
            self.origins["dataset", "type"] = "default"
        registry = self.registries.get("dataset")
        if registry is not None and registry.problems({"type": dataset["type"]}):
            return dataset  # the unknown type is complained about elsewhere
        for name in [name for name in DATASET_FIELDS if name in typed]:
            if name == "use_image_transform" and not typed[name]:
                continue
            taken = dataset["type"] == DEFAULT_DATASET  # all that is known without a registry
            if registry is not None:
                taken = not registry.problems({"type": dataset["type"], name: None})
                if not taken and name == "use_image_transform":
                    self._complain((name,), f"{name}=True has no effect: {dataset['type']} does not take it.")
            if taken and typed[name] is not None:
                dataset[name] = typed[name]
                self.origins.setdefault(("dataset", name), self.origins.get((name,), "default"))
            elif taken and name == "data_path":
                self.problems.append("data_path is not set: name the data file, for example --data-path clips.csv.")
        return dataset


def _not_plain(key: str, value: Any) -> str:
    """The problem of a value that is not plain data, or an empty string."""
    if isinstance(value, Mapping):
        value = [*value.keys(), *value.values()]
    if isinstance(value, list | tuple):
        return next((problem for item in value if (problem := _not_plain(key, item))), "")
    plain = value is None or isinstance(value, bool | int | float | str)
    return "" if plain else f"{key} holds {value!r}, a {type(value).__name__}; a config holds plain data."


def listing(problems: Sequence[str]) -> str:
    """One problem as it is; several, numbered."""
    if len(problems) == 1:
        return problems[0]
    return f"{len(problems)} problems in the config:\n" + "\n".join(f"  {i}. {p}" for i, p in enumerate(problems, 1))


def wrong_type(value: Any, annotation: Any) -> str:
    """What a constructor's argument should be, where `value` is not; annotations of richer types are not looked into."""
    kinds = [typing.get_origin(member) or member for member in members(annotation)]
    if not all(kind in PLAIN for kind in kinds):
        return ""
    fits = any(isinstance(value, PLAIN[kind]) for kind in kinds)
    if isinstance(value, bool) and bool not in kinds:
        fits = False  # Python counts it among the numbers
    if Literal in kinds and isinstance(value, str) and str not in kinds:
        fits = any(value in typing.get_args(member) for member in members(annotation))
    return "" if fits else describe(annotation)
