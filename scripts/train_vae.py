"""Train a VAE on images or video: `python scripts/train_vae.py CONFIG [--field value ...]`, or the same under torchrun.

Ends with `<run>/vae`: the EMA weights with measured latent statistics, in diffusers' format. docs/how-to/vae-training.md
says how to set it up.
"""

import opensora  # noqa: F401  # isort: skip  (before torch: it sets how OpenMP waits)

import json
import logging
import math
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from opensora.acceleration.compile import compile_blocks
from opensora.acceleration.distributed import (
    World,
    barrier,
    broadcast_from_rank0,
    init_world,
    mean_over_ranks,
    shutdown,
)
from opensora.acceleration.engine import Engine, build_engine
from opensora.acceleration.engines.ddp import DDPEngine
from opensora.checkpoint.load import load_strictly, open_checkpoint
from opensora.config.load import VAETrainConfig, parse_config, to_dict
from opensora.datasets.dataloader import batch_bytes, build_loader, build_sampler
from opensora.datasets.datasets import VideoTextDataset
from opensora.datasets.sampler import BatchSampler, SampleKey
from opensora.datasets.summary import small_data_warning
from opensora.datasets.table.files import check_exist
from opensora.datasets.video.files import BadFile
from opensora.inference.output import save_image_grid
from opensora.models.vae.metrics import Quality, mean_quality, psnr_of_error, quality, reconstruct
from opensora.registry import DATASETS, DISCRIMINATORS, VAES, build_module
from opensora.training.adversarial import AdversarialLoss, NoDiscriminator
from opensora.training.ema import EMA
from opensora.training.finite_guard import FiniteGuard
from opensora.training.loop import (
    build_ema,
    build_optimizer,
    checkpoint_parts,
    engine_settings,
    learning_rate,
    resume,
    resumed_checkpoint,
    same_data,
    same_settings,
    sample_indices,
    set_lr,
    steps,
)
from opensora.training.meter import StepMeter
from opensora.training.run import RunState, check_run_folder, check_wandb, due, seek, what_to_do_next
from opensora.training.run_log import RunLog
from opensora.training.saver import open_run
from opensora.training.signals import StopSignals
from opensora.training.vae import RandomChunks, Reconstructor, VAELoss, measure_latents
from opensora.training.watchdog import Watchdog, collective_timeout
from opensora.utils.errors import UserError, exit_on_user_error
from opensora.utils.logging import show_messages

logger = logging.getLogger("opensora.train_vae")
COMPONENTS = {"vae": VAES, "dataset": DATASETS, "discriminator": DISCRIMINATORS}
STATISTICS_SAMPLES = 256
GRID_CLIPS = 6
EXPORT = "vae"  # in the run's folder
BAD_SHOWN = 10  # unreadable files that the log names
STEP_FILE = "step.json"  # in the export: the optimizer steps behind it


@exit_on_user_error
def main() -> None:
    """Build what the config names, then train."""
    cfg = parse_config(VAETrainConfig, COMPONENTS)
    limit_s = cfg.step_timeout_min * 60
    show_messages()
    world = init_world(cfg.device, timeout=collective_timeout(limit_s))
    try:
        same_settings(cfg)
        check_exist(data_path=cfg.dataset.get("data_path"), eval_data_path=cfg.eval_data_path)
        if cfg.wandb:
            check_wandb()
        broadcast_from_rank0(partial(check_run_folder, cfg.outputs, cfg.exp_name, resume=cfg.load == "latest"))
        with StopSignals(world) as stop, Watchdog(limit_s, world) as watchdog:
            train(cfg, world, stop, watchdog)
    finally:
        shutdown()


def train(cfg: VAETrainConfig, world: World, stop: StopSignals, watchdog: Watchdog) -> None:
    """The whole run of one process."""
    model, chunks_of = build_vae(cfg, world.device)
    criterion = VAELoss(cfg.loss, cfg.lpips, cfg.lpips_frames).to(world.device)
    dataset = build_module(cfg.dataset, DATASETS, seed=cfg.seed)
    held_out = HeldOut(cfg, world) if cfg.eval_data_path is not None else None
    optimizer = build_optimizer(cfg, model)
    engine = cast(DDPEngine, build_engine("ddp", model, optimizer, world, **engine_settings(cfg)))
    ema = build_ema(cfg, model.vae, engine)
    adversarial = build_adversarial_loss(cfg, world)

    state = RunState(data=same_data(dataset), global_batch=cfg.batch_size * world.size, world=world.size)
    if (source := broadcast_from_rank0(partial(resumed_checkpoint, cfg))) is not None:
        state = resume_all(cfg, source, state, ema, engine, adversarial)
    sampler, total_steps = sampler_at(cfg, dataset, world, state, source)
    loader = build_loader(
        dataset,
        sampler,
        num_workers=cfg.num_workers,
        rank=world.rank,
        pin_memory=world.device.type == "cuda",
        batch_bytes=batch_bytes(dataset, cfg.batch_size),
        prefetch_gib=cfg.prefetch_gib,
    )

    run, saver = open_run(cfg, world, cfg.vae["type"])
    log = RunLog(run if world.is_main else None, start=state.step, wandb=cfg.wandb, config=to_dict(cfg))
    log.line(
        summary(cfg, model.vae, len(dataset), state.step, total_steps, world, run)
        + f"\n{small_data_warning(sampler)}".rstrip()
    )
    log.start_progress(state.step, total_steps)
    meter = StepMeter(world)
    guard = FiniteGuard(world, cfg.on_nonfinite, cfg.max_skipped, scales_loss=engine.scales_loss)
    share = 1 / cfg.accumulation_steps

    # ------------------------------------------------------------------ the training itself
    window: list[dict[str, Tensor]] = []  # the loss's terms, of each micro-batch since the last line of the log
    watched = watchdog.watch(steps(loader, cfg.accumulation_steps), run, loader.reading)
    for micro_batches in stop.until(watched, run):
        set_lr(optimizer, lr := learning_rate(cfg, state.step, total_steps))
        adversarial.set_lr(lr / cfg.lr)
        for i, (batch, ids) in enumerate(zip(micro_batches, sample_indices(micro_batches), strict=True)):
            last = i == cfg.accumulation_steps - 1
            x, rngs, offset = chunks_of(batch["video"], ids, state.step, i)  # [N, 3, T, H, W]
            with engine.micro_step(last=last):
                x_hat, moments, logvar = engine.model(x, rngs)
                loss = criterion(x_hat, x, moments, logvar, offset, chunks=len(x) // len(batch["video"]))
                g_loss, values = adversarial.generator_loss(
                    x_hat, loss.reconstruction, model.vae.last_layer, state.step, engine.loss_scale
                )
            engine.backward(guard(loss.total + g_loss, batch) * share)
            values |= adversarial.discriminator_step(x, x_hat, state.step, last=last, share=share)
            meter.count(loss.total, cfg.batch_size * world.size)
            window.append({**loss.terms, **values})
        grad_norm = engine.step()
        taken, grad_norm = guard.taken(grad_norm), adversarial.step(state.step, grad_norm)
        state.advance(cfg.accumulation_steps, sampler.batches_in)
        guard.note_discriminator(state.step, grad_norm, taken=taken)
        meter.step(state.step, grad_norm)
        ema.update(model.vae, state.steps_averaged, taken=taken)
        log.advance()
        last = stop.agreed() or state.step == total_steps
        if due(state.step, cfg.log_every) or due(state.step, cfg.ckpt_every) or last:
            figures = guard.checked(reading := meter.read())
            finite = [terms for i, terms in enumerate(window) if reading.steps[i // cfg.accumulation_steps].is_finite]
            log.metrics(state.step, **figures, **means(finite), lr=lr, epoch=state.epoch)
            window.clear()
        if due(state.step, cfg.ckpt_every) or last:
            with watchdog.extended_timeout(), meter.paused(), log.paused():
                saver.save(state, checkpoint_parts(engine, ema) | adversarial.state())
        if held_out is not None and (due(state.step, cfg.eval_every) or state.step == total_steps):
            with watchdog.extended_timeout(), meter.paused(), log.paused():
                held_out(ema, criterion.lpips, run, state.step, log)
    saver.wait()
    if not stop.stopping:
        log.line(broadcast_from_rank0(partial(export, cfg, ema, world.device, dataset, run, state.step)))
    barrier()
    log.line(
        f"{stop.reason or 'done'}: {run} at step {state.step}"
        + what_to_do_next(cfg, stop.reason, run / state.folder_name)
    )
    log.close()


def build_vae(cfg: VAETrainConfig, device: torch.device) -> tuple[Reconstructor, RandomChunks]:
    """What to train, and what splits a batch into chunks that it takes."""
    torch.manual_seed(cfg.seed)  # initial weights; nothing later draws from the global generator
    vae: Any = build_module(cfg.vae, VAES)
    check_trainable(cfg, vae)
    lengths = cfg.mixed_lengths or [cfg.num_frames]
    for length in lengths:
        if vae.legal_num_frames(length) != length:
            name = "num_frames" if cfg.mixed_lengths is None else "mixed_lengths"
            raise UserError(
                f"{name}: this VAE does not take {length} frames; the nearest is {vae.legal_num_frames(length)}."
            )
        vae.latent_size((length, *cfg.image_size))  # refuses a crop that the VAE cannot take
    if cfg.trained == "decoder":
        for part in (vae.autoencoder.encoder, getattr(vae.autoencoder, "quant_conv", None)):
            if part is not None:
                part.requires_grad_(False)
    model = Reconstructor(vae, cfg.logvar_init if cfg.reconstruction == "nll" else None).to(device).train()
    if device.type == "cuda":
        torch.backends.cudnn.benchmark = True  # batches have one size, or few
    if cfg.compile:
        compile_blocks([vae.autoencoder.encoder, vae.autoencoder.decoder])
    return model, RandomChunks(cfg.mixed_lengths, cfg.seed, device)


def check_trainable(cfg: VAETrainConfig, vae: nn.Module) -> None:
    """Refuse now what would fail at the first step, or at the export after the last.

    Raises:
        UserError: the VAE cannot be trained here, or not so.
    """
    name = cfg.vae["type"]
    if not hasattr(vae, "save_pretrained"):
        raise UserError(
            f"vae.type={name!r} has no save_pretrained, so its training could not be exported; train it as a part of a "
            "VideoAutoencoderPipeline."
        )
    of_one_network = {"compile=True": cfg.compile, "trained='decoder'": cfg.trained == "decoder"}
    wrong = [setting for setting, is_set in of_one_network.items() if is_set]
    if wrong and not hasattr(vae, "autoencoder"):
        raise UserError(
            f"{' and '.join(wrong)}: for VAEs of one network of diffusers (vae.autoencoder), and vae.type={name!r} is made of "
            "several; leave it out. (vae.compile=True compiles the parts, and vae.freeze_vae_2d=True trains the temporal one.)"
        )


def sampler_at(
    cfg: VAETrainConfig, dataset: Any, world: World, state: RunState, source: Path | None
) -> tuple[BatchSampler, int]:
    """What decides this process' batches from `state` on, and the optimizer steps of the whole run.

    Where all are done and the run of the checkpoint `source` has no VAE of them, there are no batches: the export is left.

    Raises:
        UserError: there is neither a step nor an export to make.
    """
    sampler = build_sampler(dataset, cfg.batch_size, seed=cfg.seed, rank=world.rank, world_size=world.size)
    nothing_left = source is None or broadcast_from_rank0(partial(is_exported, source.resolve().parent, state.step))
    return sampler, seek(cfg, sampler, state, may_be_done=not nothing_left)


def build_adversarial_loss(cfg: VAETrainConfig, world: World) -> AdversarialLoss:
    """With a discriminator, which has an engine and an optimizer of its own, or without."""
    if cfg.discriminator is None:
        return NoDiscriminator()
    discriminator: nn.Module = build_module(cfg.discriminator, DISCRIMINATORS).to(world.device).train()
    optimizer = build_optimizer(cfg, discriminator)
    engine = build_engine("ddp", discriminator, optimizer, world, **engine_settings(cfg))
    return AdversarialLoss(
        discriminator,
        engine,
        optimizer,
        lr=cfg.discriminator_lr or cfg.lr,
        weight=cfg.adversarial_weight,
        start=cfg.adversarial_start,
        scale=cfg.adversarial_scale,
    )


def resume_all(
    cfg: VAETrainConfig, source: Path, fresh: RunState, ema: EMA, engine: Engine, adversarial: AdversarialLoss
) -> RunState:
    """Load weights, EMA, optimizers and the discriminator, if there was one, from the checkpoint `source`.

    Returns:
        Where the run resumes.

    Raises:
        UserError: the checkpoint has a discriminator and the config has none.
    """
    state, checkpoint = resume(cfg, source, fresh, ema, engine), open_checkpoint(source)
    if (checkpoint.path / "discriminator").is_dir():
        if isinstance(adversarial, NoDiscriminator):
            raise UserError(
                f"{source} was written with a discriminator, and the config has none; it would be lost. Set one."
            )
        parts = ("discriminator", "discriminator_optimizer")
        adversarial.load({part: checkpoint.tensors(part) for part in parts}, str(source))
    return state


def means(window: list[dict[str, Tensor]]) -> dict[str, float]:
    """The mean of each value over the window of all processes, and the PSNR in dB of the squared error (images span 2)."""
    # the GAN's begin with its first step, in all processes
    names = dict.fromkeys(name for step in window for name in step)
    own = [torch.stack([step[name].float() for step in window if name in step]).mean() for name in names]
    values = dict(zip(names, mean_over_ranks(torch.stack(own)).tolist(), strict=True)) if own else {}
    return values | (
        {"psnr": float(psnr_of_error(torch.tensor(values["mse"], dtype=torch.float64)))} if "mse" in values else {}
    )


def ema_vae(cfg: VAETrainConfig, ema: EMA, device: torch.device) -> Any:
    """A VAE with the EMA weights, not compiled, for its batches have other sizes; its latents are posterior means."""
    vae: Any = build_module({**cfg.vae, "posterior": "mode"}, VAES)
    load_strictly(vae, ema.state_dict(), "the EMA weights")
    return vae.requires_grad_(False).eval().to(device)


class HeldOut:
    """Clips that are never trained on: measured, and shown next to their reconstructions in the run's folder.

    All processes make it and call it; the main one reads the clips and measures, and the others wait for it there, not in
    the next step's collective calls, where they would have no more than a step's time.
    """

    def __init__(self, cfg: VAETrainConfig, world: World) -> None:
        self.cfg, self.device = cfg, world.device
        self.items = self._read() if world.is_main else []

    def __call__(self, ema: EMA, lpips: nn.Module | None, run: Path, step: int, log: RunLog) -> None:
        """Log mean PSNR, SSIM and, where training has it, LPIPS; write `held_out-<step>.png`. What fails ends no training."""
        log.status("measuring held-out clips")

        def measured() -> dict[str, float]:
            try:
                return self._measure(ema, lpips, run / f"held_out-{step:06d}.png")
            except Exception:
                logger.exception("held-out clips could not be measured; training continues.")
                return {}

        if values := broadcast_from_rank0(measured):
            log.metrics(step, **values)

    def _read(self) -> list[dict[str, Any]]:
        cfg = self.cfg
        dataset = VideoTextDataset(
            data_path=str(cfg.eval_data_path),
            num_frames=max(cfg.mixed_lengths or [cfg.num_frames]),
            frame_interval=cfg.frame_interval,
            image_size=cfg.image_size,
            transform_name="center",
            text_columns=(),
            seed=cfg.seed,
            short_clips="drop",
        )
        chosen = range(0, len(dataset), max(len(dataset) // cfg.eval_num_samples, 1))[: cfg.eval_num_samples]
        return [dataset[SampleKey(0, index)] for index in chosen]

    def _measure(self, ema: EMA, lpips: nn.Module | None, grid_path: Path) -> dict[str, float]:
        vae = ema_vae(self.cfg, ema, self.device)
        rows: list[Quality] = []
        grid: dict[str, tuple[Tensor, ...]] = {}
        for item in self.items:
            x = item["video"][None].to(self.device)
            x_hat = reconstruct(vae, x)
            rows.append(quality(x_hat, x, lpips))
            if len(grid) < GRID_CLIPS:
                grid[f"{Path(item['path']).stem}, {item['index']}"] = (x[0].cpu(), x_hat[0].cpu())
        save_image_grid(grid_path, grid)
        values = mean_quality(rows)._asdict()
        return {f"held_out_{name}": value for name, value in values.items() if not math.isnan(value)}


def export(cfg: VAETrainConfig, ema: EMA, device: torch.device, dataset: Any, run: Path, step: int) -> str:
    """Write the EMA VAE, fp16, with the statistics of the latents of up to 256 training samples; returns what they are.

    With the encoder kept the statistics are kept too: a denoiser that knows the latents knows them scaled so. The folder
    gets its name when it is complete, so that a resume can tell whether the export is still to be made.
    """
    vae, report = ema_vae(cfg, ema, device), "the encoder was not trained: latents are scaled as before"
    if cfg.trained == "all":
        chosen = range(0, len(dataset), max(len(dataset) // STATISTICS_SAMPLES, 1))[:STATISTICS_SAMPLES]
        statistics = measure_latents(vae, videos(dataset, chosen))
        vae.set_latent_statistics(**statistics.config())
        report = statistics.describe()
    folder, partial_folder = run / EXPORT, run / f".{EXPORT}.partial"
    shutil.rmtree(partial_folder, ignore_errors=True)  # of an export that was interrupted
    partial_folder.mkdir()
    vae.save_pretrained(partial_folder, dtype="fp16")
    (partial_folder / STEP_FILE).write_text(json.dumps({"step": step}) + "\n")
    if folder.exists():  # of fewer steps
        shutil.rmtree(folder)
    partial_folder.rename(folder)
    return report


def is_exported(run: Path, step: int) -> bool:
    """Whether the VAE of so many steps, or of more, is in a run's folder."""
    note = run / EXPORT / STEP_FILE
    if not note.is_file():
        return note.parent.is_dir()  # before there was such a note, every export was taken for the last
    return json.loads(note.read_text())["step"] >= step


def videos(dataset: Any, indices: range) -> Iterator[Tensor]:
    """The videos [3, T, H, W] of some samples, as epoch 0 has them; those whose files cannot be read are left out.

    No `bad_files` policy ends a run here: its steps are done, and a mean needs no particular sample.

    Raises:
        UserError: they are more than half.
    """
    bad: list[str] = []
    for index in indices:
        try:
            video = dataset[SampleKey(0, index)]["video"]
        except BadFile as error:
            bad.append(str(error))
        else:
            yield video
    unread = f"{len(bad)} of {len(indices)} samples cannot be read"
    if 2 * len(bad) > len(indices):
        raise UserError(
            f"{unread}, too many for the statistics of the latents; is the storage there? The first: {bad[0]}\n"
            "The steps are done and saved. Resume the run when the files are back, with --load latest or its last "
            "checkpoint: only the export is left."
        )
    if bad:
        logger.warning("%s, and the statistics of the latents leave them out: %s", unread, "; ".join(bad[:BAD_SHOWN]))


def summary(cfg: VAETrainConfig, vae: nn.Module, samples: int, done: int, total: int, world: World, run: Path) -> str:
    """What is about to be trained, in a few lines."""
    count = sum(parameter.numel() for parameter in vae.parameters())
    whole = cfg.batch_size * cfg.accumulation_steps * world.size
    over = f"\n  {done} steps are done, and have left no VAE: only the export is left" if done >= total else ""
    return (
        f"{cfg.vae['type']}: {count / 1e6:.2f} M parameters, {vae.out_channels} channels, {cfg.dtype} on {world.size} x "
        f"{world.device.type}\n  {samples} samples, {total} steps of {whole} ({cfg.num_frames} x {cfg.image_size[0]} x "
        f"{cfg.image_size[1]} each)\n  run folder {run}{over}"
    )


if __name__ == "__main__":
    main()
