"""Validation during training: a held-out loss and sample videos of fixed prompts, every so many optimizer steps.

The training loss is a noisy view of the model: another batch, other timesteps, other noise at every step, and the trained
weights, while the averaged ones (EMA) are what is used later. Here everything is fixed: a row's clip, its noise and its
timesteps are functions of (seed, row), so that two validations differ by the weights alone, whatever the number of
processes. The latents and captions are encoded once and kept on the CPU.

Nothing of the training is touched: the averaged weights are swapped in and out in place, modes are put back, and the state
of every global generator too, though nothing of ours draws from them. The VAE and the text encoder are those of the training.

Several processes share clips and prompts by their data-parallel rank. All of them call the model equally often, a surplus
call being one more of work that is done elsewhere, since sharded weights are gathered by all processes together.
"""

import logging
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from opensora.acceleration.distributed import World
from opensora.config.schema import TrainConfig
from opensora.datasets.buckets.bucket import NONE
from opensora.datasets.dataloader import batch_bytes, build_loader
from opensora.datasets.sampler import BatchKeys, BucketKey, DataPosition, SampleKey
from opensora.datasets.video.files import IMAGE_FPS
from opensora.inference.output import sample_file_name, save_image_grid, save_sample
from opensora.inference.pipeline import VideoPipeline
from opensora.inference.prompts import load_prompts
from opensora.inference.sizes import check_size
from opensora.registry import DATASETS, SCHEDULERS, build_module
from opensora.training.batch_encoder import BatchEncoder
from opensora.training.run import due
from opensora.utils.dtype import to_torch_dtype
from opensora.utils.errors import UserError
from opensora.utils.seed import generators, randn_like

logger = logging.getLogger(__name__)

SAMPLING_STEPS = 30  # of the videos, where the config names no sampler of its own
SHEET_COLUMNS = 6
FULL_FPS = 24  # what `val_fps` divides by `frame_interval`


class Average(Protocol):
    """The averaged weights."""

    def applied_to(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Inside, the model has the averaged weights."""


class Log(Protocol):
    """What takes the results."""

    def line(self, message: str) -> None: ...

    def metrics(self, step: int, **values: float) -> None: ...

    def image(self, name: str, path: Path, step: int) -> None: ...


class Key(NamedTuple):
    """Where a clip's loss belongs in the report: its row of the table, and its size as text."""

    row: int
    size: str


class Encoded(NamedTuple):
    """A batch of held-out clips, ready for the model, on the CPU."""

    first_index: int  # of its first clip among all
    rows: list[int]
    z: Tensor  # [B, C, T, h, w]
    cond: dict[str, Tensor]
    counts: bool  # False: it is also another process', and is here to keep step


class Validation:
    """Called after every optimizer step; validates when it is time.

    Args:
        every: optimizer steps between two validations; 0: never.
        model: the model in training.
        ema: its average.
        loss: the held-out loss, or None.
        samples: the sample videos, or None.
        log: takes the numbers.
    """

    def __init__(
        self,
        every: int,
        model: nn.Module,
        ema: Average,
        loss: "HeldOutLoss | None",
        samples: "SampleVideos | None",
        log: Log,
    ) -> None:
        self.every, self.model, self.ema = every, model, ema
        self.loss, self.samples, self.log = loss, samples, log

    def __call__(self, step: int) -> None:
        """Validate, if it is due after optimizer step number `step`."""
        if not due(step, self.every):
            return
        with untouched(self.model):
            trained = {} if self.loss is None else {"val/loss_trained": self.loss(self.model)["val/loss"]}
            with self.ema.applied_to(self.model):
                averaged = {} if self.loss is None else self.loss(self.model)
                if self.samples is not None:
                    self.samples(step)
        if self.loss is not None:
            self.log.metrics(step, **averaged, **trained)
            self.log.line(
                f"step {step}: held-out loss {averaged['val/loss']:.5f}, of the trained weights "
                f"{trained['val/loss_trained']:.5f}"
            )


def build_validation(
    cfg: TrainConfig, world: World, encode: BatchEncoder, scheduler: Any, ema: Average, run: Path, log: Log
) -> Validation:
    """The validation that a config's `val_*` ask for, with the parts of the training.

    Args:
        cfg: the run's config.
        world: this process and the others.
        encode: the training's, which holds VAE, text encoder and the model in training.
        scheduler: the training's.
        ema: the average of the model's weights.
        run: the run's folder.
        log: the run's log.

    Raises:
        UserError: the table, the prompts, the size or the sampler cannot be used. That is before the first step.
    """
    vae, text_encoder, model = encode.vae, encode.text_encoder, cast(Any, encode.denoiser)
    loss = samples = None
    dataset = held_out_dataset(cfg, vae)
    if dataset is not None:
        without_drops = BatchEncoder(vae, text_encoder, model, world.device, class_dropout_prob=0.0)
        loss = HeldOutLoss(cfg, world, dataset, without_drops, scheduler)
    if cfg.val_every and (cfg.val_prompts is not None or cfg.val_prompt_path is not None):
        sampler = build_module(_sampler(cfg), SCHEDULERS)
        pipeline = VideoPipeline(model, vae, text_encoder, sampler, device=world.device, dtype=cfg.dtype)
        samples = SampleVideos(cfg, world, pipeline, run / "validation", log)
    return Validation(cfg.val_every, model, ema, loss, samples, log)


def held_out_dataset(cfg: TrainConfig, vae: Any) -> Any | None:
    """The clips of `val_data_path`, read with the settings of `dataset`; None where no loss of them is asked for.

    Raises:
        UserError: the table cannot be used.
    """
    if not cfg.val_every or cfg.val_data_path is None:
        return None
    component = {**cfg.dataset, "data_path": cfg.val_data_path}
    return build_module(component, DATASETS, seed=cfg.seed, vae_fingerprint=vae.fingerprint())


class HeldOutLoss:
    """The loss of held-out clips at fixed timesteps and noise: the same numbers for any number of processes.

    A scheduler that draws its timesteps in a way of its own (NOVA's: one for each patch) has no timestep that a sample is
    at. Its training loss is taken instead, with draws that are functions of (seed, row, number of the draw): one for each of
    `val_num_timesteps`. What it draws for a whole batch is of the batch's first row, and the batches are fixed too.

    Args:
        cfg: says how many clips and timesteps, and how they are read.
        world: this process and the others.
        dataset: of the held-out table.
        encode: makes latents and conditions of a batch; drops no caption.
        scheduler: the training's, whose loss it is.
    """

    def __init__(self, cfg: TrainConfig, world: World, dataset: Any, encode: BatchEncoder, scheduler: Any) -> None:
        self.cfg, self.world, self.dataset, self.encode, self.scheduler = cfg, world, dataset, encode, scheduler
        self.keys, self.batches = held_out_batches(dataset, cfg.val_num_samples, cfg.batch_size)
        self.timesteps = _timesteps(scheduler, cfg.val_num_timesteps)
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
        if self._encoded is None:
            self._encoded = list(self._encode())
        device = self.world.device
        losses = torch.zeros(len(self.keys), len(self.timesteps), dtype=torch.float64, device=device)
        for batch in self._encoded:
            z, cond = batch.z.to(device), {name: value.to(device) for name, value in batch.cond.items()}
            for k, t in enumerate(self.timesteps):
                values = self._losses(model, z, cond, t, generators(self.cfg.seed, "validation", k, ids=batch.rows))
                if batch.counts:
                    losses[batch.first_index : batch.first_index + len(z), k] = values.double()
        if dist.is_initialized():
            dist.all_reduce(losses)  # every entry was written by one process
        return losses.cpu()

    def _losses(
        self, model: nn.Module, z: Tensor, cond: Mapping[str, Tensor], t: int | None, rngs: Sequence[torch.Generator]
    ) -> Tensor:
        """[B] at timestep t; None: at what the scheduler draws."""
        dtype = to_torch_dtype(self.cfg.dtype)
        with torch.autocast(z.device.type, dtype, enabled=dtype != torch.float32):
            if t is None:
                return self.scheduler.training_losses(model, z, cond, generators=rngs)
            timestep = torch.full((len(z),), t, dtype=torch.int64, device=z.device)
            return self.scheduler.training_losses(model, z, cond, t=timestep, noise=randn_like(z, rngs))

    def _encode(self) -> Iterator[Encoded]:
        """This process' batches, read by worker processes and encoded."""
        mine = shares(len(self.batches), self.world)
        loader = build_loader(
            self.dataset,
            _Given([self.batches[i] for i, _ in mine]),
            num_workers=min(self.cfg.num_workers, len(mine)),
            rank=self.world.rank,
            batch_bytes=batch_bytes(self.dataset, self.cfg.batch_size),
            prefetch_gib=self.cfg.prefetch_gib,
        )
        for (i, alone), batch in zip(mine, loader, strict=True):
            keys = self.batches[i]
            rows = [key.index for key in keys.keys]
            z, cond = self.encode(batch, generators(self.cfg.seed, "validation", "posterior", ids=rows))
            on_cpu = {name: value.cpu() for name, value in cond.items()}
            yield Encoded(keys.first_index, rows, z.cpu(), on_cpu, alone and self.world.sp_rank == 0)


class SampleVideos:
    """Videos of fixed prompts, from fixed noise: `validation/step{S}/` gets an mp4 of each and one sheet of all.

    Args:
        cfg: says prompts and size.
        world: this process and the others.
        pipeline: samples with the model in training.
        folder: for the results.
        log: takes the sheet.

    Raises:
        UserError: no prompt, or a size that the VAE does not make.
    """

    def __init__(self, cfg: TrainConfig, world: World, pipeline: VideoPipeline, folder: Path, log: Log) -> None:
        self.world, self.pipeline, self.folder, self.log, self.seed = world, pipeline, folder, log, cfg.seed
        self.prompts = load_prompts(cfg.val_prompts, cfg.val_prompt_path)
        self.num_frames = cfg.val_num_frames or cfg.num_frames
        self.image_size = cfg.val_image_size or cfg.image_size
        rate = IMAGE_FPS if self.num_frames == 1 else FULL_FPS / cfg.frame_interval
        self.fps = cfg.val_fps or rate  # what the model is told; of the file too, but a picture has none
        check_size(pipeline.vae, self.num_frames, self.image_size)

    def __call__(self, step: int) -> None:
        """Sample with the weights that the model has now, and write."""
        folder, frames = self.folder / f"step{step}", {}
        for i, alone in shares(len(self.prompts), self.world):
            video = self._sample(i)
            if video is None or not alone or self.world.sp_rank > 0:
                continue
            with _without_ending_the_training():
                save_sample(video, folder / sample_file_name(self.prompts[i], i), self.fps)
            chosen = torch.linspace(0, video.shape[1] - 1, min(SHEET_COLUMNS, video.shape[1])).round().long()
            frames[i] = video[:, chosen].half()  # [3, columns, H, W]
        frames = _gathered(frames)
        if self.world.is_main and frames:
            strips = {f"{i}: {self.prompts[i][:60]}": (frames[i].float(),) for i in sorted(frames)}
            with _without_ending_the_training():
                self.log.image("val/samples", save_image_grid(folder / "sheet.jpg", strips, SHEET_COLUMNS), step)

    def _sample(self, index: int) -> Tensor | None:
        """The video of a prompt [3, T, H, W], or None where it is not finite: a bad sample does not end a training."""
        try:
            return self.pipeline(
                [self.prompts[index]],
                num_frames=self.num_frames,
                image_size=self.image_size,
                fps=self.fps,
                seed=self.seed,
                prompt_indices=[index],
            )[0]
        except UserError as error:
            logger.warning("validation: %s", error)
            return None


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Evaluate a model in training: inside it is in eval mode, afterwards modes and all global generators are as before."""
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
    """Evenly picked clips of a dataset, as they are in epoch 0, in batches of one size each.

    Args:
        dataset: with buckets, whose batch sizes are taken, or without.
        num_samples: how many clips at most.
        batch_size: of a dataset without buckets.

    Returns:
        What each clip is, and the batches, which hold the clips in that order.

    Raises:
        UserError: no clip is left.
    """
    buckets = dataset.assign(0).bucket if hasattr(dataset, "buckets") else np.zeros(len(dataset), np.int32)
    rows = np.flatnonzero(buckets != NONE)
    if not len(rows):
        raise UserError("val_data_path: no clip of the table fits a bucket, so there is no loss to measure.")
    rows = rows[np.unique(np.linspace(0, len(rows) - 1, min(num_samples, len(rows))).round().astype(int))]
    keys: list[Key] = []
    batches: list[BatchKeys] = []
    for bucket in sorted(set(buckets[rows].tolist())):
        of_bucket, size, name = rows[buckets[rows] == bucket].tolist(), batch_size, ""
        if hasattr(dataset, "buckets"):
            shape = dataset.buckets[bucket]
            size, name = shape.batch_size or 1, f"{shape.num_frames}x{shape.height}x{shape.width}"
        for first in range(0, len(of_bucket), size):
            part = of_bucket[first : first + size]
            samples: list[SampleKey | BucketKey] = [
                BucketKey(0, row, *dataset.buckets[bucket][2:5]) if name else SampleKey(0, row) for row in part
            ]
            batches.append(BatchKeys(samples, len(keys), len(rows)))
            keys += [Key(row, name) for row in part]
    return keys, batches


def shares(count: int, world: World) -> list[tuple[int, bool]]:
    """Which of `count` jobs this process does, and whether no other data-parallel rank does it: equally many on each."""
    rounds = -(-count // world.dp_size)
    places = [world.dp_rank + i * world.dp_size for i in range(rounds)]
    return [(place % count, place < count) for place in places]


class _Given:
    """A sampler of batches that are known, once over."""

    def __init__(self, batches: Sequence[BatchKeys]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def batches_in(self, epoch: int) -> int:
        """All of them."""
        return len(self)

    def seek(self, position: DataPosition, count: int | None) -> None:
        """They begin at the beginning."""
        assert position == DataPosition(), "a list of batches is read from its beginning"

    def __iter__(self) -> Iterator[BatchKeys]:
        return iter(self.batches)


def _timesteps(scheduler: Any, num: int) -> list[int | None]:
    """The middle of each of `num` equal parts of a scheduler's timesteps; None where it draws them its own way."""
    if not hasattr(scheduler, "timestep_sampling"):
        return [None] * num
    last = scheduler.timestep_sampling.num_timesteps
    return [int((k + 0.5) * last / num) for k in range(num)]


def _sampler(cfg: TrainConfig) -> dict[str, Any]:
    """The component that samples: the config's, or the training's with fewer steps."""
    if cfg.val_scheduler is not None:
        return cfg.val_scheduler
    kept = {key: value for key, value in cfg.scheduler.items() if key != "timestep_respacing"}
    return {"num_sampling_steps": SAMPLING_STEPS, **kept}


@contextmanager
def _without_ending_the_training() -> Iterator[None]:
    """A disk that is full for a moment costs a picture; the checkpoint that comes next matters more."""
    try:
        yield
    except OSError as error:
        logger.warning("a sample of the validation could not be written: %s", error)


def _gathered(frames: dict[int, Tensor]) -> dict[int, Tensor]:
    """The entries of all processes, in each."""
    if not dist.is_initialized():
        return frames
    parts: list[dict[int, Tensor]] = [{}] * dist.get_world_size()
    dist.all_gather_object(parts, frames)
    return {i: strip for part in parts for i, strip in part.items()}
