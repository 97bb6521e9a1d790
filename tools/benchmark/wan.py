"""Wan with random weights: training steps and forward passes, ours next to diffusers' own network, on the same work.

Full training holds fp32 weights (ours: the masters, under autocast; diffusers: bf16 weights and fp32 masters). With LoRA the base
is bf16 and the adapters are fp32. A batch is one sample, as sequences are long.
"""

import argparse
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from opensora.acceleration.compile import compile_blocks
from opensora.acceleration.distributed import World
from opensora.config.schema import FrozenWeights, LoraOptions, level_of
from opensora.models.loading import store_frozen
from opensora.training.lora import add_lora
from tools.benchmark import denoisers
from tools.benchmark.goals import RoundedWeights
from tools.benchmark.measure import (
    Options,
    Table,
    attempt,
    matmul_tflops,
    peak_gib,
    quiet,
    relative_error,
    reset_peak,
    seconds,
    synchronize,
)

LORA_TARGETS = ("to_q", "to_k", "to_v", "to_out.0", "net.0.proj", "net.2")
TOY = {"hidden_size": 32, "depth": 4, "num_heads": 2, "ffn_dim": 64, "caption_channels": 16}


@dataclass(frozen=True)
class Setting:
    """What is computed.

    Attributes:
        model: a registered Wan.
        latent: frames, rows and columns.
        rank: of the LoRA; 0: full training.
        trains: a training step; False: a forward pass in bf16.
        levels: values of `grad_checkpoint` to try, in order.
        frozen: what the weights that nothing trains are stored in, see `store_frozen`.
        streaming, offload: the config's `weight_streaming` and `activation_offload`.
        warmup, steps: how many before the clock starts, and after.
        size: keyword arguments of the model.
    """

    model: str
    latent: tuple[int, int, int]
    rank: int = 0
    trains: bool = True
    levels: tuple[str, ...] = ("attention", "block")
    frozen: str = "bf16"
    streaming: int = 0
    offload: bool = False
    warmup: int = 2
    steps: int = 3
    size: dict[str, int] | None = None

    def shrunk(self) -> "Setting":
        """The same for a laptop."""
        return replace(self, latent=(2, 4, 4), rank=min(self.rank, 2), warmup=1, steps=1, size=TOY)

    def build(self, device: torch.device, **size: int) -> Any:
        """The model, with adapters if there are any, in the dtypes that it is trained or sampled in."""
        torch.manual_seed(0)
        model = denoisers.build(self.model, device, **(self.size or {}) | size)
        if self.rank or not self.trains:
            store_frozen(model, self.frozen)
        if self.rank:
            add_lora(model, LoraOptions(rank=self.rank, alpha=self.rank, target_modules=list(LORA_TARGETS)), seed=0)
        return model


VIDEO_480P, VIDEO_720P = (21, 60, 104), (21, 90, 160)
SETTINGS = {
    "wan-1.3b": Setting("Wan2.1-T2V-1.3B", VIDEO_480P, levels=("selective", "attention", "block")),
    "wan-14b-lora": Setting("Wan2.1-T2V-14B", VIDEO_480P, rank=32, warmup=1, steps=2),
    "wan-5b": Setting("Wan2.2-TI2V-5B", (21, 30, 52), levels=("selective", "attention", "block")),
    "wan-5b-lora": Setting("Wan2.2-TI2V-5B", (21, 30, 52), rank=32, levels=("selective", "attention", "block")),
    "wan-1.3b-forward": Setting("Wan2.1-T2V-1.3B", VIDEO_480P, trains=False),
    "wan-14b-forward": Setting("Wan2.1-T2V-14B", VIDEO_480P, trains=False),
    "wan-5b-forward": Setting("Wan2.2-TI2V-5B", (21, 30, 52), trains=False),
    "wan-14b-720p-forward": Setting("Wan2.1-T2V-14B", VIDEO_720P, trains=False),
}
"""81 frames of 480x832 or 720x1280 pixels."""

WAYS = ("ours", "diffusers", "diffusers-eager")
COLUMNS = {
    "setting": "", "way": "", "checkpointed": "", "ms": ".1f", "TFLOP/s": ".3g", "MFU": ".1%", "peak GiB": ".1f", "error": ".2g",
    "gradient error": ".2g", "set-up s": ".1f",
}  # fmt: skip


class Result(NamedTuple):
    """What came of a way to compute."""

    seconds: float
    flops: float  # of useful work
    peak_gib: float | None
    error: float | None
    gradient_error: float | None
    setup_s: float


class Theirs(nn.Module):
    """diffusers' network with the signature of ours.

    Args:
        ours: gives its network away.
    """

    def __init__(self, ours: Any) -> None:
        super().__init__()
        from diffusers.models.transformers.transformer_wan import WanAttnProcessor

        self.net, self.text_len = ours.net, ours.text_len
        self.net.set_attn_processor(WanAttnProcessor())
        embedder = self.net.condition_embedder
        dtype = self.net.patch_embedding.weight.dtype
        embedder.time_proj.to(dtype), embedder.text_embedder.to(dtype)
        for name, parameter in self.net.named_parameters():
            if name.endswith(".bias") and not name.startswith("condition_embedder"):
                parameter.data = parameter.data.to(dtype)

    def forward(self, x: Tensor, timestep: Tensor, y: Tensor, **_: Tensor) -> Tensor:
        """See `Denoiser.forward`."""
        dtype = self.net.patch_embedding.weight.dtype
        return -self.net(x.to(dtype), timestep, y[:, 0].to(dtype), return_dict=False)[0].float()

    def transformer_blocks(self) -> list[nn.Module]:
        """See `Denoiser.transformer_blocks`."""
        return list(self.net.blocks)


def measure(
    setting: Setting, way: str, level: str, device: torch.device, memory_gib: float | None = None, **engine: Any
) -> Result:
    """Build, compile, compare, and time a way.

    The errors are those of two blocks at the full width (with streamed weights of one more than there is room for), against eager
    fp32: all blocks would not fit. Where memory is limited, it is so from the end of the set-up on.
    """
    began = time.perf_counter()
    limit_memory(None, device)
    found = compare(setting, way, level, device, **engine)
    gc.collect()
    torch._dynamo.reset()
    model = setting.build(device)
    latent = setting.latent
    flops = useful_flops(model, latent, setting)
    batch = denoisers.inputs(model, 1, latent, device)
    with kernels_of(way):
        step = prepare(setting, way, level, model, device, **engine).step(batch)
        gc.collect()
        limit_memory(memory_gib, device)
        reset_peak(device)
        for _ in range(setting.warmup):
            step()
        synchronize(device)
        setup_s = time.perf_counter() - began
        took = seconds(step, device, setting.steps)
    return Result(took, flops, peak_gib(device), *found, setup_s)


def limit_memory(gib: float | None, device: torch.device) -> None:
    """As if the GPU had no more than that; None = all of it."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        whole = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(1.0 if gib is None else min(1.0, gib * 2**30 / whole))


def useful_flops(model: Any, latent: tuple[int, int, int], setting: Setting) -> float:
    """Of a step: three forward passes of full training; the frozen linear layers of a LoRA's base need no gradient of their weights."""
    whole = model.flops(latent, model.text_len)
    if not setting.trains:
        return whole
    T, H, W = model.grid(latent)
    N, L = T * H * W, model.text_len
    attention = 2 * model.depth * (2 * N * N + 2 * N * L) * model.hidden_size
    return 3 * whole if not setting.rank else 2 * (whole - attention) + 3 * attention


class Prepared(NamedTuple):
    """A model that is ready to be timed or compared."""

    model: Any
    engine: Any  # None where nothing is trained
    device: torch.device

    def step(self, batch: denoisers.Inputs) -> Callable[[], object]:
        """What is timed."""
        if self.engine is not None:
            return denoisers.training_step(self.engine, batch.z, batch.cond, "rflow")

        @torch.no_grad()
        def forward() -> Tensor:
            with torch.autocast(self.device.type, torch.bfloat16):
                return self.model(batch.z, batch.t, **batch.cond)

        return forward


def prepare(setting: Setting, way: str, level: str, model: Any, device: torch.device, **engine: Any) -> Prepared:
    """Compile, checkpoint, stream, and start the engine."""
    world = World(0, 1, device)
    if way == "ours":
        if setting.trains:
            engine["streams"] = {"resident": setting.streaming, "activations": setting.offload}
            started = denoisers.start(model, world, dtype="bf16", compiled=True, checkpoint=level, **engine)
            return Prepared(model, started, device)
        compile_blocks(model.transformer_blocks())
        return Prepared(model, None, device)
    theirs = Theirs(model)
    if way == "diffusers":
        for block in theirs.transformer_blocks():
            block.compile(dynamic=False)
    if setting.trains and level != "none":
        theirs.train().net.enable_gradient_checkpointing()
    if not setting.trains:
        return Prepared(theirs, None, device)
    if not setting.rank:
        return Prepared(theirs, RoundedWeights(theirs, autocast=False), device)
    return Prepared(theirs, denoisers.start(theirs, world, dtype="bf16", compiled=False, checkpoint="none"), device)


@contextmanager
def kernels_of(way: str) -> Iterator[None]:
    """diffusers' compiled way may use cuDNN's attention alone, which is the fastest; eager it is as shipped."""
    with (
        sdpa_kernel([SDPBackend.CUDNN_ATTENTION]) if way == "diffusers" and torch.cuda.is_available() else nullcontext()
    ):
        yield


def compare(setting: Setting, way: str, level: str, device: torch.device, **engine: Any) -> tuple[float, float | None]:
    """Relative errors of the prediction and of the gradients of a model of two blocks, or one more than `streaming`."""
    short = replace(setting, size=(setting.size or {}) | {"depth": max(2, setting.streaming + 1)})
    model = short.build(device).float()
    batch = denoisers.inputs(model, 1, setting.latent, device)
    if setting.trains:
        right = denoisers.exact(model, batch)
    else:
        with torch.no_grad():
            right = denoisers.Exact(model(batch.z, batch.t, **batch.cond).cpu(), {})
    del model
    with kernels_of(way):
        prepared = prepare(short, way, level, short.build(device), device, **engine)
        if prepared.engine is None:
            return relative_error(prepared.step(batch)(), right.prediction), None  # type: ignore[arg-type]
        errors = denoisers.errors_of(prepared.engine, batch, right)
    return errors.prediction or 0.0, errors.gradient


def print_rows(args: argparse.Namespace, table: Table, name: str, device: torch.device, peak: float) -> None:
    """For each way the first level of checkpointing that fits, or all of them."""
    setting = SETTINGS[name].shrunk() if args.toy else SETTINGS[name]
    setting = replace(
        setting, frozen=args.frozen_weights, streaming=args.weight_streaming, offload=args.activation_offload
    )
    engine = {"cuda_graphs": args.cuda_graphs, "optimizer_offload": args.optimizer_offload}
    for way in args.ways:
        levels = (args.checkpoint or setting.levels) if way == "ours" else ("block",)
        for level in levels if setting.trains else ("none",):
            found = attempt(partial(measure, setting, way, level, device, args.memory_gib, **engine), Exception)
            if isinstance(found, str):
                table.row(name, way, level, found)
                continue
            rate = found.flops / found.seconds / 1e12
            table.row(name, way, level, found.seconds * 1e3, rate, rate / peak, *found[2:])
            if not args.all_levels:
                break


def wan(argv: Sequence[str]) -> None:
    """Time Wan with random weights of full size: training steps, with LoRA or of all weights, and forward passes.

    Ways: `ours` (blocks compiled, the first value of --checkpoint that fits); `diffusers` (its own network, blocks compiled,
    attention by cuDNN, its gradient checkpointing); `diffusers-eager` (as shipped). TFLOP/s count useful work only: three forward
    passes of full training, two of the linear layers of a frozen base, no recomputation. MFU is their share of a large bf16 product,
    measured first. The errors are |found - fp32| / |fp32| of the prediction and of all gradients, of a model of two blocks at the full
    width and size.
    """
    options = Options("wan", wan.__doc__, argv)
    options.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=tuple(SETTINGS))
    options.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    options.add_argument(
        "--checkpoint", nargs="+", type=level_of, metavar="LEVEL", help="values of grad_checkpoint to try"
    )
    options.add_argument("--all-levels", action="store_true", help="a row for each value of grad_checkpoint")
    options.add_argument(
        "--frozen-weights",
        default="bf16",
        choices=get_args(FrozenWeights),
        help="the config's; of LoRA and forward passes",
    )
    options.add_argument("--weight-streaming", type=int, default=0, metavar="K", help="the config's")
    options.add_argument("--activation-offload", action="store_true", help="the config's")
    options.add_argument("--optimizer-offload", action="store_true", help="the config's")
    options.add_argument("--memory-gib", type=float, help="as if the card had no more for PyTorch's tensors")
    denoisers.add_switches(options)
    args = options.parse()
    denoisers.switch_on(args.inductor)
    peak = matmul_tflops(options.device, torch.bfloat16)
    options.heading("bf16", f"MFU of {peak:.4g} TFLOP/s")
    table = Table(COLUMNS)
    with quiet():
        for name in args.settings:
            print_rows(args, table, name, options.device, peak)
