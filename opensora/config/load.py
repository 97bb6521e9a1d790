"""A config file and a command line become one checked, typed object.

    cfg = parse_config(TrainConfig, {"model": MODELS, "vae": MODELS, "dataset": DATASETS})

The fields are in `schema.py`, the grammar of the command line in `command_line.py`; `resolve.py` merges and checks values.
"""

import ast
import copy
import json
import re
import sys
import traceback
import types
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from mmengine.config import ConfigDict

from opensora.config.command_line import dashed, help_text, program, read_command
from opensora.config.resolve import Draft, Origins, listing
from opensora.config.schema import (
    FULL_FPS,
    InferenceConfig,
    RunConfig,
    TrainConfig,
    VAEInferenceConfig,
    VAETrainConfig,
    schema_fields,
    validation_sampler,
)
from opensora.config.upgrade import upgrade_all
from opensora.config.yacs import PIPELINE, deepspeed_overrides, read_pipeline, read_yacs
from opensora.registry import Registry, did_you_mean
from opensora.utils.errors import UserError
from opensora.utils.folders import REPOSITORY, read_json, shipped, shipped_values
from opensora.utils.imports import import_parts, not_imported

__all__ = [
    "InferenceConfig",
    "TrainConfig",
    "VAEInferenceConfig",
    "VAETrainConfig",
    "config_from_dict",
    "parse_config",
    "to_dict",
]

FileContent = tuple[dict[str, Any], Origins, list[str]]  # values, where each was set, problems
MANIFEST = "manifest.json"  # of a checkpoint folder
BASE_VARIABLE = r"""(["']?)\{\{\s*(_base_\.[\w.]+)\s*\}\}\1"""  # MMEngine's other spelling, {{_base_.model}}
HOW_TO_RESUME = ("load", "load_check", "exp_name", "outputs", "start_from_scratch", "other_data")
AnyConfig = TypeVar("AnyConfig", bound=RunConfig)


def parse_config(
    schema: type[AnyConfig],
    registries: Mapping[str, Registry] | None = None,
    argv: Sequence[str] | None = None,
    *,
    options: Iterable[str] = (),
) -> AnyConfig:
    """Read the config that the command line names, with the overrides it carries, and check all of it.

    Paths in configs/ and assets/ that are not in the working directory are those of the files that come with the project.

    Args:
        schema: `TrainConfig`, `InferenceConfig`, `VAETrainConfig` or `VAEInferenceConfig`.
        registries: for each component field, where its type is registered; a field without one is not looked into.
        argv: the command line without the program; `sys.argv[1:]` when None.
        options: names of what a tool has taken out of `argv` for itself; a flag that is no field may be one of them misspelt, and
            so is not taken for another code's name of a field.

    Raises:
        UserError: lists everything that is wrong.
        SystemExit: after `--help` and `--print-config`.
    """
    options = [dashed(name) for name in options]
    command = read_command(schema, sys.argv[1:] if argv is None else argv, translates=not options)
    if command.help:
        sys.stdout.write(help_text(schema))
        raise SystemExit(0)
    draft = Draft(schema, registries or {}, options)
    try:
        if command.config is None:
            raise UserError(
                f"no config file given; usage: {program()} CONFIG [--field VALUE ...], the config first (see --help)."
            )
        name, command.config = command.config, shipped(command.config)
        values, origins, problems = read_file(Path(command.config), schema)
        overrides, idle = ({}, []) if command.deepspeed is None else deepspeed_overrides(Path(command.deepspeed))
    except UserError as error:  # a wrong flag may be why there is no file
        draft.take_command(command)
        raise UserError(listing([str(error), *draft.problems])) from error
    draft.problems += problems
    draft.take_file(values | overrides, origins | {(name,): f"--deepspeed {command.deepspeed}" for name in overrides})
    draft.notes += [f"--deepspeed {command.deepspeed}: {', '.join(idle)} have no effect here."] if idle else []
    chosen = [setting.value for setting in command.settings if setting.path == ("imports",)]
    imports = chosen[-1] if chosen else draft.values.get("imports")
    if not chosen and Path(command.config).suffix != ".py":
        _refuse_imports(imports)
    if isinstance(imports, list | tuple):  # another type is a problem that is reported with all others
        import_parts([name for name in imports if isinstance(name, str)])
    draft.take_command(command)
    if name != command.config:
        draft.notes.append(
            f"{name} is not in {Path.cwd()}: reading the one that comes with opensora, {command.config}."
        )
    draft.values = shipped_values(draft.values)
    config = draft.finish()
    if command.print_config:
        sys.stdout.write(_provenance(config, draft.origins))
        raise SystemExit(0)
    return config


def config_from_dict(
    schema: type[AnyConfig], values: Mapping[str, Any], registries: Mapping[str, Registry] | None = None
) -> AnyConfig:
    """The config that a file with these values would give; the inverse of `to_dict`.

    Its `imports` must have been imported already: the values may be a checkpoint's, which is data and runs nothing.

    Raises:
        UserError: lists everything that is wrong.
    """
    _refuse_imports(values.get("imports"))
    draft = Draft(schema, registries or {})
    draft.take_file(shipped_values(values), {})
    return draft.finish()


def _refuse_imports(imports: Any) -> None:
    """Raise a `UserError` where a config that is data names parts that have not been imported yet."""
    names = [imports] if isinstance(imports, str) else imports if isinstance(imports, list | tuple) else []
    if missing := not_imported([name for name in names if isinstance(name, str)]):
        raise UserError(
            f"the stored config names parts from {', '.join(missing)}, which is code and is not run unasked. If you trust it, name "
            f"it yourself: imports={missing!r} in the call, or --imports {' '.join(missing)} where there is a command line."
        )


def to_dict(config: RunConfig) -> dict[str, Any]:
    """All fields as plain data; as JSON they are a config file."""
    return {name: copy.deepcopy(getattr(config, name)) for name in schema_fields(type(config))}


def read_file(path: Path, schema: type[RunConfig] = TrainConfig) -> FileContent:
    """Values of a config file, where each was set (`file:line`), and problems that its values cannot show.

    A `.py` file is run; a `.json` or `.yml` file is data: it has no base and runs nothing. To sample from, also the folder of a
    checkpoint of ours or of a pipeline of NOVA.

    Raises:
        UserError: it is missing, cannot be read, or raises an error.
    """
    values, origins, problems = _read(path, schema, ())
    return {key: value for key, value in values.items() if not key.startswith("_")}, origins, problems


def _read(path: Path, schema: type[RunConfig], above: tuple[Path, ...]) -> FileContent:
    """`read_file` with private names; `above` are the files that have led here by `_base_`."""
    if schema is InferenceConfig and path.is_dir():
        values = read_pipeline(path) if (path / PIPELINE).is_file() else _read_checkpoint(path)
        return values, {(key,): str(path) for key in values}, []
    if not path.is_file():
        configs = [str(file.relative_to(REPOSITORY)) for file in sorted(REPOSITORY.glob("configs/*/**/*.py"))]
        same_name = [name for name in configs if Path(name).name == path.name]
        hint = did_you_mean(path.name, [sibling.name for sibling in path.parent.glob("*.py")])
        hint = hint or (f" There are {', '.join(same_name)}." if same_name else did_you_mean(str(path), configs))
        wrong = "is a folder or a device, not a regular file." if path.exists() else f"does not exist.{hint}"
        raise UserError(f"config file {path} {wrong}")
    if path.resolve() in [file.resolve() for file in above]:
        raise UserError(f"_base_ leads in a circle: {' -> '.join(map(str, (*above, path)))}; remove one of them.")
    if path.suffix in (".yml", ".yaml", ".json"):
        values = _read_data(path, for_sampling=schema is InferenceConfig)
        return values, {(key,): str(path) for key in values}, []
    if path.suffix != ".py":
        raise UserError(
            f"config file {path}: expected a .py file, a .json file written by an earlier run, or a .yml file of NOVA's guide."
        )
    tree = _parse(path)
    inherited: dict[str, Any] = {}
    origins: Origins = {}
    problems = _functions(tree, path)
    for base in _base_files(tree, path):
        base_values, base_origins, base_problems = _read(base, schema, (*above, path))
        if twice := sorted(inherited.keys() & base_values.keys()):
            raise UserError(f"{path}: two of its _base_ files set {twice[0]}; keep one.")
        inherited, origins, problems = inherited | base_values, origins | base_origins, problems + base_problems
    own, merged = _execute(tree, path, inherited), ConfigDict(inherited)
    try:
        merged.merge(own)  # a dict key by key, unless it says `_delete_=True`
        values = merged.to_dict()
    except (RecursionError, TypeError) as error:
        raise UserError(
            f"{path} cannot be read as plain data ({error}): is there a generator, a lock, or a dict or list that contains itself?"
        ) from error
    stored = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    lines = {node.id: node.lineno for node in sorted(stored, key=lambda node: node.lineno)}  # the last of each
    for key in own:
        origins[key,] = f"{path}:{lines[key]}" if key in lines else str(path)
        before, value = inherited.get(key), values[key]
        for inner, item in value.items() if isinstance(value, dict) else ():
            if not isinstance(before, dict) or inner not in before or before[inner] != item:
                origins[key, inner] = origins[key,]
    return values, origins, problems


def _read_data(path: Path, *, for_sampling: bool) -> dict[str, Any]:
    if path.suffix != ".json":
        return read_yacs(path, for_sampling=for_sampling)
    values = read_json(path, "Runs write such files.")
    if "_base_" in values:
        raise UserError(f"config file {path}: a .json file is data and has no _base_; write a .py file that has it.")
    return values


def _read_checkpoint(folder: Path) -> dict[str, Any]:
    """The values of an `InferenceConfig` that samples as the validation of the run does; of a run in buckets without its size."""
    manifest = folder / MANIFEST
    trained = read_json(manifest, "Name another checkpoint.").get("config") if manifest.is_file() else None
    if not isinstance(trained, dict) or "model" not in trained:
        raise UserError(
            f"{folder} is no checkpoint of a training run: it has no {MANIFEST} with a config. Name a config file, and the weights "
            "as ckpt_path."
        )
    names = ["model", "vae", "text_encoder", "image_encoder", "seed", "dtype", "device", "imports"]
    values = {name: trained[name] for name in names if name in trained}
    sizes = ("num_frames", "image_size")
    values |= {name: trained[name] for name in sizes if name in trained and not trained.get("bucket_config")}
    values |= {name: trained[f"val_{name}"] for name in sizes if trained.get(f"val_{name}")}
    values["scheduler"] = validation_sampler(trained["scheduler"], trained.get("val_scheduler"))
    fps = trained.get("val_fps") or (trained.get("dataset") or {}).get("target_fps")
    values["fps"] = fps or FULL_FPS / (trained.get("frame_interval") or 1)
    if trained.get("lora"):
        values["lora"] = str(folder)
        if values["model"].get("expert") in ("high", "low"):  # of two; the adapter says which it is for
            values["model"] = {**values["model"], "expert": "both"}
    else:
        values["model"] = {**values["model"], "from_pretrained": str(folder)}
    return values


def _parse(path: Path) -> ast.Module:
    try:
        text = re.sub(BASE_VARIABLE, r"\2", path.read_text(encoding="utf-8-sig"))
        return ast.parse(text, filename=str(path))
    except SyntaxError as error:
        raise UserError(f"{path}:{error.lineno}: {error.msg}: {(error.text or '').strip():.200}") from error
    except ValueError as error:  # no UTF-8, or a zero byte
        raise UserError(f"{path} is not a UTF-8 text file: {error}") from error


def _base_files(tree: ast.Module, path: Path) -> list[Path]:
    """The files that `_base_` names; the line that does is taken out of the tree."""
    files = []
    for node in [*tree.body]:
        if not isinstance(node, ast.Assign) or "_base_" not in map(ast.unparse, node.targets):
            continue
        tree.body.remove(node)
        try:
            names = ast.literal_eval(node.value)
            files += [path.parent / name for name in ([names] if isinstance(names, str) else names)]
        except (ValueError, TypeError) as error:
            raise UserError(f"{path}:{node.lineno}: _base_ must be a file name or a list of them.") from error
    return files


def _functions(tree: ast.Module, path: Path) -> list[str]:
    """MMEngine drops functions in silence; a field written as one would keep its default."""
    lambdas = [node for node in tree.body if isinstance(node, ast.Assign) and isinstance(node.value, ast.Lambda)]
    found = [(ast.unparse(target), node.lineno) for node in lambdas for target in node.targets]
    found += [(node.name, node.lineno) for node in tree.body if isinstance(node, ast.FunctionDef)]
    return [
        f"{name!r} is a function; a config holds plain data, name a helper _{name}. ({path}:{line})"
        for name, line in found
        if not name.startswith("_")
    ]


def _execute(tree: ast.Module, path: Path, inherited: Mapping[str, Any]) -> dict[str, Any]:
    """Run a config file. It is code: whatever it raises is reported with the line that raised it."""
    names: dict[str, Any] = {"_base_": ConfigDict(inherited)}
    try:
        exec(compile(tree, str(path), "exec"), names)
    except (Exception, SystemExit) as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).suffix == ".py"]
        lines = [f for f in frames if "mmengine" not in f.filename and f.filename != __file__]
        where = f"{lines[-1].filename}:{lines[-1].lineno}" if lines else str(path)
        raise UserError(f"{where}: {type(error).__name__}: {error}") from error
    own = {key: value for key, value in names.items() if key != "_base_" and not key.startswith("__")}
    return {key: value for key, value in own.items() if not isinstance(value, types.FunctionType | types.ModuleType)}


def _provenance(config: RunConfig, origins: Origins) -> str:
    """One line for each value: what it is and where it was set."""
    rows = []
    for name, value in to_dict(config).items():
        items = value.items() if isinstance(value, dict) and schema_fields(type(config))[name].takes_keys else ()
        for key, item in items:
            rows.append((f"{name}.{key} = {item!r}", origins.get((name, key)) or origins.get((name,))))
        if not items:
            rows.append((f"{name} = {value!r}", origins.get((name,))))
    width = min(max(len(left) for left, _ in rows), 80)
    return "".join(f"{left:<{width}}  # {origin or 'default'}\n" for left, origin in rows)


def changed_settings(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """`lr was 0.0001, now 0.001`, for every setting that differs; fields that say how to resume are left out.

    Older spellings count as the current ones, and keys of components one by one. A field that `before` is too old to know
    is passed over.
    """
    old, new = (_flat(json.loads(json.dumps(upgrade_all(config)))) for config in (before, now))  # JSON has no tuples
    names = {name for name in new if name[0] in before} | {name for name in old if name[0] in now}
    return [
        f"{'.'.join(name)} was {old.get(name, 'not set')}, now {new.get(name, 'not set')}"
        for name in sorted(name for name in names if name[0] not in HOW_TO_RESUME)
        if (type(old.get(name)) is bool, old.get(name)) != (type(new.get(name)) is bool, new.get(name))  # True == 1
    ]


def _flat(config: Mapping[str, Any]) -> dict[tuple[str, ...], Any]:
    """Each value under its path of keys; an empty dict is no value."""
    flat: dict[tuple[str, ...], Any] = {}
    for key, value in config.items():
        inner = _flat(value) if isinstance(value, Mapping) else None
        flat |= {(key,): value} if inner is None else {(key, *path): item for path, item in inner.items()}
    return flat
