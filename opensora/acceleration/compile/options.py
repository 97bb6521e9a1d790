"""The options of `compile`: the words of a mode string and what each sets in PyTorch, read from a dict or JSON and checked.

The words' meaning is documented in OneDiff's README; nexfort, which gave them effect, is closed.

Keys with a dot are settings by the name that nexfort's users write, either next to the others or in a dict of their own
under "options":

    inductor.X                       inductor's setting X
    triton.X                         inductor's setting triton.X
    overrides.conv_benchmark         cuDNN tries its algorithms, while the module runs
    overrides.matmul_allow_tf32      TF32 in matrix products, while the module runs
"""

import json
import typing
import warnings
from collections.abc import Mapping, Set
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from opensora.config.schema import coerce, describe
from opensora.registry import did_you_mean
from opensora.utils.errors import UserError

# word -> settings of inductor. The order of words in a mode does not matter: of two that set the same, the later row wins
MODES: dict[str, dict[str, bool]] = {
    "cache-all": {"fx_graph_cache": True, "fx_graph_remote_cache": False, "autotune_local_cache": True},
    "max-autotune": {"max_autotune": True},
    "max-optimize": {
        "coordinate_descent_tuning": True,
        "coordinate_descent_check_all_directions": True,
        "conv_1x1_as_mm": True,
        "aggressive_fusion": True,
    },
    "low-precision": {},
    "cudagraphs": {"triton.cudagraphs": True},
    "freezing": {"freezing": True},
    "benchmark": {"benchmark_fusion": True, "benchmark_kernel": True},
    "quant": {},
    "jit": {},
    "disable-runtime-fusion": {"epilogue_fusion": False, "prologue_fusion": False},
}
_ALMOST_ALL = ("max-optimize", "max-autotune", "low-precision", "cache-all")
COMBINATIONS: dict[str, tuple[str, ...]] = {"O2": _ALMOST_ALL, "O3": _ALMOST_ALL}
FLAGS = ("overrides.conv_benchmark", "overrides.matmul_allow_tf32")
BUCKETS = "buckets"
# settings of inductor -> the word that sets them, whose rules a setting by itself would circumvent
WORDS_ALONE = {"freezing": "freezing", "triton.cudagraphs": "cudagraphs"}

Given = Mapping[str, Any] | str | None


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to do to a module.

    Attributes:
        mode: words joined by colons, see `MODES`.
        dynamic: True: one program for all sizes; False: one for each; "buckets": one for each of a few sizes, as many as
            come; None: PyTorch's way, where a second size makes the program dynamic.
        memory_format: layout of the convolutions' weights; None: as they are.
        regional: compile the repeated blocks, not the module around them. None: with "jit", and for our denoisers, unless
            with "cudagraphs" or "freezing".
        fullgraph: refuse graph breaks. Our blocks always do.
        quant_type: for "quant", see `quantise.TYPES`; None: what the device is good at and the weights' dtype allows.
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
        """The words of `mode`, with combinations spelt out."""
        return parse_mode(self.mode)[0]

    @property
    def reduced_precision(self) -> bool:
        """Whether fp16 and bf16 products may be accumulated in reduced precision."""
        return parse_mode(self.mode)[1]

    def mode_without(self, drop: Set[str]) -> str:
        """`mode` without some words. A combination is spelt out only where it has one of them: O2 and O3 mean more than their words."""
        kept: list[str] = []
        for word in self.mode.split(":"):
            parts = parse_mode(word)[0]
            kept += sorted(parts - drop) if parts & drop else [word]
        return ":".join(kept)

    def inductor_settings(self) -> dict[str, Any]:
        """Inductor's settings, by its names: those of the words that this PyTorch has, and those with a dot."""
        from torch._inductor import config

        known = config.get_config_copy()
        settings = {key: value for word, of in MODES.items() if word in self.words for key, value in of.items()}
        dotted = {name.removeprefix("inductor."): value for name, value in self.overrides.items() if name not in FLAGS}
        return {key: value for key, value in settings.items() if key in known} | dotted

    def describe(self) -> dict[str, Any]:
        """As JSON takes it; equal for options that mean the same."""
        mode, skip = ":".join(sorted(self.words)), sorted(self.quant_skip)
        return {**asdict(self), "quant_skip": skip, "mode": mode, "short_sums": self.reduced_precision}


def parse_mode(mode: str) -> tuple[frozenset[str], bool]:
    """The words of a mode string, with combinations spelt out; and whether products may be accumulated in reduced precision.

    The latter is what O3 does and O2 does not.

    Raises:
        UserError: a word is in neither `MODES` nor `COMBINATIONS`, or there are both O2 and O3.
    """
    words = {word.strip() for word in mode.split(":") if word.strip()}
    known = [*MODES, *COMBINATIONS]
    for word in sorted(words - set(known)):
        raise UserError(f"mode {mode!r}: no word {word!r}.{did_you_mean(word, known)} Words: {', '.join(known)}.")
    if COMBINATIONS.keys() <= words:
        raise UserError(f"mode {mode!r}: O2 and O3 differ in precision; keep one.")
    chosen = {part for word in words for part in COMBINATIONS.get(word, (word,))}
    return frozenset(chosen), "low-precision" in chosen and "O2" not in words


def parse_options(given: Given) -> Options:
    """Options from a dict or a JSON string of one, which is not changed.

    Raises:
        UserError: it is not JSON, a key is unknown, a value is wrong, or options exclude each other.
    """
    if isinstance(given, str):
        try:
            given = json.loads(given or "{}")
        except json.JSONDecodeError as error:
            raise UserError(
                f'compiler options: {given!r} is no JSON ({error}). Write them as \'{{"mode": "O3"}}\'.'
            ) from error
    if given is not None and not isinstance(given, Mapping):
        raise UserError(f'compiler options: expected a dict such as {{"mode": "O3"}}, got {given!r}.')
    values = dict(given or {})
    nested = values.pop("options", None)
    if not isinstance(nested, Mapping | None):
        raise UserError(
            f'compiler options: options={nested!r}, but it takes a dict of settings such as {{"inductor.epilogue_fusion": false}}.'
        )
    dotted = {name: values.pop(name) for name in list(values) if "." in name}
    types = typing.get_type_hints(Options)
    del types["overrides"]
    for name in values:
        if name not in types:
            raise UserError(
                f"compiler options: no key {name!r}.{did_you_mean(name, list(types))} Keys: {', '.join(types)}, "
                "and settings with a dot, such as inductor.epilogue_fusion."
            )
    if values.get("mode", "") is None:
        values["mode"] = ""
    options = Options(**_typed(values, types), overrides=_settings({**(nested or {}), **dotted}))
    _check(options)
    return options


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
        # richer types than these are checked by inductor itself
        if setting in known and (kind := config.get_type(setting)) in (bool, int, float, str):  # type: ignore[attr-defined]
            types[name] = kind
    return _typed(kept, types)


def _typed(values: Mapping[str, Any], types: Mapping[str, Any]) -> dict[str, Any]:
    """The values as their types, an int as a float where one is due.

    Raises:
        UserError: names every value of another type.
    """
    typed, problems = dict(values), []
    for name, value in values.items():
        try:
            typed[name] = coerce(value, types.get(name, Any))
        except TypeError:
            problems.append(f"compiler options: {name}={value!r}, but it takes {describe(types[name])}.")
    if problems:
        raise UserError("\n".join(problems))
    return typed


def _check(options: Options) -> None:
    words = options.words  # an unknown word is an error here
    if "cudagraphs" in words and options.dynamic is True:
        raise UserError(
            'compiler options: a CUDA graph has one size. With cudagraphs use "dynamic": "buckets", which records one graph for '
            "each size and wants few of them, or leave one of the two out."
        )
    for rival, on in {"regional": options.regional, "jit": "jit" in words}.items():
        if "cudagraphs" in words and on:
            raise UserError(
                f"compiler options: cudagraphs needs the whole module, and {rival} compiles its blocks; keep one."
            )
    if "quant" not in words and (options.quant_type, options.quant_min_features, *options.quant_skip) != (None, 512):
        raise UserError(
            'compiler options: quant_type, quant_min_features and quant_skip have no effect without "quant" in mode.'
        )
