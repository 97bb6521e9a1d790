"""Train a VAE on pictures: `python scripts/train_vae.py CONFIG [--field value ...]`, or the same under torchrun.

Ends with `<run>/vae`: the averaged weights with measured latent statistics, in diffusers' format.
"""

import math
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from opensora.acceleration.compile import compile_blocks
from opensora.acceleration.distributed import World, barrier, init_world, on_main_first, shutdown
from opensora.acceleration.engine import build_engine, check_engine
from opensora.acceleration.loop import (
    build_optimizer,
    count_steps,
    finite_mean,
    learning_rate,
    positions,
    resume,
    steps,
)
from opensora.datasets.dataloader import build_dataloader
from opensora.datasets.sampler import EpochBatchSampler, SampleKey
from opensora.models.vae import VideoAutoencoderKL
from opensora.models.vae.losses import check_weights, reconstruction_loss
from opensora.models.vae.statistics import LatentStatistics, measure_latents
from opensora.registry import DATASETS, MODELS, build_module
from opensora.utils.ckpt import load_strictly
from opensora.utils.config import VAETrainConfig, parse_config, to_dict
from opensora.utils.ema import EMA
from opensora.utils.errors import exit_on_user_error
from opensora.utils.logging import RunLog, show_messages
from opensora.utils.lr_scheduler import set_lr
from opensora.utils.run import RunState, Throughput, due, make_run_folder, save_run
from opensora.utils.seed import generators

COMPONENTS = {"vae": MODELS, "dataset": DATASETS}
STATISTICS_SAMPLES = 256


@exit_on_user_error
def main() -> None:
    """Build what the config names, then train."""
    cfg = parse_config(VAETrainConfig, COMPONENTS)
    world = init_world(cfg.device)
    if world.is_main:
        show_messages()
    try:
        train(cfg, world)
    finally:
        shutdown()


def train(cfg: VAETrainConfig, world: World) -> None:
    """The whole run of one process."""
    check_engine(cfg.plugin)
    vae = build_vae(cfg, world.device)
    dataset = build_module(cfg.dataset or {}, DATASETS, seed=cfg.seed)
    optimizer = build_optimizer(cfg, vae)
    ema = EMA(vae, cfg.ema_decay)
    engine = build_engine(cfg.plugin, vae, optimizer, world, dtype=cfg.dtype, grad_clip=cfg.grad_clip)

    state = RunState(data=dataset.fingerprint(), global_batch=cfg.batch_size * world.size)
    if cfg.load is not None:
        state = resume(cfg.load, state, vae, ema, engine, keep_place=True)
    sampler = EpochBatchSampler(len(dataset), cfg.batch_size, seed=cfg.seed, rank=world.rank, world_size=world.size)
    total_steps = count_steps(cfg, sampler.batches_per_epoch, state.step)
    loader = build_dataloader(
        dataset,
        cfg.batch_size,
        seed=cfg.seed,
        num_workers=cfg.num_workers,
        rank=world.rank,
        world_size=world.size,
        start=state.micro_batch,
        stop=state.micro_batch + (total_steps - state.step) * cfg.accumulation_steps,
        pin_memory=world.device.type == "cuda",
    )

    run = on_main_first(partial(make_run_folder, cfg.outputs, cfg.exp_name, cfg.vae["type"], to_dict(cfg)))
    log = RunLog(run if world.is_main else None, wandb=cfg.wandb, config=to_dict(cfg))
    log.line(summary(cfg, vae, len(dataset), total_steps, world, run))
    log.start_progress(state.step, total_steps)
    speed = Throughput(cfg.batch_size * cfg.accumulation_steps * world.size)

    # ------------------------------------------------------------------ the training itself
    vae.train()
    window: list[dict[str, Tensor]] = []  # loss and its parts since the last line of the log
    for micro_batches in steps(loader, cfg.accumulation_steps):
        set_lr(optimizer, lr := learning_rate(cfg, state.step, total_steps))
        for i, batch in enumerate(micro_batches):
            rngs = generators(cfg.seed, "train", state.step, ids=positions(cfg, world, i), device=world.device)
            x = batch["video"].to(world.device, non_blocking=True)  # [B, 3, T, H, W]
            with engine.micro_step(last=i == cfg.accumulation_steps - 1):
                x_hat, moments = engine.model(x, rngs)
            loss, parts = reconstruction_loss(x_hat, x, moments, cfg.loss)
            engine.backward(loss / cfg.accumulation_steps)
            window.append({"loss": loss.detach(), **parts})
        grad_norm = engine.step()
        state.advance(cfg.accumulation_steps, sampler.batches_per_epoch)
        ema.update(vae, state.step)
        log.advance()
        if due(state.step, cfg.log_every) or due(state.step, cfg.ckpt_every) or state.step == total_steps:
            mean = finite_mean([values["loss"] for values in window], micro_batches, state.step)
            numbers = {**means(window), "loss": mean, "lr": lr, "grad_norm": float(grad_norm), "epoch": state.epoch}
            log.metrics(state.step, **numbers, **speed(state.step))
            window.clear()
        if due(state.step, cfg.ckpt_every) or state.step == total_steps:
            tensors = {"model": engine.model_state(), "ema": ema.state_dict(), "optimizer": engine.optimizer_state()}
            on_main_first(partial(save_run, run, state, tensors, cfg.vae["type"], to_dict(cfg)))
    if world.is_main:
        log.line(export(cfg, ema, dataset, run / "vae", world.device).describe())
    barrier()
    log.line(f"done: {run / 'vae'}")
    log.close()


def build_vae(cfg: VAETrainConfig, device: torch.device) -> VideoAutoencoderKL:
    """The VAE to train."""
    check_weights(cfg.loss)
    torch.manual_seed(cfg.seed)  # initial weights; nothing later draws from the global generator
    vae: VideoAutoencoderKL = build_module(cfg.vae, MODELS)
    vae.latent_size((cfg.num_frames, *cfg.image_size))  # refuses a crop that the VAE cannot take
    vae.to(device)
    if device.type == "cuda":
        torch.backends.cudnn.benchmark = True  # all batches have one size
        vae.autoencoder.to(memory_format=torch.channels_last)  # what tensor cores convolve
    if cfg.compile:
        compile_blocks([vae.autoencoder.encoder, vae.autoencoder.decoder])
    return vae


def means(window: list[dict[str, Tensor]]) -> dict[str, float]:
    """The mean of each value over this process's window, and the PSNR in dB of its squared error (pictures span 2)."""
    values = {name: float(torch.stack([step[name] for step in window]).mean()) for name in window[0]}
    return values | ({"psnr": 10 * math.log10(4 / max(values["mse"], 1e-10))} if "mse" in values else {})


def export(
    cfg: VAETrainConfig, ema: EMA, dataset: Dataset[Any], folder: Path, device: torch.device
) -> LatentStatistics:
    """Measure the latents of up to 256 training samples and write the averaged VAE, fp16, with its statistics."""
    vae: VideoAutoencoderKL = build_module(cfg.vae, MODELS)  # not compiled: its batches have other sizes
    load_strictly(vae, ema.state_dict(), "the averaged weights")
    vae.requires_grad_(False).eval().to(device)
    count = len(dataset)  # type: ignore[arg-type]
    chosen = range(0, count, max(count // STATISTICS_SAMPLES, 1))[:STATISTICS_SAMPLES]
    statistics = measure_latents(vae, (dataset[SampleKey(0, index)]["video"] for index in chosen))
    vae.set_latent_statistics(**statistics.config())
    vae.save_pretrained(folder, dtype="fp16")
    return statistics


def summary(cfg: VAETrainConfig, vae: VideoAutoencoderKL, samples: int, total: int, world: World, run: Path) -> str:
    """What is about to be trained, in a few lines."""
    count = sum(parameter.numel() for parameter in vae.parameters())
    whole = cfg.batch_size * cfg.accumulation_steps * world.size
    return (
        f"{cfg.vae['type']}: {count / 1e6:.2f} M parameters, {vae.out_channels} channels, {cfg.dtype} on {world.size} x "
        f"{world.device.type}\n  {samples} samples, {total} steps of {whole} ({cfg.num_frames} x {cfg.image_size[0]} x "
        f"{cfg.image_size[1]} each)\n  run folder {run}"
    )


if __name__ == "__main__":
    main()
