"""What every training loop does around its step: optimizer, learning rate, resume, checks that all processes agree."""

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from opensora.acceleration.distributed import broadcast_from_rank0, refuse_different
from opensora.acceleration.engine import Engine
from opensora.checkpoint.load import latest_checkpoint, open_checkpoint
from opensora.config.load import changed_settings, to_dict
from opensora.config.schema import LoopConfig
from opensora.training.ema import EMA
from opensora.training.optimizers import ChainedOptimizer, adamw_8bit, muon
from opensora.training.run import RunState
from opensora.utils.errors import UserError

logger = logging.getLogger(__name__)


def build_optimizer(cfg: LoopConfig, model: nn.Module) -> torch.optim.Optimizer:
    """The config's `optimizer` over what is trainable, AdamW where there is no such field.

    Raises:
        UserError: no weight is one for this optimizer.
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    settings: dict[str, Any] = {
        "lr": cfg.lr,
        "betas": cfg.adam_betas,
        "eps": cfg.adam_eps,
        "weight_decay": cfg.weight_decay,
    }
    if (name := getattr(cfg, "optimizer", "adamw")) == "adamw":
        return torch.optim.AdamW(trainable, **settings, fused=True)
    first = adamw_8bit(trainable, **settings) if name == "adamw8bit" else muon(model, cfg.lr, cfg.weight_decay)
    if first is None:
        raise UserError(f"optimizer={name!r}: none of the trained weights is one for it. Use --optimizer adamw.")
    taken = {parameter for group in first.param_groups for parameter in group["params"]}
    rest = [parameter for parameter in trainable if parameter not in taken]
    return ChainedOptimizer(first, *([torch.optim.AdamW(rest, **settings, fused=True)] if rest else []))


def engine_settings(cfg: LoopConfig) -> dict[str, Any]:
    """The config's arguments of `build_engine`."""
    names, plugin = ["dtype", "grad_clip"], getattr(cfg, "plugin", "ddp")
    if plugin in ("ddp", "fsdp2"):  # with others these have no effect
        names += ["hybrid_zero", "shard_size", "optimizer_offload"]
    if plugin == "fsdp2":
        names += ["fsdp_reshard", "fsdp_gather", "fsdp_reduce"]
    return {name: getattr(cfg, name) for name in names}


def build_ema(cfg: LoopConfig, model: nn.Module, engine: Engine) -> EMA:
    """The EMA of `model`, which is the engine's or a part of it."""
    return EMA(model, cfg.ema_decay, every=cfg.ema_every, device=cfg.ema_device, masters=engine.masters)


def learning_rate(cfg: LoopConfig, step: int, total_steps: int) -> float:
    """The learning rate of optimizer step number `step` (the first is 0): a function of the step alone.

    Linear warm-up `lr (step + 1) / (warmup_steps + 1)`, then constant, or a cosine that reaches zero at `total_steps`.
    """
    if step < cfg.warmup_steps:
        return cfg.lr * (step + 1) / (cfg.warmup_steps + 1)
    if cfg.lr_schedule == "constant":
        return cfg.lr
    done = (step - cfg.warmup_steps) / max(total_steps - cfg.warmup_steps, 1)
    return cfg.lr * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Give all parameter groups this learning rate."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):  # torchao's: compiled, a number would be a part of the program
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def resumed_checkpoint(cfg: LoopConfig) -> Path | None:
    """The checkpoint that `load` means, checked as `load_check` says; None = begin at step 0. For the main process.

    Warns of settings that are not those of its run.

    Raises:
        UserError: it is missing or incomplete, or of another `optimizer`.
    """
    if cfg.load is None:
        return None
    if cfg.load == "latest":
        run = Path(cfg.outputs) / str(cfg.exp_name)
        source = latest_checkpoint(run, check=cfg.load_check) if run.is_dir() else None
        if source is None:
            logger.warning("load=latest: %s has no complete checkpoint yet; beginning at step 0.", run)
            return None
    else:
        source = open_checkpoint(cfg.load, check=cfg.load_check).path
    before = open_checkpoint(source).manifest.get("config") or {}
    was, wanted = (of.get("optimizer", "adamw") for of in (before, to_dict(cfg)))
    if was != wanted:
        raise UserError(
            f"load={str(source)!r} has the state of optimizer={was!r}, which {wanted!r} cannot continue: use --optimizer {was}, or "
            f"begin a new run from its weights with --ckpt-path {source}."
        )
    if changes := changed_settings(before, to_dict(cfg)):
        logger.warning("settings that are not those of %s: %s.", source, "; ".join(changes))
    return source


def checkpoint_parts(engine: Engine, ema: EMA) -> dict[str, dict[str, Tensor]]:
    """What a checkpoint holds, as this process has it; the reverse of `resume`."""
    return {"model": engine.model_state(), "ema": ema.state_dict(), "optimizer": engine.optimizer_state()}


def resume(cfg: LoopConfig, source: Path, fresh: RunState, ema: EMA, engine: Engine) -> RunState:
    """Load weights, EMA and optimizer from the checkpoint `source`; without `start_from_scratch` also its position.

    Raises:
        UserError: the checkpoint does not fit the model, or its position means something else here.
    """
    checkpoint = open_checkpoint(source)
    engine.load_model_state(checkpoint.tensors("model"), str(checkpoint.path))
    ema.load_state_dict(checkpoint.tensors("ema"))
    engine.load_optimizer_state(checkpoint.tensors("optimizer"))
    if cfg.start_from_scratch:
        return fresh.after(checkpoint.state, str(source))
    return fresh.resumed(checkpoint.state, str(source), other_data=cfg.other_data)


def same_settings(cfg: LoopConfig) -> None:
    """Raise a UserError where processes have other settings: other steps would hang them, another lr would part their weights.

    Paths may differ, as they do between machines.
    """
    own = to_dict(cfg)
    changes = changed_settings(broadcast_from_rank0(lambda: own), own)
    # a path: "model.from_pretrained was /a/w.pt, now /b/w.pt"
    differ = [change for change in changes if "/" not in change.partition(" was ")[2]]
    refuse_different("; ".join(differ) or "as there", "processes have other settings: as they are")


def same_data(dataset: Any) -> str:
    """The dataset's fingerprint; a UserError where processes see other data, since they take turns at its rows."""
    fingerprint: str = dataset.fingerprint()
    own = f"{len(dataset)} samples, {fingerprint}"
    what = "processes see other data (is a mount slow, or a file not on all machines? The log says what was left out)"
    refuse_different(own, what)
    return fingerprint


def steps(loader: Iterable[dict[str, Any]], accumulation: int) -> Iterator[list[dict[str, Any]]]:
    """The micro-batches of one optimizer step after another."""
    micro_batches = iter(loader)
    while group := list(islice(micro_batches, accumulation)):
        yield group


def sample_indices(micro_batches: Sequence[Mapping[str, Any]]) -> Iterator[list[int]]:
    """The index of each sample in the global batch of the step, however ranks and micro-batches share it out."""
    first = 0
    for batch in micro_batches:
        yield [first + index for index in batch["sample_index"].tolist()]
        first += batch["global_batch_size"]
