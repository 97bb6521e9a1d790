"""Write docs/config.md from the config schemas and the registered components, and configs/README.md from the configs' docstrings.

python -m tools.gen_config_docs           # write both
python -m tools.gen_config_docs --check   # exit 1 when a file is not what would be written
"""

import ast
import inspect
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from opensora.config.command_line import dashed, type_text
from opensora.config.schema import (
    REQUIRED,
    InferenceConfig,
    Schema,
    TrainConfig,
    VAEInferenceConfig,
    VAETrainConfig,
    grouped,
)
from opensora.config.upgrade import OLD_KEYS, OLD_SCHEDULERS
from opensora.registry import DATASETS, MODELS, SCHEDULERS, Registry
from opensora.utils.errors import exit_on_user_error
from tools.command import Parser

ROOT = Path(__file__).parent.parent
SCHEMAS: tuple[Schema, ...] = (TrainConfig, InferenceConfig, VAETrainConfig, VAEInferenceConfig)
REGISTRIES = {
    "Models, VAEs and text encoders (`model`, `vae`, `text_encoder`)": MODELS,
    "Schedulers (`scheduler`)": SCHEDULERS,
    "Datasets (`dataset`)": DATASETS,
}

HOW_TO = """# Config reference

<!-- Written by tools/gen_config_docs.py; edit opensora/config/schema.py and run it again. -->

A config is a Python file whose names are the fields below. `_base_ = ["other.py"]` starts from another file: what the
file sets replaces what the base sets, key by key inside a component (with `_delete_=True` in it, as a whole). Names
that start with `_` and imported modules are ignored; any other name that is no field is an error, and so is an
argument that a component's constructor does not take. All problems are reported together.

## On the command line

    python scripts/train.py CONFIG --data-path clips.csv --lr 1e-4 --image-size 256 256 --model.space_scale 0.5

- Any field: `--num-frames 16`, `--num_frames=16`. Dashes and underscores are alike.
- Any key inside a component: `--model.space_scale 0.5`. The value is a Python literal or else text, and takes the type
  of what it replaces (a bool, text).
- `(H, W)`: `--image-size 256 256`, `--image-size 256,256`. Lists: `--prompt "a" "b"`. `None` is None.
- Booleans: `true yes t y 1`, `false no f n 0`; `--wandb` alone is True.
- A value that begins with `--` is written with `=`: `--prompt=--dashes--`.
- Names that other codes have for an option, such as `--learning-rate` of diffusers, are taken, and the log says the name
  here; a file has the names here alone.
- `--print-config` shows every value and where it was set. `--help` lists the fields.

## Fields that the dataset shares

`data_path`, `root`, `num_frames`, `frame_interval` and `image_size` may stand at the top level or inside `dataset`;
they are one setting, so two different values in one file are an error, and the command line reaches both. Without
`dataset`, the config gets a `VideoTextDataset` made from them.
"""


@exit_on_user_error
def main() -> None:
    parser = Parser(__doc__, __spec__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when a file is stale")
    check = parser.parse_args().check
    stale = False
    for path, text in ((ROOT / "docs/config.md", generate()), (ROOT / "configs/README.md", list_configs())):
        if not check:
            path.write_text(text, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            print(f"{path} is stale: run `python -m tools.gen_config_docs`.", file=sys.stderr)
            stale = True
    sys.exit(stale)


def generate() -> str:
    """The whole of docs/config.md."""
    sections = [HOW_TO, *map(schema_section, SCHEMAS), old_names(), "## Components\n\n" + COMPONENTS_NOTE]
    for title, registry in REGISTRIES.items():
        sections += [f"### {title}\n", *components(registry)]
    return "\n".join(sections)


def schema_section(schema: Schema) -> str:
    """A table for each group of fields and short names, as `--help` has them, and the names that other codes have for them."""
    lines = [f"## {schema.__name__}\n\n{(schema.__doc__ or '').strip()} `--name` is for the command line alone.\n"]
    for group, fields in grouped(schema).items():
        rows = [
            (f"`--{dashed(f.name)}`", type_text(f), "", f.doc)
            if f.name in schema.aliases
            else (f"`{f.name}`", type_text(f), "required" if f.default is REQUIRED else f"`{f.default!r}`", f.doc)
            for f in fields
        ]
        lines += [f"### {group}\n", table(("field", "type", "default", "meaning"), rows)]
    theirs: dict[str, list[str]] = {}
    for name, ours in schema.other_names.items():
        theirs.setdefault(ours, []).append(f"`--{dashed(name)}`")
    names = [(f"`--{dashed(ours)}`", ", ".join(others)) for ours, others in sorted(theirs.items())]
    return "\n".join([*lines, "### Names of other codes\n", table(("here", "also taken"), names)])


def old_names() -> str:
    """Older spellings of keys."""
    rows = [(f"`{part}.{old}`", f"`{part}.{new}`") for part, names in OLD_KEYS.items() for old, new in names.items()]
    for kind, flags in OLD_SCHEDULERS.items():
        rows += [(f"`scheduler.{old}` of `{kind}`", f"`scheduler.{new}`") for old, (new, *_) in flags.items()]
    rows.append(("`scheduler.sample_method`, `loc`, `scale` of `rflow`", "`scheduler.timestep_sampling`"))
    return "## Older spellings\n\n" + table(("accepted", "means"), rows)


COMPONENTS_NOTE = """A component is `dict(type=NAME, argument=value, ...)`. Arguments that only another component can know
(a model's `in_channels`, `caption_channels`, `model_max_length`; a dataset's `seed`) are given by the scripts.
"""


def components(registry: Registry) -> Iterator[str]:
    """Each class, or function, with its registered names and the arguments of its constructor."""
    names: dict[Any, list[str]] = {}
    for name in registry.choices():
        names.setdefault(inspect.unwrap(registry.get(name)), []).append(name)
    for constructor, registered in names.items():
        parameters = arguments(constructor if len(registered) > 1 else registry.get(registered[0]))
        rows = [(f"`{key}`", default) for key, default in parameters.items()]
        text = f"#### `{constructor.__name__ if len(registered) > 1 else registered[0]}`\n\n"
        if len(registered) > 1:
            variants = [(name, arguments(registry.get(name)).items() - parameters.items()) for name in registered]
            changed = [
                (f"`{name}`", ", ".join(f"{key}={d.strip('`')}" for key, d in sorted(new))) for name, new in variants
            ]
            text += table(("name", "other defaults"), changed) + "\n"
        yield text + (table(("argument", "default"), rows) if rows else "No arguments.\n")


def arguments(constructor: Any) -> dict[str, str]:
    """The arguments of a constructor and their defaults."""
    return {k: default_text(p.default) for k, p in inspect.signature(constructor).parameters.items() if k != "self"}


def default_text(default: Any) -> str:
    """A default that reads the same on every machine."""
    if default is inspect.Parameter.empty:
        return "required"
    return f"`{default.__name__ if callable(default) else repr(default)}`"


CONFIGS_HEAD = """# Configs

<!-- Written by tools/gen_config_docs.py from the docstrings; edit those and run it again. -->

The task of each config, the weights it starts from (`--ckpt-path`), the hardware it is set for (memory as `python -m tools.estimate CONFIG` estimates it)
and its command. `_base_` holds
what several of them share. How to write one: [writing a config](../docs/how-to/configs.md); every field: [config](../docs/config.md).
"""


def list_configs() -> str:
    """The whole of configs/README.md: a table for each folder."""
    folders: dict[str, list[tuple[str, ...]]] = {}
    for path in sorted((ROOT / "configs").rglob("*.py")):
        name = path.relative_to(ROOT / "configs")
        if name.parts[0] == "_base_":
            continue
        text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        task = " ".join(text.split("\n\n")[0].split()).rstrip(".")
        stated = [re.search(rf"^{key}: (.*)\.$", text, re.MULTILINE) for key in ("Weights", "Hardware")]
        weights, hardware = (match.group(1) if match else "" for match in stated)
        commands = re.findall(r"^ *((?:torchrun|python) (?:.*\\\n)*.*)$", text, re.MULTILINE)
        command = "<br>".join(f"`{' '.join(line.replace(chr(92), ' ').split())}`" for line in commands)
        link = f"[{name.name}]({name.as_posix()})"
        folders.setdefault(name.parent.as_posix(), []).append((link, task, weights, hardware, command))
    head = ("config", "task", "weights", "hardware", "command")
    return "\n".join([CONFIGS_HEAD, *(f"## {folder}\n\n{table(head, rows)}" for folder, rows in folders.items())])


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """A Markdown table."""
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"


if __name__ == "__main__":
    main()
