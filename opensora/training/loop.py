"""What every training loop does around its step: optimizer, resume, learning rate, counting."""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from opensora.acceleration.distributed import broadcast_from_rank0, refuse_different
from opensora.acceleration.engine import Engine
from opensora.checkpoint.load import latest_checkpoint, open_checkpoint
from opensora.config.load import changed_settings, to_dict
from opensora.config.schema import LoopConfig, TrainConfig
from opensora.training.ema import EMA
from opensora.training.lr_scheduler import lr_at
from opensora.training.run import RunState

logger = logging.getLogger(__name__)


class Learner(Protocol):
    """What learns beside the model, such as a scheduler that counts which timesteps matter."""

    def state_dict(self) -> dict[str, Tensor]: ...

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None: ...


def build_optimizer(cfg: LoopConfig, model: nn.Module) -> torch.optim.Optimizer:
    """AdamW over what is trainable."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(
        trainable,
        lr=cfg.lr,
        betas=cfg.adam_betas,
        eps=cfg.adam_eps,
        weight_decay=cfg.weight_decay,
        fused=trainable[0].is_cuda,
    )


def engine_settings(cfg: LoopConfig) -> dict[str, Any]:
    """What a config says about its engine, as arguments of `build_engine`."""
    names = ["dtype", "grad_clip", "hybrid_zero", "shard_size", "optimizer_offload"]
    if isinstance(cfg, TrainConfig) and cfg.plugin == "fsdp2":
        names.append("fsdp_reshard")
    return {name: getattr(cfg, name) for name in names}


def build_ema(cfg: LoopConfig, model: nn.Module, engine: Engine) -> EMA:
    """The averaged weights of `model`, which is the engine's or a part of it."""
    return EMA(model, cfg.ema_decay, every=cfg.ema_every, device=cfg.ema_device, masters=engine.masters)


def checkpoint_to_load(cfg: LoopConfig) -> Path | None:
    """The checkpoint that `load` means, checked as `load_check` says; None = begin at step 0. For the main process.

    Raises:
        UserError: it is missing or incomplete.
    """
    if cfg.load is None:
        return None
    if cfg.load != "latest":
        return open_checkpoint(cfg.load, check=cfg.load_check).path
    run = Path(cfg.outputs) / str(cfg.exp_name)
    found = latest_checkpoint(run, check=cfg.load_check) if run.is_dir() else None
    if found is None:
        logger.warning("load=latest: %s has no complete checkpoint yet; beginning at step 0.", run)
    return found


def checkpoint_parts(engine: Engine, ema: EMA, scheduler: Learner | None = None) -> dict[str, dict[str, Tensor]]:
    """What a checkpoint holds, as this process has it; the reverse of `resume`."""
    parts = {"model": engine.model_state(), "ema": ema.state_dict(), "optimizer": engine.optimizer_state()}
    learnt = {} if scheduler is None else scheduler.state_dict()
    return {**parts, "scheduler": learnt} if learnt else parts


def resume(
    source: Path,
    fresh: RunState,
    ema: EMA,
    engine: Engine,
    *,
    keep_place: bool,
    other_data: Literal["refuse", "next_epoch"] = "refuse",
    scheduler: Learner | None = None,
) -> RunState:
    """Take weights, average and optimizer from the checkpoint `source`; and, with `keep_place`, where it stood.

    `other_data`: see `RunState.resumed`. `scheduler`: may have learnt something too, such as which timesteps matter.
    """
    checkpoint = open_checkpoint(source)
    engine.load_model_state(checkpoint.tensors("model"), str(checkpoint.path))
    ema.load_state_dict(checkpoint.tensors("ema"))
    engine.load_optimizer_state(checkpoint.tensors("optimizer"))
    if not keep_place:  # what the scheduler learnt of the timesteps begins anew, too
        return fresh.after(checkpoint.state)
    if scheduler is not None:
        scheduler.load_state_dict(checkpoint.tensors("scheduler"))
    return fresh.resumed(checkpoint.state, str(source), other_data=other_data)


def warn_of_idle_average(cfg: LoopConfig, total_steps: int) -> None:
    """Say so where the averaged weights, which sampling takes, will be those that training began with."""
    if cfg.ema_every > total_steps:
        logger.warning(
            "ema_every=%d is more than the run's %d steps: the averaged weights, which sampling takes, will be those that it "
            "begins with.", cfg.ema_every, total_steps,
        )  # fmt: skip


def resumed_checkpoint(cfg: LoopConfig) -> Path | None:
    """The checkpoint to go on from, if any; says which settings are not those of its run: some are meant, some are slips."""
    source = checkpoint_to_load(cfg)
    before = {} if source is None else open_checkpoint(source).manifest.get("config") or {}
    if changes := changed_settings(before, to_dict(cfg)):
        logger.warning("settings that are not those of %s: %s.", source, "; ".join(changes))
    return source


def same_settings(cfg: LoopConfig) -> None:
    """See that all processes have the same config: other steps would hang them, another lr would let their weights drift apart.

    Places of files may differ, as they do between machines.

    Raises:
        UserError: they have not.
    """
    own = to_dict(cfg)
    others = changed_settings(broadcast_from_rank0(lambda: own), own)
    # "model.from_pretrained was /a/w.pt, now /b/w.pt"
    differ = [said for said in others if "/" not in said.partition(" was ")[2]]
    refuse_different("; ".join(differ) or "as there", "processes have other settings: as they are")


def same_data(dataset: Any) -> str:
    """The dataset's fingerprint, which is that of all processes: they take turns at its rows.

    Raises:
        UserError: they see other data.
    """
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
    """The index of each sample in the global batch of the step: the same whether ranks or micro-batches share it out.

    A batch gives the indices of its samples in the batch of all ranks, since its size may differ by rank.
    """
    first = 0
    for batch in micro_batches:
        yield [first + index for index in batch["sample_index"].tolist()]
        first += batch["global_batch_size"]


def learning_rate(cfg: LoopConfig, step: int, total_steps: int) -> float:
    """The learning rate of this step."""
    return lr_at(step, cfg.lr, warmup_steps=cfg.warmup_steps, schedule=cfg.lr_schedule, total_steps=total_steps)
