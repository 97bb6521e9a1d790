"""Three ways to sample from the shipped parts: from text, from an image, on from a video; then look at what came of it.

    python -m tools.quickstart.conditions [--ckpt-path W] [--out outputs/quickstart/conditions]

Each is `scripts/inference.py` as a user would call it. The shipped model has never been trained on conditioning frames, so this shows
that the machinery works, and how far a model gets that does not know it. Two figures say so for each video: the PSNR of the
conditioning frames to what the VAE makes of the source (kept frames are exact), and the step from the last conditioning frame to the first
made one, as a multiple of the video's other steps (1 is seamless).
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import torch
from PIL import Image
from torch import Tensor

from opensora.config.load import InferenceConfig, parse_config
from opensora.datasets.video.read_video import read_frames
from opensora.inference.references import read_reference
from opensora.inference.sizes import saved_rate
from opensora.models.vae.metrics import reconstruct
from opensora.registry import MODELS, build_module
from opensora.utils.errors import UserError, exit_on_user_error
from tools.command import Parser
from tools.quickstart.__main__ import CLIPS, OPTIONS, RECIPES, command, options_of
from tools.quickstart.images import Row, contact_sheet
from tools.quickstart.measure import psnr
from tools.quickstart.report import read_clip

SHOWN = ("white_dog.mp4", "meadow_run.mp4", "pink_clouds.mp4")
INFERENCE = RECIPES["pretrained"].inference
EXTENDED_FROM = 2  # latent frames, which are frames with this VAE, that --extend keeps


class Kind(NamedTuple):
    """A way to sample: its options, given an image and a video, and how many frames are given."""

    name: str
    options: tuple[str, ...]
    given: int


KINDS = (
    Kind("text to video", (), 0),
    Kind("image to video", ("--image={image}",), 1),
    Kind("extension", ("--extend={video}", f"--condition-frame-length={EXTENDED_FROM}"), EXTENDED_FROM),
)


@exit_on_user_error
def main() -> None:
    """The command line."""
    parser = Parser(__doc__, __spec__)
    parser.add_argument("--ckpt-path", help="other weights than the shipped ones, such as a quickstart's checkpoint")
    parser.add_argument("--out", type=Path, default=Path("outputs/quickstart/conditions"), help="where everything goes")
    parser.add_argument("--clips", nargs="+", default=list(SHOWN), help="clips of assets/clips")
    args = parser.parse_args()
    weights = [] if args.ckpt_path is None else [f"--ckpt-path={args.ckpt_path}"]
    show(args.out, args.clips, weights)


def show(out: Path, clips: list[str], weights: list[str]) -> list[dict[str, Any]]:
    """Sample every clip's caption in the three ways; returns the figures, which are also in `figures.json`."""
    cfg = parse_config(InferenceConfig, argv=[INFERENCE])
    assert cfg.image_size is not None, "the quickstart says its size in numbers"
    vae = build_module(cfg.vae, MODELS).requires_grad_(False).eval()
    table = pd.read_csv(CLIPS, keep_default_na=False).set_index("path")
    keep_weights(out, weights)
    figures, rows = [], []
    for clip in clips:
        source = CLIPS.parent / clip
        image = first_image(source, out / "sources" / f"{source.stem}.png")
        groups = [(f"SOURCE {clip}", read_clip(source, cfg.image_size))]
        for kind in KINDS:
            folder = out / kind.name.replace(" ", "-") / source.stem
            options = [option.format(image=image, video=source) for option in kind.options]
            command(
                "scripts/inference.py",
                INFERENCE,
                *weights,
                f"--save-dir={folder}",
                *options,
                "--prompt",
                table["text"][clip],
            )
            video = read_clip(folder / "sample_0000.mp4", cfg.image_size)
            groups.append((f"{kind.name.upper()} {table['text'][clip]}", video))
            start = given_frames(kind, source, image, cfg, vae)
            figures.append({"clip": clip, "kind": kind.name, **measured(video, start, vae)})
        rows.append(Row(groups))
    contact_sheet(rows, out / "contact_sheet.png")
    (out / "figures.json").write_text(json.dumps(figures, indent=1) + "\n")
    print(describe(figures, out))
    return figures


def keep_weights(out: Path, weights: list[str]) -> None:
    """Note what a folder's samples are made with.

    Raises:
        UserError: those that are there are of other weights, and would be in the way.
    """
    made, wanted = options_of(out), {"weights": weights}
    if made not in (None, wanted):
        raise UserError(
            f"{out} has samples of other weights ({' '.join(made['weights']) or 'the shipped ones'}): pass another --out."
        )
    out.mkdir(parents=True, exist_ok=True)
    (out / OPTIONS).write_text(json.dumps(wanted) + "\n")


def first_image(source: Path, path: Path) -> Path:
    """The first frame of a clip, as a file of its own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(read_frames(source, 0, 1)[0].numpy()).save(path)
    return path


def given_frames(kind: Kind, source: Path, image: Path, cfg: InferenceConfig, vae: Any) -> Tensor | None:
    """[3, n, H, W]: what the video is given, as the pipeline reads it; None without."""
    assert cfg.image_size is not None, "the quickstart says its size in numbers"
    if kind.given == 0:
        return None
    if kind.name == "extension":
        return read_reference(source, vae, cfg.image_size, kind.given, rate=saved_rate(cfg), end=True)
    return read_reference(image, vae, cfg.image_size)


def measured(video: Tensor, start: Tensor | None, vae: Any) -> dict[str, float | None]:
    """The two figures; None where nothing is given."""
    if start is None:
        return {"given_psnr": None, "step": None}
    given = start.shape[1]
    expected = reconstruct(vae, start[None])[0]
    kept = float(psnr((video[:, :given] - expected).square().mean()))
    steps = (video[:, 1:] - video[:, :-1]).abs().mean(dim=(0, 2, 3))  # [T - 1]
    others = torch.cat([steps[: given - 1], steps[given:]])
    return {"given_psnr": kept, "step": float(steps[given - 1] / others.mean())}


def describe(figures: list[dict[str, Any]], out: Path) -> str:
    """The figures as a table."""
    lines = ["", "| clip | way | conditioning frames, PSNR dB | step to the first made frame |", "|---|---|---|---|"]
    for row in figures:
        cells = ["-", "-"] if row["step"] is None else [f"{row['given_psnr']:.1f}", f"{row['step']:.1f} x"]
        lines.append(f"| {row['clip']} | {row['kind']} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", f"Look at {out / 'contact_sheet.png'}"])


if __name__ == "__main__":
    main()
