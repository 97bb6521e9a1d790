"""Raw values of a file and of a command line are merged, typed and checked; everything wrong is told at once."""

import copy
import inspect
import logging
import os
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from opensora.config.command_line import FLAGS, Command, Setting, dashed, parse_bool
from opensora.config.schema import (
    REQUIRED,
    Field,
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
OTHERS_FIELDS = 3  # so many that the schema does not know and another one does are no slip
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
    options: Sequence[str] = ()  # of a tool, besides the fields

    def __post_init__(self) -> None:
        self.fields = schema_fields(self.schema)

    def take_file(self, values: Mapping[str, Any], origins: Origins) -> None:
        """Take over the values of a file.

        Raises:
            UserError: it is one for another script.
        """
        self._refuse_others([key for key in values if key not in self.fields and key not in self.schema.removed])
        self.origins.update(origins)
        for key, value in values.items():
            if key in self.schema.removed:
                if problem := self.schema.removed[key].problem(key, value):
                    self._complain((key,), problem)
                continue
            if key not in self.fields:
                self._complain((key,), self._unknown_key(key))
                continue
            if found := _not_plain(value):
                self._complain((key,), f"{key} holds {found}; a config holds plain data.")
            if key == "dataset" and value is None:
                value = {}  # so a file may say that it leaves the dataset to the fields of the top level
            if values.get("bucket_config") is not None:
                # Open-Sora's way to say that buckets have their own
                if key == "batch_size" and value is None:
                    continue
                if key == "dataset" and isinstance(value, dict):
                    value = {k: v for k, v in value.items() if k not in REPLACED_BY_BUCKETS or not _is_none(v)}
            if key in NONE_IS_EMPTY and isinstance(value, list):
                value = ["" if entry is None else entry for entry in value]
            self.values[key] = self._present(key, value)

    def _refuse_others(self, unknown: Sequence[str]) -> None:
        for other, script in SCRIPTS.items() if len(unknown) >= OTHERS_FIELDS else ():
            if other is not self.schema and set(unknown) <= schema_fields(other).keys() | other.removed.keys():
                raise UserError(
                    f"this is a config for {script}: {', '.join(map(repr, unknown[:OTHERS_FIELDS]))} and what is beside them "
                    f"are fields of {other.__name__}, not of {self.schema.__name__}."
                )

    def imports_with(self, command: Command) -> list[str]:
        """What is to be imported before any name is looked up: the command line's `imports`, or the file's."""
        chosen = [setting.value for setting in command.settings if setting.path == ("imports",)]
        names = chosen[-1] if chosen else self.values.get("imports")
        if not isinstance(names, list | tuple):
            return []  # another type is complained about with everything else
        return [name for name in names if isinstance(name, str)]

    def problems_of(self, command: Command) -> list[str]:
        """What is wrong with the command line by itself."""
        return command.problems + [self._unknown_flag(flag, key) for flag, key in command.unknown]

    def take_command(self, command: Command) -> None:
        """Write what the command line sets over what the file set."""
        self.problems += self.problems_of(command)
        # whole fields first, wherever they stand: `--model.depth 2 --model "{...}"` means both
        for setting in sorted(command.settings, key=lambda setting: len(setting.path) > 1):
            if len(setting.path) == 1:
                self._replace(setting)
            else:
                self._set_key(setting)
        for replaced in self._replaced_by(command):
            self.values.pop(replaced, None)
            self.origins.pop((replaced,), None)

    def _replaced_by(self, command: Command) -> set[str]:
        """Fields of the file whose place fields of the command line take."""
        chosen = {setting.path[0] for setting in command.settings if setting.value is not None}
        replaced = {other for name in chosen for other in self.schema.replaces.get(name, ())}
        # `--val-every 0` switches off what the file says of validation; in the file itself the two contradict each other
        for switch in [setting.path[0] for setting in command.settings if setting.value == 0]:
            if switch in SWITCHES:
                replaced |= {name for name in self.fields if name.startswith(SWITCHES[switch])} - {switch}
        return replaced - chosen

    def finish(self) -> Any:
        """Type every field, complete the dataset, check everything, and build the config.

        Raises:
            UserError: lists everything that is wrong.
        """
        self._share_with_dataset()
        typed = {name: value for f in self.fields.values() for name, value in self._typed(f)}
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
        origin = self.origins.get(path) or self.origins.get(path[:1])
        self.problems.append(f"{text} ({origin})" if origin else text)

    def _unknown_key(self, key: str) -> str:
        if key in self.schema.aliases:
            return f"{key!r} is a name for the command line; in a file set {'.'.join(self.schema.aliases[key].path)}."
        if key in NOT_NEEDED:
            return f"{key!r} is not a field of {self.schema.__name__}: it is not needed here, leave it out."
        return f"{key!r} is not a field of {self.schema.__name__}.{did_you_mean(key, list(self.fields))}"

    def _unknown_flag(self, flag: str, key: str) -> str:
        if owner := next((name for name in self.values if key in self._arguments(name)), None):
            return f"{flag} is not a field, but {owner} takes it: write --{owner}.{key}."
        names = [dashed(name) for name in (*self.fields, *self.schema.aliases)] + [*FLAGS, *self.options]
        hint = did_you_mean(dashed(key), names).replace("mean '", "mean '--")
        return f"{flag} is not a field of {self.schema.__name__}.{hint} --help lists all."

    def _present(self, name: str, value: Any) -> Any:
        """Give an older spelling, of a value or of names inside a component, its present one."""
        legacy, origin = LEGACY.get(name), self.origins.get((name,))
        if legacy is not None and (new := legacy.translate(value)) is not value:
            # without an origin it is of a checkpoint, where nobody can mend it
            if origin and new != str(value) and os.environ.get("RANK", "0") == "0":
                logger.warning("%s=%r is written %r now (%s).", name, value, new, origin)
            return new
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

    def _replace(self, setting: Setting) -> None:
        name = setting.path[0]
        value = setting.value
        if name in NONE_IS_EMPTY and isinstance(value, list):
            value = ["" if entry == "None" else entry for entry in value]
        self.origins = {path: origin for path, origin in self.origins.items() if path[0] != name}
        self.origins[name,] = f"{COMMAND_LINE} {setting.flag}"
        self.values[name] = self._present(name, value)

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
        if replaced is None and len(setting.path) == 2 and key in (arguments := self._arguments(name)):
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

    def _arguments(self, name: str) -> Mapping[str, inspect.Parameter]:
        """Arguments of the constructor that a component names; none when it is not known."""
        registry, component = self.registries.get(name), self.values.get(name)
        kind = (
            component.get("type", DEFAULT_DATASET if name == "dataset" else None)
            if isinstance(component, dict)
            else None
        )
        return {} if registry is None else self._arguments_of(registry, {"type": kind})

    @staticmethod
    def _arguments_of(registry: Registry, component: Mapping[str, Any]) -> Mapping[str, inspect.Parameter]:
        kind = component.get("type")
        return inspect.signature(registry.get(kind)).parameters if kind in registry.choices() else {}

    # --- checks

    def _typed(self, f: Field) -> Iterator[tuple[str, Any]]:
        """Yield (name, value) once if the value has the right type and range, or complain."""
        if f.name not in self.values:
            if f.default is REQUIRED:
                self.problems.append(f"{f.name} is missing; expected {describe(f.annotation)}: {f.doc}.")
            else:
                yield f.name, copy.deepcopy(f.default)
            return
        value = self.values[f.name]
        try:
            value = coerce(value, f.annotation)
        except TypeError as error:
            self._complain((f.name,), f"{f.name}={value!r}: {error}.")
            return
        if problem := f.problem(value):
            self._complain((f.name,), f"{f.name}={value!r}: {problem}.")
        else:
            yield f.name, value

    def _check_component(self, name: str, component: dict[str, Any], registry: Registry) -> None:
        """One key at a time, so that each problem can say where the key was set."""
        kind = {"type": component["type"]} if "type" in component else component
        wrong = registry.problems(kind)
        for problem in wrong:
            self._complain((name, "type"), f"{name}: {problem}")
        for key in component if not wrong else ():
            for problem in registry.problems({**kind, key: component[key]}):
                self._complain((name, key), f"{name}: {problem}")
        for key, parameter in self._arguments_of(registry, component).items() if not wrong else ():
            if key in component and (expected := wrong_type(component[key], parameter.annotation)):
                self._complain((name, key), f"{name}.{key}={component[key]!r}: expected {expected}.")

    # --- the dataset, which shares fields with the top level

    def _shared_fields(self) -> list[str]:
        return [name for name in DATASET_FIELDS if name in self.fields]

    def _share_with_dataset(self) -> None:
        """A field and the dataset's key of the same name are one setting; the command line wins over the file."""
        dataset = self.values.get("dataset")
        if not isinstance(dataset, dict):
            return
        for name in [name for name in self._shared_fields() if name in dataset]:
            outer, inner = self.values.get(name), dataset[name]
            outer_origin, inner_origin = self.origins.get((name,), ""), self._dataset_origin(name)
            from_command = [origin.startswith(COMMAND_LINE) for origin in (outer_origin, inner_origin)]
            if outer is None or from_command == [False, True]:
                self.values[name], self.origins[name,] = inner, inner_origin
            elif inner is None or from_command == [True, False]:
                dataset[name], self.origins["dataset", name] = outer, outer_origin
            elif _as_list(outer) != _as_list(inner):
                self._complain(
                    ("dataset", name), f"{name}={outer!r} and dataset.{name}={inner!r} contradict each other; keep one."
                )

    def _dataset_origin(self, name: str) -> str:
        return self.origins.get(("dataset", name)) or self.origins.get(("dataset",), "")

    def _complete_dataset(self, typed: Mapping[str, Any]) -> dict[str, Any]:
        """The dataset component with a type, and with those fields of the top level that its constructor takes."""
        dataset = {"type": DEFAULT_DATASET, **typed["dataset"]}
        if "type" not in typed["dataset"]:
            self.origins["dataset", "type"] = "default"
        registry = self.registries.get("dataset")
        if registry is not None and registry.problems({"type": dataset["type"]}):
            return dataset  # the unknown type is complained about elsewhere
        for name in [name for name in self._shared_fields() if name in typed]:
            taken = _takes(registry, dataset["type"], name)
            if name == "use_image_transform" and not typed[name]:
                continue
            if registry is not None and not taken and name == "use_image_transform":
                self._complain((name,), f"{name}=True has no effect: {dataset['type']} does not take it.")
            if taken and typed[name] is not None:
                dataset[name] = typed[name]
                self.origins.setdefault(("dataset", name), self.origins.get((name,), "default"))
            elif taken and name == "data_path":
                self.problems.append("data_path is not set: name the data file, for example --data-path clips.csv.")
        return dataset


def _takes(registry: Registry | None, type_: str, key: str) -> bool:
    """Whether the constructor takes an argument; without its registry, only the default dataset is known to."""
    return type_ == DEFAULT_DATASET if registry is None else not registry.problems({"type": type_, key: None})


def _not_plain(value: Any) -> str:
    """What in a value is no plain data, or an empty string."""
    if isinstance(value, Mapping):
        value = [*value.keys(), *value.values()]
    if isinstance(value, list | tuple):
        return next((found for item in value if (found := _not_plain(item))), "")
    plain = value is None or isinstance(value, bool | int | float | str)
    return "" if plain else f"{value!r}, a {type(value).__name__}"


def _as_list(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


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


def _is_none(value: Any) -> bool:
    """Whether it is None, or (None, None)."""
    return value is None or (isinstance(value, list | tuple) and all(entry is None for entry in value))
