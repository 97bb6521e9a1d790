"""Train a denoiser: `python scripts/train.py CONFIG [--field value ...]`, or the same under torchrun."""

import sys
from functools import partial
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
    places,
    resume,
    steps,
)
from opensora.datasets.bucket import refuse_illegal_sizes
from opensora.datasets.dataloader import batch_bytes, build_loader, build_sampler
from opensora.datasets.sampler import BatchSampler, Place
from opensora.datasets.summary import summarise
from opensora.models.encode import BatchEncoder, freeze
from opensora.models.text_encoder.memo import MemoizedTextEncoder
from opensora.registry import DATASETS, MODELS, SCHEDULERS, build_module
from opensora.utils.config import TrainConfig, parse_config, to_dict
from opensora.utils.ema import EMA
from opensora.utils.errors import exit_on_user_error
from opensora.utils.logging import RunLog, show_messages
from opensora.utils.lr_scheduler import set_lr
from opensora.utils.run import BATCHES_VARY, RunState, Throughput, due, make_run_folder, save_run
from opensora.utils.seed import generators

COMPONENTS = {"model": MODELS, "vae": MODELS, "text_encoder": MODELS, "scheduler": SCHEDULERS, "dataset": DATASETS}


@exit_on_user_error
def main() -> None:
    """Build what the config names, then train."""
    cfg = parse_config(TrainConfig, COMPONENTS)
    world = init_world(cfg.device, cfg.sp_size)
    if world.is_main:
        show_messages()
    try:
        train(cfg, world)
    finally:
        shutdown()


def train(cfg: TrainConfig, world: World) -> None:
    """The whole run of one process."""
    check_engine(cfg.plugin, cfg.sp_size)
    if cfg.dry_run:
        dry_run(cfg, world)
        return
    vae, text_encoder, model = build_models(cfg, world.device)
    scheduler = build_module(cfg.scheduler, SCHEDULERS)
    dataset = build_module(cfg.dataset, DATASETS, seed=cfg.seed, vae_fingerprint=vae.fingerprint())
    if cfg.bucket_config is not None:
        refuse_illegal_sizes(dataset.buckets, vae, model.patch_size)
    encode = BatchEncoder(vae, text_encoder, model, world.device)
    optimizer = build_optimizer(cfg, model)
    ema = EMA(model, cfg.ema_decay)
    engine = build_engine(cfg.plugin, model, optimizer, world, dtype=cfg.dtype, grad_clip=cfg.grad_clip)

    global_batch = cfg.batch_size * world.dp_size if cfg.bucket_config is None else BATCHES_VARY
    state = RunState(data=dataset.fingerprint(), global_batch=global_batch, world=world.dp_size)
    if cfg.load is not None:
        keep_place = not cfg.start_from_scratch
        state = resume(
            cfg.load, state, model, ema, engine, keep_place=keep_place, other_data=cfg.other_data, scheduler=scheduler
        )
    sampler = sampler_of(cfg, dataset, world)
    total_steps = count_steps(cfg, sampler.batches_in(0), state.step)
    place = Place(state.epoch, state.batch_in_epoch, tuple(state.segments))
    sampler.seek(place, (total_steps - state.step) * cfg.accumulation_steps)
    loader = build_loader(
        dataset,
        sampler,
        num_workers=cfg.num_workers,
        rank=world.rank,
        pin_memory=world.device.type == "cuda",
        batch_bytes=batch_bytes(dataset, cfg.batch_size),
        prefetch_gib=cfg.prefetch_gib,
    )

    run = on_main_first(partial(make_run_folder, cfg.outputs, cfg.exp_name, cfg.model["type"], to_dict(cfg)))
    log = RunLog(run if world.is_main else None, wandb=cfg.wandb, config=to_dict(cfg))
    log.line(summary(cfg, model, world))
    log.line(
        f"{summarise(dataset, sampler, world.dp_size, cfg.accumulation_steps)}\n{total_steps} steps, run folder {run}"
    )
    if cfg.load is not None:
        log.line(f"resumed {cfg.load} at step {state.step}")
    log.start_progress(state.step, total_steps)
    speed, seen = Throughput(), 0

    # ------------------------------------------------------------------ the training itself
    model.train()
    window: list[Tensor] = []  # losses since the last line of the log
    for micro_batches in steps(loader, cfg.accumulation_steps):
        set_lr(optimizer, lr := learning_rate(cfg, state.step, total_steps))
        for i, (batch, ids) in enumerate(zip(micro_batches, places(micro_batches), strict=True)):
            rngs = generators(cfg.seed, "train", state.step, ids=ids, device=world.device)
            z, cond = encode(batch, rngs)  # z [B, C, T, h, w]
            with engine.micro_step(last=i == cfg.accumulation_steps - 1):
                loss = scheduler.training_losses(engine.model, z, cond, generators=rngs).mean()
            engine.backward(loss / cfg.accumulation_steps)
            window.append(loss.detach())
            seen += batch["whole"]
        grad_norm = engine.step()
        state.advance(cfg.accumulation_steps, sampler.batches_in)
        ema.update(model, state.step)
        log.advance()
        if due(state.step, cfg.log_every) or due(state.step, cfg.ckpt_every) or state.step == total_steps:
            mean = finite_mean(window, micro_batches, state.step)
            log.metrics(
                state.step, loss=mean, lr=lr, grad_norm=float(grad_norm), epoch=state.epoch, **speed(state.step, seen)
            )
            window.clear()
        if due(state.step, cfg.ckpt_every) or state.step == total_steps:
            parts = {"model": engine.model_state(), "ema": ema.state_dict(), "optimizer": engine.optimizer_state()}
            parts |= {"scheduler": learnt} if (learnt := scheduler.state_dict()) else {}
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


def sampler_of(cfg: TrainConfig, dataset: Any, world: World) -> BatchSampler:
    """What decides this process' batches; processes that share a sample (`sp_size`, neighbours) have the same."""
    return build_sampler(
        dataset,
        cfg.batch_size,
        seed=cfg.seed,
        rank=world.dp_rank,
        world_size=world.dp_size,
        tail=cfg.bucket_tail,
        order=cfg.bucket_order,
    )


def dry_run(cfg: TrainConfig, world: World) -> None:
    """Print what becomes of the data; nothing but the table and the files' sizes is read.

    Raises:
        UserError: there would be nothing to train.
    """
    dataset = build_module(cfg.dataset, DATASETS, seed=cfg.seed)
    sampler = sampler_of(cfg, dataset, world)
    if world.is_main:
        sys.stdout.write(f"{summarise(dataset, sampler, world.dp_size, cfg.accumulation_steps)}\n")
    count_steps(cfg, sampler.batches_in(0), 0)


def summary(cfg: TrainConfig, model: nn.Module, world: World) -> str:
    """What is about to be trained, in a line."""
    count = sum(parameter.numel() for parameter in model.parameters())
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return (
        f"{cfg.model['type']}: {count / 1e6:.2f} M parameters, {trained / 1e6:.2f} M trained, {cfg.dtype} on "
        f"{world.size} x {world.device.type}"
    )


if __name__ == "__main__":
    main()
