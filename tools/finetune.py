"""Fine-tune a model on a folder of a few clips, and sample from it: one command from the files to a video.

    python -m tools.finetune FOLDER [--model small] [--prompt "a dog on a beach"] [--lr 1e-4] [any field of the config]

FOLDER has videos and images with a caption next to each: clip.txt for clip.mp4, or captions.csv, metadata.csv, .jsonl or .json
with file names and captions. Five steps, each a command that is printed before it runs and can be typed by itself:

    table   the files that have a caption and can be decoded -> OUT/clips.csv
    check   what training makes of them, and what it sees -> OUT/clips.png
    cache   their latents -> OUT/cache; of buckets those of a few windows of each clip
    train   -> OUT/run
    sample  from the captions, or from --prompt -> OUT/samples-stepN, and next to the clips in OUT/samples-stepN.png

After an interruption the same command goes on where it stopped; with more --steps it trains further.
"""

import argparse
import inspect
import json
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from torch import Tensor

from opensora.checkpoint.load import complete_checkpoints
from opensora.config.load import TrainConfig, parse_config
from opensora.datasets.buckets.bucket import NONE
from opensora.datasets.cache import CachedVariableVideoTextDataset, CachedVideoTextDataset
from opensora.datasets.transforms import get_transform
from opensora.datasets.video.read_video import open_clip, probe, read_indices
from opensora.inference.output import sample_file_name, save_image_grid
from opensora.models.image_encoder import required_frames_of
from opensora.models.vae.vae import VideoAutoencoderKL
from opensora.registry import DATASETS, DENOISERS, IMAGE_ENCODERS, SCHEDULERS, TEXT_ENCODERS, VAES, build_module
from opensora.training.batch_encoder import masks_of
from opensora.training.lora import check_lora
from opensora.training.run import image_options
from opensora.utils.errors import INTERRUPTED, UserError, exit_on_user_error
from opensora.utils.folders import make_writable, read_json
from tools.command import Parser

REGISTRIES = {
    "model": DENOISERS,
    "vae": VAES,
    "text_encoder": TEXT_ENCODERS,
    "image_encoder": IMAGE_ENCODERS,
    "scheduler": SCHEDULERS,
    "dataset": DATASETS,
}
STEPS = ("table", "check", "cache", "train", "sample")
SHORT = {"scripts.train": "train", "scripts.inference": "sample", "tools.datasets.doctor": "doctor"}  # of `opensora`
WINDOWS = 4  # of a clip that is longer than its bucket; later epochs see them again
SAMPLED = 8  # captions, where no prompt is given
COLUMNS = 4  # frames of a clip in the contact sheet of samples


@exit_on_user_error
def main() -> None:
    """The command line."""
    parser = Parser(__doc__, __spec__, usage="%(prog)s FOLDER [options] [--field value ...]")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="videos and images with captions")
    parser.add_argument(
        "--model", default="small", help="a file of configs/finetune, such as opensora-v1-2-lora, or a training config"
    )
    parser.add_argument("--out", type=Path, help="where everything goes (outputs/finetune/FOLDER-MODEL)")
    parser.add_argument("--steps", type=int, help="optimizer steps instead of the config's")
    parser.add_argument("--lora", action="store_true", help="train adapters of rank 16 instead; --lr 1e-4 suits them")
    parser.add_argument("--caption", help="of files that have none; else they are left out")
    parser.add_argument("--prompt", nargs="+", help=f"what to sample (the first {SAMPLED} captions)")
    parser.add_argument("--stop-after", choices=STEPS, default=STEPS[-1], help="end with this step")
    args, overrides = parser.parse_known_args()
    finetune(args, overrides)


class Plan(NamedTuple):
    """What is going to be done."""

    cfg: TrainConfig
    config: str  # its file
    options: list[str]  # of the training
    out: Path


def plan(args: argparse.Namespace, overrides: Sequence[str]) -> Plan:
    """Read the config with the options of the training; what is wrong with them is found here, before anything is done."""
    if not args.folder.is_dir():
        what = "is a file" if args.folder.exists() else "does not exist"
        raise UserError(
            f"{args.folder} {what}; name a folder of clips, before the options. A table is for scripts/train.py --data-path TABLE."
        )
    config = args.model if args.model.endswith(".py") else f"configs/finetune/{args.model}.py"
    name = f"{args.folder.resolve().name}-{Path(config).stem}{'-lora' * args.lora}"
    out = args.out or Path("outputs/finetune") / name
    options = [*overrides, f"--data-path={out / 'clips.csv'}", f"--outputs={out}", "--exp-name=run"]
    if args.steps is not None:
        options.append(f"--max-steps={args.steps}")
    if args.lora and not any(option.startswith("--lora.") for option in overrides):
        options += ["--lora.rank=16", "--lora.alpha=16"]
    cfg = parse_config(TrainConfig, REGISTRIES, [config, *options])
    if cfg.max_steps is None:
        raise UserError(f"{config} does not say when training ends: add --steps N.")
    if cfg.dataset["type"] not in ("VideoTextDataset", "VariableVideoTextDataset"):
        raise UserError(
            f"{config} reads a {cfg.dataset['type']}, not clips; take a config of configs/finetune, or one like them."
        )
    if args.prompt is not None and required_frames_of(cfg.model) is not None:
        raise UserError(
            f"--prompt: {cfg.model['type']} makes videos from images, and samples here start as the clips do, with their captions. "
            "Leave it out; afterwards scripts/inference.py takes --image and --prompt."
        )
    if cfg.lora is not None:
        check_lora()
    make_writable(out, "--out")
    claim(out, {"folder": str(args.folder.resolve()), "model": config, "lora": cfg.lora is not None})
    return Plan(cfg, config, options, out)


def finetune(args: argparse.Namespace, overrides: Sequence[str]) -> None:
    """Run the steps up to `args.stop_after`; `overrides` are options of the training."""
    cfg, config, options, out = plan(args, overrides)
    steps = STEPS[: STEPS.index(args.stop_after) + 1]
    from_cache: list[str] = []
    if (cached := cached_type(cfg)) is not None:
        from_cache = [f"--dataset.type={cached}", f"--dataset.cache_dir={out / 'cache'}"]
    caption = [] if args.caption is None else [f"--caption={args.caption}"]
    table = ["captioned", str(args.folder), f"--output={out / 'clips.csv'}", "--overwrite", *caption]
    command("tools.datasets.convert", *table)
    if "check" in steps:
        shown = [f"--contact-sheet={out / 'clips.png'}", "--samples=16"]
        command("tools.datasets.doctor", config, *options, *shown, accepted=(0, 1))  # 1: something was found
    if "cache" in steps and from_cache:
        windows = [f"--epochs={WINDOWS}"] * (cfg.bucket_config is not None)
        command("tools.cache_features", config, *options, f"--cache-dir={out / 'cache'}", *windows)
    elif "cache" in steps:
        print(
            "\nno cache: each step encodes its clips, for what this config makes of them is not the same in all epochs"
        )
    if "train" in steps:
        train(cfg, out / "run", [config, *options, *from_cache])
    if "sample" in steps:
        sample(cfg, out, args.prompt)
    else:
        print(f"\nstopped after {args.stop_after}: {out}\nThe same command without --stop-after goes on.")


def train(cfg: TrainConfig, run: Path, arguments: Sequence[str]) -> None:
    """Train up to the config's `max_steps`, from the last checkpoint where there is one."""
    steps = cfg.max_steps or 0
    if (done := step_of(run)) >= steps:
        print(f"\n{run} has {done} steps already; a larger --steps trains further")
        return
    resume = ["--load=latest", "--other-data=next_epoch"] if run.is_dir() else []
    command("scripts.train", *arguments, *resume)
    if (done := step_of(run)) < steps:  # Ctrl-C ends it in order
        print(f"\nstopped at step {done} of {steps}; the same command goes on")
        sys.exit(INTERRUPTED)


def claim(out: Path, options: dict[str, Any]) -> None:
    """Note what a folder is for, so that another fine-tuning does not go on from its checkpoints."""
    file = out / "finetune.json"
    if not file.exists():
        file.write_text(json.dumps(options, indent=1) + "\n")
    elif different := {
        name: value for name, value in read_json(file, "Name another --out.").items() if options.get(name) != value
    }:
        changes = ", ".join(f"{name} was {value}, now {options.get(name)}" for name, value in different.items())
        raise UserError(f"{out} holds another fine-tuning: {changes}. Name another --out.")


def cached_type(cfg: TrainConfig) -> str | None:
    """The dataset that reads what `tools.cache_features` stores for this config; None: it stores nothing for it."""
    dataset, conditioned = cfg.dataset, required_frames_of(cfg.model) is not None
    if dataset["type"] == "VariableVideoTextDataset":
        try:
            if conditioned:
                masks_of(cfg).given_frames(2)
        except UserError:  # the conditioning frames are drawn
            return None
        return CachedVariableVideoTextDataset.__name__
    is_plain = dataset.get("transform_name", "center") not in ("random_crop", "none") and not conditioned
    known = {"type", *inspect.signature(CachedVideoTextDataset).parameters}
    by_frame = issubclass(VAES.get(cfg.vae["type"]), VideoAutoencoderKL)
    fits = is_plain and by_frame and dataset.get("target_fps") is None and known >= dataset.keys()
    return CachedVideoTextDataset.__name__ if fits else None


def step_of(run: Path) -> int:
    """The optimizer step of a run's last complete checkpoint; 0: there is none."""
    return (
        max((int(path.name.rpartition("step")[2]) for path in complete_checkpoints(run)), default=0)
        if run.is_dir()
        else 0
    )


def sample(cfg: TrainConfig, out: Path, prompts: Sequence[str] | None) -> None:
    """Sample from the last checkpoint, draw the samples next to the clips of their captions, and say where all is."""
    checkpoint = max(complete_checkpoints(out / "run"), key=lambda path: int(path.name.rpartition("step")[2]))
    dataset = build_module(cfg.dataset, DATASETS, seed=cfg.seed)
    rows = np.flatnonzero(dataset.assign(0).bucket != NONE) if hasattr(dataset, "buckets") else dataset.rows
    clips = {
        dataset.table.captions(row)[0]: dataset.table.path(row) for row in map(int, reversed(rows))
    }  # the first of each
    folder = out / f"samples-step{step_of(out / 'run')}"
    common = [
        str(checkpoint),
        f"--save-dir={folder}",
        "--prompt-as-path=True",
        *(["--imports", *cfg.imports] if cfg.imports else []),
    ]
    if prompts is None:
        prompts = list(reversed(clips))[:SAMPLED]
        columns: dict[str, Any] = {"text": prompts}
        if (ends := required_frames_of(cfg.model)) is not None:  # from the clip's first frame, or first and last
            columns["reference_path"] = [clips[prompt] for prompt in prompts]
            columns["mask_strategy"] = "0;0,0,-1,-1" if -1 in ends else "0"
        pd.DataFrame(columns).to_csv(out / "prompts.csv", index=False)
        command("scripts.inference", *common, f"--prompt-path={out / 'prompts.csv'}")
    else:
        command("scripts.inference", *common, "--prompt", *prompts)
    names = [sample_file_name(prompt, i, prompt_as_path=True) for i, prompt in enumerate(prompts)]
    made = [next(path for path in folder.glob(f"{name}.*") if path.suffix != ".json") for name in names]
    info = probe(made[0])
    size = (info.height, info.width)
    strips = {
        f"{'clip, then ' * (prompt in clips)}sample: {prompt[:70]}": tuple(
            strip(path, size) for path in (clips.get(prompt), file) if path is not None
        )
        for prompt, file in zip(prompts, made, strict=True)
    }
    drawn = save_image_grid(folder.with_suffix(".png"), strips, COLUMNS)
    own = ["--prompt-as-path=True", *image_options(cfg.model), "--prompt", "..."]
    again = shlex.join(typed("scripts.inference", [*common[:2], *own]))
    print(f"""
table        {out / "clips.csv"}, {len(rows)} of its {len(dataset.table)} rows trained on
as seen      {out / "clips.png"}
checkpoint   {checkpoint}
samples      {folder}
next to the clips  {drawn}
Try your own prompt:
  {again}""")


def strip(path: Path, size: tuple[int, int]) -> Tensor:
    """Frames of a video from its first to its last, [3, COLUMNS, H, W] in [-1, 1]; of an image the same each time."""
    with open_clip(path) as clip:
        frames = read_indices(path, clip, np.linspace(0, clip.num_frames - 1, COLUMNS).round().astype(int))
    return get_transform("center", size)(frames)


def typed(program: str, arguments: Sequence[str]) -> list[str]:
    """The command line that runs `scripts.train`, `tools.cache_features`, ...: in the way in which this program was started."""
    if sys.argv[0].startswith("opensora "):
        return ["opensora", *([SHORT[program]] if program in SHORT else ["run", program]), *arguments]
    script = [f"{program.replace('.', '/')}.py"] if program.startswith("scripts.") else ["-m", program]
    return ["python", *script, *arguments]


def command(program: str, *arguments: str, accepted: Sequence[int] = (0,)) -> None:
    """Run a program of the project in a process of its own, showing its command line; end where it fails."""
    launcher, *words = typed(program, arguments)
    print(f"\n$ {shlex.join([launcher, *words])}", flush=True)
    on_interrupt = signal.signal(signal.SIGINT, lambda *_: None)  # Ctrl-C reaches the program too, which ends in order
    process = subprocess.Popen([sys.executable, *(["-m", "opensora"] if launcher == "opensora" else []), *words])
    on_term = signal.signal(signal.SIGTERM, lambda number, _: process.send_signal(number))
    try:
        code = process.wait()
    finally:
        signal.signal(signal.SIGINT, on_interrupt)
        signal.signal(signal.SIGTERM, on_term)
    if code not in accepted:
        sys.exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
