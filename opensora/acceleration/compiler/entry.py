"""`compile`: a module in place, or a function."""

import shutil
import warnings
import weakref
from collections.abc import Callable
from types import MethodType
from typing import Any, NamedTuple, TypeVar, overload

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from opensora.acceleration.compile import allow_many_programs, knows
from opensora.acceleration.compiler.call import CompiledCall
from opensora.acceleration.compiler.flags import cache_settings
from opensora.acceleration.compiler.modes import MODES, inductor_settings
from opensora.acceleration.compiler.options import BUCKETS, Given, Options, parse_options
from opensora.acceleration.compiler.quantise import plan
from opensora.acceleration.compiler.regions import is_called_by_parts, is_ours, repeated_blocks
from opensora.acceleration.sliced_vae import to_channels_last
from opensora.registry import did_you_mean
from opensora.utils.errors import UserError

NEXFORT, INDUCTOR, NONE = "nexfort", "inductor", "none"
WITHOUT_INDUCTOR = {"low-precision", "quant", "jit", "disable-runtime-fusion"}

Compilable = TypeVar("Compilable", bound=Callable[..., Any])


class Record(NamedTuple):
    """How a module was compiled."""

    backend: str
    options: Options
    targets: tuple[Any, ...]  # weak references to the modules whose call is compiled
    handles: tuple[RemovableHandle, ...]

    def calls(self) -> list[CompiledCall]:
        """The compiled calls that are still in place."""
        alive = [target() for target in self.targets]
        found = [getattr(target, "_compiled_call_impl", None) for target in alive if target is not None]
        return [call for call in found if isinstance(call, CompiledCall)]


_RECORDS: weakref.WeakKeyDictionary[nn.Module, Record] = weakref.WeakKeyDictionary()


@overload
def compile(module: Compilable, *, backend: str = ..., options: Given = ...) -> Compilable: ...
@overload
def compile(module: None = ..., *, backend: str = ..., options: Given = ...) -> Callable[[Compilable], Compilable]: ...
def compile(module: Any = None, *, backend: str = NEXFORT, options: Given = None) -> Any:
    """Compile a module in place, or a function.

    Compiling what is compiled already does it anew, with the new options. Nothing is computed before the first call.

    Args:
        module: a module, a function, or None to decorate one.
        backend: "nexfort" and "inductor" are the same; "none" leaves (or makes) a module uncompiled; else a name of
            `torch._dynamo.list_backends()` such as "aot_eager", which needs no C++ compiler.
        options: a dict or JSON, see `options.Options`. It is not changed.

    Returns:
        The module itself; or a compiled function.

    Raises:
        UserError: options are wrong, exclude each other, or have no effect with this backend or module.
    """
    if module is None:
        return lambda one: compile(one, backend=backend, options=options)
    chosen, name = parse_options(options), check_backend(backend)
    inner = getattr(module, "_orig_mod", None) or getattr(module, "_torchdynamo_orig_callable", None) or module
    inner = inner.__wrapped__ if isinstance(inner, CompiledFunction) else inner
    if isinstance(inner, nn.Module):
        compile_module(inner, name, chosen)
        return inner
    return inner if name == NONE else CompiledFunction(inner, _compiled_function(inner, name, chosen))


def record_of(module: nn.Module) -> Record | None:
    """How `compile` compiled a module; None: it did not."""
    return _RECORDS.get(module)


def check_backend(backend: str) -> str:
    """Torch's name of a backend, or "none"."""
    if backend in (NEXFORT, INDUCTOR):
        return INDUCTOR
    known = [NEXFORT, INDUCTOR, NONE, *torch._dynamo.list_backends(exclude_tags=())]
    if backend not in known:
        raise UserError(f"no compiler backend {backend!r}.{did_you_mean(backend, known)} Backends: {', '.join(known)}.")
    return backend


class CompiledFunction:
    """A compiled function, which knows what it was."""

    def __init__(self, original: Callable[..., Any], call: CompiledCall) -> None:
        self.__wrapped__, self.call = original, call
        self.__doc__, self.__name__ = original.__doc__, getattr(original, "__name__", type(original).__name__)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The function itself."""
        return self.call(*args, **kwargs)

    def __get__(self, owner: Any, kind: type | None = None) -> Callable[..., Any]:
        """As Python does with functions: an object's attribute is a method of that object."""
        return self if owner is None else MethodType(self, owner)


def _compiled_function(function: Callable[..., Any], backend: str, options: Options) -> CompiledCall:
    name = getattr(function, "__name__", type(function).__name__)
    for word in {"quant", "jit", "freezing"} & options.words:
        raise UserError(f"{name}: {word} is for modules, this is a function.")
    if options.regional or options.memory_format:
        raise UserError(f"{name}: regional and memory_format are for modules, this is a function.")
    _check_effect(name, backend, options)
    return CompiledCall(torch.compile(function, **_arguments(backend, options)), name, options, ())


def compile_module(module: nn.Module, backend: str, options: Options) -> None:
    """`compile` for a module, with options that were read already and torch's name of a backend."""
    name = type(module).__name__
    blocks = repeated_blocks(module)
    backend, regional = _resolve(name, backend, options, blocks=bool(blocks), ours=is_ours(module))
    _check_effect(name, backend, options)
    _check_module(name, module, options, whole=backend != NONE and not regional)
    quantise = plan(module, options) if "quant" in options.words else None
    restore(module)  # after all that may refuse: the module is left as it was
    if options.memory_format is not None:
        set_memory_format(module, options.memory_format)
    if quantise is not None:
        quantise()
    if backend == NONE:
        return
    arguments = _arguments(backend, options, fullgraph=regional and is_ours(module))
    targets = blocks if regional else [module]
    for target in targets:
        target.compile(**arguments)
        target._compiled_call_impl = CompiledCall(
            target._compiled_call_impl,  # type: ignore[arg-type]
            name,
            options,
            [*target.parameters(), *target.buffers()],
        )
    handles = [module.register_load_state_dict_pre_hook(_refuse_loading)] if "freezing" in options.words else []
    _RECORDS[module] = Record(backend, options, tuple(weakref.ref(one) for one in targets), tuple(handles))


def restore(module: nn.Module) -> None:
    """Take compilation off a module. Memory format and quantised weights stay."""
    record = _RECORDS.pop(module, None)
    for target in () if record is None else record.targets:
        if target() is not None:
            target()._compiled_call_impl = None
    for handle in () if record is None else record.handles:
        handle.remove()
    if record is not None and "freezing" in record.options.words and not knows("isolate_recompiles"):
        torch.compiler.reset()  # or the next compilation would find the program with the weights of before
    module._compiled_call_impl = None  # also what `module.compile()` did


def set_memory_format(module: nn.Module, memory_format: str) -> None:
    """Lay out the kernels of convolutions: "channels_last" (2D and 3D) or "contiguous_format"."""
    if memory_format == "channels_last":
        to_channels_last(module)
        return
    for parameter in module.parameters():
        parameter.data = parameter.data.contiguous()


def _resolve(name: str, backend: str, options: Options, *, blocks: bool, ours: bool) -> tuple[str, bool]:
    """The backend, and whether blocks are compiled instead of the whole."""
    if backend == NONE:
        return backend, False
    if options.regional and not blocks:
        raise UserError(f"{name} does not say which blocks it repeats; leave regional out.")
    if "jit" in options.words:
        return (backend, True) if blocks else ("aot_eager", False)
    # graphs would overwrite each other's results block by block; with weights as constants blocks share no program
    whole = bool(options.words & {"cudagraphs", "freezing"})
    return backend, ours and not whole if options.regional is None else options.regional


def _check_effect(name: str, backend: str, options: Options) -> None:
    """Refuse what would do nothing."""
    if backend != INDUCTOR:
        lost = [word for word in MODES if word in options.words - WITHOUT_INDUCTOR]
        lost += [key for key in options.overrides if not key.startswith("overrides.")]
        if lost:
            raise UserError(
                f"{name}: {', '.join(lost)} would have no effect with backend {backend!r}, which does not generate code; use "
                'backend="nexfort", and "jit" only for modules that repeat blocks.'
            )
    elif not torch.cuda.is_available():
        if not any(map(shutil.which, ("g++", "clang++", "c++"))):
            raise UserError(f'{name}: on a CPU inductor needs a C++ compiler; install g++, or use backend="aot_eager".')
        if idle := options.words & {"cudagraphs", "low-precision"}:
            warnings.warn(f"{name}: {' and '.join(sorted(idle))} has no effect without a GPU.", stacklevel=4)


def _check_module(name: str, module: nn.Module, options: Options, *, whole: bool) -> None:
    if is_called_by_parts(module) and "freezing" in options.words:
        raise UserError(
            f"{name}: freezing makes constants of weights, and its sampler puts them into autocast's number format for each video: "
            "leave freezing out."
        )
    if is_called_by_parts(module) and whole:
        raise UserError(
            f"{name} is called part by part when it samples, never as a whole, so that compiling the whole would do nothing: leave "
            'out cudagraphs and "regional": false, and its blocks are compiled.'
        )
    if "freezing" not in options.words:
        return
    if module.training:
        raise UserError(
            f"{name} is in training mode, and freezing makes constants of its weights: call .eval(), or leave it out."
        )
    if any(hasattr(one, "lora_A") for one in module.modules()):
        raise UserError(
            f"{name} has an adapter (LoRA) that is not merged, and freezing would fix it: merge it first, or leave freezing out."
        )


def _arguments(backend: str, options: Options, *, fullgraph: bool = False) -> dict[str, Any]:
    """For `torch.compile`. Settings go with the module, and change nothing else in the process, but for the limit of older PyTorch."""
    dynamic = False if options.dynamic == BUCKETS else options.dynamic
    arguments: dict[str, Any] = {
        "backend": backend,
        "dynamic": dynamic,
        "fullgraph": fullgraph or options.fullgraph,
    }
    arguments |= allow_many_programs()  # nexfort never gave up on a new size
    if "freezing" in options.words and knows("isolate_recompiles"):
        arguments["isolate_recompiles"] = True  # a program with other weights as constants is never found
    if backend == INDUCTOR:
        from torch._inductor import config

        known = config.get_config_copy()
        wanted = {**cache_settings(), **inductor_settings(options.words)}
        settings = {key: value for key, value in wanted.items() if key in known}  # what this PyTorch knows
        arguments["options"] = {**settings, **options.inductor_overrides()}
    return arguments


def _refuse_loading(module: nn.Module, *_: Any) -> None:
    raise UserError(
        f"{type(module).__name__} was compiled with freezing: its weights are constants of the program. Load them first, and "
        "compile then; or compile without freezing."
    )
