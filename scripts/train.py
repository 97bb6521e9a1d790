"""Train a denoiser: `python scripts/train.py CONFIG [--field value ...]`, or the same under torchrun."""

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from opensora.acceleration.checkpointing import checkpoint_activations
from opensora.acceleration.compile import compile_blocks
from opensora.acceleration.distributed import World, init_world, mean_over_ranks, on_main_first, shutdown
from opensora.acceleration.engine import build_engine
from opensora.datasets.dataloader import build_dataloader
from opensora.datasets.sampler import EpochBatchSampler
from opensora.models.encode import BatchEncoder, freeze
from opensora.models.text_encoder.memo import MemoizedTextEncoder
from opensora.registry import DATASETS, MODELS, SCHEDULERS, build_module
from opensora.utils.ckpt import load_strictly, open_checkpoint
from opensora.utils.config import TrainConfig, parse_config, to_dict
from opensora.utils.ema import EMA
from opensora.utils.errors import UserError, exit_on_user_error
from opensora.utils.logging import RunLog
from opensora.utils.lr_scheduler import lr_at, set_lr
from opensora.utils.run import RunState, Throughput, due, make_run_folder, save_run
from opensora.utils.seed import generators

COMPONENTS = {"model": MODELS, "vae": MODELS, "text_encoder": MODELS, "scheduler": SCHEDULERS, "dataset": DATASETS}


@exit_on_user_error
def main() -> None:
    """Build what the config names, then train."""
    cfg = parse_config(TrainConfig, COMPONENTS)
    world = init_world(cfg.device)
    try:
        train(cfg, world)
    finally:
        shutdown()


def train(cfg: TrainConfig, world: World) -> None:
    """The whole run of one process."""
    vae, text_encoder, model = build_models(cfg, world.device)
    scheduler = build_module(cfg.scheduler, SCHEDULERS)
    dataset = build_module(cfg.dataset, DATASETS, seed=cfg.seed, vae_fingerprint=vae.fingerprint())
    encode = BatchEncoder(vae, text_encoder, model, world.device)
    optimizer = build_optimizer(cfg, model)
    ema = EMA(model, cfg.ema_decay)
    parallel = {"sp_size": cfg.sp_size, "dtype": cfg.dtype, "grad_clip": cfg.grad_clip}
    engine = build_engine(cfg.plugin, model, optimizer, world, **parallel)

    state = RunState(data=dataset.fingerprint(), global_batch=cfg.batch_size * world.size)
    if cfg.load is not None:
        state = resume(cfg, state, model, ema, engine)
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
    log.line(summary(cfg, model, len(dataset), sampler.batches_per_epoch, total_steps, world, run))
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
            on_main_first(partial(save_run, run, state, parts, to_dict(cfg)))
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


def build_optimizer(cfg: TrainConfig, model: nn.Module) -> torch.optim.Optimizer:
    """AdamW over what is trainable."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(
        trainable,
        lr=cfg.lr,
        betas=tuple(cfg.adam_betas),
        eps=cfg.adam_eps,
        weight_decay=cfg.weight_decay,
        fused=trainable[0].is_cuda,
    )


def resume(cfg: TrainConfig, fresh: RunState, model: nn.Module, ema: EMA, engine: Any) -> RunState:
    """Take weights, average and optimizer from `cfg.load`; and, unless starting from scratch, where it stood."""
    checkpoint = open_checkpoint(cfg.load)
    load_strictly(model, checkpoint.tensors("model"), checkpoint.path)
    ema.load_state_dict(checkpoint.tensors("ema"))
    engine.load_optimizer_state(checkpoint.tensors("optimizer"))
    return fresh if cfg.start_from_scratch else fresh.resumed(checkpoint.state, cfg.load)


def steps(loader: Iterable[dict[str, Any]], accumulation: int) -> Iterator[list[dict[str, Any]]]:
    """The micro-batches of one optimizer step after another."""
    micro_batches = iter(loader)
    while group := list(islice(micro_batches, accumulation)):
        yield group


def positions(cfg: TrainConfig, world: World, micro_batch: int) -> range:
    """Each sample's place in the step's whole batch: the same whether ranks or micro-batches share it out."""
    first = (micro_batch * world.size + world.rank) * cfg.batch_size
    return range(first, first + cfg.batch_size)


def learning_rate(cfg: TrainConfig, step: int, total_steps: int) -> float:
    """The learning rate of this step."""
    return lr_at(step, cfg.lr, warmup_steps=cfg.warmup_steps, schedule=cfg.lr_schedule, total_steps=total_steps)


def count_steps(cfg: TrainConfig, batches_per_epoch: int, done: int) -> int:
    """Optimizer steps of the whole run."""
    total = cfg.epochs * batches_per_epoch // cfg.accumulation_steps
    if cfg.max_steps is not None:
        total = min(total, cfg.max_steps)
    if total <= done:
        raise UserError(
            f"nothing to train: {cfg.epochs} epochs of {batches_per_epoch} batches, accumulation_steps="
            f"{cfg.accumulation_steps} and max_steps={cfg.max_steps} make {total} steps, and {done} are done. "
            "Raise --epochs or --max-steps."
        )
    return total


def finite_mean(losses: list[Tensor], micro_batches: list[dict[str, Any]], step: int) -> float:
    """The mean loss over the window and all ranks; training stops when it is not a number."""
    mean = float(mean_over_ranks(torch.stack(losses).mean()))
    if mean != mean or mean in (float("inf"), float("-inf")):
        files = sorted({path for batch in micro_batches for path in batch["path"]})
        raise UserError(
            f"the loss is {mean} at step {step}. Nothing is saved from here on; resume from the last checkpoint with "
            f"a lower --lr, or fp32. The last batch held: {', '.join(files[:8])}"
        )
    return mean


def summary(cfg: TrainConfig, model: nn.Module, samples: int, batches: int, total: int, world: World, run: Path) -> str:
    """What is about to be trained, in a few lines."""
    count = sum(parameter.numel() for parameter in model.parameters())
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    whole = cfg.batch_size * cfg.accumulation_steps * world.size
    return (
        f"{cfg.model['type']}: {count / 1e6:.2f} M parameters, {trained / 1e6:.2f} M trained, {cfg.dtype} on "
        f"{world.size} x {world.device.type}\n  {samples} samples, {batches} batches an epoch, {total} steps of {whole} "
        f"samples ({cfg.batch_size} x {cfg.accumulation_steps} accumulated x {world.size} processes)\n  run folder {run}"
    )


if __name__ == "__main__":
    main()
