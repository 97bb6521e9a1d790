"""What a training config needs, without a GPU and without any weights: parameters, memory, FLOPs, steps and hours.

    python -m tools.estimate CONFIG [--gpus 8] [--per-node 8] [--rows 1000000] [--peak-tflops 790] [--mfu 0.4] [--json]
                             [--checkpoint none block every:2 mlp selective selective:2] [--batches 1 2 4 8] [--field value ...]
    python -m tools.estimate CONFIG --gpus 1 --gpu-memory 24       # the flags with which it fits, the fastest first

Models are built on PyTorch's "meta" device, which stores nothing; other flags are fields of the config. Where a table is
there (`--data-path`), its rows and their buckets are counted, else `--rows` says how many there are.

Memory of a GPU, in bytes, for weights of W bytes, of N parameters of which n are trained, with an optimizer's state of M bytes (AdamW 8n),
on G GPUs of which S share a state (`shard_size`):

    ddp          W + 4n buckets where G > 1 + M + 4n EMA; gradients 4n
    hybrid       the same, with M over the GPUs of a node
    fsdp2 zero2  (W + M + 4n EMA) / S + W, gathered; gradients 4n / S
    fsdp2 zero3  the same, with those of two blocks and of what is in no block gathered
    zero2        2N + (4n + 8n + 4n EMA) / G; gradients 2n

Gradients come while activations go: of these two the larger counts (both with accumulation_steps). Without lora the EMA is of all N. Activations
are those that autograd keeps, what it recomputes of a block, and the copies of weights that autocast keeps (zero2 has none): see
tools/activations.py. With `activation_offload` two blocks' are counted. The VAE and the text encoder
are counted as weights in their dtype: the processes of a node share those of a `shardformer`, and an encoder that leaves the
GPU `between_uses` counts nothing. A T5 that is not known and has no config.json here is taken for T5-XXL, with a
note. What they need while they work, the CUDA context (about 0.5 GiB) and what the allocator wastes are not counted: --gpu-memory leaves
2 GiB for it. Hours count
the denoiser's matrix products alone, at the assumed MFU: data, VAE and text encoder are on top, unless their results are cached.
"""

import itertools
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from opensora.config.load import TrainConfig, parse_config, read_file
from opensora.config.schema import LoraOptions, checkpointed_parts, level_of
from opensora.datasets.buckets.bucket import Buckets
from opensora.models.loading import store_frozen
from opensora.models.nova.nova import NOVA
from opensora.registry import DATASETS, DENOISERS, MODELS, SCHEDULERS, TEXT_ENCODERS, VAES, build_module
from opensora.training.lora import add_lora
from opensora.utils.dtype import to_torch_dtype
from opensora.utils.errors import UserError, exit_on_user_error
from opensora.utils.logging import show_messages
from tools.activations import Activations, Counter
from tools.command import Parser
from tools.frozen_parts import assumptions, build_text, build_vae, text_bytes, vae_bytes

GIB = 2**30
PARTS = {"model": DENOISERS, "vae": VAES, "text_encoder": TEXT_ENCODERS, "scheduler": SCHEDULERS}
ENGINES = ("ddp", "hybrid", "fsdp2 zero2", "fsdp2 zero3", "zero2")
LEVELS = ("none", "block", "every:2", "mlp", "selective", "selective:2")
FITTING_LEVELS = ("none", "selective", "selective:2", "attention", "block")
AGAIN = {"nothing": 0.0, "selective": 0.1, "mlp": 0.4, "attention": 0.5, "block": 1.0}
"""About the share of a forward pass that is recomputed."""
SLOWER = (
    ("ema_device", "cpu", 0.1), ("optimizer", "adamw8bit", 0.05), ("frozen_weights", "int8", 0.05),
    ("activation_offload", True, 0.03), ("optimizer_offload", True, 1.0),
)  # fmt: skip
SPARE = 2.0  # GiB, for the CUDA context and the allocator
BEST = 5  # settings that are shown
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
    text_dim: int | None
    text_len: int


def build(cfg: TrainConfig) -> Built:
    """All parts of a config on the meta device."""
    with torch.device("meta"):
        vae = build_vae(cfg.vae)
        text, width, text_len = build_text(cfg.text_encoder)
        model = build_denoiser(cfg, vae, width, text_len)
    return Built(model, vae, text, width, text_len)


def build_denoiser(cfg: TrainConfig, vae: Any, text_dim: int | None, text_len: int) -> Any:
    """The denoiser with its adapters, in the dtypes of the training; `text_dim`: None = its default."""
    text_size = {"model_max_length": text_len, **({} if text_dim is None else {"caption_channels": text_dim})}
    model: Any = build_module({**cfg.model, "from_pretrained": None}, MODELS, in_channels=vae.out_channels, **text_size)
    if isinstance(model, NOVA):
        raise UserError(
            f"{cfg.model['type']} computes on another part of the tokens in each step, which cannot be counted; "
            "`python -m tools.search_batch_size` measures it."
        )
    store_frozen(model, cfg.frozen_weights)
    if cfg.lora is not None:
        add_lora(model, LoraOptions.of(cfg.lora), seed=cfg.seed)
    return model


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
    """Parameters of a denoiser, and their bytes."""

    all: int
    trained: int
    ema: int
    stored: int  # bytes of all of them
    gathered: int  # bytes of those that fsdp2 zero3 gathers at one time
    moments: float  # bytes of the optimizer's state
    streamed: list[int]  # bytes of each block's weights that `weight_streaming` streams


def sizes_of(cfg: TrainConfig, model: Any) -> Sizes:
    """Of the model that a config trains, with its adapters if it has any."""
    total = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    blocks = [num_bytes(block) for block in model.transformer_blocks()]
    adapters = cfg.lora is not None
    streamed = [num_bytes(block, frozen=adapters) for block in model.transformer_blocks()]
    # two blocks, one coming and one at work, and what is in no block
    gathered = num_bytes(model) - sum(blocks) + sum(sorted(blocks)[-2:])
    return Sizes(
        total, trained, total if cfg.lora is None else trained, num_bytes(model), gathered, moment_bytes(cfg, model),
        streamed,
    )  # fmt: skip


def num_bytes(module: nn.Module, *, frozen: bool = False) -> int:
    """Of all parameters, or of those that are not trained."""
    return sum(p.numel() * p.element_size() for p in module.parameters() if not (frozen and p.requires_grad))


def moment_bytes(cfg: TrainConfig, model: Any) -> float:
    """Of the optimizer's state."""
    name, total = cfg.optimizer, 0.0
    matrices = {id(p) for block in model.transformer_blocks() for p in block.parameters() if p.ndim == 2}
    for p in (p for p in model.parameters() if p.requires_grad):
        if name == "adamw8bit" and p.ndim > 1 and p.numel() >= 4096 and not p[0].numel() % 128:
            each = 2 + 2 * 4 / 128  # two moments, with a scale for 128 of each
        else:
            each = 4 if name == "muon" and id(p) in matrices else 8
        total += each * p.numel()
    return total


def state_bytes(cfg: TrainConfig, of: Sizes, engine: str, machines: Machines) -> dict[str, float]:
    """Bytes of a GPU for weights, optimizer, EMA and gradients: the table above.

    Args:
        cfg: the training.
        of: the denoiser's sizes.
        engine: one of ENGINES.
        machines: the GPUs.
    """
    N, n, G = of.all, of.trained, machines.gpus
    moments, ema = of.moments, 4.0 * of.ema
    if engine in ("ddp", "hybrid"):
        weights, gradients = of.stored + (4.0 * n if G > 1 else 0.0), 4.0 * n
        moments /= min(machines.per_node, G) if engine == "hybrid" else 1
    elif engine == "zero2":
        weights, gradients, moments, ema = 2.0 * N, 2.0 * n, 12.0 * n / G, ema / G
    else:
        shard = _shard(cfg, machines)
        gathered = of.stored if engine == "fsdp2 zero2" else of.gathered
        weights = of.stored / shard + gathered / (2 if cfg.fsdp_gather == "bf16" else 1)
        gradients, moments, ema = 4.0 * n / shard, moments / shard, ema / shard
    if engine != "zero2":
        moments = 0.0 if cfg.optimizer_offload else moments
    return {
        "weights": weights,
        "optimizer": moments,
        "ema": 0.0 if cfg.ema_device == "cpu" else ema,
        "gradients": gradients,
    }


def memory_row(
    cfg: TrainConfig, of: Sizes, frozen: float, clip: Clip, machines: Machines, engine: str, kept: Activations
) -> dict[str, float]:
    """GiB of a GPU with a batch of `clip`, at its peak.

    Args:
        cfg, of, machines, engine: see `state_bytes`.
        frozen: bytes of VAE and text encoder.
        clip: what is trained on.
        kept: of one sample of it.
    """
    state = state_bytes(cfg, of, engine, machines)
    if cfg.weight_streaming:
        off = sum(of.streamed)
        if cfg.lora is None:  # with their gradients, moments and average; the gradients of two blocks are on their way
            gone = off / of.stored
            state = {name: size * (1 - gone) for name, size in state.items()}
            state["gradients"] += 2 * max(of.streamed)
        else:
            state["weights"] -= off
        state["weights"] += cfg.weight_streaming * max(of.streamed)
    samples = clip.batch / cfg.sp_size
    activations = samples * (min(kept.kept, 2 * kept.block) if cfg.activation_offload else kept.kept)
    gradients = state.pop("gradients")
    if (
        cfg.accumulation_steps == 1 and not cfg.activation_offload
    ):  # of these two, the smaller one comes while the other goes
        gradients = max(0.0, gradients - activations)
    activations += samples * kept.work + (0.0 if engine == "zero2" else kept.casts)
    gib = {"state": sum(state.values()), "gradients": gradients, "activations": activations, "frozen": frozen}
    return {**{name: size / GIB for name, size in gib.items()}, "total": sum(gib.values()) / GIB}


def frozen_bytes(cfg: TrainConfig, built: Built, machines: Machines) -> float:
    """Of a GPU, for VAE and text encoder."""
    of_node = min(machines.per_node, machines.gpus)
    return vae_bytes(built.vae) + text_bytes(cfg.text_encoder, built.text_encoder, of_node)


def largest_clip(clips: Sequence[Clip], batches: Sequence[int]) -> Clip:
    """The clip that needs most memory: with its own batch, or where `batches` are given with the same as all others."""
    return max(clips, key=lambda clip: (1 if batches else clip.batch) * math.prod(clip.latent))


def memory_rows(
    cfg: TrainConfig,
    built: Built,
    clip: Clip,
    count: Counter,
    machines: Machines,
    levels: Sequence[str],
    batches: Sequence[int],
) -> Iterator[dict[str, Any]]:
    """GiB of a GPU for each engine, checkpoint level and batch size, at the clip that `count` counts."""
    sizes, frozen = sizes_of(cfg, built.model), frozen_bytes(cfg, built, machines)
    for engine, level, batch in itertools.product(ENGINES, levels, batches or (clip.batch,)):
        row = {"engine": engine, "checkpoint": level, "clip": clip.name, "batch": batch}
        sized = clip._replace(batch=batch)
        yield {**row, **memory_row(cfg, sizes, frozen, sized, machines, engine, count(level))}


def fitting(
    cfg: TrainConfig,
    built: Built,
    clips: Sequence[Clip],
    largest: Clip,
    count: Counter,
    machines: Machines,
    memories: Sequence[float],
) -> list[dict[str, Any]]:
    """Settings with which a step fits into a GPU of each of `memories`, the fastest first: of the largest clip with which any does.

    Their order is that of what is recomputed and what is moved; no time is measured.

    Args:
        cfg, built, machines: the training.
        clips: all of it.
        largest, count: the clip that needs most, and what counts a sample of it.
        memories: GiB.
    """
    frozen, depth = frozen_bytes(cfg, built, machines), len(built.model.transformer_blocks())
    options, results = list(candidates(cfg, built)), []
    for gib in memories:
        found: dict[str, Any] = {"gb": gib, "rows": []}
        for clip, flags in smaller_clips(cfg, built, clips, largest):
            share = math.prod(clip.latent) / math.prod(largest.latent)  # of tokens, for each of which it is the same
            rows = []
            for new, sizes in options:
                kept = count(new.grad_checkpoint)
                kept = kept._replace(**{k: int(share * getattr(kept, k)) for k in ("kept", "work", "block")})
                args = frozen, clip, machines, engine_of(new), kept
                row = memory_row(new, sizes, *args)
                if new.weight_streaming:  # as many resident blocks as there is room for
                    resident = 2 + int(max(0.0, gib - SPARE - row["total"]) * GIB / max(sizes.streamed))
                    if resident >= depth:
                        continue
                    new = replace(new, weight_streaming=resident)
                    row = memory_row(new, sizes, *args)
                if row["total"] <= gib - SPARE:
                    changes = [f.name for f in fields(new) if getattr(new, f.name) != getattr(cfg, f.name)]
                    words = [*flags, *(f"--{name.replace('_', '-')} {getattr(new, name)}" for name in changes)]
                    settings = {"GiB": row["total"], "flags": " ".join(words) or "(as it is)"}
                    rows.append((slowdown(new, depth), len(changes), settings))
            if rows:
                best: list[dict[str, Any]] = []
                for *_, fit in sorted(rows, key=lambda each: each[:2]):  # what is slower has to need less
                    if not best or fit["GiB"] < best[-1]["GiB"]:
                        best.append(fit)
                smaller = cfg.bucket_config is not None and clip != largest
                found |= {"clip": clip.name, "batch": clip.batch, "smaller": smaller, "rows": best[:BEST]}
                break
        results.append(found)
    return results


def slowdown(cfg: TrainConfig, depth: int) -> float:
    """About how many forward passes a step takes longer: guesses, for an order."""
    parts = checkpointed_parts(cfg.grad_checkpoint, depth)
    moved = sum(slower for name, value, slower in SLOWER if getattr(cfg, name, None) == value)
    moved += (
        0 if not cfg.weight_streaming else 1.0 if cfg.lora is None else 0.03
    )  # the CPU takes the steps of the former
    return sum(AGAIN[part] for part in parts) / depth + moved


def smaller_clips(
    cfg: TrainConfig, built: Built, clips: Sequence[Clip], largest: Clip
) -> Iterator[tuple[Clip, list[str]]]:
    """`largest`, then smaller batches and shorter or smaller clips, with the flags that ask for them."""
    yield largest, []
    buckets = cfg.bucket_config is not None
    batch = [] if largest.batch == 1 or buckets else ["--batch-size 1"]
    if largest.batch > 1:
        yield largest._replace(batch=1), batch
    if buckets:
        for clip in sorted(clips, key=lambda clip: -math.prod(clip.latent)):
            if math.prod(clip.latent) < math.prod(largest.latent):
                yield clip._replace(batch=1), []
        return
    frames = cfg.num_frames
    while frames > 1:
        frames = built.vae.legal_num_frames(frames // 2)
        size = (frames, *cfg.image_size)
        clip = Clip("x".join(map(str, size)), latent_size(built.vae, size), 1, None)
        yield clip, [*batch, f"--num-frames {frames}"]


def candidates(cfg: TrainConfig, built: Built) -> Iterator[tuple[TrainConfig, Sizes]]:
    """The config with all values of fields that save memory which it allows, and its denoiser's sizes."""
    choices: dict[str, Sequence[Any]] = {
        "grad_checkpoint": (cfg.grad_checkpoint, *FITTING_LEVELS),
        "activation_offload": (cfg.activation_offload, False, True),
        "weight_streaming": (cfg.weight_streaming, 0, 2),
    }
    if cfg.lora is None:
        choices |= {"ema_device": ("model", "cpu"), "optimizer_offload": (False, True)}
        choices["optimizer"] = (cfg.optimizer, "adamw8bit")
    else:
        choices["frozen_weights"] = (cfg.frozen_weights, "bf16", "int8")
    problems, sizes = set(cfg.problems()), dict[Any, Sizes]()
    for values in itertools.product(*(dict.fromkeys(each) for each in choices.values())):
        new = replace(cfg, **dict(zip(choices, values, strict=True)))
        if not problems.issuperset(new.problems()):
            continue
        if new.activation_offload and new.grad_checkpoint not in ("attention", "block"):
            continue  # hundreds of GiB
        key = new.frozen_weights, new.optimizer
        if key not in sizes:
            model = built.model
            if new.frozen_weights != cfg.frozen_weights:
                with torch.device("meta"):
                    model = build_denoiser(new, built.vae, built.text_dim, built.text_len)
            sizes[key] = sizes_of(new, model)
        yield new, sizes[key]


def engine_of(cfg: TrainConfig) -> str:
    """Which of ENGINES a config asks for."""
    if cfg.plugin.startswith("zero2"):
        return "zero2"
    if cfg.plugin == "fsdp2":
        return f"fsdp2 {cfg.fsdp_reshard}"
    return "hybrid" if cfg.hybrid_zero else "ddp"


def time_rows(cfg: TrainConfig, built: Built, clips: Sequence[Clip], machines: Machines) -> Iterator[dict[str, Any]]:
    """Tokens, FLOPs, steps and hours of each clip size; None where the number of rows is not known."""
    groups = machines.gpus // cfg.sp_size
    rate = machines.peak_tflops * machines.mfu * 1e12  # of a GPU
    epochs = [  # a step may go on in the next epoch
        None if clip.rows is None else -(-clip.rows // (clip.batch * groups)) / cfg.accumulation_steps for clip in clips
    ]
    total = None if None in epochs else sum(filter(None, epochs)) * cfg.epochs
    # of the steps of all epochs, those before `max_steps`: of each size alike
    share = min(1.0, cfg.max_steps / total) if cfg.max_steps is not None and total else 1.0
    for clip, epoch in zip(clips, epochs, strict=True):
        flops = 3 * built.model.flops(clip.latent, built.text_len)  # forward, and twice as much backward
        whole = clip.batch * groups * cfg.accumulation_steps
        whole_steps = int if len(clips) == 1 else round  # of the last step, a part is not taken
        steps = None if epoch is None else whole_steps(epoch * cfg.epochs * share)
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
            "steps_of_epoch": epoch if epoch is None or epoch % 1 else int(epoch),
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
    gpu_memory: Sequence[float] = (),
) -> dict[str, Any]:
    """Everything, as plain data.

    Args:
        cfg: the training.
        machines: the GPUs.
        levels: values of `grad_checkpoint`.
        batches: per GPU; () takes each clip's own.
        rows: of an epoch, where there is no table.
        table: the data, if it is there.
        gpu_memory: GiB of a GPU: find settings that fit; of each of these GPUs.

    Raises:
        UserError: the GPUs cannot be shared as the config says, or a part cannot be built.
    """
    _refuse_impossible(cfg, machines)
    for flag, numbers in (
        ("--rows", [] if rows is None else [rows]),
        ("--batches", batches),
        ("--gpu-memory", gpu_memory),
    ):
        if any(number < 1 for number in numbers):
            raise UserError(f"{flag} {' '.join(map(str, numbers))}: each must be at least 1.")
    built = build(cfg)
    clips = clips_of(cfg, built, rows, table)
    if not clips:
        raise UserError(
            f"no row of {table} fits a bucket of bucket_config; `python -m tools.datasets.doctor` says why."
        )
    clip = largest_clip(clips, batches)
    how = {"compiled": cfg.compile, "masked": cfg.mask_ratios is not None}
    count = Counter(built.model, clip.latent, to_torch_dtype(cfg.dtype), **how)
    fits = fitting(cfg, built, clips, clip, count, machines, gpu_memory) if gpu_memory else []
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
        "fits": fits,
        "memory_gib": list(memory_rows(cfg, built, clip, count, machines, levels, batches)),
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
        "--gpu-memory", type=float, nargs="+", default=[], help="GB of a GPU: the settings that fit, the fastest first"
    )
    parser.add_argument("--checkpoint", nargs="+", type=level_of, help="values of grad_checkpoint")
    parser.add_argument("--batches", type=int, nargs="+", default=[], help="per GPU; the config's when left out")
    parser.add_argument("--json", action="store_true")
    args, fields = parser.parse_known_args()
    show_messages()
    cfg, table = read_config(args.config, fields, vars(args))
    machines = Machines(args.gpus, args.per_node, args.peak_tflops, args.mfu)
    levels = args.checkpoint or ((cfg.grad_checkpoint,) if args.gpu_memory else LEVELS)
    counted = {"levels": levels, "batches": args.batches, "rows": args.rows, "table": table}
    result = estimate(cfg, machines, **counted, gpu_memory=args.gpu_memory)
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
            *(line for fits in result["fits"] for line in _fitting_text(fits)),
            "GiB of a GPU, estimated",
            _table(result["memory_gib"]),
            "",
            _table(result["time"]),
        ]
    )


def _fitting_text(fits: dict[str, Any]) -> list[str]:
    if not fits["rows"]:
        return [
            f"{fits['gb']:g} GB: nothing that this tool tries fits. Try lora (docs/how-to/fine-tuning.md), several GPUs with --plugin fsdp2 "
            "--fsdp-reshard zero3, a smaller image_size, or cached features in place of VAE and text encoder (docs/how-to/memory.md).",
            "",
        ]
    head = f"{fits['gb']:g} GB: what fits with a batch of {fits['batch']} of {fits['clip']}, the fastest first"
    if fits["smaller"]:
        head += "; in bucket_config leave out what is larger, and set that batch"
    return [head, _table(fits["rows"]), ""]


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
