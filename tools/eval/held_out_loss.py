"""The loss on held-out clips, by size of clip and timestep: whether a model fits more than it was trained on, and where.

    python -m tools.eval.held_out_loss TRAIN_CONFIG --ckpt-path WEIGHTS --val-data-path TABLE [--out loss.json] [--field value ...]

It is the loss of training's validation (`opensora/training/validation.py`), with the same fixed noise and timesteps, for
weights that are already there; all that a training config says about data, buckets and scheduler holds. `--val-num-samples`
clips, evenly picked, at `--val-num-timesteps` timesteps. Under torchrun the processes share the clips. `--adapter LORA` (an
exported adapter, or a checkpoint folder of a run with lora) is merged into WEIGHTS; `--lora None` measures WEIGHTS alone.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from opensora.acceleration.distributed import World, init_world, shutdown
from opensora.checkpoint.lora import Adapter, merge_adapter, read_adapter
from opensora.config.load import TrainConfig, parse_config, to_dict
from opensora.inference.manifest import describe_checkpoint
from opensora.inference.sizes import legal_dataset
from opensora.registry import DATASETS, DENOISERS, MODELS, SCHEDULERS, TEXT_ENCODERS, VAES, build_module
from opensora.schedulers.mask_ratios import MaskRatios
from opensora.training.batch_encoder import BatchEncoder, freeze, mask_ratios_of
from opensora.training.run import with_expert_interval
from opensora.training.validation import HeldOutLoss, Key
from opensora.utils.errors import UserError, exit_on_user_error
from opensora.utils.logging import progress_bar, show_messages
from tools.command import Parser
from tools.eval.record import refuse_unwritable, score_record, write_record

COMPONENTS = {
    "model": DENOISERS,
    "vae": VAES,
    "text_encoder": TEXT_ENCODERS,
    "scheduler": SCHEDULERS,
    "dataset": DATASETS,
}
# settings of a training that change nothing here, left out of the record
NOT_OF_A_LOSS = {"lr", "warmup_steps", "max_steps", "epochs", "log_every", "ckpt_every", "outputs", "wandb", "exp_name"}


def by_size(table: Tensor, keys: Sequence[Key]) -> dict[str, Tensor]:
    """The losses [N, K] averaged over the clips of each size, [K], and over all, "all"."""
    sizes = [key.size or "clips" for key in keys]
    rows = {size: table[[i for i, s in enumerate(sizes) if s == size]].mean(0) for size in dict.fromkeys(sizes)}
    return rows if len(rows) == 1 else rows | {"all": table.mean(0)}


def names_of(timesteps: Sequence[int | None]) -> list[str]:
    """What the columns are of: a timestep, or one of the draws of a scheduler that has no timestep for a sample."""
    return [f"draw {k}" if t is None else f"t={t}" for k, t in enumerate(timesteps, start=1)]


def lines(rows: dict[str, Tensor], timesteps: Sequence[int | None], counts: dict[str, int]) -> list[str]:
    """The table for the terminal: a row for each size, a column for each timestep, and their mean."""
    width = max(12, *(len(size) for size in rows))
    head = [f"{'size':{width}}", f"{'clips':>6}", *(f"{name:>8}" for name in names_of(timesteps)), f"{'mean':>8}"]
    body = [
        " ".join(
            [f"{size:{width}}", f"{counts[size]:6}", *(f"{v:8.4f}" for v in row.tolist()), f"{float(row.mean()):8.4f}"]
        )
        for size, row in rows.items()
    ]
    return [" ".join(head), *body]


class Command(NamedTuple):
    """What is measured, and where the record goes."""

    cfg: TrainConfig
    out: Path | None
    adapter: Path | None


def measure(cfg: TrainConfig, world: World, adapter: Adapter | None = None) -> tuple[HeldOutLoss, Tensor]:
    """Build what the config names, with an adapter, and measure: the loss object, and the losses [N, K]."""
    cfg = with_expert_interval(cfg)
    vae = freeze(build_module(cfg.vae, MODELS), world.device)
    text_encoder = freeze(build_module(cfg.text_encoder, MODELS), world.device)
    model = build_module(
        cfg.model,
        MODELS,
        in_channels=vae.out_channels,
        caption_channels=text_encoder.output_dim,
        model_max_length=text_encoder.model_max_length,
    )
    if adapter is not None:
        merge_adapter(model, adapter)
    freeze(model, world.device)
    component = {**legal_dataset(cfg.dataset, vae), "data_path": cfg.val_data_path}
    dataset = build_module(component, DATASETS, seed=cfg.seed, vae_fingerprint=vae.fingerprint())
    parts: Any = {"masks": MaskRatios(mask_ratios_of(cfg.model, cfg.mask_ratios)), "image_encoder": None}
    if cfg.image_encoder is not None:
        parts["image_encoder"] = freeze(build_module(cfg.image_encoder, MODELS), world.device)
    encode = BatchEncoder(vae, text_encoder, model, world.device, class_dropout_prob=0.0, **parts)
    scheduler = build_module(cfg.scheduler, SCHEDULERS)
    with progress_bar(bar_format="{desc}, {elapsed} so far", disable=not world.is_main) as bar:
        loss = HeldOutLoss(cfg, world, dataset, encode, scheduler, bar.set_description_str)
        return loss, loss.table(model)


def read_command(argv: Sequence[str]) -> Command:
    """The config, and the tool's own options.

    Raises:
        UserError: the config is wrong, or names no clips, no weights, or a LoRA that is nowhere.
    """
    parser = Parser(__doc__, __spec__, usage="%(prog)s TRAIN_CONFIG [options] [--field value ...]")
    parser.add_argument("--adapter", type=Path, help="LoRA to merge into the weights")
    parser.add_argument("--out", type=Path, help="write the losses and all settings to this JSON file")
    own, rest = parser.parse_known_args(argv)
    cfg = parse_config(TrainConfig, COMPONENTS, [*rest, "--val-every", "1"], options=vars(own))
    if cfg.val_data_path is None:
        raise UserError("which clips? Name their table with --val-data-path.")
    if cfg.model.get("from_pretrained") is None:
        raise UserError("which weights? Name them with --ckpt-path; random ones have no loss worth knowing.")
    if cfg.lora is not None and own.adapter is None:
        raise UserError(
            "the config trains a LoRA, and --ckpt-path names the model below it. Name the adapter with --adapter (a checkpoint "
            "folder of the run, or what tools.lora exported), or measure the model alone with --lora None."
        )
    return Command(cfg, own.out, own.adapter)


def record(command: Command, rows: dict[str, Tensor], timesteps: Sequence[int | None]) -> dict[str, Any]:
    """What is written: the loss of each size at each timestep."""
    names = [name.removeprefix("t=") for name in names_of(timesteps)]
    scores = {size: dict(zip(names, row.tolist(), strict=True)) for size, row in rows.items()}
    settings = {key: value for key, value in to_dict(command.cfg).items() if key not in NOT_OF_A_LOSS}
    checkpoint = describe_checkpoint(command.cfg.model["from_pretrained"])
    adapter = {} if command.adapter is None else {"adapter": describe_checkpoint(str(command.adapter))}
    return score_record("held_out_loss", scores, {**settings, "checkpoint": checkpoint, **adapter})


@exit_on_user_error
def main() -> None:
    """Measure and print."""
    command = read_command(sys.argv[1:])
    cfg, out = command.cfg, command.out
    adapter = None if command.adapter is None else read_adapter(command.adapter)
    world = init_world(cfg.device, cfg.sp_size)
    if world.is_main:
        show_messages()
    try:
        if world.is_main:
            refuse_unwritable(out)
        with torch.no_grad():
            loss, table = measure(cfg, world, adapter)
    finally:
        shutdown()
    if not world.is_main:
        return
    rows = by_size(table, loss.keys)
    counts = {size: sum((key.size or "clips") == size for key in loss.keys) for size in rows} | {"all": len(loss.keys)}
    print("\n".join(lines(rows, loss.timesteps, counts)))
    if out is not None:
        write_record(out, record(command, rows, loss.timesteps))


if __name__ == "__main__":
    main()
