"""Train Latte text-to-video (Ma et al., arXiv:2401.03048) through Optix's call: 320 frames of 512x512 on one GPU of 80 GB.

    python docs/examples/train_latte_t2v.py --toy
    torchrun --nproc_per_node 8 docs/examples/train_latte_t2v.py --num-frames 320 --size 512

Optix's own memory test, on random videos and random features in place of T5's. What makes it fit: videos are encoded a few
frames at a time (`sliced_vae`), every block is checkpointed, and the optimizer's state and the EMA are
shared out over the processes. A step of this size is slow; start with fewer frames.
"""

import argparse
import time

import torch
from diffusers import AutoencoderKL

from opensora.acceleration import optix
from opensora.acceleration.distributed import init_world, shutdown
from opensora.registry import MODELS, SCHEDULERS, build_module
from opensora.utils.seed import generators

TEXT_LENGTH, TEXT_WIDTH = 120, 4096  # of T5-XXL
TOY_LATTE = {"hidden_size": 32, "depth": 2, "num_heads": 2}


def main() -> None:
    args = parse_args()
    world = init_world()
    model, vae = build(args)
    scheduler = build_module({"type": "iddpm"}, SCHEDULERS)
    model, vae, opt, ema = optix.compile(
        model.to(world.device), vae, learning_rate=1e-5, use_ema=True, compile_vae=not args.toy, hybrid_zero=True
    )
    for step in range(args.steps):
        start = time.perf_counter()
        shape = (args.batch_size, args.num_frames, 3, args.size, args.size)
        rngs = generators("example", world.rank, step, ids=range(args.batch_size))  # draw timesteps and noise
        z = optix.sliced_vae(vae, torch.rand(shape, device=world.device) * 2 - 1, use_autocast=True, nhwc=True)
        # latents are [B, 4, T, H/8, W/8]
        text = torch.randn(args.batch_size, 1, TEXT_LENGTH, TEXT_WIDTH, device=world.device)
        mask = torch.ones(args.batch_size, TEXT_LENGTH, dtype=torch.bool, device=world.device)
        with torch.autocast(world.device.type, torch.bfloat16):
            loss = scheduler.training_losses(model, z, {"y": text, "mask": mask}, generators=rngs).mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        ema.update(model)
        report(world, step, loss, start)
    shutdown()


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=1, help="videos for each process")
    parser.add_argument("--num-frames", type=int, default=320)
    parser.add_argument("--size", type=int, default=512, help="of the frames, in pixels")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument(
        "--toy", action="store_true", help="a tiny model and two steps of 4 frames of 16 pixels, for a CPU"
    )
    args = parser.parse_args()
    if args.toy:
        args.steps, args.num_frames, args.size = 2, 4, 16
    return args


def build(args: argparse.Namespace) -> tuple[torch.nn.Module, AutoencoderKL]:
    """Latte with captions, and the VAE of Stable Diffusion with random weights."""
    torch.manual_seed(0)  # the same weights in every process
    channels, groups = ((8, 8), 4) if args.toy else ((128, 256, 512, 512), 32)
    vae = AutoencoderKL(
        block_out_channels=channels,
        down_block_types=("DownEncoderBlock2D",) * len(channels),
        up_block_types=("UpDecoderBlock2D",) * len(channels),
        layers_per_block=2,
        norm_num_groups=groups,
    )
    text = {"caption_channels": TEXT_WIDTH, "model_max_length": TEXT_LENGTH}
    size = TOY_LATTE if args.toy else {}
    return build_module({"type": "LatteT2V-XL/2", **text, **size}, MODELS).train(), vae


def report(world, step: int, loss: torch.Tensor, start: float) -> None:
    """One line a step, of the first process."""
    value = loss.item()  # waits for the step
    memory = torch.cuda.max_memory_allocated() / 2**30 if world.device.type == "cuda" else 0.0
    if world.rank == 0:
        print(f"step {step + 1}: loss {value:.4f}, {time.perf_counter() - start:.2f} s, peak {memory:.1f} GiB")


if __name__ == "__main__":
    main()
