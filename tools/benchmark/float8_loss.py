"""The loss of a training in float8 beside bf16's: same weights at the start, same clips, noise and timesteps in every step.

    python -m tools.benchmark.float8_loss --save-latents outputs/float8_latents.safetensors     clips -> latents, any machine
    python -m tools.benchmark.float8_loss [--latents FILE] [--steps 300] [--recipes rowwise tensorwise] [--plot PNG]
    python -m tools.benchmark.float8_loss --emulate --steps 20 --batch 2 --model STDiT-XS/2     without such a GPU; slow

An STDiT-S/2 (width 384, 12 blocks) learns the latents of windows of the repository's clips by the shipped VAE, from random
weights, with an invented text for each clip. Prints the loss at the end, which is the mean of the last tenth of the steps,
how far it is from bf16's, and how far the losses of single steps are. `bf16 again` is bf16 with other noise in the last bit
of the initial weights: what rounding alone does.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from opensora.acceleration.compile import compile_blocks
from opensora.acceleration.distributed import World
from opensora.acceleration.engine import build_engine
from opensora.acceleration.float8 import check_float8, convert_linears
from opensora.datasets.datasets import VideoTextDataset
from opensora.datasets.sampler import SampleKey
from opensora.registry import MODELS, SCHEDULERS
from opensora.training.lr_scheduler import lr_at, set_lr
from opensora.utils.errors import UserError, exit_on_user_error
from opensora.utils.seed import generator, generators
from tools.benchmark.heading import heading, quiet

CLIPS, VAE = "assets/clips/clips.csv", "assets/models/vae-quickstart"
SIZE, NUM_FRAMES, FRAME_INTERVAL = (96, 160), 8, 3
WINDOWS = 4
"""Random windows of each clip."""
TEXT_LEN, TEXT_DIM = 16, 64
BASE, AGAIN = "bf16", "bf16 again"
WARMUP_STEPS = 20


class Latents(NamedTuple):
    """What is learnt."""

    z: Tensor  # [N, C, T, h, w], scaled as the VAE scales
    clip: Tensor  # [N] int64, which clip each is of


class Curve(NamedTuple):
    """One training."""

    losses: Tensor  # [steps]
    layers: int  # in float8
    seconds: float

    def end(self) -> float:
        """The mean of the last tenth of the steps."""
        return float(self.losses[-max(len(self.losses) // 10, 1) :].mean())


@exit_on_user_error
def main() -> None:
    """The command line."""
    args = parse_args()
    if args.save_latents is not None:
        save_latents(encode_clips(), args.save_latents)
        return
    device = torch.device(args.device)
    for recipe in args.recipes:
        check_float8(recipe, device, emulate=args.emulate)
    latents = encode_clips() if args.latents is None else read_latents(args.latents)
    latents = Latents(latents.z.to(device), latents.clip.to(device))
    blocks = "compiled" if args.compile else "eager"
    print(f"{heading(device, 'tools.benchmark.float8_loss')}\n")
    print(
        f"{args.model}, {len(latents.z)} latents of {tuple(latents.z.shape[1:])}, batch {args.batch}, {blocks} blocks\n"
    )
    print("| products | float8 layers | loss at the end | from bf16's | single steps from bf16's | s |")
    print("|---|---|---|---|---|---|", flush=True)
    curves, failed = {}, False
    with quiet():
        for name in [BASE, *args.recipes, *([AGAIN] if args.again else [])]:
            try:
                curves[name] = train(name, latents, args)
            except (RuntimeError, AssertionError, NotImplementedError) as error:  # the others are worth having
                failed = True
                print(f"| {name} | failed: {type(error).__name__}: {str(error).splitlines()[0]} | | | | |", flush=True)
                continue
            print(row(name, curves[name], curves.get(BASE)), flush=True)
    if args.plot is not None and curves:
        draw(curves, args.plot, f"{args.model}, {blocks} blocks, batch {args.batch}")
    sys.exit(failed)


def parse_args() -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save-latents", type=Path, help="encode the clips into this file, and stop")
    parser.add_argument("--latents", type=Path, help="such a file; the clips are encoded when it is left out")
    parser.add_argument("--model", default="STDiT-S/2")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--recipes", nargs="+", default=["rowwise"])
    parser.add_argument("--again", action="store_true", help="bf16 a second time, see above")
    parser.add_argument("--compile", action="store_true", help="compile the blocks")
    parser.add_argument("--emulate", action="store_true", help="float8 without a GPU that has it")
    parser.add_argument("--plot", type=Path, help="draw the losses to this file")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    args = parser.parse_args()
    if min(args.steps, args.batch) < 1:
        raise UserError(f"--steps {args.steps} and --batch {args.batch} must be at least 1.")
    return args


@torch.no_grad()
def encode_clips() -> Latents:
    """Windows of the repository's clips through the shipped VAE; run it in the repository's root."""
    vae = MODELS.build({"type": "VideoAutoencoderKL", "from_pretrained": VAE, "micro_batch_size": 8}).eval()
    data = VideoTextDataset(CLIPS, NUM_FRAMES, FRAME_INTERVAL, SIZE, short_clips="drop")
    keys = [SampleKey(window, index) for index in range(len(data)) for window in range(WINDOWS)]
    z = [vae.encode(data[key]["video"][None], [generator("float8", *key)]) for key in keys]
    return Latents(torch.cat(z), torch.tensor([key.index for key in keys]))


def save_latents(latents: Latents, path: Path) -> None:
    """Half precision is finer than the VAE."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({"z": latents.z.half().contiguous(), "clip": latents.clip}, path)
    print(f"{path}: {len(latents.z)} latents of {tuple(latents.z.shape[1:])}, {path.stat().st_size / 1e6:.2f} MB")


def read_latents(path: Path) -> Latents:
    """The reverse of `save_latents`.

    Raises:
        UserError: there is no such file.
    """
    if not path.is_file():
        raise UserError(f"--latents {path}: no such file; make it by --save-latents {path}.")
    with safe_open(path, "pt") as file:
        return Latents(file.get_tensor("z").float(), file.get_tensor("clip"))


def train(name: str, latents: Latents, args: argparse.Namespace) -> Curve:
    """Train a new model.

    Args:
        name: "bf16", "bf16 again", or a recipe of `convert_linears`.
        latents: on the device.
        args: the command line's.
    """
    device = latents.z.device
    torch._dynamo.reset()
    model = new_model(args.model, latents.z.shape[1], args.seed, nudge=name == AGAIN).to(device).train()
    layers = 0 if name in (BASE, AGAIN) else convert_linears(model, name, emulate=args.emulate)
    if args.compile:
        compile_blocks(model.transformer_blocks())
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.99), fused=device.type == "cuda")
    engine = build_engine("ddp", model, optimizer, World(0, 1, device), dtype="bf16", grad_clip=1.0)
    scheduler = SCHEDULERS.build({"type": "iddpm", "prediction": "v", "variance": "fixed_small"})
    texts = torch.randn(int(latents.clip.max()) + 1, 1, TEXT_LEN, TEXT_DIM, generator=generator("texts")).to(device)
    losses, start = [], time.perf_counter()
    for step in range(args.steps):
        picked = torch.randint(len(latents.z), (args.batch,), generator=generator(args.seed, "batch", step)).to(device)
        rngs = generators(args.seed, "train", step, ids=range(args.batch), device=device)
        set_lr(optimizer, lr_at(step, args.lr, warmup_steps=WARMUP_STEPS, schedule="cosine", total_steps=args.steps))
        with engine.micro_step(last=True):
            cond = {"y": texts[latents.clip[picked]]}
            loss = scheduler.training_losses(engine.model, latents.z[picked], cond, generators=rngs).mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    return Curve(torch.stack(losses).float().cpu(), layers, time.perf_counter() - start)


def new_model(name: str, channels: int, seed: int, *, nudge: bool) -> Any:
    """The same weights for a seed; `nudge` changes them by one part in 10 million."""
    torch.manual_seed(seed)
    model = MODELS.build(
        {
            "type": name,
            "in_channels": channels,
            "caption_channels": TEXT_DIM,
            "model_max_length": TEXT_LEN,
            "pred_sigma": False,
        }
    )
    with torch.no_grad():
        for parameter in model.parameters() if nudge else ():
            parameter.mul_(1 + 1e-7 * torch.randn_like(parameter))
    return model


def row(name: str, curve: Curve, base: Curve | None) -> str:
    """Of the table."""
    cells = [name, str(curve.layers or "-"), f"{curve.end():.4f}", "-", "-"]
    if base is not None and name != BASE:
        cells[3] = f"{curve.end() / base.end() - 1:+.2%}"
        cells[4] = f"{float(((curve.losses - base.losses).abs() / base.losses).mean()):.2%}"
    return f"| {' | '.join([*cells, f'{curve.seconds:.0f}'])} |"


def smooth(losses: Tensor, window: int) -> Tensor:
    """Means of `window` steps, the last of which is each step; of fewer at the beginning."""
    total = torch.cat([torch.zeros(1, dtype=torch.float64), losses.double().cumsum(0)])
    ends = torch.arange(1, len(losses) + 1)
    starts = (ends - window).clamp(min=0)
    return (total[ends] - total[starts]) / (ends - starts)


def draw(curves: dict[str, Curve], path: Path, title: str) -> None:
    """All losses, and below, how far the smoothed ones are from bf16's."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 5.5), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    window = max(len(next(iter(curves.values())).losses) // 15, 1)
    base = curves.get(BASE)
    for number, (name, curve) in enumerate(curves.items()):
        steps, smoothed = range(1, len(curve.losses) + 1), smooth(curve.losses, window)
        colour = f"C{number}"
        top.plot(steps, curve.losses, color=colour, alpha=0.2, linewidth=0.7)
        top.plot(steps, smoothed, color=colour, label=f"{name}: {curve.end():.4f} at the end")
        if base is not None and name != BASE:
            bottom.plot(steps, 100 * (smoothed / smooth(base.losses, window) - 1), color=colour)
    top.set(ylabel="loss", title=f"{title}; mean of {window} steps")
    bottom.set(xlabel="optimizer step", ylabel="% from bf16's")
    bottom.axhline(0, color="grey", linewidth=0.8)
    for axes in (top, bottom):
        axes.grid(alpha=0.3, which="both")
    top.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
