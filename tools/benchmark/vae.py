"""Speed and memory of VAEs at full size, with random weights: encoding and decoding in every number format and layout.

    python -m tools.benchmark.vae [--vaes sd wan] [--size 512 512] [--frames 16] [--formats fp32 fp16 bf16] ...

First table: frames a second, of one video, one line for each way of running the same network. Second table: peak memory
(weights and input included) of one large video, whole, in micro-batches, in tiles and in both. On a GPU, cuDNN chooses its
algorithms by trial and multiplies fp32 in TF32, as in training. Errors are |line - first line| / |first line| of the VAE's
moments and pictures: list fp32 first. Without a GPU everything is small enough for a laptop, and
memory is not measured.
"""

import argparse
import gc
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from opensora.models.vae.base import VideoVAE
from opensora.registry import MODELS
from opensora.utils.seed import generator
from tools.benchmark.heading import heading

# Stable Diffusion's VAE; Wan 2.1's is its class's default
FULL: dict[str, dict[str, Any]] = {
    "sd": {
        "type": "VideoAutoencoderKL",
        "architecture": {"block_out_channels": (128, 256, 512, 512), "layers_per_block": 2},
    },
    "wan": {"type": "DiffusersVideoVAE", "architecture": {"type": "AutoencoderKLWan"}},
    "hunyuan": {"type": "DiffusersVideoVAE", "architecture": {"type": "AutoencoderKLHunyuanVideo"}},
}
SMALL: dict[str, dict[str, Any]] = {
    "sd": {"type": "VideoAutoencoderKL", "architecture": {"block_out_channels": (32, 32, 32, 32)}},
    "wan": {"type": "DiffusersVideoVAE", "architecture": {"type": "AutoencoderKLWan", "base_dim": 16}},
    "hunyuan": {
        "type": "DiffusersVideoVAE",
        "architecture": {"type": "AutoencoderKLHunyuanVideo", "block_out_channels": (32, 32, 32, 32)},
    },
}
ON_GPU = {"size": [512, 512], "large": [1024, 1024], "frames": 16, "formats": ["fp32", "fp16", "bf16"], "seconds": 0.5}
ON_CPU = {"size": [64, 64], "large": [128, 128], "frames": 4, "formats": ["fp32"], "seconds": 0.2}
WAYS: dict[str, dict[str, Any]] = {
    "eager": {},
    "channels last": {"memory_format": "channels_last"},
    "compiled": {"memory_format": "channels_last", "compile": True},
}


def main() -> None:
    """The command line."""
    args = parse_args()
    torch.backends.cudnn.benchmark = True
    device = torch.device(args.device)
    gpu = device.type == "cuda"
    print(heading(device, "tools.benchmark.vae"))
    print(
        f"{args.frames} frames of {args.size[0]}x{args.size[1]} at a time{'' if gpu else ', networks of toy width'}\n"
    )
    print(
        "| VAE | numbers | way | encode frames/s | decode frames/s | peak GiB encode | decode | error encode | error decode |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for vae in args.vaes:
        wanted: list[Tensor] = []  # what the first line computes
        for dtype in args.formats:
            for way in args.ways:
                # compiling takes most of the time: one number format shows what it is worth
                if way != "compiled" or (vae in args.compiled and dtype == args.formats[-1]):
                    print(f"| {vae} | {dtype} | {way} | {speed(args, vae, dtype, way, wanted)} |", flush=True)
                    clear(args.device)
    if not gpu:
        return
    dtype = args.formats[-1]
    print(f"\n{args.frames} frames of {args.large[0]}x{args.large[1]}, {dtype}, channels last\n")
    print("| VAE | settings | encode s | decode s | peak GiB encode | decode |")
    print("|---|---|---|---|---|---|")
    for vae in args.vaes:
        for settings in memory_settings(vae, args.large):
            text = ", ".join(f"{key}={value}" for key, value in settings.items()) or "whole"
            print(f"| {vae} | {text} | {memory(args, vae, dtype, settings)} |", flush=True)
            clear(args.device)


def parse_args() -> argparse.Namespace:
    """Options, with defaults that suit the device."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    defaults: dict[str, Any] = ON_GPU if parser.parse_known_args()[0].device == "cuda" else ON_CPU
    parser.add_argument("--vaes", nargs="+", default=["sd", "wan"], choices=tuple(FULL))
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=tuple(WAYS))
    parser.add_argument("--compiled", nargs="*", default=["sd"], choices=tuple(FULL), help="VAEs to compile, too")
    parser.add_argument("--formats", nargs="+", default=defaults["formats"], choices=("fp32", "fp16", "bf16"))
    parser.add_argument("--size", type=int, nargs=2, default=defaults["size"], metavar=("H", "W"))
    parser.add_argument("--large", type=int, nargs=2, default=defaults["large"], metavar=("H", "W"), help="for memory")
    parser.add_argument(
        "--frames", type=int, default=defaults["frames"], help="the nearest number that a VAE takes is used"
    )
    parser.add_argument("--seconds", type=float, default=defaults["seconds"], help="to time each line for, at least")
    return parser.parse_args()


def memory_settings(vae: str, size: list[int]) -> list[dict[str, Any]]:
    """Ways to need less memory."""
    tile = {"tile_size": min(size) // 2}
    if FULL[vae]["type"] == "VideoAutoencoderKL":
        return [{}, {"micro_batch_size": 4}, {"micro_batch_size": 1}, tile, {"micro_batch_size": 1, **tile}]
    return [{}, tile]


def speed(args: argparse.Namespace, name: str, dtype: str, way: str, wanted: list[Tensor]) -> str:
    """Cells of the first table; `wanted` is filled by the first line."""
    try:
        vae = build(args, name, dtype, WAYS[way])
        x = video(vae, args, args.size)
        z = torch.randn(1, vae.out_channels, *vae.latent_size((x.shape[2], *args.size)), generator=generator(1)).to(
            x.device
        )
        encode, encode_peak = timed(lambda: vae.moments(x), args)
        decode, decode_peak = timed(lambda: vae.decode(z, x.shape[2]), args)
        found = results(vae, x, z)
    except torch.OutOfMemoryError:
        return "out of memory | - | - | - | - | -"
    wanted[:] = wanted or found
    errors = [f"{float((a - b).norm() / b.norm()):.2g}" for a, b in zip(found, wanted, strict=True)]
    frames = x.shape[2]
    speeds = f"{frames / encode:.1f} | {frames / decode:.1f} | {gib(encode_peak)} | {gib(decode_peak)}"
    return f"{speeds} | {' | '.join(errors)}"


@torch.inference_mode()
def results(vae: VideoVAE, x: Tensor, z: Tensor) -> list[Tensor]:
    """Moments and pictures, fp32 on the CPU."""
    return [vae.moments(x).float().cpu(), vae.decode(z, x.shape[2]).float().cpu()]


def memory(args: argparse.Namespace, name: str, dtype: str, settings: dict[str, Any]) -> str:
    """Cells of the second table; encoding may fit where decoding does not."""
    vae = build(args, name, dtype, {"memory_format": "channels_last", **settings})
    x = video(vae, args, args.large)
    z = torch.randn(1, vae.out_channels, *vae.latent_size((x.shape[2], *args.large)), device=x.device)
    encode, encode_peak = once(lambda: vae.moments(x), args)
    decode, decode_peak = once(lambda: vae.decode(z, x.shape[2]), args)
    return f"{encode} | {decode} | {encode_peak} | {decode_peak}"


@torch.inference_mode()
def once(call: Callable[[], Tensor], args: argparse.Namespace) -> tuple[str, str]:
    """Seconds of the second of two calls, and the peak, as text."""
    try:
        call()
        seconds, peak = measured(call, args.device, 1)
    except torch.OutOfMemoryError:
        gc.collect()
        torch.cuda.empty_cache()
        return "out of memory", "-"
    return f"{seconds:.2f}", gib(peak)


@torch.inference_mode()
def timed(call: Callable[[], Tensor], args: argparse.Namespace) -> tuple[float, int]:
    """Seconds of a call, over as many as fill `args.seconds`, and the peak in bytes."""
    call()
    first, _ = measured(call, args.device, 1)
    return measured(call, args.device, max(int(args.seconds / first), 2))


def measured(call: Callable[[], Tensor], device: str, repeats: int) -> tuple[float, int]:
    """Mean seconds and the peak in bytes."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    for _ in range(repeats):
        call()
    if device == "cuda":
        torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    return (time.perf_counter() - started) / repeats, peak


def build(args: argparse.Namespace, name: str, dtype: str, settings: dict[str, Any]) -> VideoVAE:
    """A VAE with random weights, the same for every line."""
    torch.manual_seed(0)
    cfg = (FULL if args.device == "cuda" else SMALL)[name]
    with torch.device(args.device):
        vae: VideoVAE = MODELS.build({**cfg, "dtype": dtype, **settings})
    return vae.requires_grad_(False).eval()


def video(vae: VideoVAE, args: argparse.Namespace, size: list[int]) -> Tensor:
    """Noise [1, 3, T, H, W] in [-1, 1]."""
    frames = vae.legal_num_frames(args.frames)
    return (torch.rand(1, 3, frames, *size, generator=generator(0)) * 2 - 1).to(args.device)


def clear(device: str) -> None:
    """Give memory and programs back before the next line."""
    gc.collect()
    torch._dynamo.reset()
    if device == "cuda":
        torch.cuda.empty_cache()


def gib(size: int) -> str:
    """Bytes as GiB; nothing where they were not measured."""
    return f"{size / 2**30:.1f}" if size else "-"


if __name__ == "__main__":
    main()
