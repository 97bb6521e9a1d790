"""Train DiT-XL/2 (Peebles & Xie, arXiv:2212.09748) on classes through Optix's call, on random images.

    python docs/examples/train_dit.py --toy
    torchrun --nproc_per_node 8 docs/examples/train_dit.py --batch-size 32 --size 256

It shows the loop, and how much memory and time a step takes; data of your own take the place of `images` and `classes`.
For training in earnest there is scripts/train.py, which is made of the same parts.
"""

import argparse
import time

import torch
from diffusers import AutoencoderKL

from opensora.acceleration import optix
from opensora.acceleration.distributed import init_world, shutdown
from opensora.registry import MODELS, SCHEDULERS, build_module
from opensora.utils.seed import generators

TOY_DIT = {"hidden_size": 32, "depth": 2, "num_heads": 2}


def main() -> None:
    args = parse_args()
    world = init_world()
    model, vae = build(args)
    scheduler = build_module({"type": "iddpm"}, SCHEDULERS)
    model, vae, opt, ema = optix.compile(
        model.to(world.device),
        vae,
        learning_rate=1e-4,
        use_ema=True,
        compile_vae=not args.toy,
        compile_unet=not args.toy,
    )
    for step in range(args.steps):
        start = time.perf_counter()
        images = torch.rand(args.batch_size, 3, args.size, args.size, device=world.device) * 2 - 1
        classes = torch.randint(1000, (args.batch_size, 1, 1, 1), device=world.device)
        rngs = generators("example", world.rank, step, ids=range(args.batch_size))  # draw timesteps and noise
        z = optix.sliced_vae(vae, images, use_autocast=True, nhwc=True).unsqueeze(2)  # [B, 4, 1, H/8, W/8]
        with torch.autocast(world.device.type, torch.bfloat16):
            loss = scheduler.training_losses(model, z, {"y": classes}, generators=rngs).mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        ema.update(model)
        report(world, step, loss, start)
    shutdown()


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=2, help="images for each process")
    parser.add_argument("--size", type=int, default=256, help="of the images, in pixels")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--toy", action="store_true", help="a tiny model and two steps of 16 pixels, for a CPU")
    args = parser.parse_args()
    if args.toy:
        args.steps, args.size = 2, 16
    return args


def build(args: argparse.Namespace) -> tuple[torch.nn.Module, AutoencoderKL]:
    """DiT for ImageNet's classes, and the VAE of Stable Diffusion with random weights."""
    torch.manual_seed(0)  # the same weights in every process
    channels, groups = ((8, 8), 4) if args.toy else ((128, 256, 512, 512), 32)
    vae = AutoencoderKL(
        block_out_channels=channels,
        down_block_types=("DownEncoderBlock2D",) * len(channels),
        up_block_types=("UpDecoderBlock2D",) * len(channels),
        layers_per_block=2,
        norm_num_groups=groups,
    )
    size = TOY_DIT if args.toy else {}
    return build_module({"type": "DiT-XL/2", "condition": "label_1000", **size}, MODELS).train(), vae


def report(world, step: int, loss: torch.Tensor, start: float) -> None:
    """One line a step, of the first process."""
    value = loss.item()  # waits for the step
    memory = torch.cuda.max_memory_allocated() / 2**30 if world.device.type == "cuda" else 0.0
    if world.rank == 0:
        print(f"step {step + 1}: loss {value:.4f}, {time.perf_counter() - start:.2f} s, peak {memory:.1f} GiB")


if __name__ == "__main__":
    main()
