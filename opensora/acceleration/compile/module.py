"""`compile`: a module in place, or a function, with what its options ask for around each call."""

import functools
import os
import shutil
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from opensora.acceleration.compile.blocks import allow_many_programs, is_ours, knows, repeated_blocks
from opensora.acceleration.compile.options import BUCKETS, MODES, Given, Options, parse_options
from opensora.acceleration.compile.quantise import plan
from opensora.acceleration.vae_slicing import to_channels_last
from opensora.registry import did_you_mean
from opensora.utils.errors import UserError

NEXFORT, INDUCTOR, NONE = "nexfort", "inductor", "none"
WITHOUT_INDUCTOR = {"low-precision", "quant", "jit", "disable-runtime-fusion"}
CACHE_VARIABLES = {
    "NEXFORT_GRAPH_CACHE": "fx_graph_cache",
    "NEXFORT_ENABLE_TRITON_AUTOTUNE_CACHE": "autotune_local_cache",
}
IDLE_VARIABLES = ("NEXFORT_ENABLE_FP8_QUANTIZE_ATTENTION", "NEXFORT_FORCE_QUANTE_ON_CUDA")

Compilable = TypeVar("Compilable", bound=Callable[..., Any])


class CompiledCall:
    """A compiled function with what its options ask for around it.

    Some rules can only be checked while it runs: frozen weights allow neither gradients nor changes. A CUDA graph writes
    its result into the same memory each time, so that it is copied out; samplers keep earlier predictions.

    Attributes:
        sizes: of the tensors of each call so far, as a set.
    """

    def __init__(self, compiled: Callable[..., Any], name: str, options: Options, weights: Iterable[Tensor]) -> None:
        self.compiled, self.name = compiled, name
        self.flags = flags_of(options)
        self.frozen = list(weights) if "freezing" in options.words else None
        self.graphs = "cudagraphs" in options.words
        self.sizes: set[tuple[tuple[int, ...], ...]] = set()
        self._stamp: list[tuple[int, int]] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The function itself."""
        leaves = pytree.tree_leaves((args, kwargs))
        self.sizes.add(tuple(tuple(leaf.shape) for leaf in leaves if isinstance(leaf, Tensor)))
        if self.frozen is not None:
            self._check_frozen(self.frozen)
        if self.graphs:
            torch.compiler.cudagraph_mark_step_begin()
        with switched(self.flags):
            out = self.compiled(*args, **kwargs)
        return pytree.tree_map_only(Tensor, torch.clone, out) if self.graphs else out

    def _check_frozen(self, weights: list[Tensor]) -> None:
        if torch.is_grad_enabled():
            raise UserError(
                f"{self.name} was compiled with freezing, which is for inference: call it under torch.no_grad(), or compile it "
                "without freezing."
            )
        stamp = [(w.data_ptr(), 0 if w.is_inference() else w._version) for w in weights]
        if self._stamp is None:
            self._stamp = stamp
        elif stamp != self._stamp:
            raise UserError(
                f"{self.name} was compiled with freezing, and its weights changed since; the program has the old ones. Compile it "
                "again after every change (a checkpoint, an average, an adapter), or without freezing."
            )


class Record(NamedTuple):
    """How a module was compiled."""

    backend: str
    options: Options
    targets: tuple[Any, ...]  # weak references to the modules whose call is compiled
    handles: tuple[RemovableHandle, ...]

    def calls(self) -> list[CompiledCall]:
        """The compiled calls that are still in place."""
        found = [getattr(target(), "_compiled_call_impl", None) for target in self.targets]
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
    inner = inner.__wrapped__ if hasattr(inner, "compiled_call") else inner
    if isinstance(inner, nn.Module):
        compile_module(inner, name, chosen)
        return inner
    if name == NONE:
        return inner
    call = _compiled_function(inner, name, chosen)

    @functools.wraps(inner)
    def compiled(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    compiled.compiled_call = call  # type: ignore[attr-defined]
    return compiled


def _compiled_function(function: Callable[..., Any], backend: str, options: Options) -> CompiledCall:
    name = getattr(function, "__name__", type(function).__name__)
    for word in {"quant", "jit", "freezing"} & options.words:
        raise UserError(f"{name}: {word} is for modules, this is a function.")
    if options.regional or options.memory_format:
        raise UserError(f"{name}: regional and memory_format are for modules, this is a function.")
    _check_effect(name, backend, options)
    return CompiledCall(torch.compile(function, **_arguments(backend, options)), name, options, ())


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


def compile_module(module: nn.Module, backend: str, options: Options) -> None:
    """`compile` for a module, with options that were read already and torch's name of a backend."""
    name, blocks, ours = type(module).__name__, repeated_blocks(module), is_ours(module)
    regional = False  # whether blocks are compiled instead of the whole
    if backend != NONE:
        if options.regional and not blocks:
            raise UserError(f"{name} does not say which blocks it repeats; leave regional out.")
        if "jit" in options.words:
            backend, regional = (backend, True) if blocks else ("aot_eager", False)
        elif options.regional is None:
            # graphs would overwrite each other's results block by block; with weights as constants blocks share no program
            regional = ours and not options.words & {"cudagraphs", "freezing"}
        else:
            regional = options.regional
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
    arguments = _arguments(backend, options, fullgraph=regional and ours)
    targets = blocks if regional else [module]
    for target in targets:
        target.compile(**arguments)
        compiled: Any = target._compiled_call_impl
        target._compiled_call_impl = CompiledCall(compiled, name, options, [*target.parameters(), *target.buffers()])
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


def _check_effect(name: str, backend: str, options: Options) -> None:
    """Refuse what would do nothing."""
    if backend != INDUCTOR:
        idle = [word for word in MODES if word in options.words - WITHOUT_INDUCTOR]
        idle += [key for key in options.overrides if not key.startswith("overrides.")]
        if idle:
            raise UserError(
                f"{name}: {', '.join(idle)} would have no effect with backend {backend!r}, which does not generate code; use "
                'backend="nexfort", and "jit" only for modules that repeat blocks.'
            )
    elif not torch.cuda.is_available():
        if not any(map(shutil.which, ("g++", "clang++", "c++"))):
            raise UserError(f'{name}: on a CPU inductor needs a C++ compiler; install g++, or use backend="aot_eager".')
        if words := options.words & {"cudagraphs", "low-precision"}:
            warnings.warn(f"{name}: {' and '.join(sorted(words))} has no effect without a GPU.", stacklevel=4)


def _check_module(name: str, module: nn.Module, options: Options, *, whole: bool) -> None:
    freezing = "freezing" in options.words
    if hasattr(module, "next_condition"):  # NOVA: its sampler calls its methods one by one, and never the module
        if freezing:
            raise UserError(
                f"{name}: freezing makes constants of weights, and its sampler casts them to autocast's dtype for each video: "
                "leave freezing out."
            )
        if whole:
            raise UserError(
                f"{name} is called part by part when it samples, never as a whole, so that compiling the whole would do nothing: leave "
                'out cudagraphs and "regional": false, and its blocks are compiled.'
            )
    if freezing and module.training:
        raise UserError(
            f"{name} is in training mode, and freezing makes constants of its weights: call .eval(), or leave it out."
        )
    if freezing and any(hasattr(one, "lora_A") for one in module.modules()):
        raise UserError(
            f"{name} has an adapter (LoRA) that is not merged, and freezing would fix it: merge it first, or leave freezing out."
        )


def _arguments(backend: str, options: Options, *, fullgraph: bool = False) -> dict[str, Any]:
    """For `torch.compile`. Settings go with the module, and change nothing else in the process, but for the limit of older PyTorch."""
    arguments: dict[str, Any] = {
        "backend": backend,
        "dynamic": False if options.dynamic == BUCKETS else options.dynamic,
        "fullgraph": fullgraph or options.fullgraph,
        **allow_many_programs(),  # nexfort never gave up on a new size
    }
    if "freezing" in options.words and knows("isolate_recompiles"):
        arguments["isolate_recompiles"] = True  # a program with other weights as constants is never found
    if backend == INDUCTOR:
        arguments["options"] = {**cache_settings(), **options.inductor_settings()}
    return arguments


def cache_settings() -> dict[str, bool]:
    """Inductor's settings that nexfort's environment variables ask for; a warning for those that mean nothing here."""
    for variable in IDLE_VARIABLES:
        if variable in os.environ:
            warnings.warn(f"{variable} has no effect: it belongs to nexfort's own kernels.", stacklevel=4)
    return {
        setting: os.environ[variable].lower() in ("1", "true", "on", "yes")
        for variable, setting in CACHE_VARIABLES.items()
        if variable in os.environ
    }


def _refuse_loading(module: nn.Module, *_: Any) -> None:
    raise UserError(
        f"{type(module).__name__} was compiled with freezing: its weights are constants of the program. Load them first, and "
        "compile then; or compile without freezing."
    )


# --- settings that PyTorch keeps for the whole process, set while a compiled module runs and put back afterwards, so that a
# denoiser may compute in TF32 next to a VAE that does not. Programs are compiled inside the first call, and see them


class Flag(NamedTuple):
    """An attribute of an object of PyTorch's, and its value while the module runs."""

    owner: Any
    name: str
    value: bool


def flags_of(options: Options) -> list[Flag]:
    """What `options` switch while the module runs."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    flags = []
    if "low-precision" in options.words:
        flags += [Flag(matmul, "allow_tf32", True), Flag(cudnn, "allow_tf32", True)]
        for dtype in ("fp16", "bf16"):
            flags.append(Flag(matmul, f"allow_{dtype}_reduced_precision_reduction", options.reduced_precision))
    if "overrides.conv_benchmark" in options.overrides:
        flags.append(Flag(cudnn, "benchmark", options.overrides["overrides.conv_benchmark"]))
    if "overrides.matmul_allow_tf32" in options.overrides:
        flags.append(Flag(matmul, "allow_tf32", options.overrides["overrides.matmul_allow_tf32"]))
    if options.dynamic is True:
        from torch.fx.experimental import _config as shapes

        # or a first call with height == width makes a program for squares
        flags.append(Flag(shapes, "use_duck_shape", False))
    if "cache-all" in options.words:
        import torch._functorch.config as functorch

        flags.append(Flag(functorch, "enable_autograd_cache", True))
    if "freezing" in options.words:
        from torch._inductor import config as inductor

        # dynamo looks here, not into the module's settings, whether weights are to be inputs of the program
        flags.append(Flag(inductor, "freezing", True))
    return flags


@contextmanager
def switched(flags: list[Flag]) -> Iterator[None]:
    """Set all flags; put back what was there."""
    with ExitStack() as undo:
        for flag in flags:
            if flag.name == "allow_tf32":
                undo.callback(_set_tf32(matmul=flag.owner is torch.backends.cuda.matmul, allow=flag.value))
            else:
                undo.callback(setattr, flag.owner, flag.name, getattr(flag.owner, flag.name))
                setattr(flag.owner, flag.name, flag.value)
        yield


def _set_tf32(*, matmul: bool, allow: bool) -> Callable[[], None]:
    """Switch TF32 in matrix products or in cuDNN; returns what puts back what was there.

    PyTorch 2.9 brought `fp32_precision` next to `allow_tf32`. The older one has a value of its own, which cannot be read
    while the newer disagrees, and which sets the newer when it is set. So both are saved, and while the module runs they
    agree, for the compiler reads both.
    """
    backends, cudnn = torch.backends, torch.backends.cudnn
    owners = (
        [backends.cuda.matmul, getattr(backends.mkldnn, "matmul", None)]
        if matmul
        else [getattr(cudnn, "conv", None), getattr(cudnn, "rnn", None)]
    )
    newer = [(owner, owner.fp32_precision) for owner in owners if hasattr(owner, "fp32_precision")]
    for owner, _ in newer:
        owner.fp32_precision = "ieee" if matmul else "tf32"  # the former agrees with all older values
    if matmul:
        put_older = torch.set_float32_matmul_precision
        older: Any = torch.get_float32_matmul_precision()
        cpu = newer[1:]  # oneDNN's has the same older value, and is to stay as it is
        put_older("highest" if not allow else "medium" if any(value == "bf16" for _, value in cpu) else "high")
        if allow:
            _put_newer(cpu)
    else:
        put_older = partial(setattr, cudnn, "allow_tf32")
        try:
            older = cudnn.allow_tf32
        except RuntimeError:  # it disagrees with "tf32"
            older = False
        put_older(allow)

    def undo() -> None:
        put_older(older)
        _put_newer(newer)

    return undo


def _put_newer(settings: Iterable[tuple[Any, str]]) -> None:
    """Set `fp32_precision` as it was read; a value inherited from `torch.backends.fp32_precision` stays inherited."""
    for owner, precision in settings:
        owner.fp32_precision = "none"
        if owner.fp32_precision != precision:
            owner.fp32_precision = precision
