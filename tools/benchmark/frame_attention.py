"""Time self-attention within frames in training: our kernel with several block sizes, against PyTorch's.

    python -m tools.benchmark.frame_attention [--frames 128] [--tokens 256] [--heads 16] [--head-dim 72]

From the output of a linear layer, [frames, tokens, 3 heads x channels], to the attention's result, and back to the gradients of that
output and of the layer's bias, in bf16; medians. `cudnn` is PyTorch's fused kernel with all that surrounds it in a compiled block. The errors are
|ours - fp32| / |fp32| of the result, of the gradient and of the bias' gradient, in the same run. Needs a GPU.
"""

import argparse
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from opensora.utils.errors import UserError, exit_on_user_error
from tools.benchmark.heading import heading

REPEATS = 30


@exit_on_user_error
def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("frames", 128), ("tokens", 256), ("heads", 16), ("head-dim", 72)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise UserError("tools.benchmark.frame_attention measures a GPU, and PyTorch sees none.")
    width = args.heads * args.head_dim
    qkv = torch.randn(1, args.frames, args.tokens, 3 * width, device="cuda", dtype=torch.bfloat16)
    bias, grad = torch.zeros(3 * width, device="cuda"), torch.randn_like(qkv[..., :width])
    exact = gradients(partial(plain, heads=args.heads), qkv.float(), bias, grad.float())
    print(f"{heading(torch.device('cuda'), 'tools.benchmark.frame_attention')}, bf16\n")
    print(
        "| kernel | forward blocks | backward blocks | forward ms | with backward ms | errors |\n|---|---|---|---|---|---|"
    )
    for name, forward, backward, attend in candidates(args.heads):
        try:
            found = gradients(attend, qkv, bias, grad)
            errors = ", ".join(f"{(a.float() - b).norm() / b.norm():.2g}" for a, b in zip(found, exact, strict=True))
            ahead = median_ms(lambda: attend(qkv, None))  # noqa: B023
            both = median_ms(lambda: gradients(attend, qkv, bias, grad))  # noqa: B023
            print(f"| {name} | {forward} | {backward} | {ahead:.3f} | {both:.3f} | {errors} |", flush=True)
        except Exception as error:  # noqa: BLE001  (sizes that do not fit on the chip must not end the others)
            print(f"| {name} | {forward} | {backward} | {type(error).__name__} | - | {str(error)[:60]} |", flush=True)


def candidates(heads: int) -> Iterator[tuple[str, str, str, Callable[[Tensor, Tensor | None], Tensor]]]:
    """PyTorch's kernel, then ours with the blocks of the module, then with others: first of one pass, then of the other."""
    from opensora.acceleration import frame_attention as ours
    from opensora.acceleration.triton_tiles import one_tile

    def attend(qkv: Tensor, bias: Tensor | None) -> Tensor:
        return ours.attend_packed(qkv, heads, bias)

    yield "cudnn", "-", "-", torch.compile(lambda qkv, bias: cudnn(qkv, bias, heads), fullgraph=True)
    shipped = dict(ours._FORWARD), dict(ours._BACKWARD)
    yield "ours", told(shipped[0]), told(shipped[1]), attend
    tiles = ours.tiles
    ours.tiles = one_tile
    yield "ours, one tile of channels", told(shipped[0]), told(shipped[1]), attend
    ours.tiles = tiles
    for blocks, default, sizes in (
        (ours._FORWARD, shipped[0], product((64, 128), (64, 128, 256), (4, 8), (1, 2))),
        (ours._BACKWARD, shipped[1], product((32, 64, 128), (64, 128), (4, 8), (1, 2))),
    ):
        for values in sizes:
            blocks.update(zip(default, values, strict=True))
            yield "ours", told(ours._FORWARD), told(ours._BACKWARD), attend
        blocks.update(default)


def told(blocks: dict[str, int]) -> str:
    """Queries x keys, warps, stages."""
    queries, keys, warps, stages = blocks.values()
    return f"{queries}x{keys}, {warps} warps, {stages} stages"


def cudnn(qkv: Tensor, bias: Tensor | None, heads: int) -> Tensor:
    """PyTorch's attention, after the layer's bias."""
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]):
        return plain(qkv, bias, heads)


def plain(qkv: Tensor, bias: Tensor | None, heads: int) -> Tensor:
    """`qkv [1, T, S, 3 H d] -> [1, T, S, H d]`."""
    qkv = qkv if bias is None else qkv + bias.to(qkv.dtype)
    q, k, v = (part[0].unflatten(-1, (heads, -1)).transpose(1, 2) for part in qkv.chunk(3, dim=-1))  # [T, H, S, d]
    return scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)[None]


def gradients(attend: Callable[..., Tensor], qkv: Tensor, bias: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The result, and the gradients of qkv and bias."""
    qkv, bias = qkv.detach().requires_grad_(), bias.detach().requires_grad_()
    out = attend(qkv, bias)
    of_qkv, of_bias = torch.autograd.grad(out, (qkv, bias), grad)
    return out.detach(), of_qkv, of_bias


def median_ms(call: Callable[[], object]) -> float:
    """Milliseconds on the device."""
    times = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[REPEATS // 3 :])


if __name__ == "__main__":
    main()
