"""Put a trained VAE into assets/models with its model card: what it is, how it was trained, what it measures.

    python -m tools.eval_vae --vae RUN/vae --data-path assets/clips/held_out.csv --csv RUN/held_out.csv --sheet docs/images/NAME.jpg
    python -m assets.build.ship_vae RUN --name NAME --csv RUN/held_out.csv --about "One sentence." --hardware "one H100" \
        --command "python scripts/train_vae.py CONFIG"

Copied are the weights, their config and the run's `metrics.jsonl`. Every number of the card comes from the run's files; a
folder of that name is replaced.
"""

import argparse
import csv
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from safetensors import safe_open

from opensora.utils.errors import UserError, exit_on_user_error
from tools.command import Parser

ASSETS = Path("assets/models")
FILES = ("config.json", "diffusion_pytorch_model.safetensors")


def last_entry(metrics: Path) -> dict[str, Any]:
    """The run's last numbers, those of the loss and those of held-out clips together."""
    values: dict[str, Any] = {}
    for line in metrics.read_text().splitlines():
        values |= json.loads(line)
    return values


def minutes(metrics: Path) -> float:
    """The time that the steps took, by their own figures."""
    steps = [json.loads(line) for line in metrics.read_text().splitlines()]
    timed = [entry for entry in steps if "s_per_step" in entry]
    return (
        sum(b["s_per_step"] * (b["step"] - a["step"]) for a, b in zip([{"step": 0}, *timed], timed, strict=False)) / 60
    )


def count_parameters(weights: Path) -> int:
    """Numbers in a safetensors file."""
    with safe_open(weights, framework="pt") as file:
        total = 0
        for name in file.keys():  # noqa: SIM118  (not a dict)
            size = 1
            for side in file.get_slice(name).get_shape():
                size *= side
            total += size
    return total


def card(run: Path, args: argparse.Namespace) -> str:
    """The text of the model card."""
    config, end = json.loads((run / "config.json").read_text()), last_entry(run / "metrics.jsonl")
    versions = json.loads((run / "environment.json").read_text())["versions"]
    weights = run / "vae" / FILES[1]
    height, width = config["image_size"]
    loss = " + ".join(f"{weight:g} {term}" for term, weight in config["loss"].items() if weight)
    lengths = f", cut into {config['mixed_lengths']} frames" if config["mixed_lengths"] else ""
    lines = [
        f"# {args.name}",
        "",
        args.about,
        "",
        f"{count_parameters(weights) / 1e6:.2f} M parameters, {weights.stat().st_size / 1e6:.1f} MB in fp16, in diffusers' format.",
        "",
        "| | |",
        "|---|---|",
        f"| command | `{args.command}` |",
        f"| data | {args.data} |",
        f"| run | {end['step']} steps of {config['batch_size']} clips of {config['num_frames']} x {height} x {width}{lengths}; "
        f"{config['dtype']}, {args.hardware}, {minutes(run / 'metrics.jsonl'):.1f} min; torch {versions['torch']}, "
        f"diffusers {versions['diffusers']} (`metrics.jsonl` is its log) |",
        f"| loss | {loss} |",
        f"| at the end | loss {end['loss']:.4f}, "
        + (f"training PSNR {end['psnr']:.2f} dB |" if "psnr" in end else "|"),
        "",
        "Clips that it never saw, each at its own size "
        f"(`python -m tools.eval_vae --vae {ASSETS / args.name} {args.eval_options}`):",
        "",
        "| clip | source | PSNR dB | SSIM | LPIPS | saturation out / in |",
        "|---|---|---|---|---|---|",
    ]
    with args.csv.open() as file:
        for row in csv.DictReader(file):
            numbers = [float(row[name]) for name in ("psnr", "ssim", "lpips", "saturation")]
            shown = [f"{value:{form}}" for value, form in zip(numbers, (".2f", ".4f", ".4f", ".3f"), strict=True)]
            bold = "**" if row["path"].startswith("mean") else ""
            lines.append(f"| {bold}{row['path']}{bold} | {row['source']} | {' | '.join(shown)} |")
    lines += ["", "LPIPS is AlexNet's (stlpips-pytorch). Weights: Apache-2.0, as the repository.", ""]
    return "\n".join(lines)


@exit_on_user_error
def main() -> None:
    """Copy and write."""
    parser = Parser(__doc__, __spec__)
    parser.add_argument("run", type=Path, help="the run's folder, with vae/ in it")
    parser.add_argument("--name", required=True, help="of the folder in assets/models")
    parser.add_argument("--csv", type=Path, required=True, help="what eval_vae wrote")
    parser.add_argument("--about", required=True, help="what it is, in a sentence or two")
    parser.add_argument("--command", required=True, help="how it was trained")
    parser.add_argument("--hardware", required=True)
    parser.add_argument("--data", default="what `assets/build/clips.txt` lists, cut by `assets.build.collect_clips`")
    parser.add_argument("--eval-options", default="--data-path assets/clips/held_out.csv")
    args = parser.parse_args()
    if args.name in ("", ".", "..") or Path(args.name).name != args.name:
        raise UserError(f"--name {args.name!r}: the name of one folder in {ASSETS}, without others in front of it.")
    if missing := [str(args.run / "vae" / name) for name in FILES if not (args.run / "vae" / name).is_file()]:
        raise UserError(f"{args.run} is no finished run: {', '.join(missing)} missing.")
    text = card(args.run, args)
    ASSETS.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=ASSETS) as made:  # what was shipped stays until all is there
        for name in FILES:
            shutil.copyfile(args.run / "vae" / name, Path(made) / name)
        shutil.copyfile(args.run / "metrics.jsonl", Path(made) / "metrics.jsonl")
        (Path(made) / "README.md").write_text(text)
        target = ASSETS / args.name
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(made, target)
    print(text)


if __name__ == "__main__":
    main()
