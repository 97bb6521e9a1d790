"""Time one training step of a denoiser: forward, backward, clipping, AdamW. No data, no VAE, no text encoder.

    python -m tools.benchmark.train_step [--model STDiT-XL/2] [--latent 16 32 32] [--batch 8] [--compile] ...

FLOPs are the model's own `flops()` times three (backward = 2 x forward); recomputation by activation checkpointing
is not counted as useful work. With --peak-tflops the share of that peak (MFU) is printed too.
"""

import argparse
import statistics
import time

import torch
from torch import Tensor

from opensora.acceleration.checkpointing import checkpoint_activations
from opensora.acceleration.compile import compile_blocks
from opensora.acceleration.distributed import World
from opensora.acceleration.engine import build_engine
from opensora.registry import MODELS, SCHEDULERS
from opensora.utils.seed import generators


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="STDiT-XL/2")
    parser.add_argument("--latent", type=int, nargs=3, default=(16, 32, 32), metavar=("T", "H", "W"))
    parser.add_argument("--text-len", type=int, default=120)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--dtype", default="bf16", choices=("fp32", "bf16", "fp16"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--grad-checkpoint", action="store_true")
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--peak-tflops", type=float, help="of the device, measured by a large matrix product")
    args = parser.parse_args()
    device = torch.device(args.device)

    torch.manual_seed(0)
    model = MODELS.build({"type": args.model}, model_max_length=args.text_len).to(device).train()
    if args.compile:
        compile_blocks(model.transformer_blocks())
    if args.grad_checkpoint:
        checkpoint_activations(model.transformer_blocks())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=device.type == "cuda")
    engine = build_engine("ddp", model, optimizer, World(0, 1, device), dtype=args.dtype, grad_clip=1.0)
    scheduler = SCHEDULERS.build({"type": "iddpm"})
    z = torch.randn(args.batch, model.in_channels, *args.latent, device=device)
    y = torch.randn(args.batch, 1, args.text_len, model.caption_channels, device=device)
    cond = {"y": y, "mask": torch.ones(args.batch, args.text_len, dtype=torch.bool, device=device)}

    def step(number: int) -> None:
        rngs = generators(0, "benchmark", number, ids=range(args.batch), device=device)
        with engine.micro_step(last=True):
            loss: Tensor = scheduler.training_losses(engine.model, z, cond, generators=rngs).mean()
        engine.backward(loss)
        engine.step()

    seconds = []
    for number in range(args.warmup + args.steps):
        started = time.perf_counter()
        step(number)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    median = statistics.median(seconds[args.warmup :])
    tflops = 3 * args.batch * model.flops(tuple(args.latent), args.text_len) / median / 1e12
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    memory = f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB" if device.type == "cuda" else "-"
    print(f"{args.model} {tuple(args.latent)} batch {args.batch} {args.dtype}, {name}, torch {torch.__version__}")
    print(f"compile {args.compile}, activation checkpointing {args.grad_checkpoint}, median of {args.steps} steps")
    share = f", MFU {tflops / args.peak_tflops:.0%} of {args.peak_tflops:g}" if args.peak_tflops else ""
    print(
        f"{median * 1e3:.1f} ms/step, {args.batch / median:.2f} samples/s, {tflops:.2f} TFLOP/s{share}, peak {memory}"
    )


if __name__ == "__main__":
    main()
