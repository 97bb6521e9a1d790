"""Train a denoiser: `python scripts/train.py CONFIG [--field value ...]`, or the same under torchrun."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from opensora.acceleration.checkpointing import checkpoint_activations
from opensora.acceleration.compile import compile_blocks
from opensora.acceleration.distributed import World, init_world, on_main_first, shutdown
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
from opensora.datasets.sampler import EpochBatchSampler
from opensora.models.encode import BatchEncoder, freeze
from opensora.models.text_encoder.memo import MemoizedTextEncoder
from opensora.registry import DATASETS, MODELS, SCHEDULERS, build_module
from opensora.utils.config import TrainConfig, parse_config, to_dict
from opensora.utils.ema import EMA
from opensora.utils.errors import exit_on_user_error
from opensora.utils.logging import RunLog, show_messages
from opensora.utils.lr_scheduler import set_lr
from opensora.utils.run import RunState, Throughput, due, make_run_folder, save_run
from opensora.utils.seed import generators

COMPONENTS = {"model": MODELS, "vae": MODELS, "text_encoder": MODELS, "scheduler": SCHEDULERS, "dataset": DATASETS}


@exit_on_user_error
def main() -> None:
    """Build what the config names, then train."""
    cfg = parse_config(TrainConfig, COMPONENTS)
    world = init_world(cfg.device)
    if world.is_main:
        show_messages()
    try:
        train(cfg, world)
    finally:
        shutdown()


def train(cfg: TrainConfig, world: World) -> None:
    """The whole run of one process."""
    check_engine(cfg.plugin, cfg.sp_size)
    vae, text_encoder, model = build_models(cfg, world.device)
    scheduler = build_module(cfg.scheduler, SCHEDULERS)
    dataset = build_module(cfg.dataset, DATASETS, seed=cfg.seed, vae_fingerprint=vae.fingerprint())
    encode = BatchEncoder(vae, text_encoder, model, world.device)
    optimizer = build_optimizer(cfg, model)
    ema = EMA(model, cfg.ema_decay)
    engine = build_engine(cfg.plugin, model, optimizer, world, dtype=cfg.dtype, grad_clip=cfg.grad_clip)

    state = RunState(data=dataset.fingerprint(), global_batch=cfg.batch_size * world.size)
    if cfg.load is not None:
        state = resume(cfg.load, state, model, ema, engine, keep_place=not cfg.start_from_scratch)
    sampler = EpochBatchSampler(len(dataset), cfg.batch_size, seed=cfg.seed, rank=world.rank, world_size=world.size)
    total_steps = count_steps(cfg, sampler.batches_per_epoch, state.step)
    stop = state.micro_batch + (total_steps - state.step) * cfg.accumulation_steps
    loader = build_dataloader(
        dataset,
        cfg.batch_size,
        seed=cfg.seed,
        num_workers=cfg.num_workers,
        rank=world.rank,
        world_size=world.size,
        start=state.micro_batch,
        stop=stop,
        pin_memory=world.device.type == "cuda",
    )

    run = on_main_first(partial(make_run_folder, cfg.outputs, cfg.exp_name, cfg.model["type"], to_dict(cfg)))
    log = RunLog(run if world.is_main else None, wandb=cfg.wandb, config=to_dict(cfg))
    log.line(summary(cfg, model, sampler, total_steps, world, run))
    if cfg.load is not None:
        log.line(f"resumed {cfg.load} at step {state.step}")
    log.start_progress(state.step, total_steps)
    speed = Throughput(cfg.batch_size * cfg.accumulation_steps * world.size)

    # ------------------------------------------------------------------ the training itself
    model.train()
    window: list[Tensor] = []  # losses since the last line of the log
    for micro_batches in steps(loader, cfg.accumulation_steps):
        set_lr(optimizer, lr := learning_rate(cfg, state.step, total_steps))
        for i, batch in enumerate(micro_batches):
            rngs = generators(cfg.seed, "train", state.step, ids=positions(cfg, world, i), device=world.device)
            z, cond = encode(batch, rngs)  # z [B, C, T, h, w]
            with engine.micro_step(last=i == cfg.accumulation_steps - 1):
                loss = scheduler.training_losses(engine.model, z, cond, generators=rngs).mean()
            engine.backward(loss / cfg.accumulation_steps)
            window.append(loss.detach())
        grad_norm = engine.step()
        state.advance(cfg.accumulation_steps, sampler.batches_per_epoch)
        ema.update(model, state.step)
        log.advance()
        if due(state.step, cfg.log_every) or due(state.step, cfg.ckpt_every) or state.step == total_steps:
            mean = finite_mean(window, micro_batches, state.step)
            log.metrics(
                state.step, loss=mean, lr=lr, grad_norm=float(grad_norm), epoch=state.epoch, **speed(state.step)
            )
            window.clear()
        if due(state.step, cfg.ckpt_every) or state.step == total_steps:
            parts = {"model": engine.model_state(), "ema": ema.state_dict(), "optimizer": engine.optimizer_state()}
            on_main_first(partial(save_run, run, state, parts, cfg.model["type"], to_dict(cfg)))
    log.line(f"done: {run}")
    log.close()


def build_models(cfg: TrainConfig, device: torch.device) -> tuple[Any, Any, Any]:
    """The frozen VAE and text encoder, and the denoiser to train."""
    vae = freeze(build_module(cfg.vae, MODELS), device)
    text_encoder = freeze(build_module(cfg.text_encoder, MODELS), device)
    torch.manual_seed(cfg.seed)  # initial weights; nothing later draws from the global generator
    model = build_module(
        cfg.model,
        MODELS,
        in_channels=vae.out_channels,
        caption_channels=text_encoder.output_dim,
        model_max_length=text_encoder.model_max_length,
    ).to(device)
    if cfg.compile:
        compile_blocks(model.transformer_blocks())
    if cfg.grad_checkpoint:
        checkpoint_activations(model.transformer_blocks())
    return vae, MemoizedTextEncoder(text_encoder) if cfg.cache_text else text_encoder, model


def summary(cfg: TrainConfig, model: nn.Module, sampler: EpochBatchSampler, total: int, world: World, run: Path) -> str:
    """What is about to be trained, in a few lines."""
    count = sum(parameter.numel() for parameter in model.parameters())
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    whole = cfg.batch_size * cfg.accumulation_steps * world.size
    return (
        f"{cfg.model['type']}: {count / 1e6:.2f} M parameters, {trained / 1e6:.2f} M trained, {cfg.dtype} on "
        f"{world.size} x {world.device.type}\n  {sampler.num_samples} samples, {sampler.batches_per_epoch} batches an epoch "
        f"({sampler.num_padded} samples seen twice to fill the last), {total} steps of {whole} "
        f"samples ({cfg.batch_size} x {cfg.accumulation_steps} accumulated x {world.size} processes)\n  run folder {run}"
    )


if __name__ == "__main__":
    main()
