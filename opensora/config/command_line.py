"""The command line of a config: `CONFIG --field value --component.key value`, and the text of `--help`."""

import ast
import itertools
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, Literal

from opensora.config.schema import REQUIRED, Field, Schema, coerce, describe, members, schema_fields
from opensora.config.upgrade import KEY_ALIASES, LEGACY

CONFIG_SUFFIXES = (".py", ".json", ".yml", ".yaml")
FLAGS = ("cfg", "deepspeed", "print-config", "help")  # that are not fields
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
    unknown: list[tuple[str, str]] = field(default_factory=list)  # (flag, key) of flags that name no field
    problems: list[str] = field(default_factory=list)


def read_command(schema: Schema, argv: Sequence[str]) -> Command:
    """Take a command line apart, by the types that the schema declares."""
    return _Reader(schema, argv).read()


class _Reader:
    def __init__(self, schema: Schema, argv: Sequence[str]) -> None:
        self.schema = schema
        self.fields = schema_fields(schema)
        self.tokens = list(argv)
        self.command = Command()
        self.passed_over: list[str] = []  # after flags that are wrong

    def read(self) -> Command:
        while self.tokens:
            token = self.tokens.pop(0)
            if token in ("-h", "--help"):
                self.command.help = True
            elif token == "--print-config":
                self.command.print_config = True
            elif token.partition("=")[0] in ("--cfg", "--deepspeed"):
                self._read_file_name(*token.partition("="))
            elif _is_flag(token):
                self._read_flag(token)
            elif self.command.config is None and not token.startswith("-"):
                self.command.config = token
            elif names_config(token):
                self.command.problems.append(f"{token!r}: {self.command.config} is the config already.")
            else:
                self.command.problems.append(f"{token!r} on the command line belongs to no option.")
        if self.command.config is None:  # `--wandbb configs/x.py`
            self.command.config = next(filter(names_config, reversed(self.passed_over)), None)
        seen: dict[tuple[str, ...], Setting] = {}
        for setting in self.command.settings:
            first = seen.setdefault(setting.path, setting)
            one_is_bool = len(setting.path) == 1 and isinstance(first.value, bool) != isinstance(setting.value, bool)
            if first.value != setting.value or one_is_bool:  # True == 1
                self.command.problems.append(
                    f"{first.flag} {first.value!r} and {setting.flag} {setting.value!r} both set "
                    f"{'.'.join(setting.path)}; keep one."
                )
        return self.command

    def _read_file_name(self, flag: str, equals: str, attached: str) -> None:
        """`--cfg FILE` is another way to name the config."""
        if not equals and (not self.tokens or _is_flag(self.tokens[0])):
            self.command.problems.append(f"{flag}: a file name is missing.")
            return
        name = attached if equals else self.tokens.pop(0)
        if flag == "--deepspeed":
            self.command.deepspeed = name
        elif self.command.config is not None:
            self.command.problems.append(f"{flag} {name}: {self.command.config} is the config already.")
        else:
            self.command.config = name

    def _read_flag(self, token: str) -> None:
        flag, equals, attached = token.partition("=")
        name, *keys = (part.replace("-", "_") for part in flag[2:].split("."))
        alias = None if keys else self.schema.aliases.get(name)
        removed = None if keys else self.schema.removed.get(name)
        declared = self.fields.get(name)
        path: tuple[str, ...] = (name, *(KEY_ALIASES.get(name, {}).get(key, key) for key in keys))
        annotation: Any = Any
        if removed is not None:
            annotation = removed.annotation
        elif alias is not None:
            path, annotation = alias
        elif declared is None:
            self.command.unknown.append((flag, name))
        elif keys and not (declared.takes_keys and all(keys)):
            self.command.problems.append(f"{flag}: {name} is {describe(declared.annotation)}; it has no keys.")
            declared = None
        elif not keys:
            annotation = (LEGACY.get(name) or declared).annotation
        if not (removed or alias or declared):
            self.passed_over += [] if equals else self._take(self._until_flag())  # not reported as well
            return
        texts: list[str] = []
        try:
            texts = [attached] if equals else self._take_values(annotation)
            value = parse_texts(texts, annotation)
        except ValueError as error:
            self.command.problems.append(f"{flag}: {error}.")
            self.passed_over += texts
            return
        if removed is not None:
            self.command.problems += filter(None, [removed.problem(name, value)])
            return
        text = texts[0] if annotation is Any and texts else None
        self.command.settings.append(Setting(path, flag, value, text))

    def _until_flag(self) -> int:
        """How many values come before the next flag."""
        return next((i for i, token in enumerate(self.tokens) if _is_flag(token)), len(self.tokens))

    def _take(self, count: int) -> list[str]:
        taken, self.tokens = self.tokens[:count], self.tokens[count:]
        return taken

    def _take_values(self, annotation: Any) -> list[str]:
        """As many values as the type wants."""
        kinds = [typing.get_origin(member) or member for member in members(annotation)]
        bare = not self.tokens or _is_flag(self.tokens[0])
        if bare and (bool in kinds or annotation is Any):
            return []
        if bare:
            raise ValueError(f"a value is missing, expected {describe(annotation)}")
        if bool in kinds and self.command.config is None and names_config(self.tokens[0]):
            return []  # `--wandb configs/x.py`
        if list in kinds:
            return self._take(self._until_flag())
        if tuple in kinds and _is_number(self.tokens[0]):
            size = next(len(typing.get_args(m)) for m in members(annotation) if typing.get_origin(m) is tuple)
            return self._take(len(list(itertools.takewhile(_is_number, self.tokens[:size]))))
        return self._take(1)


def _is_flag(token: str) -> bool:
    return token.startswith("--") or token == "-h"


def names_config(value: Any) -> bool:
    """Whether it is a text that ends as the name of a config file does."""
    return isinstance(value, str) and PurePath(value).suffix in CONFIG_SUFFIXES


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
    # None first, so that `--load None` is no folder called None
    for member in sorted(members(annotation), key=lambda member: member is not types.NoneType):
        try:
            return coerce(_parse_member(texts, member), member)
        except (TypeError, ValueError):
            continue
    raise ValueError(f"{' '.join(texts)!r}: expected {describe(annotation)}")


def _parse_member(texts: Sequence[str], annotation: Any) -> Any:
    origin, text = typing.get_origin(annotation), texts[0]
    if annotation is bool:
        return parse_bool(text)
    if annotation in (int, float, str):
        return annotation(text)
    if origin is Literal:
        return text
    if origin is list:
        literal = parse_literal(text) if len(texts) == 1 else None
        item = typing.get_args(annotation)[0]
        return literal if isinstance(literal, list) else [_parse_member([text], item) for text in texts]
    return parse_literal(text) if len(texts) == 1 else [parse_literal(text) for text in texts]


def parse_bool(text: str) -> bool:
    """`true yes t y 1` or `false no f n 0`, in any case."""
    if text.lower() in TRUE:
        return True
    if text.lower() in FALSE:
        return False
    raise ValueError(f"{text!r} is not a bool, write True or False")


def parse_literal(text: str) -> Any:
    """A Python literal, in which `dict(a=1)` may stand as in a config file; what is none is the text itself."""
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
    lines = []
    for f in schema_fields(schema).values():
        default = "required" if f.default is REQUIRED else f"default {f.default!r}"
        lines.append(f"  --{dashed(f.name):<24}{type_text(f)}, {default}\n{'':28}{f.doc}")
    blocks = [
        "usage: SCRIPT CONFIG [--field VALUE] [--component.key VALUE] [--print-config] [--help]",
        f"{(schema.__doc__ or '').strip()}\nCONFIG is a Python file that sets fields; the command line overrides it.",
        "fields:\n" + "\n".join(lines),
        "short names for keys of components:\n"
        + "\n".join(f"  --{dashed(name):<24}{'.'.join(alias.path)}" for name, alias in schema.aliases.items()),
        f"other:\n  --{'print-config':<24}show every value and where it was set, then stop",
    ]
    return "\n\n".join(blocks) + "\n"


def dashed(name: str) -> str:
    """A field's name as users of the command line write it."""
    return name.replace("_", "-")


def type_text(f: Field) -> str:
    """A field's type in words, or its choices."""
    return " or ".join(f.choices) if f.choices else describe(f.annotation)
