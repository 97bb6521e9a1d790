"""OneDiff's `compile` for its nexfort backend: the words of a mode are settings of PyTorch's inductor, see docs/how-to/compiler.md."""

import json
import os
import typing
import warnings
import weakref
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import wraps
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from opensora.acceleration.compile import allow_many_programs, is_ours, knows, repeated_blocks
from opensora.acceleration.compile.quantise import quantise
from opensora.acceleration.vae_slicing import to_channels_last
from opensora.config.schema import coerce, describe
from opensora.registry import did_you_mean
from opensora.utils.errors import UserError

NEXFORT, INDUCTOR, NONE = "nexfort", "inductor", "none"

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
COMBINATIONS = dict.fromkeys(("O2", "O3"), ("max-optimize", "max-autotune", "low-precision", "cache-all"))

Given = Mapping[str, Any] | str | None


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to do to a module.

    Attributes:
        mode: words joined by colons, see `MODES` and `COMBINATIONS`.
        dynamic: True: one program for all sizes; False or "buckets": one for each; None: a second size makes it dynamic.
        memory_format: layout of the convolutions' weights; None: as they are.
        regional: compile the repeated blocks, not the module around them. None: with "jit", and for our denoisers, unless
            with "cudagraphs" or "freezing".
        fullgraph: refuse graph breaks. Our blocks always do.
        quant_type: for "quant", see `quantise.TYPES`; None: what device and weights allow. Layers that are quantised stay so.
        quant_min_features: linear layers narrower than this are not quantised.
        quant_skip: full names of layers that are not quantised either.
        overrides: inductor's settings with a dot: `inductor.X`, `triton.X`.

    Raises:
        UserError: a word is unknown, or options exclude each other.
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

    def __post_init__(self) -> None:
        known = [*MODES, *COMBINATIONS]
        for word in self.given:
            if word not in known:
                raise UserError(
                    f"mode {self.mode!r}: no word {word!r}.{did_you_mean(word, known)} Words: {', '.join(known)}."
                )
        if {"O2", "O3"} <= {*self.given}:
            raise UserError(f"mode {self.mode!r}: O2 and O3 differ in precision; keep one.")
        if "cudagraphs" in self.words and (self.dynamic is True or self.regional or "jit" in self.words):
            raise UserError(
                "compiler options: a CUDA graph is of the whole module and has one size; with cudagraphs leave out regional and jit, and use "
                '"dynamic": "buckets".'
            )
        if "quant" not in self.words and (self.quant_type, self.quant_min_features, *self.quant_skip) != (None, 512):
            raise UserError(
                'compiler options: quant_type, quant_min_features and quant_skip have no effect without "quant" in mode.'
            )

    @property
    def given(self) -> list[str]:
        """The words of `mode` as they were given."""
        return [word.strip() for word in self.mode.split(":") if word.strip()]

    @property
    def words(self) -> frozenset[str]:
        """The words of `mode`, with combinations spelt out."""
        return frozenset(part for word in self.given for part in COMBINATIONS.get(word, (word,)))

    @property
    def reduced_precision(self) -> bool:
        """Whether fp16 and bf16 products may be accumulated in reduced precision, which O3 allows and O2 does not."""
        return "low-precision" in self.words and "O2" not in self.given

    def inductor_settings(self) -> dict[str, Any]:
        """Inductor's settings by name, as far as this PyTorch has them; those with a dot win."""
        from torch._inductor import config

        known = config.get_config_copy()
        settings = {key: value for word, of in MODES.items() if word in self.words for key, value in of.items()}
        settings |= {name.removeprefix("inductor."): value for name, value in self.overrides.items()}
        return {key: value for key, value in settings.items() if key in known}

    def describe(self) -> dict[str, Any]:
        """As JSON takes it; equal for options that mean the same."""
        mode, skip = ":".join(sorted(self.words)), sorted(self.quant_skip)
        return {**asdict(self), "quant_skip": skip, "mode": mode, "short_sums": self.reduced_precision}


def parse_options(given: Given) -> Options:
    """Options from a dict or a JSON string of one, which is not changed.

    Raises:
        UserError: it is not JSON, a key is unknown, a value has another type, or what `Options` raises.
    """
    from torch._inductor import config

    try:
        values = dict(json.loads(given or "{}") if isinstance(given, str) else given or {})
        overrides = {**(values.pop("options", None) or {})}
    except (TypeError, ValueError) as error:
        raise UserError(
            f'compiler options: expected a dict or JSON such as {{"mode": "O3"}}, got {given!r} ({error}).'
        ) from error
    overrides |= {name: values.pop(name) for name in list(values) if "." in name}
    types, known = typing.get_type_hints(Options), config.get_config_copy()
    del types["overrides"]
    for name in values.keys() - types:
        raise UserError(
            f"compiler options: no key {name!r}.{did_you_mean(name, list(types))} Keys: {', '.join(types)}, "
            "and settings with a dot, such as inductor.epilogue_fusion."
        )
    values |= {"mode": ""} if values.get("mode", "") is None else {}
    if isinstance(layout := values.get("memory_format"), torch.memory_format):
        values["memory_format"] = None if layout == torch.preserve_format else str(layout).removeprefix("torch.")
    for name in list(overrides):
        setting = name.removeprefix("inductor.")
        if setting in ("freezing", "triton.cudagraphs"):
            raise UserError(f"compiler options: {name} is more than a setting: put {setting.split('.')[-1]} into mode.")
        if setting not in known:
            warnings.warn(f"compiler options: {name} is not a setting of this PyTorch's inductor.", stacklevel=3)
            del overrides[name]
        elif (kind := config.get_type(setting)) in (bool, int, float, str):
            types[name] = kind  # inductor itself checks richer types
    problems = []
    for some in (values, overrides):
        for name, value in some.items():
            try:
                some[name] = coerce(value, types.get(name, Any))
            except TypeError:
                problems.append(f"compiler options: {name}={value!r}, but it takes {describe(types[name])}.")
    if problems:
        raise UserError("\n".join(problems))
    return Options(**values, overrides=overrides)


class Record(NamedTuple):
    """How a module was compiled."""

    backend: str
    options: Options


_RECORDS: weakref.WeakKeyDictionary[nn.Module, Record] = weakref.WeakKeyDictionary()


def record_of(module: nn.Module) -> Record | None:
    """How `compile` compiled a module; None: it did not."""
    return _RECORDS.get(module)


def compile(module: Any = None, *, backend: str = NEXFORT, options: Given = None) -> Any:
    """Compile a module in place, or a function.

    Compiling what is compiled already does it anew, with the new options. Nothing is computed before the first call.

    Args:
        module: a module, which is returned; a function; or None to decorate one.
        backend: "nexfort" and "inductor" are the same; "none" leaves (or makes) a module uncompiled; else a name of
            `torch._dynamo.list_backends()` such as "aot_eager", which needs no C++ compiler.
        options: a dict or JSON, see `Options`.

    Raises:
        UserError: options are wrong, exclude each other, or do not work with this module.
    """
    if module is None:
        return lambda one: compile(one, backend=backend, options=options)
    chosen, backend = parse_options(options), check_backend(backend)
    inner = getattr(module, "_orig_mod", None) or getattr(module, "_torchdynamo_orig_callable", module)
    if isinstance(inner, nn.Module):
        compile_module(inner, backend, chosen)
        set_precision(chosen)
        return inner
    if chosen.words & {"quant", "jit", "freezing", "cudagraphs"} or chosen.regional or chosen.memory_format:
        raise UserError(
            f"{inner.__name__} is a function: quant, jit, freezing, cudagraphs, regional and memory_format are for modules."
        )
    set_precision(chosen)
    return inner if backend == NONE else torch.compile(inner, **_arguments(backend, chosen))


def check_backend(backend: str) -> str:
    """Torch's name of a backend, or "none"."""
    known = [NEXFORT, INDUCTOR, NONE, *torch._dynamo.list_backends(exclude_tags=())]
    if backend not in known:
        raise UserError(f"no compiler backend {backend!r}.{did_you_mean(backend, known)} Backends: {', '.join(known)}.")
    return INDUCTOR if backend == NEXFORT else backend


def set_precision(options: Options) -> None:
    """For "low-precision": TF32 and the precision of sums, which PyTorch has for the whole process only."""
    if "low-precision" in options.words:
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.allow_tf32 = True
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = options.reduced_precision
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = options.reduced_precision


def compile_module(module: nn.Module, backend: str, options: Options) -> None:
    """`compile` for a module, with torch's name of a backend; what raises leaves the module as it was."""
    name, words, blocks = type(module).__name__, options.words, repeated_blocks(module)
    if options.regional and not blocks:
        raise UserError(f"{name} does not say which blocks it repeats; leave regional out.")
    regional = options.regional
    if regional is None:
        # graphs would overwrite each other's results block by block; with weights as constants blocks share no program
        regional = bool(blocks) if "jit" in words else is_ours(module) and not words & {"cudagraphs", "freezing"}
    if "jit" in words and not blocks and backend == INDUCTOR:
        backend = "aot_eager"
    if hasattr(module, "next_condition") and backend != NONE and ("freezing" in words or not regional):
        raise UserError(
            f"{name}: its sampler calls its parts one by one, and casts weights for each video, so that it is compiled by blocks alone: leave "
            'out freezing, cudagraphs and "regional": false.'
        )
    if "freezing" in words and (module.training or any(hasattr(one, "lora_A") for one in module.modules())):
        raise UserError(
            f"{name}: freezing makes constants of weights: call .eval() and merge adapters (LoRA) first, or leave it out."
        )
    if "quant" in words:
        quantise(module, options.quant_type, options.quant_min_features, options.quant_skip)
    restore(module)
    if options.memory_format == "channels_last":
        to_channels_last(module)
    elif options.memory_format is not None:
        for parameter in module.parameters():
            parameter.data = parameter.data.contiguous()
    if backend == NONE:
        return
    arguments = _arguments(backend, options, fullgraph=regional and is_ours(module))
    for target in blocks if regional else [module]:
        target.compile(**arguments)
        target._compiled_call_impl = _with_options(target._compiled_call_impl, name, options)
    module.register_load_state_dict_pre_hook(_refuse_loading)
    _RECORDS[module] = Record(backend, options)


def restore(module: nn.Module) -> None:
    """Take compilation off a module and all inside it. Memory format and quantised weights stay."""
    record = _RECORDS.pop(module, None)
    if record is not None and "freezing" in record.options.words and not knows("isolate_recompiles"):
        torch.compiler.reset()  # or the next compilation would find the program with the weights of before
    for one in module.modules():
        one._compiled_call_impl = None


def _with_options(compiled: Any, name: str, options: Options) -> Any:
    """A compiled call with what must be done around each call of it."""
    graphs, freezing = "cudagraphs" in options.words, "freezing" in options.words
    if not graphs and not freezing and options.dynamic is not True:
        return compiled
    from torch._inductor import config as inductor
    from torch.fx.experimental import _config as shapes

    @wraps(compiled)
    def call(*args: Any, **kwargs: Any) -> Any:
        if freezing and torch.is_grad_enabled():
            raise UserError(f"{name} was compiled with freezing: call it under torch.no_grad(), or compile it without.")
        with ExitStack() as stack:
            if freezing:  # dynamo looks here whether weights are inputs of the program, not into its options
                stack.enter_context(inductor.patch(freezing=True))
            if options.dynamic is True:  # or a first call with height == width makes a program for squares
                stack.enter_context(shapes.patch(use_duck_shape=False))
            if graphs:
                torch.compiler.cudagraph_mark_step_begin()
            out = compiled(*args, **kwargs)
        # a graph writes its result into the same memory each time, and samplers keep earlier predictions
        return pytree.tree_map_only(Tensor, torch.clone, out) if graphs else out

    return call


def _arguments(backend: str, options: Options, *, fullgraph: bool = False) -> dict[str, Any]:
    """For `torch.compile`; settings go with the module."""
    arguments: dict[str, Any] = {
        "backend": backend,
        "dynamic": False if options.dynamic == "buckets" else options.dynamic,
        "fullgraph": fullgraph or options.fullgraph,
        **allow_many_programs(),  # nexfort never gave up on a new size
    }
    if "freezing" in options.words and knows("isolate_recompiles"):
        arguments["isolate_recompiles"] = True  # a program with other weights as constants is never found
    if backend == INDUCTOR:
        cache = os.environ.get("NEXFORT_GRAPH_CACHE", "")
        own = {"fx_graph_cache": cache.lower() in ("1", "true", "on", "yes")} if cache else {}
        arguments["options"] = own | options.inductor_settings()
    return arguments


def _refuse_loading(module: nn.Module, *_: Any) -> None:
    record = record_of(module)
    if record is not None and "freezing" in record.options.words:
        name = type(module).__name__
        raise UserError(
            f"{name} was compiled with freezing: its weights are constants of the program. Load them before."
        )
