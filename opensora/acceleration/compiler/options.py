"""The options of `compile`: read from a dict or JSON, checked as a whole, never changed.

Keys with a dot are settings by the name that nexfort's users write; they stand beside the others or in a dict of their
own under "options":

    inductor.X                       inductor's setting X
    triton.X                         inductor's setting triton.X
    overrides.conv_benchmark         cuDNN tries its algorithms, while the module runs
    overrides.matmul_allow_tf32      TF32 in matrix products, while the module runs
"""

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from opensora.acceleration.compiler.modes import parse_mode
from opensora.registry import did_you_mean
from opensora.utils.errors import UserError

MEMORY_FORMATS = ("channels_last", "contiguous_format")
FLAGS = ("overrides.conv_benchmark", "overrides.matmul_allow_tf32")
BUCKETS = "buckets"

Given = Mapping[str, Any] | str | None


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to do to a module.

    Attributes:
        mode: words joined by colons, see `modes`.
        dynamic: True: one program for all sizes; False: one for each; "buckets": one for each of a few sizes, as many as
            come; None: PyTorch's way, where a second size makes the program dynamic.
        memory_format: layout of the convolutions' weights; None: as they are.
        regional: compile the repeated blocks, not the module around them. None: for our denoisers, and with "jit".
        fullgraph: refuse what would interrupt the program. Our blocks always do.
        quant_type: for "quant", see `quantise.TYPES`; None: what the device is good at.
        quant_min_features: linear layers narrower than this are not quantised.
        quant_skip: full names of layers that are not quantised either, see `quantise.worst`.
        overrides: settings with a dot.
    """

    mode: str = ""
    dynamic: bool | str | None = None
    memory_format: str | None = None
    regional: bool | None = None
    fullgraph: bool = False
    quant_type: str | None = None
    quant_min_features: int = 512
    quant_skip: Sequence[str] = ()
    overrides: Mapping[str, Any] = field(default_factory=dict)

    @property
    def words(self) -> frozenset[str]:
        """The words of `mode`, combinations spelt out."""
        return parse_mode(self.mode)[0]

    @property
    def short_sums(self) -> bool:
        """Whether fp16 and bf16 products may be summed in short formats."""
        return parse_mode(self.mode)[1]

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
    nested = values.pop("options", None) or {}
    dotted = {name: value for name, value in values.items() if "." in name}
    plain = {name: value for name, value in values.items() if "." not in name}
    known = [one.name for one in fields(Options) if one.name != "overrides"]
    for name in plain:
        if name not in known:
            raise UserError(
                f"compiler options: no key {name!r}.{did_you_mean(name, known)} Keys: {', '.join(known)}, "
                "and settings with a dot, such as inductor.epilogue_fusion."
            )
    plain["mode"] = plain.get("mode") or ""
    options = Options(**plain, overrides=_settings({**nested, **dotted}))
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
    kept = {}
    for name, value in given.items():
        if name in FLAGS or name.removeprefix("inductor.") in known:
            kept[name] = value
        else:
            warnings.warn(f"compiler options: {name} is no setting of this PyTorch's inductor, left out.", stacklevel=4)
    return kept


def _check(options: Options) -> None:
    words = options.words  # an unknown word is an error here
    if not isinstance(options.dynamic, bool | None) and options.dynamic != BUCKETS:
        raise UserError(f'compiler options: dynamic={options.dynamic!r}; use true, false, "{BUCKETS}" or null.')
    if options.memory_format not in (None, *MEMORY_FORMATS):
        raise UserError(
            f"compiler options: memory_format={options.memory_format!r} is none of {', '.join(MEMORY_FORMATS)}."
        )
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
