"""Training steps against the goals: our way next to the reference's settings and to diffusers' models, on the same work.

**The reference** is Open-Sora's own code. Its settings are re-created with our model, which has the same layers: eager, every
block checkpointed, weights in bf16 with fp32 masters as its ColossalAI ZeRO-2 holds them, plain operations, flash attention
over space and, on sequences [B S, T] whose tokens were copied into that order, over time; cross-attention without a mask, as all
tokens of the text are real here. docs/explanation/benchmarks/goals.md compares it with the original's own time.

**diffusers** has no STDiT. Its `LatteTransformer3DModel` is of the same kind: of the same width, it gets as many pairs of blocks
as come nearest to the FLOPs of our model. It sees no mask, which is less work for it. `DiTTransformer2DModel` is DiT.
"""

import argparse
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from timm.layers import Mlp as TimmMlp
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from opensora.acceleration.checkpointing import checkpoint_activations
from opensora.acceleration.distributed import World
from opensora.acceleration.engines.base import global_norm, take_step
from opensora.config.schema import level_of
from opensora.models.layers.attention import Attention, CrossAttention
from opensora.models.layers.mlp import Mlp
from opensora.models.layers.modulation import plain_modulation
from tools.benchmark import denoisers
from tools.benchmark.denoisers import Errors, Exact, Steps, Timed
from tools.benchmark.measure import OUT_OF_MEMORY, Options, Table, attempt, matmul_tflops, quiet, synchronize

COLUMNS = {
    "setting": "", "way": "", "checkpointed": "", "ms/step": ".1f", "samples/s": ".3g", "at equal FLOPs": ".3g",
    "of the reference": ".2f", "TFLOP/s": ".3g", "MFU": ".1%", "peak GiB": "", "error": ".2g", "gradient error": ".2g",
    "set-up s": ".1f",
}  # fmt: skip
WAYS = ("reference", "ours", "diffusers")
FLASH = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
"""What the reference may use of PyTorch's attention: flash, or for sizes that it does not take what xformers has."""
IN_ORDER = {"space": "B T S D -> (B T) S D", "time": "B T S D -> (B S) T D", "all": "B T S D -> B (T S) D"}
BACK = {"space": "(B T) S D -> B T S D", "time": "(B S) T D -> B T S D", "all": "B (T S) D -> B T S D"}


@dataclass(frozen=True)
class Setting:
    """What is trained.

    Attributes:
        model: a registered denoiser.
        latent: frames, rows and columns.
        batch: samples of a step.
        text_len: tokens of the text.
        levels: values of `grad_checkpoint` to try, in order.
        warmup, steps: how many steps before the clock starts, and after.
        size: keyword arguments of the model.
    """

    model: str
    latent: tuple[int, int, int]
    batch: int
    text_len: int = 120
    levels: tuple[str, ...] = ("none", "every:2", "block")
    warmup: int = 3
    steps: int = 8
    size: dict[str, int] | None = None

    def shrunk(self) -> "Setting":
        """The same for a laptop: one or some frames as before, an odd or even number of rows as before."""
        T, H, _ = self.latent
        latent = (min(T, 3), 5 if H % 2 else 4, 4)
        text_len = min(self.text_len, 6)
        return replace(self, latent=latent, batch=2, text_len=text_len, warmup=1, steps=2, size=denoisers.TOY)

    def build(self, device: torch.device) -> Any:
        """The model."""
        return denoisers.build(self.model, device, self.text_len, **(self.size or {}))


SETTINGS = {
    "stdit-16x256": Setting("STDiT-XL/2", (16, 32, 32), 8),
    "stdit-16x512": Setting("STDiT-XL/2", (16, 64, 64), 2),
    "stdit-64x512": Setting(
        "STDiT-XL/2", (64, 64, 64), 1, levels=("selective", "selective+every:8", "every:2", "block"), warmup=2, steps=4
    ),
    "stdit3-51x360p": Setting("STDiT3-XL/2", (15, 45, 80), 2, 300, ("selective", "selective:2", "block"), 2, 4),
    "stdit3-51x720p": Setting("STDiT3-XL/2", (15, 90, 160), 1, 300, ("selective:2", "block"), 2, 3),
    "dit-256": Setting("DiT-XL/2", (1, 32, 32), 128, text_len=1),
}
"""51 frames of 360p or 720p are latents of 15 frames in the VAE of Open-Sora 1.2; all others are VAEs of frames."""


class Result(NamedTuple):
    """What came of a way to train."""

    timed: Timed
    flops: int  # of a forward pass of one sample
    errors: Errors  # against fp32; none of another model
    setup_s: float


def goals(argv: Sequence[str]) -> None:
    """Time training steps on the same work in one process: the reference's settings, ours, diffusers' models.

    A setting is a model, a size of latents and a batch. The ways to train it, all in bf16 and with fp32 master weights:

    - `reference`: the reference's settings, re-created with our model (see the head of tools/benchmark/goals.py);
    - `ours`: blocks compiled, the `ddp` engine in one process, and the first value of --checkpoint that fits;
    - `diffusers`: diffusers' nearest model, its blocks compiled, weights in bf16; its own gradient checkpointing where needed.

    "At equal FLOPs" is samples/s times the FLOPs of the way's own model over those of ours; "of the reference" compares these rates.
    TFLOP/s count the matrix products of a forward pass three times, and no recomputation. MFU is their share of --peak-tflops, or of
    a large bf16 product measured first. The errors are |found - fp32| / |fp32| of the prediction for the first sample and of the
    gradients of all weights. Set-up is everything before the clock: building, compiling, warming up.
    """
    options = Options("goals", goals.__doc__, argv)
    options.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=tuple(SETTINGS))
    options.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    options.add_argument(
        "--checkpoint", nargs="+", type=level_of, metavar="LEVEL", help="values of grad_checkpoint to try"
    )
    options.add_argument("--batch", type=int, help="in place of the settings' own")
    denoisers.add_switches(options)
    options.add_argument("--peak-tflops", type=float, help="of the device in bf16; measured when left out")
    options.add_argument("--memory-gib", type=float, help="as if the card had no more: 79 for one of 80 GB")
    args = options.parse()
    denoisers.switch_on(args.inductor)
    began, device = time.perf_counter(), options.device
    if args.memory_gib and device.type == "cuda":
        whole = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, args.memory_gib * 2**30 / whole))
    peak = args.peak_tflops or matmul_tflops(device, torch.bfloat16)
    options.heading("bf16", f"MFU of {peak:.4g} TFLOP/s")
    table = Table(COLUMNS)
    with quiet():
        for name in args.settings:
            setting = SETTINGS[name].shrunk() if args.toy else SETTINGS[name]
            measure_setting(args, table, name, replace(setting, batch=args.batch or setting.batch), device, peak)
    print(f"\n{time.perf_counter() - began:.0f} s in all")


def measure_setting(
    args: argparse.Namespace, table: Table, name: str, setting: Setting, device: torch.device, peak: float
) -> None:
    """Print the rows of one setting."""

    def exactly() -> tuple[Exact, int]:
        """Ours for the first sample, eager in fp32 without our kernels, and the FLOPs of its forward pass."""
        model = setting.build(device)
        like_the_reference(model)
        batch = denoisers.inputs(model, setting.batch, setting.latent, device)
        return denoisers.exact(model, batch), model.flops(setting.latent, batch.cond["y"].shape[2])

    right = attempt(exactly, Exception)
    if isinstance(right, str):
        table.row(name, "fp32", "-", right)
        return
    rate_of_reference = None
    for way in args.ways:
        failure = ""
        for level in levels_of(way, tuple(args.checkpoint or setting.levels)):
            found = attempt(
                partial(measure, setting, way, level, right[0], device, cuda_graphs=args.cuda_graphs), Exception
            )
            if isinstance(found, str):
                table.row(name, way, level, found)
                if found == failure != OUT_OF_MEMORY:  # no level of checkpointing mends this
                    break
                failure = found
                continue
            step_s = found.timed.seconds
            rate = setting.batch / step_s * found.flops / right[1]
            rate_of_reference = rate if way == "reference" else rate_of_reference
            times = rate / rate_of_reference if rate_of_reference else None
            tflops = 3 * setting.batch * found.flops / step_s / 1e12
            speed = (step_s * 1e3, setting.batch / step_s, rate, times, tflops, tflops / peak)
            table.row(name, way, level, *speed, found.timed.memory, *found.errors, found.setup_s)
            break


def levels_of(way: str, levels: Sequence[str]) -> Sequence[str]:
    """The values of `grad_checkpoint` to try for a way, of which `levels` are those for ours."""
    if way == "reference":
        return ("block",)
    if way == "diffusers":  # it has all or nothing
        return ("none", "block") if levels[0] == "none" else ("block",)
    return levels


def measure(
    setting: Setting, way: str, level: str, right: Exact, device: torch.device, *, cuda_graphs: bool = False
) -> Result:
    """Build, compile, compare, train."""
    began = time.perf_counter()
    model = setting.build(device)
    batch = denoisers.inputs(model, setting.batch, setting.latent, device)
    flops = model.flops(setting.latent, batch.cond["y"].shape[2])
    engine: Steps
    around: Callable[[], AbstractContextManager[None]] = nullcontext
    if way == "ours":
        engine = denoisers.start(
            model, World(0, 1, device), dtype="bf16", compiled=True, checkpoint=level, cuda_graphs=cuda_graphs
        )
    elif way == "reference":
        like_the_reference(model)
        checkpoint_activations(model.transformer_blocks(), level)
        engine, around = RoundedWeights(model, autocast=True), plain_kernels
        del batch.cond["mask"]  # all tokens are real
    else:
        with device:
            theirs, flops = diffusers_like(model, setting.latent)
        for block in theirs.train().transformer_blocks():
            block.compile(dynamic=False)  # of two shapes and the same code: the second would become dynamic, and slower
        if level == "block":
            theirs.theirs.enable_gradient_checkpointing()
        engine = RoundedWeights(theirs, autocast=False)
    del model
    gc.collect()
    with around():
        errors = Errors(None, None) if way == "diffusers" else denoisers.errors_of(engine, batch, right)
        step = denoisers.training_step(engine, batch.z, batch.cond)
        for _ in range(setting.warmup):
            step()
        synchronize(device)
        setup_s = time.perf_counter() - began
        return Result(denoisers.timed(step, device, 0, setting.steps), flops, errors, setup_s)


@contextmanager
def plain_kernels() -> Iterator[None]:
    """What the reference computes with: PyTorch's flash attention, and none of our kernels."""
    with sdpa_kernel(FLASH), plain_modulation():
        yield


class RoundedWeights:
    """Trains weights in bf16 with fp32 masters, in one process, as `Steps`.

    Args:
        model: on its device, in fp32; its weights and buffers become bf16.
        autocast: compute under bf16 autocast, for models that keep some parameters in fp32.
        grad_clip: largest global gradient norm.
    """

    def __init__(self, model: nn.Module, *, autocast: bool, grad_clip: float = 1.0) -> None:
        trained = [weight for weight in model.parameters() if weight.requires_grad]
        self.masters = [nn.Parameter(weight.detach().clone()) for weight in trained]
        self.model = model.to(torch.bfloat16)
        self.weights = [weight for weight in model.parameters() if weight.requires_grad]
        self.device = self.weights[0].device
        self.autocast, self.grad_clip = autocast, grad_clip
        self.optimizer = torch.optim.AdamW(self.masters, lr=1e-5, fused=self.device.type == "cuda")

    @contextmanager
    def micro_step(self, *, last: bool) -> Iterator[None]:
        """See `Engine.micro_step`."""
        with torch.autocast(self.device.type, torch.bfloat16) if self.autocast else nullcontext():
            yield

    def backward(self, loss: Tensor) -> None:
        """See `Engine.backward`."""
        loss.backward()

    @torch.no_grad()
    def step(self) -> Tensor:
        """See `Engine.step`."""
        for master, weight in zip(self.masters, self.weights, strict=True):
            master.grad = None if weight.grad is None else weight.grad.float()
            weight.grad = None
        gradients = [master.grad for master in self.masters if master.grad is not None]
        norm = global_norm(gradients, self.device)
        take_step(self.optimizer, gradients, norm, self.grad_clip)
        torch._foreach_copy_(list[Tensor](self.weights), list[Tensor](self.masters))
        self.optimizer.zero_grad()
        return norm


def like_the_reference(model: nn.Module) -> None:
    """Plain operations and PyTorch's attention in place of our kernels, in the order in which the reference computes."""
    for module in model.modules():
        if isinstance(module, Attention | CrossAttention):
            module.kernel = "sdpa"
        if isinstance(module, Attention):
            module.forward = partial(_attention, module)  # type: ignore[method-assign]
        elif isinstance(module, Mlp):
            module.drop1, module.norm, module.drop2 = nn.Dropout(0.0), nn.Identity(), nn.Dropout(0.0)
            module.forward = partial(TimmMlp.forward, module)  # type: ignore[method-assign]


def _attention(attn: Attention, x: Tensor, rope: Tensor | None = None, grid: tuple[int, int] | None = None) -> Tensor:
    """`Attention.forward` on tokens that are brought into its order first: `x [B, T, S, D]` -> the same."""
    B, T, _, _ = x.shape
    qkv = attn.qkv(rearrange(x, IN_ORDER[attn.axis]))
    q, k, v = rearrange(qkv, "M N (k H d) -> k M H N d", k=3, H=attn.num_heads)
    out = rearrange(attn.attend(q, k, v, rope), "M H N d -> M N (H d)")
    return rearrange(attn.proj(out), BACK[attn.axis], B=B, T=T)


class DiffusersModel(nn.Module):
    """A model of diffusers with the signature of ours.

    Args:
        theirs: a `LatteTransformer3DModel` or a `DiTTransformer2DModel`.
    """

    def __init__(self, theirs: Any) -> None:
        super().__init__()
        self.theirs = theirs
        self.takes_images = type(theirs).__name__ == "DiTTransformer2DModel"

    def forward(self, x: Tensor, timestep: Tensor, y: Tensor, **_: Tensor) -> Tensor:
        """`x [B, C, T, H, W]`, `timestep [B]`, `y [B, 1, L, C_text]` -> `[B, 2 C, T, H, W]` fp32."""
        weights = self.theirs.proj_out_2 if self.takes_images else self.theirs.proj_out
        H, W = x.shape[-2:]
        latent = F.pad(x, (0, W % 2, 0, H % 2)).to(weights.weight.dtype)  # ours counts a part of a patch too
        if self.takes_images:
            classes = torch.zeros(len(x), dtype=torch.long, device=x.device)
            out = self.theirs(latent[:, :, 0], timestep, classes).sample[:, :, None]
        else:
            out = self.theirs(latent, timestep, y[:, 0].to(latent.dtype)).sample
        return out[..., :H, :W].float()

    def transformer_blocks(self) -> list[nn.Module]:
        """All that is worth compiling."""
        return [*self.theirs.transformer_blocks, *getattr(self.theirs, "temporal_transformer_blocks", [])]


def diffusers_like(model: Any, latent: Sequence[int]) -> tuple[DiffusersModel, int]:
    """Diffusers' nearest model on the device that is set, and the FLOPs of its forward pass of one sample.

    Args:
        model: ours, a DiT or an STDiT, for width, heads and FLOPs.
        latent: frames, rows and columns.
    """
    y = model.null_condition(1)
    wanted = model.flops(tuple(latent), y.shape[2])
    with torch.device("meta"):
        x = torch.empty(1, model.in_channels, *latent)
        one, two = (
            _flops(_diffusers(model, latent, layers), x, torch.empty_like(y, device="meta")) for layers in (1, 2)
        )
    layers = max(1, round((wanted - one) / (two - one)) + 1)
    return DiffusersModel(_diffusers(model, latent, layers)), one + (layers - 1) * (two - one)


def _diffusers(model: Any, latent: Sequence[int], layers: int) -> Any:
    from diffusers import DiTTransformer2DModel, LatteTransformer3DModel

    heads = next(module.num_heads for module in model.modules() if isinstance(module, Attention))
    common = {
        "num_attention_heads": heads,
        "attention_head_dim": model.hidden_size // heads,
        "in_channels": model.in_channels,
        "out_channels": model.out_channels,
        "num_layers": layers,
        "attention_bias": True,
        "sample_size": latent[1] + latent[1] % 2,
        "patch_size": model.patch_size[1],
        "activation_fn": "gelu-approximate",
        "norm_elementwise_affine": False,
    }
    if latent[0] == 1:
        return DiTTransformer2DModel(**common)
    return LatteTransformer3DModel(
        **common,
        cross_attention_dim=model.hidden_size,
        norm_type="ada_norm_single",
        norm_eps=1e-6,
        caption_channels=model.caption_channels,
        video_length=latent[0],
    )


def _flops(theirs: Any, x: Tensor, y: Tensor) -> int:
    """Of the forward pass, counted on tensors without content."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        DiffusersModel(theirs)(x, torch.empty(len(x), device=x.device), y)
    return counter.get_total_flops()
