"""Find the batch size of every bucket: the largest that fits, or the one whose step takes as long as a base bucket's.

    python -m tools.search_batch_size CONFIG OUT.py [--goal largest] [--memory-gib 70] [--encoders] [--field value ...]
    python -m tools.search_batch_size CONFIG OUT.py --goal even --base 480p:51
    python -m tools.search_batch_size CONFIG OUT.py --goal even --base-seconds 2.0

Real training steps of the config's denoiser, scheduler, engine, checkpointing and EMA run on random latents, or on
random videos and captions through the config's VAE and text encoder with `--encoders`. For `largest` the batch is doubled
until a step does not fit, then the gap is halved; what runs out of memory is no error. On a GPU "fits" means `--memory-gib`
or, without it, 95 % of the memory; on a CPU it means `--memory-gib` and `--max-seconds` for a step, one of which has to be
given. `even` takes the batch whose step is nearest to the base's time. In each bucket its largest shape is tried.

OUT.py starts from CONFIG and has the batch sizes and the fields of the command line; its docstring has a table of what was
measured. One process: on several GPUs the engines that shard their state need less of each, so what fits here fits there.
"""

import argparse
import copy
import gc
import math
import os
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from opensora.acceleration.distributed import World, init_world
from opensora.acceleration.engine import build_engine
from opensora.config.command_line import read_command
from opensora.config.load import TrainConfig, read_file
from opensora.config.resolve import Draft
from opensora.config.yacs import deepspeed_overrides
from opensora.datasets.buckets.bucket import Buckets, parse_num_frames
from opensora.registry import DATASETS, MODELS, SCHEDULERS, build_module
from opensora.schedulers.mask_ratios import MaskRatios
from opensora.training.batch_encoder import BatchEncoder, freeze_encoder, mask_ratios_of
from opensora.training.loop import build_ema, build_optimizer, engine_settings
from opensora.training.model import build_model
from opensora.utils.errors import UserError, exit_on_user_error
from opensora.utils.logging import show_messages
from opensora.utils.seed import generators
from tools.command import Parser
from tools.estimate import PARTS, latent_size, read_config
from tools.frozen_parts import assumptions, build_text, build_vae

GIB = 2**30
FREE = 0.05  # of a GPU's memory that stays unused where no limit is given: sizes of a run differ from step to step
WARM_UP, MEASURED = 2, 3  # steps


class Clip(NamedTuple):
    """What a bucket's batches are made of: its largest shape."""

    resolution: str
    num_frames: int
    height: int
    width: int
    batch: int  # of the config

    @property
    def name(self) -> str:
        """For tables."""
        return f"{self.resolution}:{self.num_frames}"


class Outcome(NamedTuple):
    """Of some training steps with one batch size."""

    fits: bool
    seconds: float = math.inf  # a step
    gib: float = math.inf  # peak


class Limits(NamedTuple):
    """When a step counts as too large; None: no limit."""

    gib: float | None
    seconds: float | None
    batch: int


class Trainer:
    """Takes training steps with batches of any size.

    Args:
        cfg: the training.
        world: one process.
        limits: when a step is too large.
        encoders: whether VAE and text encoder work too.
    """

    def __init__(self, cfg: TrainConfig, world: World, limits: Limits, *, encoders: bool) -> None:
        self.cfg, self.device, self.limits = cfg, world.device, limits
        with torch.device("meta"):  # without weights, for their sizes
            self.vae = build_vae(cfg.vae)
            _, text_width, text_len = build_text(cfg.text_encoder)
        sizes: dict[str, int | None] = {"in_channels": self.vae.out_channels, "model_max_length": text_len}
        if text_width is not None:
            sizes["caption_channels"] = text_width
        random = replace(cfg, model={**cfg.model, "from_pretrained": None})
        self.model = model = build_model(random, sizes, self.device).train()
        self.encode: BatchEncoder | None = None
        masks = MaskRatios(mask_ratios_of(cfg.model, cfg.mask_ratios, {clip.num_frames for clip in clips_of(cfg)}))
        if encoders:
            parts = (cfg.vae, cfg.text_encoder, *([] if cfg.image_encoder is None else [cfg.image_encoder]))
            freeze = partial(freeze_encoder, device=self.device, offload=cfg.encoder_offload)
            vae, text, *images = (freeze(build_module(part, MODELS)) for part in parts)
            self.encode = BatchEncoder(
                vae, text, model, self.device, image_encoder=next(iter(images), None), masks=masks
            )
        self.scheduler = build_module(cfg.scheduler, SCHEDULERS)
        self.optimizer = build_optimizer(cfg, self.model)
        self.engine = build_engine(cfg.plugin, self.model, self.optimizer, world, **engine_settings(cfg))
        self.ema = build_ema(cfg, self.model, self.engine)
        self.step = 0

    def __call__(self, clip: Clip, batch: int) -> Outcome:
        """Try some steps; out of memory is an outcome, not an error."""
        try:
            return self._measure(clip, batch)
        except torch.OutOfMemoryError:
            return Outcome(fits=False)
        finally:
            self.optimizer.zero_grad(set_to_none=True)
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def _measure(self, clip: Clip, batch: int) -> Outcome:
        reset_peak(self.device)
        for _ in range(WARM_UP):
            first = self._timed_step(clip, batch)
        if self.limits.seconds is not None and first > self.limits.seconds:
            return Outcome(fits=False, seconds=first, gib=peak_gib(self.device))
        seconds = sum(self._timed_step(clip, batch) for _ in range(MEASURED)) / MEASURED
        gib = peak_gib(self.device)
        slow = self.limits.seconds is not None and seconds > self.limits.seconds
        large = self.limits.gib is not None and gib > self.limits.gib
        return Outcome(not (slow or large), seconds, gib)

    def _timed_step(self, clip: Clip, batch: int) -> float:
        begin = time.perf_counter()
        rngs = generators(self.cfg.seed, "search", self.step, ids=range(batch), device=self.device)
        z, cond = self._batch(clip, batch, rngs)
        with self.engine.micro_step(last=True):
            loss = self.scheduler.training_losses(self.engine.model, z, cond, mask=None, generators=rngs).mean()
        self.engine.backward(loss)
        self.engine.step()
        self.step += 1
        self.ema.update(self.model, self.step)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - begin

    def _batch(self, clip: Clip, batch: int, rngs: Sequence[torch.Generator]) -> tuple[Tensor, dict[str, Tensor]]:
        """Random latents [B, C, T, h, w] and conditions, encoded or made up."""
        size = clip.num_frames, clip.height, clip.width
        known = {"fps": 24.0, "height": size[1], "width": size[2], "num_frames": size[0], "flow": 5.0}
        values = {name: float(known.get(name, 1)) for name in self.model.micro_conditions}
        cond = {name: torch.full((batch,), value, device=self.device) for name, value in values.items()}
        if self.encode is not None:
            video = torch.rand(batch, 3, *size) * 2 - 1
            texts = ["0" if self.cfg.text_encoder["type"] == "classes" else "a calm lake at dawn"] * batch
            return self.encode({"video": video, "text": texts, **cond}, rngs)
        z = torch.randn(batch, self.model.in_channels, *latent_size(self.vae, size), device=self.device)
        y = self.model.null_condition(batch).detach()
        if channels := getattr(
            self.model, "condition_channels", 0
        ):  # conditioning frames, and the features of their images
            cond["condition"] = z.new_zeros(batch, channels, *z.shape[2:])
            if self.model.image_dim is not None:
                cond["image_features"] = z.new_zeros(batch, self.model.image_tokens, self.model.image_dim)
        return z, {"y": y, "mask": torch.ones(batch, y.shape[2], dtype=torch.bool, device=self.device), **cond}


def largest(attempt: Callable[[int], Outcome], most: int) -> int:
    """The largest batch from 1 to `most` that fits, by doubling and halving; 0 where not even 1 does."""
    low, high = 0, 1
    while high <= most and attempt(high).fits:
        low, high = high, high * 2
    high = min(high, most + 1)  # does not fit, or is not allowed
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if attempt(middle).fits else (low, middle)
    return low


def nearest(attempt: Callable[[int], Outcome], seconds: float, most: int) -> int:
    """The batch from 1 to `most` whose step takes nearest to `seconds`, among those that fit; 0 where none does."""

    def within(batch: int) -> Outcome:
        outcome = attempt(batch)
        return outcome._replace(fits=outcome.fits and outcome.seconds <= seconds)

    below = largest(within, most)
    candidates = [batch for batch in (below, below + 1) if 1 <= batch <= most and attempt(batch).fits]
    return min(candidates, key=lambda batch: abs(attempt(batch).seconds - seconds), default=0)


def clips_of(cfg: TrainConfig) -> list[Clip]:
    """The largest shape of each bucket that takes samples, or the one size of a config without buckets."""
    if cfg.bucket_config is None:
        return [Clip("", cfg.num_frames, *cfg.image_size, cfg.batch_size)]
    chosen: dict[tuple[str, int], Clip] = {}
    for bucket in Buckets(cfg.bucket_config, cfg.dataset.get("size_multiple", 16), cfg.dataset.get("cost_power", 1.0)):
        size = bucket.num_frames, bucket.height, bucket.width
        clip = Clip(bucket.resolution, *size, bucket.batch_size or 0)
        entry = clip.resolution, clip.num_frames
        if clip.batch and (
            entry not in chosen or clip.height * clip.width > chosen[entry].height * chosen[entry].width
        ):
            chosen[entry] = clip
    return list(chosen.values())


def search(
    cfg: TrainConfig,
    trainer: Trainer,
    *,
    base: str | None = None,
    base_seconds: float | None = None,
    even: bool = False,
) -> dict[Clip, tuple[int, Outcome]]:
    """The batch size of each clip and what was measured with it; 0 where none fits.

    Args:
        cfg: the training.
        trainer: takes the steps.
        base: name of the bucket whose time is the measure, with its batch of the config.
        base_seconds: that time itself.
        even: make times even; else take the largest batches.

    Raises:
        UserError: there is no such bucket, or its step does not fit.
    """
    clips, results = clips_of(cfg), {}
    known: dict[tuple[Clip, int], Outcome] = {}

    def attempt(clip: Clip, batch: int) -> Outcome:
        if (clip, batch) not in known:
            known[clip, batch] = trainer(clip, batch)
            print(f"{clip.name} {clip.height}x{clip.width}, batch {batch}: {_words(known[clip, batch])}", flush=True)
        return known[clip, batch]

    if even and base_seconds is None:
        resolution, _, frames = (base or "").rpartition(":")
        name = f"{resolution}:{parse_num_frames(frames)}" if frames else ""  # `480p:2s` as `480p:51`
        named = next((clip for clip in clips if clip.name == name), None)
        if named is None:
            names = ", ".join(clip.name for clip in clips)
            raise UserError(f"--base {base}: there is no such bucket. Buckets: {names}.")
        outcome = attempt(named, named.batch)
        if not outcome.fits:
            raise UserError(f"--base {base}: a step with its batch size {named.batch} does not fit: {_words(outcome)}.")
        base_seconds = outcome.seconds
    for clip in clips:
        most = trainer.limits.batch
        if base_seconds is None:
            batch = largest(lambda size, clip=clip: attempt(clip, size), most)  # type: ignore[misc]
        else:
            batch = nearest(lambda size, clip=clip: attempt(clip, size), base_seconds, most)  # type: ignore[misc]
        results[clip] = batch, attempt(clip, max(batch, 1))
    return results


def write_config(
    out: Path,
    source: Path,
    cfg: TrainConfig,
    results: dict[Clip, tuple[int, Outcome]],
    device: torch.device,
    fields: Sequence[str] = (),
) -> Path:
    """Write a config that starts from `source`, has what `fields` of the command line set, and the batch sizes that were found.

    A bucket of which not even one sample fits takes no more samples: (0.0, None).

    Raises:
        UserError: nothing fits at all.
    """
    found = {(clip.resolution, clip.num_frames): batch for clip, (batch, _) in results.items()}
    if not any(found.values()):
        raise UserError(
            "not even one sample of any bucket fits; nothing is written. Use more checkpointing or smaller clips."
        )
    settings = {name: repr(value) for name, value in changed_fields(source, fields).items()}
    if cfg.bucket_config is None:
        settings["batch_size"] = repr(next(iter(found.values())))
    else:
        settings["bucket_config"] = _buckets_text(
            cfg.bucket_config, found, replace="_delete_" in settings.get("bucket_config", "")
        )
    setting = "".join(f"{name} = {text}\n" for name, text in settings.items())
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    table = "\n".join(
        f"    {clip.name} {clip.height}x{clip.width}: batch {batch}, {_words(outcome)}"
        for clip, (batch, outcome) in results.items()
    )
    base = os.path.relpath(source.resolve(), out.resolve().parent)
    given = f", with {shlex.join(fields)}" if fields else ""
    head = f"Batch sizes of {source.name}{given}, measured by tools/search_batch_size.py.\n\n{name}, torch {torch.__version__}:\n"
    # a path of Windows or a quote on the command line would end the docstring, or say another character
    head, table = (text.replace("\\", "\\\\").replace('"', '\\"') for text in (head, table))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(f'"""{head}\n{table}\n"""\n\n_base_ = [{base!r}]\n\n{setting}', encoding="utf-8")
    return out


def changed_fields(source: Path, fields: Sequence[str]) -> dict[str, Any]:
    """The changes of a command line to a config file, as fields of a file that starts from it."""
    before, origins, _ = read_file(source)
    command = read_command(TrainConfig, fields)
    draft = Draft(TrainConfig, {**PARTS, "dataset": DATASETS})
    draft.take_file(copy.deepcopy(before), origins)
    if command.deepspeed is not None:
        draft.values |= deepspeed_overrides(Path(command.deepspeed))[0]
    draft.take_command(command)
    dataset = draft.values.setdefault("dataset", {})
    if not draft.values.get("data_path") and not dataset.get("data_path"):
        # a config is complete here without a table, see read_config
        before["data_path"] = draft.values["data_path"] = "none"
    draft.notes = []  # shown when the config was read
    draft.finish()  # fields that the dataset has too are the same in both
    if dataset.get("bucket_config") is not None:
        dataset["bucket_config"] = None  # the top level has it
    changed = {name: value for name, value in draft.values.items() if before.get(name, {}) != value}
    # without the mark the base's keys would stay
    return {
        name: {"_delete_": True, **value} if isinstance(value, dict) and name in before else value
        for name, value in changed.items()
    }


def _buckets_text(
    config: dict[str, dict[int | str, Any]], found: dict[tuple[str, int], int], *, replace: bool = False
) -> str:
    """A bucket_config as it is written in a file, with other batch sizes; `replace`: of the base nothing is kept."""
    lines = ["    '_delete_': True,\n"] if replace else []
    for resolution, entries in config.items():
        pairs = []
        for frames, (prob, size) in entries.items():
            batch = found.get((resolution, parse_num_frames(frames)))
            value = (prob, size) if batch is None else (prob, batch) if batch else (0.0, None)
            pairs.append(f"{frames!r}: {value!r}")
        lines.append(f"    {resolution!r}: {{{', '.join(pairs)}}},\n")
    return "{\n" + "".join(lines) + "}"


def reset_peak(device: torch.device) -> None:
    """Begin to measure the peak memory."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        Path("/proc/self/clear_refs").write_text("5")  # Linux: the high-water mark becomes what is in use now


def peak_gib(device: torch.device) -> float:
    """The largest memory since `reset_peak`: what the allocator took from the GPU, or what the process had resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device) / GIB
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024 / GIB


def _words(outcome: Outcome) -> str:
    if outcome.seconds == math.inf:
        return "out of memory"
    words = f"{outcome.seconds:.3g} s a step, {outcome.gib:.3g} GiB"
    return words if outcome.fits else f"{words}, too much"


def limits_of(args: argparse.Namespace, device: torch.device) -> Limits:
    """The limits of the command line.

    Raises:
        UserError: on a CPU nothing would stop the search, or there is nothing to search.
    """
    gib, seconds = args.memory_gib, args.max_seconds
    if device.type == "cuda" and gib is None:
        gib = torch.cuda.get_device_properties(device).total_memory * (1 - FREE) / GIB
    if args.max_batch < 1:
        raise UserError(f"--max-batch {args.max_batch}: it must be at least 1.")
    if device.type == "cpu" and gib is None and seconds is None and args.goal == "largest":
        raise UserError("on a CPU, say what a step may take: --memory-gib 4 or --max-seconds 10.")
    return Limits(gib, seconds, args.max_batch)


@exit_on_user_error
def main() -> None:
    """The command line."""
    parser = Parser(__doc__, __spec__)
    parser.add_argument("config", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--goal", choices=("largest", "even"), default="largest")
    parser.add_argument("--base", help="bucket whose step time is the measure of even, such as 480p:51")
    parser.add_argument("--base-seconds", type=float, help="that time itself")
    parser.add_argument("--memory-gib", type=float, help="most memory of a step")
    parser.add_argument("--max-seconds", type=float, help="most seconds of a step")
    parser.add_argument("--max-batch", type=int, default=512)
    parser.add_argument("--encoders", action="store_true", help="run VAE and text encoder too")
    args, fields = parser.parse_known_args()
    show_messages()
    if (args.goal == "even") != ((args.base is not None) + (args.base_seconds is not None) == 1):
        raise UserError("--goal even needs one of --base and --base-seconds, and only it takes one.")
    cfg, _ = read_config(args.config, fields, vars(args))
    if args.out.exists():
        raise UserError(f"{args.out} is there already; choose another name.")
    world = init_world(cfg.device)
    if world.size > 1:
        raise UserError("the search is for one process: run it without torchrun.")
    for note in () if args.encoders else assumptions(cfg.text_encoder):
        print(f"note: {note}")
    print(f"building {cfg.model['type']} with random weights", flush=True)
    trainer = Trainer(cfg, world, limits_of(args, world.device), encoders=args.encoders)
    results = search(cfg, trainer, base=args.base, base_seconds=args.base_seconds, even=args.goal == "even")
    print(write_config(args.out, args.config, cfg, results, world.device, fields))


if __name__ == "__main__":
    main()
