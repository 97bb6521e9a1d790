"""A config file and a command line become one checked, typed object (architecture D1).

    cfg = parse_config(TrainConfig, {"model": MODELS, "vae": MODELS, "dataset": DATASETS})

What fields there are is in `config_schema.py`, the grammar of the command line in `config_cli.py`.
"""

import ast
import copy
import inspect
import json
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from mmengine.config import Config

from opensora.registry import Registry, did_you_mean
from opensora.utils.config_cli import Setting, help_text, parse_bool, read_command
from opensora.utils.config_schema import (
    REQUIRED,
    Field,
    InferenceConfig,
    RunConfig,
    Schema,
    TrainConfig,
    VAETrainConfig,
    coerce,
    describe,
    schema_fields,
)
from opensora.utils.errors import UserError

__all__ = [
    "InferenceConfig",
    "TrainConfig",
    "VAETrainConfig",
    "config_from_dict",
    "dump_config",
    "parse_config",
    "to_dict",
]

AnyConfig = TypeVar("AnyConfig", bound=RunConfig)
Origins = dict[tuple[str, ...], str]

COMMAND_LINE = "command line"
DEFAULT_DATASET = "VideoTextDataset"
# fields that a dataset component takes over when it does not set them itself
DATASET_FIELDS = ("data_path", "root", "num_frames", "frame_interval", "image_size", "use_image_transform")
# older spellings of keys inside components
KEY_ALIASES = {"model": {"enable_flashattn": "enable_flash_attn"}}


@dataclass
class _Draft:
    """A config in the making: raw values, where each came from, and all that is wrong so far."""

    schema: Schema
    registries: Mapping[str, Registry]
    values: dict[str, Any] = field(default_factory=dict)
    origins: Origins = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def complain(self, path: tuple[str, ...], text: str) -> None:
        origin = self.origins.get(path) or self.origins.get(path[:1])
        self.problems.append(f"{text} ({origin})" if origin else text)


def parse_config(
    schema: type[AnyConfig], registries: Mapping[str, Registry] | None = None, argv: Sequence[str] | None = None
) -> AnyConfig:
    """Read the config that the command line names, with the overrides it carries, and check all of it.

    Args:
        schema: `TrainConfig`, `InferenceConfig` or `VAETrainConfig`.
        registries: for each component field, where its type is registered; a field without one is not looked into.
        argv: the command line without the program; `sys.argv[1:]` when None.

    Raises:
        UserError: lists everything that is wrong.
        SystemExit: after `--help` and `--print-config`.
    """
    draft = _Draft(schema, registries or {})
    command = read_command(schema, sys.argv[1:] if argv is None else argv, lambda key: _owner(draft, key))
    if command.help:
        sys.stdout.write(help_text(schema))
        raise SystemExit(0)
    if command.config is None:
        raise UserError("no config file given; usage: SCRIPT CONFIG [--field VALUE ...] (--help lists the fields).")
    _read_into(draft, Path(command.config))
    # read again: with the file's components known, an unknown flag can be told which component takes it
    command = read_command(schema, sys.argv[1:] if argv is None else argv, lambda key: _owner(draft, key))
    draft.problems += command.problems
    for setting in command.settings:
        _apply(draft, setting)
    config = _finish(draft)
    if command.print_config:
        sys.stdout.write(_provenance(config, draft.origins))
        raise SystemExit(0)
    return config


def config_from_dict(
    schema: type[AnyConfig], values: Mapping[str, Any], registries: Mapping[str, Registry] | None = None
) -> AnyConfig:
    """The config that a file with these values would give; the inverse of `to_dict`."""
    draft = _Draft(schema, registries or {})
    _adopt(draft, copy.deepcopy(dict(values)), {})
    return _finish(draft)


def to_dict(config: RunConfig) -> dict[str, Any]:
    """All fields as plain data."""
    return asdict(config)


def dump_config(config: RunConfig, path: Path | str) -> None:
    """Write a config as JSON; `parse_config` reads the file back."""
    Path(path).write_text(json.dumps(to_dict(config), indent=2) + "\n", encoding="utf-8")


def _read_into(draft: _Draft, path: Path) -> None:
    values, origins, problems = _read_file(path)
    draft.problems += problems
    _adopt(draft, values, origins)


def _adopt(draft: _Draft, values: dict[str, Any], origins: Origins) -> None:
    """Take over the values of a file."""
    draft.origins.update(origins)
    known = schema_fields(draft.schema)
    for key, value in values.items():
        if key not in known:
            draft.complain((key,), _unknown_key(draft.schema, key, list(known)))
            continue
        if problem := _not_plain(value):
            draft.complain((key,), f"{key}: {problem}; a config holds plain data.")
        draft.values[key] = _rename_keys(draft, key, value)


def _unknown_key(schema: Schema, key: str, known: list[str]) -> str:
    if key in schema.aliases:
        return f"{key!r} is a name for the command line; in a file write {'.'.join(schema.aliases[key].path)}."
    return f"{key!r} is not a field of {schema.__name__}.{did_you_mean(key, known)}"


def _not_plain(value: Any) -> str:
    """What in a value is no plain data, or an empty string."""
    if isinstance(value, Mapping):
        return next((p for item in value.values() if (p := _not_plain(item))), "")
    if isinstance(value, list | tuple):
        return next((p for item in value if (p := _not_plain(item))), "")
    plain = value is None or isinstance(value, bool | int | float | str)
    return "" if plain else f"{value!r} is a {type(value).__name__}"


def _rename_keys(draft: _Draft, name: str, value: Any) -> Any:
    """Give older spellings inside a component their present name."""
    if not isinstance(value, dict):
        return value
    for old, new in KEY_ALIASES.get(name, {}).items():
        if old not in value:
            continue
        if new in value and value[new] != value[old]:
            draft.complain((name, old), f"{name}: {old}={value[old]!r} and {new}={value[new]!r} are the same setting.")
        value.setdefault(new, value[old])
        del value[old]
        if (name, old) in draft.origins:
            draft.origins[name, new] = draft.origins.pop((name, old))
    return value


# --- files -----------------------------------------------------------------------------------------------------------


def _read_file(path: Path) -> tuple[dict[str, Any], Origins, list[str]]:
    """Values of a config file, where each was set (`file:line`), and what its values cannot show."""
    if not path.is_file():
        raise UserError(f"config file {path} does not exist.{_similar_file(path)}")
    if path.suffix not in (".py", ".json"):
        raise UserError(f"config file {path}: expected a .py file, or a .json file written by an earlier run.")
    tree = _parse(path) if path.suffix == ".py" else ast.Module([], [])
    bases = [_read_file(base) for base in _base_files(tree, path)]
    values = {key: value for key, value in _execute(path).items() if not key.startswith("_")}
    inherited = {key: item for base_values, _, _ in bases for key, item in base_values.items()}
    origins: Origins = {key: origin for _, base_origins, _ in bases for key, origin in base_origins.items()}
    lines = _assigned_lines(tree)
    for key, value in values.items():
        if path.suffix == ".py" and key not in lines and key in inherited:
            continue
        here = f"{path}:{lines[key]}" if key in lines else str(path)
        origins[key,] = here
        for inner, item in value.items() if isinstance(value, dict) else ():
            before = inherited.get(key)
            if not isinstance(before, dict) or inner not in before or before[inner] != item:
                origins[key, inner] = here
    return values, origins, [p for *_, problems in bases for p in problems] + _functions(tree, path)


def _similar_file(path: Path) -> str:
    siblings = [p.name for p in path.parent.glob("*.py")] if path.parent.is_dir() else []
    return did_you_mean(path.name, siblings)


def _parse(path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    except SyntaxError as error:
        raise UserError(f"{path}:{error.lineno}: {error.msg}: {(error.text or '').strip()}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not a UTF-8 text file: {error}") from error


def _execute(path: Path) -> dict[str, Any]:
    """Run a config file. It is code: whatever it raises is told with the line that raised it."""
    try:
        # no environment variables, no file-name templates, no imports on the config's behalf: a config is plain data
        config = Config.fromfile(
            path,
            use_predefined_variables=False,
            use_environment_variables=False,
            import_custom_modules=False,
            lazy_import=False,
        )
    except Exception as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).suffix == ".py"]
        lines = [f for f in frames if "mmengine" not in f.filename and f.filename != __file__]
        where = f"{lines[-1].filename}:{lines[-1].lineno}" if lines else str(path)
        raise UserError(f"{where}: {type(error).__name__}: {error}") from error
    return _without_scope(config.to_dict())


def _without_scope(value: Any) -> Any:
    """Plain dicts, without the mark that MMEngine leaves in what was taken from a base file."""
    if isinstance(value, dict):
        return {key: _without_scope(item) for key, item in value.items() if key != "_scope_"}
    if isinstance(value, list | tuple):
        return type(value)(_without_scope(item) for item in value)
    return value


def _base_files(tree: ast.Module, path: Path) -> Iterator[Path]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "_base_" for t in node.targets):
            try:
                names = ast.literal_eval(node.value)
            except ValueError as error:
                raise UserError(f"{path}:{node.lineno}: _base_ must be a file name or a list of them.") from error
            for name in [names] if isinstance(names, str) else names:
                yield path.parent / name


def _assigned_lines(tree: ast.Module) -> dict[str, int]:
    """The last line that assigns each name."""
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    return {node.id: node.lineno for node in sorted(nodes, key=lambda node: node.lineno)}


def _functions(tree: ast.Module, path: Path) -> list[str]:
    """MMEngine drops functions without a word; a field written as one would silently keep its default."""
    found = [(node.name, node.lineno) for node in tree.body if isinstance(node, ast.FunctionDef)]
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Lambda):
            found += [(target.id, node.lineno) for target in node.targets if isinstance(target, ast.Name)]
    return [
        f"{name!r} is a function; a config holds plain data, name a helper _{name}. ({path}:{line})"
        for name, line in found
        if not name.startswith("_")
    ]


# --- command line ----------------------------------------------------------------------------------------------------


def _owner(draft: _Draft, key: str) -> str | None:
    """The component whose constructor takes `key`."""
    for name, component in draft.values.items():
        if isinstance(component, Mapping) and key in _signature(draft, name):
            return name
    return None


def _signature(draft: _Draft, name: str) -> Mapping[str, inspect.Parameter]:
    """Arguments of the constructor that a component names; none when it is not known."""
    registry, component = draft.registries.get(name), draft.values.get(name)
    if registry is None or not isinstance(component, Mapping) or component.get("type") not in registry.choices():
        return {}
    return inspect.signature(registry.get(component["type"])).parameters


def _apply(draft: _Draft, setting: Setting) -> None:
    """Write one setting of the command line over the file's values."""
    name, *keys = setting.path
    if not keys:
        draft.values[name] = setting.value
        for path in [path for path in draft.origins if path[0] == name]:
            del draft.origins[path]
        draft.origins[name,] = f"{COMMAND_LINE} {setting.flag}"
        return
    keys = [KEY_ALIASES.get(name, {}).get(key, key) for key in keys]
    default = schema_fields(draft.schema)[name].default
    target = draft.values.setdefault(name, copy.deepcopy(default) if isinstance(default, dict) else {})
    if target is None:
        target = draft.values[name] = {}
    for key in keys[:-1]:
        target = target.setdefault(key, {}) if isinstance(target, dict) else target
    if not isinstance(target, dict):
        draft.problems.append(f"{setting.flag}: {'.'.join([name, *keys[:-1]])} has no keys.")
        return
    try:
        target[keys[-1]] = _as_replaced(draft, setting, target, [name, *keys])
    except ValueError as error:
        draft.problems.append(f"{setting.flag}: {error}.")
    draft.origins[name, keys[0]] = f"{COMMAND_LINE} {setting.flag}"


def _as_replaced(draft: _Draft, setting: Setting, target: dict[str, Any], path: list[str]) -> Any:
    """A nested value has no declared type, so it takes that of the value it replaces, or of the argument's default."""
    replaced = target.get(path[-1])
    if replaced is None and len(path) == 2 and path[1] in (signature := _signature(draft, path[0])):
        replaced = signature[path[1]].default
    if setting.text is None or setting.value is None:
        return setting.value
    if isinstance(replaced, bool):
        return parse_bool(setting.text)
    if isinstance(replaced, str):
        return setting.text
    if isinstance(replaced, int | float) and isinstance(setting.value, str):
        raise ValueError(f"{setting.text!r} is not a number, and it replaces {replaced!r}")
    return setting.value


# --- checks ----------------------------------------------------------------------------------------------------------


def _finish(draft: _Draft) -> Any:
    """Type every field, complete the dataset, check everything, and build the config."""
    _share_with_dataset(draft)
    typed = {name: value for f in schema_fields(draft.schema).values() for name, value in _typed(draft, f)}
    complete = len(typed) == len(schema_fields(draft.schema))
    if "dataset" in typed:
        typed["dataset"] = _complete_dataset(draft, typed)
    for name, registry in draft.registries.items():
        if isinstance(typed.get(name), dict):
            _check_component(draft, name, typed[name], registry)
    config = draft.schema(**typed) if complete else None
    draft.problems += config.problems() if config else []
    if draft.problems:
        raise UserError(_listing(draft.problems))
    return config


def _typed(draft: _Draft, f: Field) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) once if the value has the right type and range, or complain."""
    if f.name not in draft.values:
        if f.default is REQUIRED:
            draft.problems.append(f"{f.name} is missing; expected {describe(f.annotation)}: {f.doc}.")
        else:
            yield f.name, copy.deepcopy(f.default)
        return
    value = draft.values[f.name]
    try:
        value = coerce(value, f.annotation)
    except TypeError as error:
        draft.complain((f.name,), f"{f.name}={value!r}: {error}.")
        return
    if problem := f.problem(value):
        draft.complain((f.name,), f"{f.name}={value!r}: {problem}.")
    yield f.name, value


def _check_component(draft: _Draft, name: str, component: dict[str, Any], registry: Registry) -> None:
    whole = registry.problems({"type": component["type"]}) if "type" in component else registry.problems(component)
    for problem in whole:
        draft.complain((name, "type"), f"{name}: {problem}")
    for key in component if not whole else ():
        for problem in registry.problems({"type": component["type"], key: component[key]}):
            draft.complain((name, key), f"{name}: {problem}")


def _shared_fields(draft: _Draft) -> list[str]:
    return [name for name in DATASET_FIELDS if name in schema_fields(draft.schema)]


def _share_with_dataset(draft: _Draft) -> None:
    """Make a field and the dataset's key of the same name one setting: the command line wins over the file."""
    dataset = draft.values.get("dataset")
    if not isinstance(dataset, dict):
        return
    for name in [name for name in _shared_fields(draft) if name in dataset]:
        top, inner = draft.origins.get((name,), ""), draft.origins.get(("dataset", name), "")
        if name not in draft.values or (inner.startswith(COMMAND_LINE) and not top.startswith(COMMAND_LINE)):
            draft.values[name] = dataset[name]
            draft.origins[name,] = inner or draft.origins.get(("dataset",), "")
        elif top.startswith(COMMAND_LINE) and not inner.startswith(COMMAND_LINE):
            dataset[name] = draft.values[name]
            draft.origins["dataset", name] = top
        elif _as_lists(draft.values[name]) != _as_lists(dataset[name]):
            draft.complain(
                ("dataset", name),
                f"{name}={draft.values[name]!r} and dataset.{name}={dataset[name]!r} contradict each other; keep one.",
            )


def _as_lists(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _complete_dataset(draft: _Draft, typed: dict[str, Any]) -> dict[str, Any]:
    """The dataset component with a type, and with the fields that its constructor takes."""
    dataset = {"type": DEFAULT_DATASET, **(typed["dataset"] or {})}
    registry = draft.registries.get("dataset")
    for name in [name for name in _shared_fields(draft) if name in typed]:
        taken = registry is None or not registry.problems({"type": dataset["type"], name: typed[name]})
        is_known = registry is None or dataset["type"] in registry.choices()
        if name == "use_image_transform" and typed[name] and is_known and not taken:
            draft.complain((name,), f"use_image_transform=True has no effect: {dataset['type']} does not take it.")
        if name == "data_path" and typed[name] is None and is_known and taken:
            draft.problems.append("data_path is not set: name the data file, for example --data-path clips.csv.")
        if not taken or typed[name] is None or (name == "use_image_transform" and not typed[name]):
            continue
        dataset[name] = typed[name]
        if (name,) in draft.origins:
            draft.origins.setdefault(("dataset", name), draft.origins[name,])
    return dataset


def _listing(problems: list[str]) -> str:
    if len(problems) == 1:
        return problems[0]
    return f"{len(problems)} problems in the config:\n" + "\n".join(f"  {i}. {p}" for i, p in enumerate(problems, 1))


def _provenance(config: RunConfig, origins: Origins) -> str:
    """One line for each value: what it is and where it came from."""
    rows = []
    for name, value in to_dict(config).items():
        if isinstance(value, dict) and value:
            for key, item in value.items():
                origin = origins.get((name, key)) or origins.get((name,)) or "default"
                rows.append((f"{name}.{key} = {item!r}", origin))
        else:
            rows.append((f"{name} = {value!r}", origins.get((name,), "default")))
    width = min(max(len(left) for left, _ in rows), 72)
    return "".join(f"{left:<{width}}  # {origin}\n" for left, origin in rows)
