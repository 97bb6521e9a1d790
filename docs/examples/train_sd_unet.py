"""Train Stable Diffusion's U-Net (Rombach et al., arXiv:2112.10752) through Optix's call, on random images and texts.

    python docs/examples/train_sd_unet.py --toy
    torchrun --nproc_per_node 8 docs/examples/train_sd_unet.py --batch-size 16 --size 512
    python docs/examples/train_sd_unet.py --pretrained FOLDER      # in diffusers' format, with unet/ and vae/

It shows the loop, and how much memory and time a step takes; data of your own take the place of `images` and `text`.
"""

import argparse
import time

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel

from opensora.acceleration import optix
from opensora.acceleration.distributed import init_world, shutdown

TOY_UNET = {
    "block_out_channels": (8, 16),
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "attention_head_dim": 4,
}
TOY_VAE = {"block_out_channels": (8, 8), "norm_num_groups": 4}
SD_VAE = {"block_out_channels": (128, 256, 512, 512), "layers_per_block": 2}


def main() -> None:
    args = parse_args()
    world = init_world()
    model, vae = build(args)
    model, vae, opt, ema = optix.compile(
        model.to(world.device), vae, learning_rate=1e-5, weight_decay=1e-2, use_ema=True, compile_vae=not args.toy
    )
    noise_schedule = DDPMScheduler(beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012)
    for step in range(args.steps):
        start = time.perf_counter()
        images = torch.rand(args.batch_size, 3, args.size, args.size, device=world.device) * 2 - 1
        text = torch.randn(args.batch_size, 77, 768, device=world.device)
        z = optix.sliced_vae(vae, images, use_autocast=True, nhwc=True)  # [B, 4, H/8, W/8]
        noise, t = torch.randn_like(z), torch.randint(1000, (len(z),), device=world.device)
        with torch.autocast(world.device.type, torch.bfloat16):
            predicted = model(noise_schedule.add_noise(z, noise, t), t, text).sample
        loss = F.mse_loss(predicted.float(), noise)
        loss.backward()
        opt.step()
        opt.zero_grad()
        ema.update(model)
        report(world, step, loss, start)
    shutdown()


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pretrained", help="folder in diffusers' format; without it weights are random")
    parser.add_argument("--batch-size", type=int, default=2, help="images for each process")
    parser.add_argument("--size", type=int, default=512, help="of the images, in pixels")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--toy", action="store_true", help="a tiny model and two steps of 16 pixels, for a CPU")
    args = parser.parse_args()
    if args.toy:
        args.steps, args.size = 2, 16
    return args


def build(args: argparse.Namespace) -> tuple[UNet2DConditionModel, AutoencoderKL]:
    """The two networks of Stable Diffusion 1.x."""
    if args.pretrained:
        unet = UNet2DConditionModel.from_pretrained(args.pretrained, subfolder="unet")
        return unet.train(), AutoencoderKL.from_pretrained(args.pretrained, subfolder="vae")
    torch.manual_seed(0)  # the same weights in every process
    shape = TOY_VAE if args.toy else SD_VAE
    count = len(shape["block_out_channels"])
    vae = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * count, up_block_types=("UpDecoderBlock2D",) * count, **shape
    )
    return UNet2DConditionModel(cross_attention_dim=768, **(TOY_UNET if args.toy else {})), vae


def report(world, step: int, loss: torch.Tensor, start: float) -> None:
    """One line a step, of the first process."""
    value = loss.item()  # waits for the step
    memory = torch.cuda.max_memory_allocated() / 2**30 if world.device.type == "cuda" else 0.0
    if world.rank == 0:
        print(f"step {step + 1}: loss {value:.4f}, {time.perf_counter() - start:.2f} s, peak {memory:.1f} GiB")


if __name__ == "__main__":
    main()
