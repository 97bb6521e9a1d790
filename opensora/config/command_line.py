"""The command line of a config: `CONFIG --field value --component.key value`, and the text of `--help`.

`field=value` and `component.key=value` are the same without dashes, as in other codes with such configs.
"""

import ast
import itertools
import re
import sys
import textwrap
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any, Literal

from opensora.config.schema import REQUIRED, Component, Field, Schema, coerce, describe, grouped, members, schema_fields
from opensora.config.upgrade import FOREIGN_NAMES, OLD_KEYS, OLD_TYPES

FLAGS = ("cfg", "deepspeed", "print-config", "help")  # that are not fields
BARE = re.compile(r"([A-Za-z_]\w*)(\.\w+)*=")  # the beginning of `component.key=value`
WIDTH, INDENT = 100, 28  # of --help
TRUE, FALSE = ("true", "yes", "t", "y", "1"), ("false", "no", "f", "n", "0")


@dataclass
class Setting:
    """One thing that the command line sets."""

    path: tuple[str, ...]  # (field,) or (component, key, ...)
    flag: str  # as typed
    value: Any
    text: str | None = None  # the value as typed, where no schema declares its type


@dataclass
class Command:
    """A command line, taken apart."""

    config: str | None = None
    deepspeed: str | None = None  # a DeepSpeed JSON, as NOVA's guide passes one
    settings: list[Setting] = field(default_factory=list)
    print_config: bool = False
    help: bool = False
    translates: bool = True
    unknown: list[tuple[str, str]] = field(default_factory=list)  # (flag, key) of flags that name no field
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what other codes' names are here


def read_command(schema: Schema, argv: Sequence[str], *, translates: bool = True) -> Command:
    """Take a command line apart, by the types that the schema declares; `translates`: other codes' names are taken too."""
    command, tokens = Command(translates=translates), list(argv)
    while tokens:
        token = tokens.pop(0)
        if token in ("-h", "--help"):
            command.help = True
        elif token == "--print-config":
            command.print_config = True
        elif _is_flag(token):
            _read_flag(schema, command, token, tokens)
        elif BARE.match(token) and (command.config is not None or not _names_config(token)):
            _read_flag(schema, command, f"--{token}", tokens)
        elif token.startswith("-") or (command.config is not None and not _names_config(token)):
            command.problems.append(f"{token!r} on the command line belongs to no option.")
        else:
            _set_config(command, token)
    first: dict[tuple[str, ...], Setting] = {}
    for new in command.settings:
        old = first.setdefault(new.path, new)
        one_is_bool = len(new.path) == 1 and isinstance(old.value, bool) != isinstance(new.value, bool)
        if old.value != new.value or one_is_bool:  # True == 1
            name = ".".join(new.path)
            command.problems.append(f"{old.flag} {old.value!r} and {new.flag} {new.value!r} both set {name}; keep one.")
    return command


def _set_config(command: Command, name: str) -> None:
    if command.config is not None:
        command.problems.append(f"{name!r}: {command.config} is the config already.")
    else:
        command.config = name


def _read_flag(schema: Schema, command: Command, token: str, tokens: list[str]) -> None:
    """One flag and its values, which are taken from the front of `tokens`."""
    flag, equals, attached = token.partition("=")
    path, annotation = _target(schema, command, flag)
    count = 0 if equals else _count_values(schema, tokens, annotation, config_comes=command.config is None)
    texts = [attached] if equals else tokens[:count]
    del tokens[:count]
    if annotation is None:
        return
    try:
        if not texts and not {bool, Any} & {*members(annotation)}:
            raise ValueError(f"a value is missing, expected {describe(annotation)}")
        value = parse_texts(texts, annotation)
    except ValueError as error:
        hint = ""
        if Component in members(annotation):  # a name, where a component is due
            hint = f" Its arguments are set one by one: {flag}.{'rank 16' if path == ('lora',) else 'type NAME'}."
        elif path[0].endswith("image_size"):
            hint = f" Write {flag} HEIGHT WIDTH."
        command.problems.append(f"{flag}: {error}.{hint}")
        return
    removed = schema.removed.get(path[0])
    if flag == "--cfg" and _is_number(value):
        command.problems.append(f"--cfg names the config; the scale of guidance is --cfg-scale {value}.")
    elif flag == "--cfg":
        _set_config(command, value)
    elif flag == "--deepspeed":
        command.deepspeed = value
    elif removed is None:
        command.settings.append(Setting(path, flag, value, texts[0] if annotation is Any and texts else None))
    elif value not in removed.accepted:
        command.problems.append(f"{path[0]}={value!r}: {removed.why}")


def _target(schema: Schema, command: Command, flag: str) -> tuple[tuple[str, ...], Any]:
    """What a flag sets, and of which type; None: nothing, which is then one of the command's problems."""
    name, *keys = flag[2:].replace("-", "_").split(".")
    name = FOREIGN_NAMES.get(name, name) if keys else name
    path, declared = (name, *(OLD_KEYS.get(name, {}).get(key, key) for key in keys)), schema_fields(schema).get(name)
    if flag in ("--cfg", "--deepspeed"):
        return path, str
    if not keys and name in schema.removed:
        return path, schema.removed[name].annotation
    if not keys and name in schema.aliases:
        return schema.aliases[name].path, schema.aliases[name].annotation
    if declared is not None and not keys:
        return path, OLD_TYPES.get(name, declared.annotation)
    if declared is not None and declared.takes_keys and all(keys):
        return path, Any
    if not keys and name in schema.other_names and command.translates:
        ours = dashed(schema.other_names[name])
        found = (f for fields in grouped(schema).values() for f in fields if dashed(f.name) == ours)
        docs = [f" ({re.split('[:;]', f.doc)[0]})" for f in found]
        command.notes.append(f"{flag} is --{ours} here{''.join(docs)}.")
        return _target(schema, command, f"--{ours}")
    if not keys and name in schema.open_names:
        command.problems.append(f"{flag} is no option: {schema.open_names[name]}.")
    elif declared is None:
        command.unknown.append((flag, name))
    else:
        command.problems.append(f"{flag}: {name} is {describe(declared.annotation)}; it has no keys.")
    return path, None


def _count_values(schema: Schema, tokens: Sequence[str], annotation: Any, *, config_comes: bool) -> int:
    """How many of the next tokens are values of a flag of that type; None: a flag that is wrong, and takes all."""
    kinds = [typing.get_origin(member) or member for member in members(annotation)]
    end = next((i for i, token in enumerate(tokens) if _is_flag(token)), len(tokens))
    may_end = bool in kinds or annotation is None or (list in kinds and {str, float} & {*kinds})
    if config_comes and may_end:  # `--wandb configs/x.py`, `--lora a b configs/x.py`
        end = next((i for i, token in enumerate(tokens[:end]) if _names_config(token)), end)
    if {list, bool, Any} & {*kinds} or annotation is None:  # `--prompt "a lake" seed=3`, `--scheduler.faster seed=3`
        names = {*schema_fields(schema), *schema.aliases, *schema.removed, *FOREIGN_NAMES, *schema.other_names}
        bare = (i for i, token in enumerate(tokens[:end]) if (match := BARE.match(token)) and match[1] in names)
        end = next(bare, end)
    if list in kinds or annotation is None:
        return end
    size = max(
        len(typing.get_args(member)) if typing.get_origin(member) is tuple else 1 for member in members(annotation)
    )
    return min(end, len(list(itertools.takewhile(_is_number, tokens[:size]))) or 1)


def _is_flag(token: str) -> bool:
    return token.startswith("--") or token == "-h"


def _names_config(token: str) -> bool:
    return PurePath(token).suffix in (".py", ".json", ".yml", ".yaml")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def parse_texts(texts: Sequence[str], annotation: Any) -> Any:
    """The values of one flag as the annotated type; no value at all is True.

    Raises:
        ValueError: they are not of that type.
    """
    if not texts:
        return True
    text, single = texts[0], len(texts) == 1
    literal = parse_literal(text) if single else [parse_literal(text) for text in texts]
    # None first, so that `--load None` is no folder called None
    for member in sorted(members(annotation), key=lambda member: member is not types.NoneType):
        origin, args, value = typing.get_origin(member), typing.get_args(member), literal
        try:
            if member is bool:
                value = parse_bool(text)
            elif member in (int, float, str) and single:
                value = member(text)
            elif origin is Literal:
                value = text
            elif origin is list and not (single and isinstance(literal, list)):
                value = [parse_texts([text], args[0]) for text in texts]
            return coerce(value, member)
        except (TypeError, ValueError):
            continue
    raise ValueError(f"{' '.join(texts)!r}: expected {describe(annotation)}")


def parse_bool(text: str) -> bool:
    """`true yes t y 1` or `false no f n 0`, in any case."""
    if text.lower() not in TRUE + FALSE:
        raise ValueError(f"{text!r} is not a bool, write True or False")
    return text.lower() in TRUE


def parse_literal(text: str) -> Any:
    """A Python literal, in which `dict(a=1)` may stand as in a config file; anything else is the text itself."""
    words = {"none": None, "true": True, "false": False}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return ast.literal_eval(_Dicts().visit(ast.parse(text.strip(), mode="eval")))
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return text


class _Dicts(ast.NodeTransformer):
    """`dict(a=1)` -> `{"a": 1}`."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        names = [keyword.arg for keyword in node.keywords]
        if not isinstance(node.func, ast.Name) or node.func.id != "dict" or node.args or None in names:
            return node
        return ast.Dict([ast.Constant(name) for name in names], [keyword.value for keyword in node.keywords])


def help_text(schema: Schema) -> str:
    """What `--help` prints."""
    example = textwrap.wrap(f"{program()} {schema.example}", WIDTH - 8, break_long_words=False, break_on_hyphens=False)
    parts = [
        f"usage: {program()} CONFIG [--field VALUE] [--component.key VALUE] ...",
        "  " + " \\\n      ".join(example),
        _filled(
            f"{(schema.__doc__ or '').strip()} CONFIG is a Python file that sets fields; the command line overrides it, also "
            "as field=VALUE. --print-config shows every value and where it was set, then stops. docs/config.md lists the "
            "arguments of components.",
            "",
        ),
    ]
    for group, fields in grouped(schema).items():
        lines = []
        for f in fields:
            default = (
                ""
                if f.name in schema.aliases
                else "; required"
                if f.default is REQUIRED
                else f"; default {f.default!r}"
            )
            lines.append(_filled(f"{f.doc} [{type_text(f)}{default}]", f"  --{dashed(f.name):<{INDENT - 5}} "))
        parts.append("\n".join([f"{group}:", *lines]))
    return "\n\n".join(parts) + "\n"


def _filled(text: str, first: str) -> str:
    """A paragraph in the width of a terminal; below `first`, where there is one, its other lines are indented."""
    indent = INDENT * " " if first else ""
    return textwrap.fill(text, WIDTH, initial_indent=first, subsequent_indent=indent, break_on_hyphens=False)


def program() -> str:
    """What a user types to start this program, without its arguments: `python scripts/train.py`, `opensora train`."""
    path = Path(sys.argv[0])
    if path.suffix != ".py":
        return path.name
    return f"python {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}"


def dashed(name: str) -> str:
    """A field's name as users of the command line write it."""
    return name.replace("_", "-")


def type_text(f: Field) -> str:
    """A field's type in words, or its choices."""
    return " or ".join(f.choices) if f.choices else describe(f.annotation)
