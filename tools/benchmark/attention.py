"""Attention kernels at the shapes of our denoisers, each compared with fp32."""

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from opensora.acceleration.kernels.attention import KERNELS
from opensora.acceleration.kernels.attention import attention as attend
from opensora.utils.dtype import to_torch_dtype
from opensora.utils.errors import UserError
from tools.benchmark.measure import Options, Table, attempt, relative_error

COLUMNS = {
    "case": "", "kernel": "", "forward ms": ".3f", "TFLOP/s": ".3g", "with backward ms": ".3f", "TFLOP/s ": ".3g", "error": ".2g",
    "of the gradient": ".2g",
}  # fmt: skip
HEADS, HEAD_DIM, TEXT_TOKENS = 16, 72, 120
PYTORCH = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
INPUTS = 3  # sets of tensors that take turns
SLEEP_S, CLOCK_HZ = 2e-3, 3.5e9  # for how long a GPU sleeps, and a clock that none has


class Case(NamedTuple):
    """Shapes of a layer: queries [batch, pixels, H, N, D], or without pixels, over `keys` keys."""

    batch: int
    pixels: int | None
    tokens: int
    keys: int
    masked: bool = False


CASES = {
    "space-256": Case(128, None, 256, 256),  # 8 videos of 16x256x256
    "space-1024": Case(32, None, 1024, 1024),  # 2 of 16x512x512
    "space-3600": Case(13, None, 3600, 3600),  # 51 frames of 720p after a VAE that compresses time
    "time-16": Case(8, 256, 16, 16),
    "time-64": Case(1, 1024, 64, 64),
    "text": Case(8, None, 4096, TEXT_TOKENS, masked=True),
    "text-300": Case(1, None, 54000, 300, masked=True),  # 51 frames of 720p, the captions of STDiT3
}
TOY = {
    "space-256": Case(2, None, 32, 32),
    "space-1024": Case(1, None, 64, 64),
    "space-3600": Case(1, None, 96, 96),
    "time-16": Case(1, 8, 4, 4),
    "time-64": Case(1, 8, 8, 8),
    "text": Case(2, None, 32, 10, masked=True),
    "text-300": Case(1, None, 48, 12, masked=True),
}


def attention(argv: Sequence[str]) -> None:
    """Time attention kernels at the shapes of our denoisers, and compare each with fp32.

    A case is one layer of STDiT-XL/2 (16 heads of 72 channels, which for each token lie one behind the other) at one size: `space`
    (tokens of a frame see each other), `time` (frames at one pixel) and `text` (tokens see a caption, of which half is padding).
    `auto`, `sdpa` and `math` are those of `opensora.acceleration.kernels.attention`; `cudnn`, `flash` and `efficient` are PyTorch's
    kernels by themselves, on a GPU. TFLOP/s count the two matrix products, and two and a half times as many for the backward pass.
    Errors are |kernel - fp32| / |fp32| of the output and of the queries' gradient, on the same inputs. Times are medians after
    warm-up, on inputs that take turns; a GPU sleeps until the host has launched all of a call. Forward passes alone are those of
    sampling, without gradients.
    """
    options = Options("attention", attention.__doc__, argv)
    known = [*KERNELS, *PYTORCH]
    options.add_argument("--cases", nargs="+", default=list(CASES), choices=tuple(CASES))
    options.add("--kernels", known, list(KERNELS), choices=known)
    options.add("--dtype", "bf16", "fp32", choices=("fp32", "bf16", "fp16"))
    options.add("--repeats", 50, 1)
    args, device = options.parse(), options.device
    if device.type == "cpu" and (alone := [kernel for kernel in args.kernels if kernel in PYTORCH]):
        raise UserError(f"--kernels {alone[0]}: a kernel of GPUs, and the device is {args.device}.")
    options.heading(args.dtype)
    table = Table(COLUMNS)
    for name in args.cases:
        case = (TOY if args.toy else CASES)[name]
        inputs = [tensors(case, device, to_torch_dtype(args.dtype), seed) for seed in range(INPUTS)]
        right = reference(*inputs[0])
        flops = 4 * case.batch * (case.pixels or 1) * HEADS * case.tokens * case.keys * HEAD_DIM / 1e12
        for kernel in args.kernels:
            # PyTorch says by a RuntimeError that a kernel does not take such inputs
            found = attempt(lambda: measure(kernel, inputs, right, args.repeats), RuntimeError)  # noqa: B023
            if isinstance(found, str):
                table.row(name, kernel, found)
                continue
            forward_s, both_s, errors = found
            table.row(name, kernel, forward_s * 1e3, flops / forward_s, both_s * 1e3, 3.5 * flops / both_s, *errors)


def tensors(
    case: Case, device: torch.device, dtype: torch.dtype, seed: int
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """q, k, v [batch, pixels, heads, tokens, channels] as leaves, and the mask or None."""
    rng = torch.Generator(device).manual_seed(seed)
    pixels = () if case.pixels is None else (case.pixels,)

    def draw(tokens: int) -> Tensor:
        shape = (case.batch, tokens, *pixels, HEADS, HEAD_DIM)  # in memory, as linear layers write it
        drawn = torch.randn(shape, generator=rng, device=device).to(dtype)
        return drawn.movedim(1, -2).requires_grad_()

    mask = torch.arange(case.keys, device=device).expand(case.batch, -1) < case.keys // 2 if case.masked else None
    return draw(case.tokens), draw(case.keys), draw(case.keys), mask


def reference(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Output and gradient of q, in fp32 by the plain formula, without TF32, a few batches at a time."""
    outputs, grads = [], []
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    for i in range(len(q)):
        q1, k1, v1 = (x[i : i + 1].detach().float().requires_grad_() for x in (q, k, v))
        out = attend(q1, k1, v1, mask=None if mask is None else mask[i : i + 1], kernel="math")
        grads.append(torch.autograd.grad(out, q1, torch.ones_like(out))[0])
        outputs.append(out.detach())
    torch.backends.cuda.matmul.allow_tf32 = before
    return torch.cat(outputs), torch.cat(grads)


def measure(
    kernel: str, inputs: list[Any], right: tuple[Tensor, Tensor], repeats: int
) -> tuple[float, float, list[float]]:
    """Seconds of the forward pass and of both passes, medians over all inputs; errors on the first."""
    out = run(kernel, *inputs[0])
    grad = torch.autograd.grad(out, inputs[0][0], torch.ones_like(out))[0]
    errors = [relative_error(found, exact) for found, exact in zip((out, grad), right, strict=True)]
    forward, both = [], []
    clock = clocked_by_the_gpu if out.is_cuda else clocked
    for number in range(INPUTS + repeats):
        q, k, v, mask = inputs[number % INPUTS]
        with torch.no_grad():
            forward.append(clock(lambda: run(kernel, q, k, v, mask)))  # noqa: B023
        both.append(clock(lambda: there_and_back(kernel, q, k, v, mask)))  # noqa: B023
    forward_s, both_s = (statistics.median(times[INPUTS:]) for times in (forward, both))
    return forward_s, both_s, errors


def run(kernel: str, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """The output of a kernel."""
    chosen = PYTORCH.get(kernel)
    with nullcontext() if chosen is None else sdpa_kernel(chosen):
        return attend(q, k, v, mask, kernel if chosen is None else "sdpa")


def there_and_back(kernel: str, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> None:
    """Forward and backward pass."""
    out = run(kernel, q, k, v, mask)
    torch.autograd.grad(out, (q, k, v), out)


def clocked(call: Callable[[], object]) -> float:
    """Seconds."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def clocked_by_the_gpu(call: Callable[[], object]) -> float:
    """Seconds between two events on its stream, with the host well ahead."""
    sleep_s = SLEEP_S
    while True:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(int(sleep_s * CLOCK_HZ))
        start.record()
        launch_s = clocked(call)
        end.record()
        end.synchronize()
        if launch_s < sleep_s:
            return start.elapsed_time(end) / 1e3
        sleep_s = 2 * launch_s
