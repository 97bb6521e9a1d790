"""Validation during training: a held-out loss and sample videos of fixed prompts, every so many optimizer steps.

A row's clip, its noise and its timesteps are functions of (seed, row), so that two validations differ by the weights alone,
whatever the number of processes. The training stays as it was: the EMA weights are swapped in and out in place, modes and
the state of every global generator are restored.

Several processes share clips and prompts by their data-parallel rank. All of them call the model equally often, a surplus
call repeating one of another process, since sharded weights are gathered by all processes together.
"""

import logging
import random
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from opensora.acceleration.distributed import World
from opensora.config.schema import FULL_FPS, InferenceConfig, TrainConfig, validation_sampler
from opensora.datasets.buckets.bucket import NONE, move_to_legal_sizes
from opensora.datasets.dataloader import batch_bytes, build_loader
from opensora.datasets.sampler import BatchKeys, BucketKey, SampleKey
from opensora.datasets.video.files import IMAGE_FPS
from opensora.inference.output import sample_file_name, save_image_grid, save_sample
from opensora.inference.pipeline import VideoPipeline
from opensora.inference.prompts import PromptItem, load_items
from opensora.inference.references import check_files_exist, check_has_images, conditioning
from opensora.inference.sizes import legal_dataset, legal_image_size, legal_length
from opensora.registry import DATASETS, SAMPLERS, build_module
from opensora.training.batch_encoder import BatchEncoder, stored_parts
from opensora.training.ema import EMA
from opensora.training.run import due
from opensora.training.run_log import RunLog
from opensora.utils.dtype import to_torch_dtype
from opensora.utils.errors import UserError
from opensora.utils.seed import generators, randn_like

logger = logging.getLogger(__name__)
T = TypeVar("T")

GRID_COLUMNS = 6


class Key(NamedTuple):
    """A clip: its row of the table, and its size as text."""

    row: int
    size: str


class Encoded(NamedTuple):
    """A batch of held-out clips, ready for the model, on the CPU."""

    first_index: int  # of its first clip among all
    rows: list[int]
    z: Tensor  # [B, C, T, h, w]
    cond: dict[str, Tensor]
    counts: bool  # False: another process reports it


@dataclass
class Validation:
    """Called after every optimizer step; validates when it is due."""

    every: int
    model: nn.Module
    ema: EMA
    loss: "HeldOutLoss | None"
    samples: "SampleVideos | None"
    log: RunLog

    def __call__(self, step: int) -> None:
        """Validate, if it is due after optimizer step number `step`. Whatever fails in it is logged, and training continues."""
        if not due(step, self.every):
            return
        with _evaluating(self.model):
            trained = None if self.loss is None else self._try("held-out loss", self.loss, self.model)
            with self.ema.applied_to(self.model):
                report = None if self.loss is None else self._try("held-out loss", self.loss, self.model)
                if self.samples is not None:
                    self._try("sampling", self.samples, step)
        if trained is not None and report is not None:
            of_trained = trained["val/loss"]
            self.log.metrics(step, **report, **{"val/loss_trained": of_trained})
            self.log.line(
                f"step {step}: held-out loss {report['val/loss']:.5f}, of the trained weights {of_trained:.5f}"
            )

    def _try(self, what: str, work: Callable[..., T], *arguments: Any) -> T | None:
        try:
            return work(*arguments)
        except _Interrupted:
            self.log.line(f"validation: {what} is left out, as the run is to stop.")
        except Exception as error:  # noqa: BLE001  (no preview is worth a run)
            report = f"{error}" if isinstance(error, _FailedSomewhere) else traceback.format_exc()
            self.log.line(f"warning: {what} of the validation failed; training continues.\n{report}")
        return None


class _Interrupted(Exception):
    """The run is to stop."""


class _FailedSomewhere(Exception):
    """The traceback of the first process that failed."""


@contextmanager
def _failing_together() -> Iterator[None]:
    """What fails in one process fails in all, so that none is left alone in the collective call that follows."""
    error = None
    try:
        yield
    except Exception:
        if not dist.is_initialized():
            raise
        error = traceback.format_exc()
    if dist.is_initialized():
        errors: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(errors, error)
        if found := next((text for text in errors if text), None):
            raise _FailedSomewhere(found)


def build_validation(
    cfg: TrainConfig,
    world: World,
    encode: BatchEncoder,
    scheduler: Any,
    ema: EMA,
    run: Path,
    log: RunLog,
    is_stopping: Callable[[], bool] = lambda: False,
) -> Validation:
    """The validation of a config's `val_*`, with the parts of the training.

    Args:
        run: the run's folder.
        is_stopping: whether the run is to stop: then a validation of one process ends early. (Several would have to agree
            after each step of a sampler.)

    Raises:
        UserError: the table, the prompts, the size or the sampler cannot be used. That is before the first step.
    """
    vae, text_encoder, model = encode.vae, encode.text_encoder, cast(Any, encode.denoiser)
    loss = samples = None

    def report(text: str) -> None:
        if world.size == 1 and is_stopping():
            raise _Interrupted
        log.status(f"validating: {text}")

    stored = stored_parts(cfg, vae, encode.masks, encode.image_encoder)
    if (dataset := held_out_dataset(cfg, vae, stored)) is not None:
        parts: Any = {"image_encoder": encode.image_encoder, "masks": encode.masks}
        without_drops = BatchEncoder(vae, text_encoder, model, world.device, class_dropout_prob=0.0, **parts)
        loss = HeldOutLoss(cfg, world, dataset, without_drops, scheduler, report)
    if (sampler := build_val_sampler(cfg)) is not None:
        options: Any = {"image_encoder": encode.image_encoder, "device": world.device, "dtype": cfg.dtype}
        # nothing is moved: the denoiser is where its engine has it, and encoders come and go by themselves
        pipeline = VideoPipeline(model, vae, text_encoder, sampler, offload=None, **options)
        samples = SampleVideos(cfg, world, pipeline, run / "validation", log, report)
    return Validation(cfg.val_every, model, ema, loss, samples, log)


def build_val_sampler(cfg: TrainConfig) -> Any | None:
    """What samples videos in the validation of a config; None without prompts.

    Raises:
        PartError: it cannot be built, or it trains and does not sample.
    """
    if not cfg.val_every or (cfg.val_prompts is None and cfg.val_prompt_path is None):
        return None
    return build_module(validation_sampler(cfg.scheduler, cfg.val_scheduler), SAMPLERS)


def validation_items(cfg: TrainConfig) -> tuple[InferenceConfig, list[PromptItem]]:
    """The prompts of a config's validation with their references, and the settings of sampling that they are read with.

    Raises:
        UserError: they cannot be read, a file does not exist, or a model that makes videos from images is given none.
    """
    names = ("model", "vae", "text_encoder", "scheduler", "image_encoder")
    prompts: Any = {"prompt": cfg.val_prompts, "prompt_path": cfg.val_prompt_path}
    settings = InferenceConfig(**{name: getattr(cfg, name) for name in names}, **prompts, fps=cfg.val_fps or FULL_FPS)
    items = load_items(settings)
    check_files_exist(settings, items)
    check_has_images(settings, items, "val_prompt_path takes a table with the columns reference_path and mask_strategy")
    return settings, items


def held_out_dataset(cfg: TrainConfig, vae: Any, stored: Mapping[str, Any]) -> Any | None:
    """The clips of `val_data_path`, read with the settings of `dataset`; None without a held-out loss.

    `stored`: see `stored_parts`.

    Raises:
        UserError: the table cannot be used.
    """
    if not cfg.val_every or cfg.val_data_path is None:
        return None
    component = {**legal_dataset(cfg.dataset, vae), "data_path": cfg.val_data_path}
    return build_module(component, DATASETS, seed=cfg.seed, **stored)


class HeldOutLoss:
    """The loss of held-out clips at fixed timesteps and noise: the same numbers for any number of processes.

    A scheduler that draws its timesteps in a way of its own (NOVA's: one for each patch) has no timestep that a sample is
    at. Its training loss is taken instead, with draws that are functions of (seed, row, number of the draw), one for each of
    `val_num_timesteps`, or of the first row of a batch, which is fixed too.

    Latents and captions are encoded once, by an `encode` that drops no caption, and kept on the CPU.
    """

    def __init__(
        self,
        cfg: TrainConfig,
        world: World,
        dataset: Any,
        encode: BatchEncoder,
        scheduler: Any,
        report: Callable[[str], None] = lambda _text: None,
    ) -> None:
        self.cfg, self.world, self.dataset, self.encode, self.scheduler = cfg, world, dataset, encode, scheduler
        self.report = report
        if hasattr(dataset, "buckets"):
            move_to_legal_sizes(dataset.buckets, encode.vae)
        self.keys, self.batches = held_out_batches(dataset, cfg.val_num_samples, cfg.batch_size)
        num = cfg.val_num_timesteps
        self.timesteps: list[int | None] = [None] * num
        if hasattr(scheduler, "timestep_sampling"):  # the middle of each of `num` equal parts of what is trained
            last = scheduler.timestep_sampling.num_timesteps
            low, high = getattr(scheduler, "interval", (0, 1))
            self.timesteps = [int(low * last + (high - low) * (k + 0.5) * last / num) for k in range(num)]
        self._encoded: list[Encoded] | None = None

    def __call__(self, model: nn.Module) -> dict[str, float]:
        """The mean over all clips and timesteps `val/loss`, and that of each known timestep and each size of clip."""
        losses = self.table(model)  # [N, K]
        report = {"val/loss": losses.mean()}
        report |= {f"val/loss_t{t}": losses[:, k].mean() for k, t in enumerate(self.timesteps) if t is not None}
        sizes = [key.size for key in self.keys]
        for size in dict.fromkeys(sizes) if len(set(sizes)) > 1 else ():
            report[f"val/loss_{size}"] = losses[[i for i, s in enumerate(sizes) if s == size]].mean()
        return {name: float(value) for name, value in report.items()}

    @torch.no_grad()
    def table(self, model: nn.Module) -> Tensor:
        """The loss of every clip at every timestep [N, K], fp64 on the CPU, the same in all processes."""
        device, dtype = self.world.device, to_torch_dtype(self.cfg.dtype)
        losses = torch.zeros(len(self.keys), len(self.timesteps), dtype=torch.float64, device=device)
        with _failing_together():
            if self._encoded is None:
                self._encoded = list(self._encode())
            for i, batch in enumerate(self._encoded):
                self.report(f"held-out batch {i + 1}/{len(self._encoded)}")
                z, cond = batch.z.to(device), {name: value.to(device) for name, value in batch.cond.items()}
                for k, t in enumerate(self.timesteps):
                    rngs = generators(self.cfg.seed, "validation", k, ids=batch.rows)
                    with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
                        if t is None:
                            values = self.scheduler.training_losses(model, z, cond, mask=None, generators=rngs)
                        else:
                            at = torch.full((len(z),), t, dtype=torch.int64, device=device)
                            values = self.scheduler.training_losses(model, z, cond, t=at, noise=randn_like(z, rngs))
                    if batch.counts:
                        losses[batch.first_index : batch.first_index + len(z), k] = values.double()
        if dist.is_initialized():
            dist.all_reduce(losses)  # every entry was written by one process
        return losses.cpu()

    def _encode(self) -> Iterator[Encoded]:
        """This process' batches, read by worker processes and encoded."""
        own = shares(len(self.batches), self.world)
        loader = build_loader(
            self.dataset,
            cast(Any, [self.batches[i] for i, _ in own]),
            num_workers=min(self.cfg.num_workers, len(own)),
            rank=self.world.rank,
            batch_bytes=batch_bytes(self.dataset, self.cfg.batch_size),
            prefetch_gib=self.cfg.prefetch_gib,
        )
        for (i, alone), batch in zip(own, loader, strict=True):
            keys = self.batches[i]
            rows = [key.index for key in keys.keys]
            z, cond = self.encode(batch, generators(self.cfg.seed, "validation", "posterior", ids=rows))
            on_cpu = {name: value.cpu() for name, value in cond.items()}
            yield Encoded(keys.first_index, rows, z.cpu(), on_cpu, alone and self.world.sp_rank == 0)


class SampleVideos:
    """Videos of fixed prompts, from fixed noise: an mp4 of each in `folder/step{S}/`, and one image grid of all.

    Raises:
        UserError: no prompt, or a size that the VAE does not make.
    """

    def __init__(
        self,
        cfg: TrainConfig,
        world: World,
        pipeline: VideoPipeline,
        folder: Path,
        log: RunLog,
        report: Callable[[str], None],
    ) -> None:
        self.world, self.pipeline, self.folder, self.log, self.seed = world, pipeline, folder, log, cfg.seed
        self.report = report
        settings, self.items = validation_items(cfg)
        self.num_frames = legal_length(pipeline.vae, cfg.val_num_frames or cfg.num_frames)
        self.image_size = legal_image_size(pipeline.vae, cfg.val_image_size or cfg.image_size)
        # the model's condition, also for an image, and the rate of the file
        self.fps = cfg.val_fps or (IMAGE_FPS if self.num_frames == 1 else FULL_FPS / cfg.frame_interval)
        size = (self.num_frames, self.image_size)
        self.conditioning = [conditioning(settings, item, pipeline.vae, *size) for item in self.items]

    def __call__(self, step: int) -> None:
        """Sample with the weights that the model has now, and write."""
        folder, frames = self.folder / f"step{step}", {}
        with _failing_together():
            for i, alone in shares(len(self.items), self.world):
                video = self._sample(i)
                if video is None or not alone or self.world.sp_rank > 0:
                    continue
                with _warn_of_os_errors():
                    save_sample(video, folder / sample_file_name(self.items[i].text, i), self.fps)
                chosen = torch.linspace(0, video.shape[1] - 1, min(GRID_COLUMNS, video.shape[1])).round().long()
                frames[i] = video[:, chosen].half()  # [3, columns, H, W]
        if dist.is_initialized():
            of_ranks: list[dict[int, Tensor]] = [{}] * dist.get_world_size()
            dist.all_gather_object(of_ranks, frames)
            frames = {i: strip for part in of_ranks for i, strip in part.items()}
        if self.world.is_main and frames:
            strips = {f"{i}: {self.items[i].text[:60]}": (frames[i].float(),) for i in sorted(frames)}
            with _warn_of_os_errors():
                self.log.image("val/samples", save_image_grid(folder / "sheet.jpg", strips, GRID_COLUMNS), step)

    def _sample(self, index: int) -> Tensor | None:
        """The video of a prompt [3, T, H, W], or None where it is not finite: a bad sample does not end a training."""
        which = f"prompt {index + 1}/{len(self.items)}"
        self.report(which)
        try:
            return self.pipeline(
                [self.items[index]],
                on_step=lambda step: self.report(f"{which}, step {step.index + 1}/{step.num_steps}"),
                num_frames=self.num_frames,
                image_size=self.image_size,
                fps=self.fps,
                seed=self.seed,
                conditioning=[self.conditioning[index]],
                guidance_scale=self.items[index].overrides.get("cfg_scale"),
            )[0]
        except UserError as error:
            logger.warning("validation: %s", error)
            return None


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Inside a model in training is in eval mode; afterwards modes and all global generators are as before."""
    modes = [(module, module.training) for module in model.modules()]
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002  (what others draw from)
    for module, _ in modes:
        module.training = False
    try:
        with torch.random.fork_rng(devices=[torch.cuda.current_device()] if torch.cuda.is_available() else []):
            yield
    finally:
        for module, training in modes:
            module.training = training
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002


def held_out_batches(dataset: Any, num_samples: int, batch_size: int) -> tuple[list[Key], list[BatchKeys]]:
    """Up to `num_samples` evenly picked clips of a dataset, as they are in epoch 0, in batches of one size each.

    `batch_size` is for a dataset without buckets.

    Returns:
        The key of each clip, and the batches, which hold the clips in that order.

    Raises:
        UserError: no clip is left.
    """
    with_buckets = hasattr(dataset, "buckets")
    buckets = dataset.assign(0).bucket if with_buckets else np.zeros(len(dataset), np.int32)
    rows = np.flatnonzero(buckets != NONE)
    if not len(rows):
        raise UserError("val_data_path: no clip of the table fits a bucket, so there is no loss to measure.")
    rows = rows[np.unique(np.linspace(0, len(rows) - 1, min(num_samples, len(rows))).round().astype(int))]
    keys: list[Key] = []
    batches: list[BatchKeys] = []
    for index in sorted(set(buckets[rows].tolist())):
        of_bucket, size = rows[buckets[rows] == index].tolist(), batch_size
        shape: Any = ()
        if with_buckets:
            size, shape = dataset.buckets[index].batch_size or 1, dataset.buckets[index][2:5]
        for first in range(0, len(of_bucket), size):
            part = of_bucket[first : first + size]
            samples: list[SampleKey | BucketKey] = [
                BucketKey(0, row, *shape) if with_buckets else SampleKey(0, row) for row in part
            ]
            batches.append(BatchKeys(samples, len(keys), len(rows)))
            keys += [Key(row, "x".join(map(str, shape))) for row in part]
    return keys, batches


def shares(count: int, world: World) -> list[tuple[int, bool]]:
    """Which of `count` jobs this process does, and whether no other data-parallel rank does it: equally many on each."""
    own = range(world.dp_rank, -(-count // world.dp_size) * world.dp_size, world.dp_size)
    return [(job % count, job < count) for job in own]


@contextmanager
def _warn_of_os_errors() -> Iterator[None]:
    """A disk that is full for a moment costs a sample; the checkpoint that comes next matters more."""
    try:
        yield
    except OSError as error:
        logger.warning("a sample of the validation could not be written: %s", error)
