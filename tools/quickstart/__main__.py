"""Train (fine-tune) a small model on the clips, sample from prompts, measure and show the result.

    python -m tools.quickstart [--from pretrained|scratch|nova|wan]

Every part is one of the commands a user would type; each is printed before it runs. A run that was interrupted is
continued from its last checkpoint, when the same options are given again; with others a new one begins. The shipped model is
fine-tuned on clips that it was not trained on (assets/unseen_clips), and is also sampled from before; the models that begin
from nothing are trained on the 21 clips (assets/clips) that the shipped one was trained on.
"""

import json
import os
import shlex
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
CLIPS = Path("assets/clips/clips.csv")  # what the shipped model was trained on
UNSEEN_CLIPS = Path("assets/unseen_clips/clips.csv")
ENCODING, BEFORE, TRAINING, SAMPLING, MEASURING = (
    "encoding",
    "sampling before fine-tuning",
    "training",
    "sampling",
    "measuring",
)
VALIDATIONS = 8  # in a training: points of the held-out loss
OPTIONS = "options.json"  # in a run's folder: what it was started with


class Recipe(NamedTuple):
    """The configs of a quickstart.

    train: of the training; what it makes is sampled from.
    minutes: roughly, of each part on two idle cores (of an AMD EPYC); the parts in their order.
    inference: samples from the model.
    clips: the table to train on.
    before: of a training before it, which it starts from.
    images: sample images too, of one frame.
    bf16_steps: where the CPU has bf16 arithmetic, train in bf16 and take so many times the configs' steps: it takes as long.
        None: train as the configs say everywhere.
    cached_epochs: encode the samples of so many epochs, for a VAE that compresses time; 0: whole clips.
    """

    train: str
    minutes: Mapping[str, float]
    inference: str = "configs/quickstart/inference.py"
    clips: Path = CLIPS
    before: str | None = None
    images: bool = False
    bf16_steps: float | None = None
    cached_epochs: int = 0


RECIPES = {
    "pretrained": Recipe(
        "configs/quickstart/finetune.py",
        {ENCODING: 0.5, BEFORE: 0.5, TRAINING: 4, SAMPLING: 0.5, MEASURING: 0.5},
        clips=UNSEEN_CLIPS,
    ),
    "scratch": Recipe("configs/quickstart/scratch.py", {ENCODING: 1, TRAINING: 11, SAMPLING: 1.5, MEASURING: 0.5}),
    "nova": Recipe(
        "configs/quickstart/nova.py",
        {ENCODING: 1, TRAINING: 14, SAMPLING: 0.5, MEASURING: 0.5},
        "configs/quickstart/inference_nova.py",
        before="configs/quickstart/nova_images.py",
        images=True,
        # on an AMD EPYC with AVX512_BF16 a step takes 1.3 to 1.5 times as long in fp32
        bf16_steps=4 / 3,
    ),
    "wan": Recipe(
        "configs/quickstart/wan.py",
        {ENCODING: 1, TRAINING: 10, SAMPLING: 1, MEASURING: 0.5},
        "configs/quickstart/inference_wan.py",
        cached_epochs=4,
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
        help="the shipped STDiT's weights, or from nothing a smaller STDiT's, a NOVA's or a Wan's",
    )
    parser.add_argument("--out", type=Path, default=Path("outputs/quickstart"), help="where everything goes")
    parser.add_argument("--max-steps", type=int, help="optimizer steps instead of the config's")
    parser.add_argument(
        "--held-out",
        choices=("paraphrase", "blind"),
        default="paraphrase",
        help="captions never trained on: written with the others at hand, or by someone who saw only the clips",
    )
    parser.add_argument("--num-clips", type=int, help="use only the first clips of each table")
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
    recipe = RECIPES[start]
    given = {
        "start": start,
        "config": recipe.train,
        "held_out": held_out,
        "max_steps": max_steps,
        "num_clips": num_clips,
    }
    parts = Parts(recipe.minutes, as_measured=max_steps is None and num_clips is None)
    print(parts.overview(), flush=True)
    run = run_folder(out, given)
    plan = read_plan(recipe, length(recipe, recipe.train, max_steps))
    table = pd.read_csv(recipe.clips, keep_default_na=False)[:num_clips]
    table["paraphrase"] = table[held_out]
    table.to_csv(run / "clips.csv", index=False)
    data = data_options(run, out, recipe.clips.parent)
    captions, paraphrases = list(table["text"]), list(table["paraphrase"])

    def sample(name: str, texts: list[str], *options: str) -> None:
        prompts = run / f"prompts_{name}.csv"
        pd.DataFrame({"text": texts}).to_csv(prompts, index=False)
        folder = f"--save-dir={run / name}"
        command("scripts/inference.py", recipe.inference, folder, f"--prompt-path={prompts}", *options)

    with parts(ENCODING):
        epochs = [f"--epochs={recipe.cached_epochs}"] if recipe.cached_epochs else []
        command("-m", "tools.cache_features", recipe.train, *data, *epochs)
    if BEFORE in recipe.minutes:
        with parts(BEFORE):
            sample("samples_before", captions)
    with parts(TRAINING):
        start_from = []
        if recipe.before is not None:
            before = train(recipe.before, run / "before", [*data, *length(recipe, recipe.before, max_steps)])
            start_from = [f"--ckpt-path={before}"]
        options = [*data, *length(recipe, recipe.train, max_steps), *start_from, *held_out_loss(run, table, plan.train)]
        checkpoint = train(recipe.train, run / "runs", options)
    with parts(SAMPLING):
        trained = [f"--ckpt-path={checkpoint}", *model_of(plan)]
        sample("samples", captions + paraphrases, *trained)
        if recipe.images:
            sample("images", captions + paraphrases, "--num-frames=1", *trained)
    with parts(MEASURING):
        from tools.quickstart.report import report, report_images

        others = [] if recipe.clips == CLIPS else [CLIPS.parent / p for p in pd.read_csv(CLIPS)["path"][:num_clips]]
        root, frame_interval = recipe.clips.parent, plan.train.frame_interval
        figures = report(run, table, root, plan.inference, frame_interval, others)
        if recipe.images:
            figures |= report_images(run, table, root, plan.inference)
    figures |= {"start": start, "checkpoint": str(checkpoint), "seconds": parts.seconds}
    (run / "report.json").write_text(json.dumps(figures, indent=1) + "\n")
    print(describe(run, figures))
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


def data_options(run: Path, out: Path, root: Path) -> list[str]:
    """Overrides that point a config to the run's own table of clips in `root`, and to the cache that all runs share."""
    return [
        f"--data-path={run / 'clips.csv'}",
        f"--dataset.root={root}",
        f"--dataset.cache_dir={out / 'cache'}",
    ]


def held_out_loss(run: Path, table: pd.DataFrame, cfg: TrainConfig) -> list[str]:
    """Overrides that take the loss of the clips with their held-out captions a few times in the training, at fixed noise."""
    assert cfg.max_steps is not None, "checked"
    table.assign(**dict.fromkeys(cfg.dataset["text_columns"], table["paraphrase"])).to_csv(
        run / "held_out.csv", index=False
    )
    every = max(cfg.max_steps // VALIDATIONS, 1)
    return [f"--val-data-path={run / 'held_out.csv'}", f"--val-every={every}", "--val-num-timesteps=2"]


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


def command(*args: str) -> None:
    """Run one of the repository's commands with this Python, showing it; stop if it fails."""
    print(f"\n$ python {' '.join(args)}", flush=True)
    done = subprocess.run([sys.executable, *args], check=False)
    if done.returncode:
        sys.exit(done.returncode)


class Parts:
    """The parts of a quickstart: says which begins and how long it takes, and measures it.

    Args:
        minutes: of each part, in order.
        as_measured: nothing was left out that `minutes` counts.
    """

    def __init__(self, minutes: Mapping[str, float], *, as_measured: bool) -> None:
        self.minutes, self.as_measured = minutes, as_measured
        self.seconds: dict[str, float] = {}

    def overview(self) -> str:
        """What comes, and how long it takes."""
        if not self.as_measured:
            return f"{len(self.minutes)} parts: {', '.join(self.minutes)}"
        parts = ", ".join(f"{part} {minutes:g}" for part, minutes in self.minutes.items())
        total = round(sum(self.minutes.values()))
        return f"{len(self.minutes)} parts, about {total} minutes on two idle CPU cores: {parts}"

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        about = f", about {self.minutes[part]:g} min" if self.as_measured else ""
        print(f"\n=== {list(self.minutes).index(part) + 1}/{len(self.minutes)} {part}{about}", flush=True)
        started = time.monotonic()
        yield
        self.seconds[part] = round(time.monotonic() - started, 1)


def describe(run: Path, figures: Mapping[str, Any]) -> str:
    """The result, for the terminal."""
    n, seconds, checkpoint = figures["num_clips"], figures["seconds"], figures["checkpoint"]
    columns = [name for name in ("before", "captions", "paraphrases") if f"{name}_right" in figures]
    heads = {"before": "before fine-tuning", "captions": "after", "paraphrases": "after, paraphrases"}

    def row(what: str, values: Sequence[str]) -> str:
        return f"{what:<46}" + "".join(f"{value:>20}" for value in values)

    rows = [
        row("", [heads[name] for name in columns]),
        row(
            f"nearest of {figures['num_candidates']} clips is its own",
            [f"{figures[f'{c}_right']}/{n}" for c in columns],
        ),
        row("PSNR to the best frame of its clip", [f"{figures[f'{c}_psnr']:.1f} dB" for c in columns]),
    ]
    if "images_captions_right" in figures:
        rows.append(
            row("an image's nearest frame is of its own clip", [f"{figures[f'images_{c}_right']}/{n}" for c in columns])
        )
    times = ", ".join(f"{part} {value:.0f}" for part, value in seconds.items())
    python = os.path.relpath(sys.executable) if Path(sys.executable).is_relative_to(Path.cwd()) else "python"
    return f"""
{chr(10).join(rows)}
The samples are of the clips' captions, and of paraphrases that were never trained on. The VAE alone reaches {figures["vae_psnr"]:.1f} dB.
Seconds: {times}; {sum(seconds.values()):.0f} in all

Look at
  {run / "contact_sheet.png"}   clips next to samples
  {run / "samples"}   one mp4 for each prompt
  {run / "loss.png"}   the loss in training, and of the held-out captions
  {checkpoint}   the checkpoint
Next
  {python} scripts/inference.py {shlex.quote(checkpoint)} --prompt "..."   samples another prompt
  {python} -m tools.demo {shlex.quote(checkpoint)}   samples in a browser
  {python} -m tools.finetune FOLDER   fine-tunes on your own clips
"""


if __name__ == "__main__":
    main()
