"""The options of `compile`: read from a dict or JSON, checked as a whole, never changed.

Keys with a dot are settings by the name that nexfort's users write; they stand beside the others or in a dict of their
own under "options":

    inductor.X                       inductor's setting X
    triton.X                         inductor's setting triton.X
    overrides.conv_benchmark         cuDNN tries its algorithms, while the module runs
    overrides.matmul_allow_tf32      TF32 in matrix products, while the module runs
"""

import json
import typing
import warnings
from collections.abc import Iterator, Mapping, Set
from dataclasses import asdict, dataclass, field
from types import NoneType
from typing import Any, Literal

from opensora.acceleration.compiler.modes import parse_mode
from opensora.config.schema import coerce, describe, members
from opensora.registry import did_you_mean
from opensora.utils.errors import UserError

FLAGS = ("overrides.conv_benchmark", "overrides.matmul_allow_tf32")
BUCKETS = "buckets"
# settings of inductor -> the word that sets them, whose rules a setting by itself would go round
WORDS_ALONE = {"freezing": "freezing", "triton.cudagraphs": "cudagraphs"}
PLAIN = (bool, int, float, str, list, dict, NoneType)

Given = Mapping[str, Any] | str | None


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to do to a module.

    Attributes:
        mode: words joined by colons, see `modes`.
        dynamic: True: one program for all sizes; False: one for each; "buckets": one for each of a few sizes, as many as
            come; None: PyTorch's way, where a second size makes the program dynamic.
        memory_format: layout of the convolutions' weights; None: as they are.
        regional: compile the repeated blocks, not the module around them. None: with "jit", and for our denoisers, unless
            with "cudagraphs" or "freezing".
        fullgraph: refuse what would interrupt the program. Our blocks always do.
        quant_type: for "quant", see `quantise.TYPES`; None: what the device is good at and the weights' format allows.
        quant_min_features: linear layers narrower than this are not quantised.
        quant_skip: full names of layers that are not quantised either, see `quantise.worst`.
        overrides: settings with a dot.
    """

    mode: str = ""
    dynamic: bool | Literal["buckets"] | None = None
    memory_format: Literal["channels_last", "contiguous_format"] | None = None
    regional: bool | None = None
    fullgraph: bool = False
    quant_type: str | None = None
    quant_min_features: int = 512
    quant_skip: list[str] = field(default_factory=list)
    overrides: Mapping[str, Any] = field(default_factory=dict)

    @property
    def words(self) -> frozenset[str]:
        """The words of `mode`, combinations spelt out."""
        return parse_mode(self.mode)[0]

    @property
    def short_sums(self) -> bool:
        """Whether fp16 and bf16 products may be summed in short formats."""
        return parse_mode(self.mode)[1]

    def mode_without(self, drop: Set[str]) -> str:
        """`mode` without some words. A combination is spelt out only where it has one of them, for O2 and O3 say more than their words."""
        kept: list[str] = []
        for word in self.mode.split(":"):
            parts = parse_mode(word)[0]
            kept += sorted(parts - drop) if parts & drop else [word]
        return ":".join(kept)

    def inductor_overrides(self) -> dict[str, Any]:
        """The settings with a dot that are inductor's, by inductor's names."""
        return {name.removeprefix("inductor."): value for name, value in self.overrides.items() if name not in FLAGS}

    def describe(self) -> dict[str, Any]:
        """As JSON takes it; equal for options that mean the same."""
        skipped = sorted(self.quant_skip)
        return {
            **asdict(self),
            "quant_skip": skipped,
            "mode": ":".join(sorted(self.words)),
            "short_sums": self.short_sums,
        }


def parse_options(given: Given) -> Options:
    """Options from a dict or a JSON string of one, which is left as it was.

    Raises:
        UserError: no JSON, an unknown key, a wrong value, or options that exclude each other.
    """
    values = _as_dict(given)
    nested = values.pop("options", None)
    if not isinstance(nested, Mapping | None):
        raise UserError(
            f'compiler options: options={nested!r}, but it takes a dict of settings such as {{"inductor.epilogue_fusion": false}}.'
        )
    dotted = {name: value for name, value in values.items() if "." in name}
    plain = {name: value for name, value in values.items() if "." not in name}
    known = typing.get_type_hints(Options)
    del known["overrides"]
    for name in plain:
        if name not in known:
            raise UserError(
                f"compiler options: no key {name!r}.{did_you_mean(name, list(known))} Keys: {', '.join(known)}, "
                "and settings with a dot, such as inductor.epilogue_fusion."
            )
    if plain.get("mode", "") is None:
        plain["mode"] = ""
    plain = _typed(plain, known)
    options = Options(**plain, overrides=_settings({**(nested or {}), **dotted}))
    _check(options)
    return options


def _as_dict(given: Given) -> dict[str, Any]:
    if isinstance(given, str):
        try:
            given = json.loads(given or "{}")
        except json.JSONDecodeError as error:
            raise UserError(
                f'compiler options: {given!r} is no JSON ({error}). Write them as \'{{"mode": "O3"}}\'.'
            ) from error
    if given is not None and not isinstance(given, Mapping):
        raise UserError(f'compiler options: expected a dict such as {{"mode": "O3"}}, got {given!r}.')
    return dict(given or {})


def _settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with a dot that mean something; a warning for each that does not."""
    from torch._inductor import config

    known = config.get_config_copy()
    kept, types = {}, dict.fromkeys(FLAGS, bool)
    for name, value in given.items():
        setting = name.removeprefix("inductor.")
        if word := WORDS_ALONE.get(setting):
            raise UserError(
                f'compiler options: {name} is what the word "{word}" sets, which has rules that go with it. Put the word into mode, '
                f'"mode": "O3:{word}", or leave {name} out.'
            )
        if name in FLAGS or setting in known:
            kept[name] = value
        else:
            warnings.warn(f"compiler options: {name} is no setting of this PyTorch's inductor, left out.", stacklevel=4)
        if setting in known:
            types[name] = config.get_type(setting)  # type: ignore[attr-defined]
    return _typed(kept, types)


def _typed(values: Mapping[str, Any], types: Mapping[str, Any]) -> dict[str, Any]:
    """The values as their types, an int as a float where one is due.

    Raises:
        UserError: names every value that is of another type.
    """
    typed, problems = {}, []
    for name, value in values.items():
        try:
            typed[name] = coerce(value, types[name]) if all(map(_is_plain, _inside(types[name]))) else value
        except TypeError:
            problems.append(f"compiler options: {name}={value!r}, but it takes {describe(types[name])}.")
    if problems:
        raise UserError("\n".join(problems))
    return typed


def _inside(annotation: Any) -> Iterator[Any]:
    """The alternatives of a type; of lists and dicts those of what they hold too."""
    for member in members(annotation):
        yield member
        if typing.get_origin(member) in (list, dict):
            for held in typing.get_args(member):
                yield from _inside(held)


def _is_plain(annotation: Any) -> bool:
    """Whether JSON can write it, and `coerce` tell; inductor has settings of richer types, which it looks at itself."""
    if typing.get_origin(annotation) is Literal:
        return all(isinstance(value, str) for value in typing.get_args(annotation))
    return (typing.get_origin(annotation) or annotation) in PLAIN


def _check(options: Options) -> None:
    words = options.words  # an unknown word is an error here
    if "cudagraphs" in words and options.dynamic is True:
        raise UserError(
            'compiler options: a CUDA graph has one size. With cudagraphs use "dynamic": "buckets", which records one graph for '
            "each size and wants few of them, or leave one of the two out."
        )
    if "cudagraphs" in words and options.regional:
        raise UserError(
            "compiler options: cudagraphs needs the whole module, and regional compiles its blocks; keep one."
        )
    if "cudagraphs" in words and "jit" in words:
        raise UserError("compiler options: jit compiles block by block, cudagraphs needs the whole module; keep one.")
    if "quant" not in words and (options.quant_type, options.quant_min_features, *options.quant_skip) != (None, 512):
        raise UserError(
            'compiler options: quant_type, quant_min_features and quant_skip have no effect without "quant" in mode.'
        )
