"""The command line of a config: `CONFIG --field value --component.key value`, and the text of `--help`."""

import ast
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from opensora.registry import did_you_mean
from opensora.utils.config_schema import (
    REQUIRED,
    Field,
    Schema,
    coerce,
    describe,
    members,
    schema_fields,
)

TRUE, FALSE = ("true", "yes", "t", "y", "1"), ("false", "no", "f", "n", "0")


@dataclass
class Setting:
    """One thing that the command line sets: `path` inside the config, the flag as typed, and the value."""

    path: tuple[str, ...]
    flag: str
    value: Any
    text: str | None = None  # as typed, where the type is not known from the schema


@dataclass
class Command:
    """A command line, taken apart."""

    config: str | None = None
    settings: list[Setting] = field(default_factory=list)
    print_config: bool = False
    help: bool = False
    problems: list[str] = field(default_factory=list)


def read_command(schema: Schema, argv: Sequence[str], owner: Callable[[str], str | None]) -> Command:
    """Take a command line apart. `owner(key)` names the component that would take an unknown top-level `key`."""
    command, tokens, fields = Command(), list(argv), schema_fields(schema)
    while tokens:
        token = tokens.pop(0)
        flag, has_value, value = token.partition("=")
        if token in ("-h", "--help"):
            command.help = True
        elif token == "--print-config":
            command.print_config = True
        elif _is_flag(token):
            if has_value:
                tokens.insert(0, value)
            _read_setting(command, schema, fields, flag, tokens, attached=bool(has_value), owner=owner)
        elif command.config is None and not token.startswith("-"):
            command.config = token
        else:
            command.problems.append(f"{token!r} on the command line belongs to no option.")
    _refuse_contradictions(command)
    return command


def _is_flag(token: str) -> bool:
    return token.startswith("--") or token == "-h"


def _read_setting(
    command: Command,
    schema: Schema,
    fields: dict[str, Field],
    flag: str,
    tokens: list[str],
    *,
    attached: bool,
    owner: Callable[[str], str | None],
) -> None:
    """Read the values of one flag off the front of `tokens`."""
    path = tuple(part.replace("-", "_") for part in flag[2:].split("."))
    alias = schema.aliases.get(path[0]) if len(path) == 1 else None
    if alias:
        path, annotation = alias.path, alias.annotation
    elif path[0] not in fields:
        command.problems.append(_unknown_flag(flag, path[0], schema, fields, owner))
        _take_until_flag(tokens, attached=attached)
        return
    elif len(path) > 1 and not (fields[path[0]].takes_keys and all(path)):
        command.problems.append(f"{flag}: {path[0]} is {describe(fields[path[0]].annotation)} and has no keys.")
        _take_until_flag(tokens, attached=attached)
        return
    else:
        annotation = fields[path[0]].annotation if len(path) == 1 else Any
    try:
        texts = _take_values(tokens, annotation, attached=attached)
        value = parse_texts(texts, annotation)
    except (TypeError, ValueError) as error:
        command.problems.append(f"{flag}: {error}.")
        return
    text = texts[0] if annotation is Any and texts else None
    command.settings.append(Setting(path, flag, value, text))


def _unknown_flag(
    flag: str, key: str, schema: Schema, fields: dict[str, Field], owner: Callable[[str], str | None]
) -> str:
    component = owner(key)
    if component:
        return f"{flag} is not a field. {component} takes it: write --{component}.{key}."
    hint = did_you_mean(key, [*fields, *schema.aliases]).replace("_", "-").replace("mean '", "mean '--")
    return f"{flag} is not a field of {schema.__name__}.{hint} --help lists all."


def _take_until_flag(tokens: list[str], *, attached: bool) -> list[str]:
    """All values up to the next flag; a value written as `--flag=value` is the only one."""
    taken = [tokens.pop(0)] if attached else []
    while not attached and tokens and not _is_flag(tokens[0]):
        taken.append(tokens.pop(0))
    return taken


def _take_values(tokens: list[str], annotation: Any, *, attached: bool) -> list[str]:
    """As many values as the type wants, off the front of `tokens`."""
    if attached:
        return [tokens.pop(0)]
    kinds = [typing.get_origin(member) or member for member in members(annotation)]
    bare = not tokens or _is_flag(tokens[0])
    if bool in kinds and (bare or tokens[0].lower() not in (*TRUE, *FALSE)):
        return []
    if bare and annotation is Any:
        return []
    if bare:
        raise ValueError(f"a value is missing; expected {describe(annotation)}")
    if list in kinds:
        return _take_until_flag(tokens, attached=False)
    if tuple in kinds and _is_number(tokens[0]):
        size = next(len(typing.get_args(m)) for m in members(annotation) if typing.get_origin(m) is tuple)
        count = next((i for i, token in enumerate(tokens[:size]) if not _is_number(token)), len(tokens[:size]))
        return [tokens.pop(0) for _ in range(count)]
    return [tokens.pop(0)]


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def parse_texts(texts: list[str], annotation: Any) -> Any:
    """The values of one flag as the annotated type; no value at all is True.

    Raises:
        TypeError, ValueError: they are not of that type.
    """
    if not texts:
        return True
    expected = f"{' '.join(texts)!r} is not {describe(annotation)}"
    for member in sorted(members(annotation), key=lambda m: m is not types.NoneType):
        try:
            return _parse_member(texts, member)
        except (TypeError, ValueError):
            continue
    raise ValueError(expected)


def _parse_member(texts: list[str], annotation: Any) -> Any:
    origin = typing.get_origin(annotation)
    if annotation is types.NoneType and texts[0].lower() == "none" and len(texts) == 1:
        return None
    if annotation is bool:
        return parse_bool(texts[0])
    if annotation in (int, float, str):
        return coerce(annotation(texts[0]), annotation)
    if origin is Literal:
        return coerce(texts[0], annotation)
    if annotation is Any:
        return parse_literal(texts[0])
    if origin is list:
        literal = parse_literal(texts[0]) if len(texts) == 1 and texts[0].startswith("[") else texts
        return coerce(literal if isinstance(literal, list) else texts, annotation)
    literal = ast.literal_eval(texts[0] if len(texts) == 1 else f"({','.join(texts)})")
    return coerce(literal, annotation)


def parse_bool(text: str) -> bool:
    """`true yes t y 1` or `false no f n 0`, in any case."""
    if text.lower() in TRUE:
        return True
    if text.lower() in FALSE:
        return False
    raise ValueError(f"{text!r} is not a bool (write True or False)")


def parse_literal(text: str) -> Any:
    """A Python literal; anything that is none is the text itself."""
    words = {"none": None, "true": True, "false": False}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _refuse_contradictions(command: Command) -> None:
    seen: dict[tuple[str, ...], Setting] = {}
    for setting in command.settings:
        first = seen.setdefault(setting.path, setting)
        if first.value != setting.value:
            where = ".".join(setting.path)
            command.problems.append(
                f"{first.flag} sets {where} to {first.value!r} and {setting.flag} sets it to {setting.value!r}; "
                "keep one."
            )


def help_text(schema: Schema) -> str:
    """What `--help` prints."""
    blocks = [
        "usage: SCRIPT CONFIG [--field VALUE] [--component.key VALUE] [--print-config] [--help]",
        f"{(schema.__doc__ or '').strip()}\nCONFIG is a Python file that sets fields; the command line overrides it.",
        "fields:",
        *(_field_help(f) for f in schema_fields(schema).values()),
        "short names for keys of components:",
        *(f"  --{dashed(name):<24}{'.'.join(alias.path)}" for name, alias in schema.aliases.items()),
        "other:\n  --print-config            show every value and where it comes from, then stop",
    ]
    return "\n".join(blocks) + "\n"


def _field_help(f: Field) -> str:
    return f"  --{dashed(f.name):<24}{type_text(f)}, {default_text(f)}\n{'':28}{f.doc}"


def dashed(name: str) -> str:
    """A field's name as the command line's users write it."""
    return name.replace("_", "-")


def type_text(f: Field) -> str:
    """A field's type in words, or its choices."""
    return " or ".join(f.choices) if f.choices else describe(f.annotation)


def default_text(f: Field) -> str:
    """`default 16` or `required`."""
    return "required" if f.default is REQUIRED else f"default {f.default!r}"
