"""What a training config needs, without a GPU and without any weights: parameters, memory, FLOPs, steps and hours.

    python -m tools.estimate CONFIG [--gpus 8] [--per-node 8] [--rows 1000000] [--peak-tflops 790] [--mfu 0.4] [--json]
                             [--checkpoint none block every:2 mlp selective selective:2] [--batches 1 2 4 8] [--field value ...]

Models are built on PyTorch's "meta" device, which stores nothing; other flags are fields of the config. Where a table is
there (`--data-path`), its rows and their buckets are counted, else `--rows` says how many there are.

Memory of a GPU, in bytes, for N parameters of which n are trained, on G GPUs of which S share a state (`shard_size`):

    ddp          4N weights + 4n gradients + 4n buckets where G > 1 + 8n AdamW + 4N EMA
    hybrid       the same, with the 8n of AdamW over the GPUs of a node
    fsdp2 zero2  (4N + 4n + 8n + 4N) / S + 4N of weights that are gathered
    fsdp2 zero3  the same, with those of two blocks and of what is in no block gathered
    zero2        2N weights + 2n gradients + (4n + 8n + 4N) / G

and 2N more for the copies that autocast keeps with bf16 or fp16 (zero2 has none). With lora, n and the EMA are the
adapters', and with frozen_weights="bf16" the base is 2N, of which there are no copies. Activations: see tools/activations.py; with lora they are an upper bound. The VAE and the text encoder
are counted as weights in their dtype: the processes of a node share those of a `shardformer`, and an encoder that leaves the
GPU `between_uses` counts nothing. A T5 that is not known and has no config.json here is taken for T5-XXL, with a
note. What they need while they work, the CUDA context (about 0.5 GiB) and what the allocator wastes are not counted. Hours count
the denoiser's matrix products alone, at the assumed MFU: data, VAE and text encoder are on top, unless their results are cached.
"""

import itertools
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from opensora.config.load import TrainConfig, parse_config, read_file
from opensora.config.schema import LoraOptions, level_of
from opensora.datasets.buckets.bucket import Buckets
from opensora.models.denoiser import Denoiser
from opensora.registry import DATASETS, DENOISERS, MODELS, SCHEDULERS, TEXT_ENCODERS, VAES, build_module
from opensora.training.lora import target_names
from opensora.utils.dtype import to_torch_dtype
from opensora.utils.errors import UserError, exit_on_user_error
from opensora.utils.logging import show_messages
from tools.activations import activation_bytes
from tools.command import Parser
from tools.frozen_parts import assumptions, build_text, build_vae, text_bytes, vae_bytes

GIB = 2**30
PARTS = {"model": DENOISERS, "vae": VAES, "text_encoder": TEXT_ENCODERS, "scheduler": SCHEDULERS}
ENGINES = ("ddp", "hybrid", "fsdp2 zero2", "fsdp2 zero3", "zero2")
LEVELS = ("none", "block", "every:2", "mlp", "selective", "selective:2")
NO_TABLE = "--data-path=none-given.csv"


class Clip(NamedTuple):
    """A size of the training, and how it is batched."""

    name: str
    latent: tuple[int, int, int]
    batch: int  # of a GPU
    rows: int | None  # of an epoch; None where it is not known


class Machines(NamedTuple):
    """The GPUs."""

    gpus: int
    per_node: int
    peak_tflops: float
    mfu: float


class Built(NamedTuple):
    """The parts, without weights; a text encoder that is not loaded, or of an unknown architecture, is None."""

    model: Any
    vae: Any
    text_encoder: nn.Module | None
    text_len: int


def build(cfg: TrainConfig) -> Built:
    """All parts of a config on the meta device."""
    with torch.device("meta"):
        vae = build_vae(cfg.vae)
        text, width, text_len = build_text(cfg.text_encoder)
        text_size = {"model_max_length": text_len, **({} if width is None else {"caption_channels": width})}
        settings = {**cfg.model, "from_pretrained": None}
        model: Any = build_module(settings, MODELS, in_channels=vae.out_channels, **text_size)
    if not isinstance(model, Denoiser):
        raise UserError(
            f"{cfg.model['type']}: the formula for memory is for models of `opensora.models.denoiser.Denoiser`, with one stack of "
            "blocks of one width; `python -m tools.search_batch_size` measures any."
        )
    return Built(model, vae, text, text_len)


def clips_of(cfg: TrainConfig, built: Built, rows: int | None, table: Path | None) -> list[Clip]:
    """The sizes that a config trains on; of a bucket's shapes, the largest stands for all.

    Args:
        rows: of an epoch, where there is no table.
        table: the data, if it is there.
    """
    dataset = None if table is None else build_module(cfg.dataset, DATASETS, seed=cfg.seed)
    if cfg.bucket_config is None:
        size = (cfg.num_frames, *cfg.image_size)
        count = rows if dataset is None else len(dataset)
        return [Clip("x".join(map(str, size)), latent_size(built.vae, size), cfg.batch_size, count)]
    buckets = Buckets(cfg.bucket_config, cfg.dataset.get("size_multiple", 16), cfg.dataset.get("cost_power", 1.0))
    assigned = None if dataset is None else dataset.assign(0).bucket
    clips: dict[tuple[str, int], Clip] = {}
    for i, bucket in enumerate(buckets):
        if not bucket.batch_size:
            continue
        latent = latent_size(built.vae, bucket[2:5])
        count = None if assigned is None else int((assigned == i).sum())
        clip = Clip(f"{bucket.resolution} x {bucket.num_frames}", latent, bucket.batch_size, count)
        other = clips.setdefault((bucket.resolution, bucket.num_frames), clip)
        if other is not clip:  # two shapes of one entry as one: the larger, with the rows of both
            rows_of_both = None if other.rows is None or count is None else other.rows + count
            larger = max(other, clip, key=lambda clip: math.prod(clip.latent))
            clips[bucket.resolution, bucket.num_frames] = larger._replace(rows=rows_of_both)
    return [clip for clip in clips.values() if clip.rows != 0]


class Sizes(NamedTuple):
    """Parameters of a denoiser: all, trained, in the EMA, and gathered at one time by fsdp2 zero3."""

    all: int
    trained: int
    ema: int
    gathered: int


def sizes_of(cfg: TrainConfig, model: Any) -> Sizes:
    """Of the model that a config trains, with its adapters if it has any."""
    total = sum(p.numel() for p in model.parameters())
    blocks = [sum(p.numel() for p in block.parameters()) for block in model.transformer_blocks()]
    # two blocks, one coming and one at work, and what is in no block
    gathered = total - sum(blocks) + sum(sorted(blocks)[-2:])
    if cfg.lora is None:
        return Sizes(total, sum(p.numel() for p in model.parameters() if p.requires_grad), total, gathered)
    options = LoraOptions.of(cfg.lora)
    layers = [model.get_submodule(name) for name in target_names(model, options.target_modules)]
    adapters = sum(options.rank * (layer.in_features + layer.out_features) for layer in layers)
    return Sizes(total + adapters, adapters, adapters, gathered)


def state_bytes(
    of: Sizes, engine: str, machines: Machines, *, shard: int, short: bool, frozen: float = 4.0
) -> dict[str, float]:
    """Bytes of a GPU for weights, gradients, optimizer, EMA and copies: the table above.

    Args:
        of: the denoiser's sizes.
        engine: one of ENGINES.
        machines: the GPUs.
        shard: GPUs that share the state of fsdp2.
        short: whether it computes in bf16 or fp16.
        frozen: bytes of a weight that is not trained; one of 2 bytes is not cast.
    """
    N, n, G = of.all, of.trained, machines.gpus
    stored = 4.0 * n + frozen * (N - n)
    if engine in ("ddp", "hybrid"):
        over = min(machines.per_node, G) if engine == "hybrid" else 1
        weights, gradients, copies = stored, (8.0 if G > 1 else 4.0) * n, N
        optimizer, ema = 8.0 * n / over, 4.0 * of.ema
    elif engine == "zero2":
        weights, gradients, copies = 2.0 * N, 2.0 * n, 0
        optimizer, ema = 12.0 * n / G, 4.0 * of.ema / G
    else:
        copies = N if engine == "fsdp2 zero2" else of.gathered
        weights, gradients = stored / shard + stored / N * copies, 4.0 * n / shard
        optimizer, ema = 8.0 * n / shard, 4.0 * of.ema / shard
    casts = 2.0 * copies * (1.0 if frozen == 4 else n / N) if short else 0.0
    return {"weights": weights, "gradients": gradients, "optimizer": optimizer, "ema": ema, "copies": casts}


def memory_rows(
    cfg: TrainConfig,
    built: Built,
    clips: Sequence[Clip],
    machines: Machines,
    levels: Sequence[str],
    batches: Sequence[int],
) -> Iterator[dict[str, Any]]:
    """GiB of a GPU for each engine, checkpoint level and batch size, at the clip that needs most."""
    short = to_torch_dtype(cfg.dtype) != torch.float32
    of_node = min(machines.per_node, machines.gpus)
    frozen = vae_bytes(built.vae) + text_bytes(cfg.text_encoder, built.text_encoder, of_node)
    clip = max(clips, key=lambda clip: clip.batch * math.prod(clip.latent))
    tokens = math.prod(built.model.grid(clip.latent)) / cfg.sp_size
    sizes = sizes_of(cfg, built.model)
    for engine, level, batch in itertools.product(ENGINES, levels, batches or (clip.batch,)):
        stored = {"frozen": 2.0 if cfg.frozen_weights == "bf16" else 4.0}
        state = state_bytes(sizes, engine, machines, shard=_shard(cfg, machines), short=short, **stored)
        kept = activation_bytes(
            built.model, batch * tokens, 2 if short else 4, level, compiled=cfg.compile, kernels=True
        )
        gib = {"state": sum(state.values()) / GIB, "activations": kept / GIB, "frozen": frozen / GIB}
        row = {"engine": engine, "checkpoint": level, "clip": clip.name, "batch": batch}
        yield {**row, **gib, "total": sum(gib.values())}


def time_rows(cfg: TrainConfig, built: Built, clips: Sequence[Clip], machines: Machines) -> Iterator[dict[str, Any]]:
    """Tokens, FLOPs, steps and hours of each clip size; None where the number of rows is not known."""
    groups = machines.gpus // cfg.sp_size
    rate = machines.peak_tflops * machines.mfu * 1e12  # of a GPU
    epochs = [
        None if clip.rows is None else -(-clip.rows // (clip.batch * groups * cfg.accumulation_steps)) for clip in clips
    ]
    total = None if None in epochs else sum(filter(None, epochs)) * cfg.epochs
    # of the steps of all epochs, those before `max_steps`: of each size alike
    share = min(1.0, cfg.max_steps / total) if cfg.max_steps is not None and total else 1.0
    for clip, epoch in zip(clips, epochs, strict=True):
        flops = 3 * built.model.flops(clip.latent, built.text_len)  # forward, and twice as much backward
        whole = clip.batch * groups * cfg.accumulation_steps
        steps = None if epoch is None else round(epoch * cfg.epochs * share)
        if epoch is None and len(clips) == 1:
            steps = cfg.max_steps  # all that is known
        step_flops = flops * whole
        yield {
            "clip": clip.name,
            "tokens": math.prod(built.model.grid(clip.latent)),
            "batch": clip.batch,
            "whole_batch": whole,
            "tflop_of_step": step_flops / 1e12,
            "s_of_step": step_flops / machines.gpus / rate,
            "rows": clip.rows,
            "steps_of_epoch": epoch,
            "steps": steps,
            "hours": None if steps is None else steps * step_flops / machines.gpus / rate / 3600,
        }


def estimate(
    cfg: TrainConfig,
    machines: Machines,
    *,
    levels: Sequence[str] = LEVELS,
    batches: Sequence[int] = (),
    rows: int | None = None,
    table: Path | None = None,
) -> dict[str, Any]:
    """Everything, as plain data.

    Args:
        cfg: the training.
        machines: the GPUs.
        levels: values of `grad_checkpoint`.
        batches: per GPU; () takes each clip's own.
        rows: of an epoch, where there is no table.
        table: the data, if it is there.

    Raises:
        UserError: the GPUs cannot be shared as the config says, or a part cannot be built.
    """
    _refuse_impossible(cfg, machines)
    for flag, numbers in (("--rows", [] if rows is None else [rows]), ("--batches", batches)):
        if any(number < 1 for number in numbers):
            raise UserError(f"{flag} {' '.join(map(str, numbers))}: each must be at least 1.")
    built = build(cfg)
    clips = clips_of(cfg, built, rows, table)
    if not clips:
        raise UserError(
            f"no row of {table} fits a bucket of bucket_config; `python -m tools.datasets.doctor` says why."
        )
    sizes = sizes_of(cfg, built.model)
    of_blocks = sum(p.numel() for block in built.model.transformer_blocks() for p in block.parameters())
    parameters: list[dict[str, Any]] = [
        {"part": "model", "million": sizes.all / 1e6, "trained": sizes.trained / 1e6},
        {"part": "its blocks", "million": of_blocks / 1e6, "trained": None},
    ]
    for name, part in (("vae", built.vae), ("text_encoder", built.text_encoder)):
        million = None if part is None else sum(p.numel() for p in part.parameters()) / 1e6
        parameters.append({"part": name, "million": million, "trained": 0.0})
    return {
        "assumed": {**machines._asdict(), "dtype": cfg.dtype, "sp_size": cfg.sp_size, "compile": cfg.compile},
        "notes": assumptions(cfg.text_encoder),
        "parameters": parameters,
        "legal_sp_sizes": [n for n in range(1, machines.gpus + 1) if machines.gpus % n == 0],
        "memory_gib": list(memory_rows(cfg, built, clips, machines, levels, batches)),
        "time": list(time_rows(cfg, built, clips, machines)),
    }


def _refuse_impossible(cfg: TrainConfig, machines: Machines) -> None:
    """Refuse GPUs that there are not, or that cannot be shared as the config says."""
    for flag, value in (("--gpus", machines.gpus), ("--per-node", machines.per_node)):
        if value < 1:
            raise UserError(f"{flag} {value}: it must be at least 1.")
    for flag, share in (("--peak-tflops", machines.peak_tflops), ("--mfu", machines.mfu)):
        if not share > 0:
            raise UserError(f"{flag} {share}: it must be above 0.")
    for name, size in (("sp_size", cfg.sp_size), ("shard_size", cfg.shard_size)):
        if size is not None and machines.gpus % size:
            legal = [n for n in range(1, machines.gpus + 1) if machines.gpus % n == 0]
            raise UserError(
                f"{name}={size} does not divide --gpus {machines.gpus}. Here it can be {', '.join(map(str, legal))}."
            )
    if cfg.hybrid_zero and machines.gpus % _shard(cfg, machines):
        raise UserError(
            f"hybrid_zero shares the state over a node, and --per-node {machines.per_node} does not divide --gpus {machines.gpus}. "
            "Set shard_size, or give the GPUs of whole nodes."
        )


@exit_on_user_error
def main() -> None:
    """The command line."""
    parser = Parser(__doc__, __spec__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--per-node", type=int, default=8)
    parser.add_argument("--rows", type=int, help="rows of an epoch, where there is no table")
    parser.add_argument("--peak-tflops", type=float, default=790.0, help="of a GPU; an H100 in bf16 when left out")
    parser.add_argument("--mfu", type=float, default=0.4, help="share of it that training reaches")
    parser.add_argument(
        "--checkpoint", nargs="+", type=level_of, default=list(LEVELS), help="values of grad_checkpoint"
    )
    parser.add_argument("--batches", type=int, nargs="+", default=[], help="per GPU; the config's when left out")
    parser.add_argument("--json", action="store_true")
    args, fields = parser.parse_known_args()
    show_messages()
    cfg, table = read_config(args.config, fields, vars(args))
    machines = Machines(args.gpus, args.per_node, args.peak_tflops, args.mfu)
    result = estimate(cfg, machines, levels=args.checkpoint, batches=args.batches, rows=args.rows, table=table)
    print(json.dumps(result, indent=1) if args.json else as_text(result))


def as_text(result: dict[str, Any]) -> str:
    """The result as markdown tables."""
    a = result["assumed"]
    return "\n".join(
        [
            f"{a['gpus']} GPUs, {a['per_node']} a node, {a['dtype']}, sp_size={a['sp_size']} "
            f"(legal: {', '.join(map(str, result['legal_sp_sizes']))}); assumed {a['mfu']:.0%} of {a['peak_tflops']:g} TFLOP/s",
            *(f"note: {note}" for note in result["notes"]),
            "",
            _table(result["parameters"]),
            "",
            "GiB of a GPU, estimated",
            _table(result["memory_gib"]),
            "",
            _table(result["time"]),
        ]
    )


def _table(rows: Sequence[dict[str, Any]]) -> str:
    cells = [
        ["?" if v is None else f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()] for row in rows
    ]
    names = list(rows[0])
    widths = [max(len(row[i]) for row in [names, *cells]) for i in range(len(names))]
    lines = [names, ["-" * width for width in widths], *cells]
    return "\n".join("| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |" for line in lines)


def read_config(config: Path, fields: Sequence[str], options: Iterable[str] = ()) -> tuple[TrainConfig, Path | None]:
    """The config, and its table where that is there; without a table a config is complete here.

    `options`: see `parse_config`.

    Raises:
        UserError: the config is wrong, or the table that the command line names is not there.
    """
    values = read_file(config)[0] if config.is_file() else {}  # `parse_config` says what else is wrong, too
    named = values.get("data_path") or values.get("dataset", {}).get("data_path")
    given = any(field.replace("_", "-").startswith("--data-path") for field in fields)
    more = [] if named or given else [NO_TABLE]
    cfg = parse_config(TrainConfig, {**PARTS, "dataset": DATASETS}, [str(config), *fields, *more], options=options)
    table = Path(cfg.dataset["data_path"])
    if given and not table.is_file():
        raise UserError(f"--data-path {table}: there is no such file.")
    # stored features need the cache to be there too, which is not asked of an estimate
    return cfg, table if table.is_file() and "Cached" not in cfg.dataset["type"] else None


def latent_size(vae: Any, size: tuple[int, int, int]) -> tuple[int, int, int]:
    """(t, h, w) of a video (frames, height, width)."""
    return vae.latent_size(vae.legal_size(size))


def _shard(cfg: TrainConfig, machines: Machines) -> int:
    """GPUs that share the state of fsdp2."""
    if cfg.shard_size is not None:
        return cfg.shard_size
    return min(machines.per_node, machines.gpus) if cfg.hybrid_zero else machines.gpus


if __name__ == "__main__":
    main()
