"""Train a denoiser: `python scripts/train.py CONFIG [--field value ...]`, or the same under torchrun."""

import opensora  # noqa: F401  # isort: skip  (before torch: it sets how OpenMP waits)

import logging
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from inspect import signature
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from opensora.acceleration.distributed import World, broadcast_from_rank0, init_world, shutdown
from opensora.acceleration.engine import build_engine, check_engine
from opensora.checkpoint.weight_files import refuse_misnamed
from opensora.config.command_line import read_command
from opensora.config.load import TrainConfig, parse_config, to_dict
from opensora.datasets.buckets.bucket import move_to_legal_sizes
from opensora.datasets.dataloader import batch_bytes, build_loader, build_sampler
from opensora.datasets.sampler import BatchSampler
from opensora.datasets.summary import summarise
from opensora.datasets.table.files import check_exist
from opensora.inference.sizes import legal_dataset, take_whole_patches
from opensora.models.image_encoder import check_image_encoder
from opensora.models.loading import released_weights
from opensora.models.text_encoder.classes import check_classes_of_data
from opensora.models.text_encoder.memo import MemoizedTextEncoder
from opensora.registry import (
    DATASETS,
    DENOISERS,
    IMAGE_ENCODERS,
    SAMPLERS,
    SCHEDULERS,
    TEXT_ENCODERS,
    VAES,
    build_module,
)
from opensora.schedulers.mask_ratios import MaskRatios
from opensora.training.batch_encoder import BatchEncoder, freeze_encoder, masks_of, stored_parts
from opensora.training.finite_guard import FiniteGuard
from opensora.training.flops import describe_peak, device_peak
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
from opensora.training.lora import check_lora
from opensora.training.meter import Meter
from opensora.training.model import build_model
from opensora.training.optimizers import check_optimizer
from opensora.training.run import (
    BATCHES_VARY,
    RunState,
    check_run_folder,
    check_wandb,
    class_list,
    due,
    effective_batch,
    oom_report,
    parameter_table,
    seek,
    warn_of_random_weights,
    what_to_do_next,
    with_expert_interval,
)
from opensora.training.run_log import RunLog
from opensora.training.saver import open_run
from opensora.training.signals import StopSignals
from opensora.training.validation import build_val_sampler, build_validation, held_out_dataset, validation_items
from opensora.training.watchdog import Watchdog, collective_timeout
from opensora.utils.dtype import to_torch_dtype
from opensora.utils.errors import UserError, exit_on_user_error
from opensora.utils.logging import show_messages
from opensora.utils.seed import generators

logger = logging.getLogger("opensora.train")
COMPONENTS = {
    "model": DENOISERS,
    "vae": VAES,
    "text_encoder": TEXT_ENCODERS,
    "image_encoder": IMAGE_ENCODERS,
    "scheduler": SCHEDULERS,
    "val_scheduler": SAMPLERS,
    "dataset": DATASETS,
}


@exit_on_user_error
def main() -> None:
    """Build what the config names, then train."""
    cfg, notes = fit_to_machine(parse_config(TrainConfig, COMPONENTS), sys.argv[1:])
    limit_s = cfg.step_timeout_min * 60
    show_messages()
    world = init_world(cfg.device, cfg.sp_size, collective_timeout(limit_s))
    for note in notes:
        logger.info(note)
    try:
        cfg = with_expert_interval(cfg)
        same_settings(cfg)
        check_engine(cfg.plugin, cfg.sp_size, device=world.device, dtype=cfg.dtype)
        check_optimizer(cfg.optimizer)
        check_image_encoder(cfg.model, cfg.image_encoder)
        if cfg.lora is not None:
            check_lora()
            refuse_without_base(cfg.model)
        if cfg.dry_run:
            dry_run(cfg, world)
            return
        check_inputs_exist(cfg)
        broadcast_from_rank0(partial(check_run_folder, cfg.outputs, cfg.exp_name, resume=cfg.load == "latest"))
        with StopSignals(world) as stop, Watchdog(limit_s, world) as watchdog, oom_report(world):
            train(cfg, world, stop, watchdog)
    finally:
        shutdown()


def fit_to_machine(cfg: TrainConfig, argv: Sequence[str]) -> tuple[TrainConfig, list[str]]:
    """The config as it can be trained here, and what to say of it, for a recipe's file that asks for another machine.

    `sp_size` becomes 1 where it does not divide the processes, and ColossalAI's engine becomes `fsdp2`, in its way ZeRO-2 too,
    where it cannot run. What the command line sets stays, and is an error where it cannot work.
    """
    typed = {setting.path for setting in read_command(TrainConfig, argv).settings}
    processes, notes = int(os.environ.get("WORLD_SIZE", "1")), []
    if processes % cfg.sp_size and ("sp_size",) not in typed:
        notes.append(f"sp_size={cfg.sp_size} of the config does not divide {processes} processes: sp_size=1.")
        cfg = replace(cfg, sp_size=1)
    if cfg.plugin.startswith("zero2") and ("plugin",) not in typed:
        plugin: Literal["zero2", "zero2-seq", "fsdp2"] = "zero2-seq" if cfg.sp_size > 1 else "zero2"
        device = None if cfg.device == "auto" else torch.device(cfg.device)
        try:
            check_engine(plugin, cfg.sp_size, device=device, dtype=cfg.dtype)
        except UserError:
            plugin = "fsdp2"
            needs = "ColossalAI, a GPU and bf16 or fp16"
            notes.append(f"plugin={cfg.plugin!r} of the config needs {needs}: plugin='fsdp2', which is ZeRO-2 as well.")
        cfg = replace(cfg, plugin=plugin)
    return cfg, notes


def refuse_without_base(model: Mapping[str, Any]) -> None:
    """Adapters of random weights learn nothing.

    Raises:
        UserError: the model could begin with given weights, and does not.
    """
    if "from_pretrained" in signature(DENOISERS.get(model["type"])).parameters and not model.get("from_pretrained"):
        such_as = f", such as {' or '.join(released)}" if (released := released_weights(model)) else ""
        raise UserError(
            "lora adapts a model, and none is given: set --ckpt-path (model.from_pretrained) to the weights of its base"
            f"{such_as}, in a resumed run too."
        )


def check_inputs_exist(cfg: TrainConfig) -> None:
    """What is used only after the models are loaded has to be there before.

    Raises:
        PartError: the validation's sampler cannot be built, or cannot sample.
        UserError: a file, a folder or a package is missing.
    """
    check_exist(data_path=cfg.dataset.get("data_path"))
    if cfg.val_every:
        check_exist(val_data_path=cfg.val_data_path, val_prompt_path=cfg.val_prompt_path)
        build_val_sampler(cfg)
        if cfg.val_prompts is not None or cfg.val_prompt_path is not None:
            validation_items(cfg)
    if cfg.wandb:
        check_wandb()


def train(cfg: TrainConfig, world: World, stop: StopSignals, watchdog: Watchdog) -> None:
    """The whole run of one process."""
    masks = masks_of(cfg)
    source = broadcast_from_rank0(partial(resumed_checkpoint, cfg))
    scheduler = build_module(cfg.scheduler, SCHEDULERS)
    dataset, vae, text_encoder, image_encoder, model = build_data_and_models(cfg, world, masks)
    cfg = with_stored_size(cfg, dataset)
    check_classes_of_data(dataset, text_encoder)
    encode = BatchEncoder(vae, text_encoder, model, world.device, image_encoder=image_encoder, masks=masks)
    optimizer = build_optimizer(cfg, model)
    engine = build_engine(cfg.plugin, model, optimizer, world, **engine_settings(cfg), cuda_graphs=cfg.cuda_graphs)
    ema = build_ema(cfg, model, engine)

    global_batch = cfg.batch_size * world.dp_size if cfg.bucket_config is None else BATCHES_VARY
    plan = "" if cfg.bucket_config is None else f"bucket_tail={cfg.bucket_tail!r}, bucket_order={cfg.bucket_order!r}"
    state = RunState(data=same_data(dataset), global_batch=global_batch, world=world.dp_size, plan=plan)
    if source is not None:
        state = resume(cfg, source, state, ema, engine)
    sampler = sampler_of(cfg, dataset, world)
    total_steps = seek(cfg, sampler, state)
    loader = build_loader(
        dataset,
        sampler,
        num_workers=cfg.num_workers,
        rank=world.rank,
        pin_memory=world.device.type == "cuda",
        batch_bytes=batch_bytes(dataset, cfg.batch_size),
        prefetch_gib=cfg.prefetch_gib,
    )

    peak = device_peak(world.device, to_torch_dtype(cfg.dtype), cfg.peak_tflops)
    sizes = [
        (bucket.num_frames, bucket.height, bucket.width)
        for bucket in getattr(dataset, "buckets", ())
        if bucket.batch_size
    ]
    meter = Meter(world, model, peak=peak, sizes=sizes, epoch=state.epoch)
    guard = FiniteGuard(world, cfg.on_nonfinite, cfg.max_skipped, scales_loss=engine.scales_loss)
    run, saver = open_run(cfg, world, cfg.model["type"])
    log = RunLog(run if world.is_main else None, start=state.step, wandb=cfg.wandb, config=to_dict(cfg))
    log.line(f"{summary(cfg, model, world, dataset, sampler)}\n{describe_peak(peak)}")
    log.line(
        f"{summarise(dataset, sampler, world.dp_size, cfg.accumulation_steps)}\n{total_steps} steps, run folder {run}"
        + (f"\nresumed {source} at step {state.step}" if source is not None else warn_of_random_weights(cfg.model))
    )
    validation = build_validation(cfg, world, encode, scheduler, ema, run, log, lambda: stop.asked)
    log.start_progress(state.step, total_steps)

    # ------------------------------------------------------------------ the training itself
    model.train()
    watched = watchdog.watch(meter.data_wait(steps(loader, cfg.accumulation_steps)), run, loader.reading)
    for micro_batches in stop.until(watched, run):
        set_lr(optimizer, lr := learning_rate(cfg, state.step, total_steps))
        for i, (batch, ids) in enumerate(zip(micro_batches, sample_indices(micro_batches), strict=True)):
            rngs = generators(cfg.seed, "train", state.step, ids=ids, device=world.device)
            z, cond = encode(batch, rngs)  # z [B, C, T, h, w]
            with engine.micro_step(last=i == cfg.accumulation_steps - 1):
                mask = encode.conditioning_frames(z, rngs)  # [B, T], False at conditioning frames; None: there are none
                loss = scheduler.training_losses(engine.model, z, cond, mask=mask, generators=rngs).mean()
            engine.backward(guard(loss, batch) / cfg.accumulation_steps)
            meter.add(batch, z, cond, loss)
        grad_norm = engine.step()
        state.advance(cfg.accumulation_steps, sampler.batches_in)
        meter.step(state.step, grad_norm)
        ema.update(model, state.steps_averaged, taken=guard.taken(grad_norm))
        log.advance()
        last = stop.agreed() or state.step == total_steps
        if due(state.step, cfg.log_every) or due(state.step, cfg.ckpt_every) or last:
            log.metrics(state.step, lr=lr, epoch=state.epoch, **guard.checked(meter.read()))
            log.line(meter.epoch_table(state.epoch))
        if due(state.step, cfg.ckpt_every) or last:
            with watchdog.extended_timeout(), meter.paused(), log.paused():
                saver.save(state, checkpoint_parts(engine, ema))
        if not stop.stopping:  # after the checkpoint: a crash in it costs no step
            with watchdog.extended_timeout(), meter.paused(), log.paused():
                validation(state.step)
    saver.wait()
    what_next = what_to_do_next(cfg, stop.reason, run / state.folder_name)
    log.line(f"{stop.reason or 'done'}: {run} at step {state.step}{what_next}")
    log.close()


def with_stored_size(cfg: TrainConfig, dataset: Any) -> TrainConfig:
    """The config with the size of the dataset's records, if it has any: manifest and validation go by it."""
    size = getattr(dataset, "video_size", None)
    if size in (None, (cfg.num_frames, *cfg.image_size)):
        return cfg
    before = (cfg.num_frames, *cfg.image_size)
    logger.info("num_frames and image_size are the records': %d frames of %dx%d, not %d of %dx%d.", *size, *before)
    return replace(cfg, num_frames=size[0], image_size=size[1:])


def build_data_and_models(cfg: TrainConfig, world: World, masks: MaskRatios) -> tuple[Any, Any, Any, Any, Any]:
    """The dataset, the frozen VAE, text and image encoder, and the denoiser to train; what loads for minutes comes last."""
    for name in ("from_pretrained", "from_pretrained_2"):
        refuse_misnamed(cfg.model.get(name), f"model.{name}")
    device = world.device
    vae = build_module(cfg.vae, VAES)
    take_whole_patches(vae, cfg.model)
    image_encoder = None if cfg.image_encoder is None else build_module(cfg.image_encoder, IMAGE_ENCODERS)
    parts = stored_parts(cfg, vae, masks, image_encoder)
    dataset = build_module(legal_dataset(cfg.dataset, vae), DATASETS, seed=cfg.seed, **parts)
    if cfg.bucket_config is not None:
        move_to_legal_sizes(dataset.buckets, vae)
    held_out_dataset(cfg, vae, parts)  # refuses a bad table now; validation, which comes last, reads it again
    stored, freeze = getattr(dataset, "stored", ()), partial(freeze_encoder, device=device, offload=cfg.encoder_offload)
    vae = freeze(vae, stored="vae" in stored)
    text_encoder = freeze(build_module(cfg.text_encoder, TEXT_ENCODERS), stored="text_encoder" in stored)
    image_encoder = None if image_encoder is None else freeze(image_encoder, stored="image_encoder" in stored)
    sizes = {
        "in_channels": vae.out_channels,
        "caption_channels": text_encoder.output_dim,
        "model_max_length": text_encoder.model_max_length,
    }
    model = build_model(cfg, sizes, device, world.sp_group)
    if cfg.cache_text:
        text_encoder = MemoizedTextEncoder(text_encoder)
    return dataset, vae, text_encoder, image_encoder, model


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
    masks_of(cfg)  # refuses what is wrong with them
    dataset = build_module(cfg.dataset, DATASETS, seed=cfg.seed)
    sampler = sampler_of(cfg, dataset, world)
    if world.is_main:
        sys.stdout.write(f"{summarise(dataset, sampler, world.dp_size, cfg.accumulation_steps)}\n")
    seek(cfg, sampler, RunState(data="", global_batch=0))


def summary(cfg: TrainConfig, model: nn.Module, world: World, dataset: Any, sampler: Any) -> str:
    """What is about to be trained, and on how much at once."""
    filled = np.flatnonzero(sampler.plan(0).samples) if cfg.bucket_config is not None else ()  # most may be empty
    buckets = [dataset.buckets[int(index)] for index in filled]
    return (
        f"{cfg.model['type']}, {cfg.dtype} on {world.size} x {world.device.type}\n{parameter_table(model)}\n"
        f"{effective_batch(cfg.batch_size, world.dp_size, cfg.accumulation_steps, sp_size=world.sp_size, buckets=buckets)}"
        f"{class_list(getattr(dataset, 'class_names', ()))}"
    )


if __name__ == "__main__":
    main()
