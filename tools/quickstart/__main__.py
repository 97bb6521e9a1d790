"""Train (fine-tune) a small model on the clips, sample from prompts, measure and show the result.

    python -m tools.quickstart [--from pretrained|scratch|nova]

Every part is one of the commands a user would type; each is printed before it runs. A run that was interrupted is
continued from its last checkpoint, when the same options are given again; with others a new one begins.
"""

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import torch

from opensora.checkpoint.load import complete_checkpoints
from opensora.config.load import InferenceConfig, TrainConfig, parse_config
from opensora.utils.errors import UserError, exit_on_user_error
from tools.command import Parser

ROOT = Path(__file__).resolve().parents[2]
CLIPS = Path("assets/clips/clips.csv")
OPTIONS = "options.json"  # in a run's folder: what it was started with


class Recipe(NamedTuple):
    """The configs of a quickstart.

    train: of the training; what it makes is sampled from.
    before: of a training before it, which it starts from.
    images: sample images too, of one frame.
    bf16_steps: where the CPU has bf16 arithmetic, train in bf16 and take so many times the configs' steps: it takes as long.
        None: train as the configs say everywhere.
    """

    train: str
    inference: str = "configs/quickstart/inference.py"
    before: str | None = None
    images: bool = False
    bf16_steps: float | None = None


RECIPES = {
    "pretrained": Recipe("configs/quickstart/train.py"),
    "scratch": Recipe("configs/quickstart/scratch.py"),
    "nova": Recipe(
        "configs/quickstart/nova.py",
        "configs/quickstart/inference_nova.py",
        before="configs/quickstart/nova_images.py",
        images=True,
        # on an AMD EPYC with AVX512_BF16 a step takes 1.3 to 1.5 times as long in fp32
        bf16_steps=4 / 3,
    ),
}


class Plan(NamedTuple):
    """What the two configs say."""

    train: TrainConfig
    inference: InferenceConfig


@exit_on_user_error
def main() -> None:
    """The command line."""
    parser = Parser(__doc__, __spec__)
    parser.add_argument(
        "--from",
        dest="start",
        choices=RECIPES,
        default="pretrained",
        help="the shipped STDiT's weights, a smaller STDiT's from nothing, or a NOVA's from nothing",
    )
    parser.add_argument("--out", type=Path, default=Path("outputs/quickstart"), help="where everything goes")
    parser.add_argument("--max-steps", type=int, help="optimizer steps instead of the config's")
    parser.add_argument(
        "--held-out",
        choices=("paraphrase", "blind"),
        default="paraphrase",
        help="captions never trained on: written with the others at hand, or by someone who saw only the clips",
    )
    parser.add_argument("--num-clips", type=int, help="use only the first clips of the table")
    args = parser.parse_args()
    if missing := [name for name in ("configs", "scripts", "assets/clips") if not Path(name).is_dir()]:
        raise UserError(f"run this in the repository's root: there is no {missing[0]}/ in {Path.cwd()}.")
    quickstart(args.start, args.out, held_out=args.held_out, max_steps=args.max_steps, num_clips=args.num_clips)


def quickstart(
    start: str,
    out: Path,
    *,
    held_out: str = "paraphrase",
    max_steps: int | None = None,
    num_clips: int | None = None,
) -> dict[str, Any]:
    """Run everything; returns the report that is also written to `<run>/report.json`."""
    given = {"start": start, "held_out": held_out, "max_steps": max_steps, "num_clips": num_clips}
    run, seconds = run_folder(out, given), Seconds()
    recipe = RECIPES[start]
    plan = read_plan(recipe, length(recipe, recipe.train, max_steps))
    table = pd.read_csv(CLIPS, keep_default_na=False)[:num_clips]
    table["paraphrase"] = table[held_out]
    table.to_csv(run / "clips.csv", index=False)
    data = data_options(run, out)

    with seconds("latents of the clips"):
        command("-m", "tools.cache_features", recipe.train, *data)
    with seconds("training"):
        start_from = []
        if recipe.before is not None:
            before = train(recipe.before, run / "before", [*data, *length(recipe, recipe.before, max_steps)])
            start_from = [f"--ckpt-path={before}"]
        options = [*data, *length(recipe, recipe.train, max_steps), *start_from]
        checkpoint = train(recipe.train, run / "runs", options)
    with seconds("sampling"):
        prompts = write_prompts(table, run / "prompts.csv")
        options = [f"--ckpt-path={checkpoint}", f"--prompt-path={prompts}", *model_of(plan)]
        command("scripts/inference.py", recipe.inference, f"--save-dir={run / 'samples'}", *options)
        if recipe.images:
            command(
                "scripts/inference.py", recipe.inference, f"--save-dir={run / 'images'}", "--num-frames=1", *options
            )
    with seconds("measuring"):
        from tools.quickstart.report import report, report_images

        figures = report(run, table, CLIPS.parent, plan.inference, plan.train.frame_interval)
        if recipe.images:
            figures |= report_images(run, table, CLIPS.parent, plan.inference)
    figures |= {"start": start, "checkpoint": str(checkpoint), "seconds": seconds.by_part}
    (run / "report.json").write_text(json.dumps(figures, indent=1) + "\n")
    print(describe(run, figures, recipe))
    return figures


def run_folder(out: Path, options: Mapping[str, Any]) -> Path:
    """The folder of the last run with these options, if it was interrupted, or the next new one."""
    out.mkdir(parents=True, exist_ok=True)
    start = options["start"]
    runs = sorted(path for path in out.glob(f"[0-9][0-9][0-9]-{start}") if path.is_dir())
    alike = [run for run in runs if options_of(run) == options]
    if alike and not (alike[-1] / "report.json").exists():
        print(f"continuing {alike[-1]}, which was interrupted")
        return alike[-1]
    if runs and not (runs[-1] / "report.json").exists():
        print(f"{runs[-1]} was interrupted and had other options: a new run begins")
    number = max((int(path.name[:3]) for path in out.glob("[0-9][0-9][0-9]-*")), default=-1) + 1
    run = out / f"{number:03d}-{start}"
    run.mkdir()
    (run / OPTIONS).write_text(json.dumps(dict(options)) + "\n")
    return run


def options_of(run: Path) -> dict[str, Any] | None:
    """What a run was started with; None where that is not written, or only half."""
    try:
        return json.loads((run / OPTIONS).read_text())
    except (OSError, json.JSONDecodeError):
        return None


def data_options(run: Path, out: Path) -> list[str]:
    """Overrides that point a config to the run's own table and to the cache that all runs share."""
    return [
        f"--data-path={run / 'clips.csv'}",
        f"--dataset.root={CLIPS.parent}",
        f"--dataset.cache_dir={out / 'cache'}",
    ]


def train(config: str, outputs: Path, options: Sequence[str]) -> Path:
    """Train, or resume from the last checkpoint of an interrupted run; returns the last checkpoint."""
    done, steps = checkpoints(outputs), training_config(config, options).max_steps
    assert steps is not None, "checked"
    resume = [f"--load={done[-1]}"] if done else []
    if not done or step_of(done[-1]) < steps:
        command("scripts/train.py", config, *options, f"--outputs={outputs}", *resume)
    return checkpoints(outputs)[-1]


def length(recipe: Recipe, config: str, max_steps: int | None) -> list[str]:
    """Overrides for a training of `max_steps`; in bf16, and without `max_steps` longer, where recipe and CPU are for that."""
    if recipe.bf16_steps is None or torch.cuda.is_available() or not has_bf16():
        return [] if max_steps is None else [f"--max-steps={max_steps}"]
    if max_steps is None:
        in_config = training_config(config).max_steps
        assert in_config is not None, "checked"
        max_steps = round(recipe.bf16_steps * in_config)
    return ["--dtype=bf16", f"--max-steps={max_steps}"]


def has_bf16() -> bool:
    """Whether this CPU multiplies matrices in bf16. Others emulate it, and are slower than in fp32; older PyTorch does not say."""
    found: Mapping[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    return bool(found.get("avx512_bf16") or found.get("amx_bf16"))


def checkpoints(outputs: Path) -> list[Path]:
    """The complete checkpoints of a training and of its continuations, by step."""
    found = [path for folder in sorted(outputs.glob("*")) for path in complete_checkpoints(folder)]
    return sorted(found, key=step_of)


def step_of(checkpoint: Path) -> int:
    """The optimizer step in a checkpoint's name."""
    return int(checkpoint.name.rpartition("step")[2])


def training_config(config: str, options: Sequence[str] = ()) -> TrainConfig:
    """A config of training, with overrides, that says how many steps it takes."""
    cfg = parse_config(TrainConfig, argv=[config, *options])
    if cfg.max_steps is None:
        raise UserError(f"{config} sets no max_steps, which the quickstart needs.")
    return cfg


def read_plan(recipe: Recipe, options: Sequence[str] = ()) -> Plan:
    """Read the config of a training, with overrides, and the one that samples from what it trains."""
    return Plan(training_config(recipe.train, options), parse_config(InferenceConfig, argv=[recipe.inference]))


def model_of(plan: Plan) -> list[str]:
    """Overrides that make the inference config build the training config's model."""
    trained, sampled = plan.train.model, plan.inference.model
    different = {key: value for key, value in trained.items() if key != "from_pretrained" and sampled.get(key) != value}
    return [f"--model.{key}={value}" for key, value in different.items()]


def write_prompts(table: pd.DataFrame, path: Path) -> Path:
    """One table of prompts: every clip's caption, then every clip's held-out paraphrase."""
    pd.DataFrame({"text": [*table["text"], *table["paraphrase"]]}).to_csv(path, index=False)
    return path


def command(*args: str) -> None:
    """Run one of the repository's commands with this Python, showing it; stop if it fails."""
    print(f"\n$ python {' '.join(args)}", flush=True)
    done = subprocess.run([sys.executable, *args], check=False)
    if done.returncode:
        sys.exit(done.returncode)


class Seconds:
    """Wall-clock seconds of each part."""

    def __init__(self) -> None:
        self.by_part: dict[str, float] = {}

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        started = time.monotonic()
        yield
        self.by_part[part] = round(time.monotonic() - started, 1)


def describe(run: Path, figures: dict[str, Any], recipe: Recipe) -> str:
    """The result, for the terminal."""
    n, seconds = figures["num_clips"], figures["seconds"]
    images = ""
    if recipe.images:
        right = [f"{figures[f'images_{name}_right']}/{n} for {name}" for name in ("captions", "paraphrases")]
        images = f"\nA image's nearest frame is of its own clip:\n  {', '.join(right)}"
    times = ", ".join(f"{part} {value:.0f}" for part, value in seconds.items())
    return f"""
The sample's nearest clip is its own, among {n}:
  {figures["captions_right"]}/{n} for captions seen in training, {figures["paraphrases_right"]}/{n} for paraphrases never seen{images}
PSNR of a sample's frames to the best frame of its clip (the VAE alone reaches {figures["vae_psnr"]:.1f} dB):
  {figures["captions_psnr"]:.1f} dB for captions, {figures["paraphrases_psnr"]:.1f} dB for paraphrases
Seconds: {times}; {sum(seconds.values()):.0f} in all

Look at
  {run / "contact_sheet.png"}   source clips next to samples
  {run / "samples"}             one mp4 for each prompt
  {run / "loss.png"}            the loss curve
  {figures["checkpoint"]}
Try your own prompt:
  .venv/bin/python scripts/inference.py {recipe.inference} --ckpt-path {figures["checkpoint"]} --save-dir samples --prompt "..."
"""


if __name__ == "__main__":
    main()
