"""How far bf16 is from fp32: one forward pass of full-size denoisers, with random weights.

    python -m tools.benchmark.precision [--models STDiT-XL/2 DiT-XL/2 ...] [--latent 4 32 32]

Prints |bf16 - fp32| / |fp32| (2-norms) of the output, with the blocks compiled and not: where several operations are
one program, their intermediate results are not rounded to bf16. The fp32 result is that of the eager model. Layers that start at zero get small random weights instead, as
otherwise there would be nothing to compare. fp32 is without TF32.
"""

import argparse

import torch

from opensora.acceleration.compile import compile_blocks
from opensora.registry import MODELS

XL = [
    *("DiT-XL/2", "Latte-XL/2", "LatteT2V-XL/2", "PixArt-XL/2", "PixArtMS-XL/2", "PixArt-Sigma-XL/2"),
    *("STDiT-XL/2", "STDiT2-XL/2", "STDiT3-XL/2"),
]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=XL)
    parser.add_argument("--latent", type=int, nargs=3, default=(4, 32, 32), metavar=("T", "H", "W"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    name = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}, latent {'x'.join(map(str, args.latent))}\n")
    print("| model | compiled | eager |")
    print("|---|---|---|")
    for model in args.models:
        compiled, eager = relative_errors(model, tuple(args.latent), args.device)
        print(f"| {model} | {compiled:.3%} | {eager:.3%} |", flush=True)


@torch.no_grad()
def relative_errors(name: str, latent: tuple[int, int, int], device: str) -> tuple[float, float]:
    """Of one registered model with compiled and with eager blocks, for a batch of two."""
    torch.manual_seed(0)
    with torch.device(device):
        model = MODELS.build({"type": name}).eval()
        for parameter in model.parameters():
            if not parameter.any():
                parameter.normal_(std=0.02)
        x, y = torch.randn(2, model.in_channels, *latent), torch.randn_like(model.null_condition(2))
        sizes = {"fps": 8.0, "height": 8.0 * latent[1], "width": 8.0 * latent[2], "num_frames": float(latent[0])}
        cond = {key: torch.full((2,), value) for key, value in sizes.items()}
        timestep = torch.tensor([37.0, 801.0])
    exact = model(x, timestep, y, **cond)
    errors = []
    for compiled in (False, True):
        if compiled:
            torch._dynamo.reset()
            compile_blocks(model.transformer_blocks())
        with torch.autocast(device, torch.bfloat16):
            short = model(x, timestep, y, **cond)
        errors.append(float((short - exact).norm() / exact.norm()))
    return errors[1], errors[0]


if __name__ == "__main__":
    main()
