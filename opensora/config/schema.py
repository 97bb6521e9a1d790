"""The fields of each kind of config: name, type, default and meaning, declared once.

`--help`, `docs/config.md` and every check read these classes; nothing else in the project states a default of a config.
How a file and a command line become one of them is in `load.py`.
"""
# ruff: noqa: RUF009  `option` returns a dataclass field, so nothing is shared between instances

import re
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from math import isfinite
from typing import Any, ClassVar, Literal, NamedTuple, Union

from opensora.config.activation_checkpointing import level_problems
from opensora.config.lora import lora_problems
from opensora.config.upgrade import (
    GENERATION_ALIASES,
    MULTI_RESOLUTION,
    REMOVED_TRAIN,
    REMOVED_VAE_TRAIN,
    VAE_ALIASES,
    Alias,
    Removed,
)
from opensora.registry import did_you_mean
from opensora.utils.dtype import DTYPES, HALF, to_torch_dtype

Component = dict[str, Any]  # dict(type=NAME, ...): a registered name and the arguments of its constructor

REQUIRED: Any = MISSING
LOSS_TERMS = ("l1", "mse", "pooled", "lpips", "kl")
NUM_FRAMES = r"[0-9]{1,9}|[0-9]{1,6}(\.[0-9]{1,6})?[sx]"  # a number, seconds, or multiples of two seconds


class Bounds(NamedTuple):
    """Limits of a number, or of each number of a tuple."""

    ge: float | None = None
    gt: float | None = None
    lt: float | None = None

    def problem(self, value: float) -> str:
        """What `value` breaks, or an empty string."""
        if self.ge is not None and value < self.ge:
            return f"must be at least {self.ge:g}"
        if self.gt is not None and value <= self.gt:
            return f"must be greater than {self.gt:g}"
        if self.lt is not None and value >= self.lt:
            return f"must be less than {self.lt:g}"
        return ""


def option(
    doc: str,
    default: Any = REQUIRED,
    *,
    bounds: Bounds | None = None,
    choices: Sequence[str] = (),
) -> Any:
    """A dataclass field that carries its own documentation and limits."""
    metadata = {"doc": doc, "bounds": bounds, "choices": tuple(choices)}
    if isinstance(default, dict):
        return field(default_factory=lambda: dict(default), metadata=metadata)
    return field(default=default, metadata=metadata)


POSITIVE, COUNT, AT_LEAST_ONE = Bounds(gt=0), Bounds(ge=0), Bounds(ge=1)
FRACTION = Bounds(ge=0, lt=1)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """What training and inference share."""

    aliases: ClassVar[Mapping[str, Alias]] = {}
    removed: ClassVar[Mapping[str, Removed]] = {}
    # a field on the command line takes the place of these fields of the file, which say the same in another way
    replaces: ClassVar[Mapping[str, tuple[str, ...]]] = {}

    seed: int = option("every random number follows from it", 42)
    dtype: str = option("computation type", "bf16", choices=tuple(DTYPES))
    device: Literal["auto", "cpu", "cuda"] = option("auto: the GPU when there is one", "auto")
    compile: bool = option("torch.compile the blocks of the model", default=False)
    imports: list[str] | None = option(
        "Python files (.py, by path) and modules of your own to import first: they register parts that a config may name",
        None,
    )

    def problems(self) -> list[str]:
        """What is wrong between fields, each of which has the right type."""
        return []

    def without_effect(self, *reasons: tuple[bool, str, Sequence[str]]) -> list[str]:
        """What is set and does nothing: of each (whether it holds, reason, fields) those fields that are not their default."""
        known = schema_fields(type(self))
        return [
            f"{name}={getattr(self, name)!r} has no effect {reason}."
            for holds, reason, names in reasons
            for name in names
            if holds and getattr(self, name) != known[name].default
        ]


@dataclass(frozen=True, kw_only=True)
class LoopConfig(RunConfig):
    """What every training loop has: data, optimizer, checkpoints."""

    root: str | None = option("folder that the paths in the data file are relative to", None)
    data_path: str | None = option(
        "csv, jsonl or parquet table with one clip per row; for datasets of folders the folder", None
    )
    num_workers: int = option("worker processes of each data loader", 4, bounds=COUNT)
    dataset: Component = option(
        "dataset component, a VideoTextDataset when left out; keys it leaves out come from the fields of the same name",
        {},
    )
    frame_interval: int = option("take every n-th frame of the video", 1, bounds=AT_LEAST_ONE)
    prefetch_gib: float = option(
        "memory that batches read ahead may take in each process, in GiB", 8.0, bounds=POSITIVE
    )
    batch_size: int = option("samples per process and step", 1, bounds=AT_LEAST_ONE)
    accumulation_steps: int = option("batches per optimizer step", 1, bounds=AT_LEAST_ONE)
    epochs: int = option("passes over the data; training also ends at max_steps", 1000, bounds=AT_LEAST_ONE)
    max_steps: int | None = option("optimizer steps after which training ends", None, bounds=AT_LEAST_ONE)
    lr: float = option("learning rate", 2e-5, bounds=POSITIVE)
    lr_schedule: Literal["constant", "cosine"] = option("learning rate after the warm-up", "constant")
    warmup_steps: int = option("optimizer steps over which the learning rate rises linearly", 0, bounds=COUNT)
    weight_decay: float = option("decoupled weight decay of AdamW", 0.0, bounds=COUNT)
    adam_betas: tuple[float, float] = option("AdamW's averaging coefficients", (0.9, 0.999), bounds=FRACTION)
    adam_eps: float = option("AdamW's epsilon", 1e-8, bounds=POSITIVE)
    grad_clip: float = option("largest gradient norm; 0 switches clipping off", 1.0, bounds=COUNT)
    ema_decay: float = option("decay of the EMA weights", 0.9999, bounds=FRACTION)
    ema_every: int = option(
        "optimizer steps between two updates of the EMA weights; each update decays as much as that many",
        1,
        bounds=AT_LEAST_ONE,
    )
    ema_device: Literal["model", "cpu"] = option(
        "where the EMA weights are; cpu saves 4 bytes per weight on the GPU", "model"
    )
    shard_size: int | None = option(
        "neighbouring processes that share one copy of the sharded state; None: all with fsdp2, with hybrid_zero those of a node",
        None,
        bounds=AT_LEAST_ONE,
    )
    hybrid_zero: bool = option(
        "ddp: shard the optimizer's state inside each node; fsdp2: shard everything inside each node", default=False
    )
    optimizer_offload: bool = option(
        "ddp and fsdp2: keep the optimizer's state on the CPU and take its steps there", default=False
    )
    outputs: str = option("folder that holds one folder for each experiment", "outputs")
    exp_name: str | None = option("name of the experiment's folder; made from the config when None", None)
    wandb: bool = option("log to Weights & Biases too", default=False)
    log_every: int = option("optimizer steps between two lines of the log", 10, bounds=AT_LEAST_ONE)
    ckpt_every: int = option("optimizer steps between two checkpoints; 0: only at the end", 250, bounds=COUNT)
    ckpt_async: bool = option(
        "write checkpoints while training continues, from a copy in the host's memory", default=True
    )
    keep_last_n: int | None = option(
        "newest checkpoints to keep; older ones are deleted once a newer one is complete; None: all",
        None,
        bounds=AT_LEAST_ONE,
    )
    keep_every_m: int | None = option(
        "with keep_last_n: keep those at multiples of so many steps too", None, bounds=AT_LEAST_ONE
    )
    step_timeout_min: float = option(
        "minutes after which a step that has not ended is a hang; the first may take 4 times as long",
        30.0,
        bounds=POSITIVE,
    )
    on_nonfinite: Literal["stop", "skip"] = option(
        "a step whose loss or gradient is NaN or infinite is not taken: stop then, or skip it and continue", "stop"
    )
    max_skipped: int = option("with on_nonfinite='skip': skipped steps above which training ends", 10, bounds=COUNT)
    load: str | None = option(
        "checkpoint folder to resume from; latest: continue the run exp_name, in its folder, from its newest complete "
        "checkpoint",
        None,
    )
    load_check: Literal["size", "checksum"] = option(
        "with load: what of the checkpoint's files is compared with its manifest; checksum reads them once more", "size"
    )
    other_data: Literal["refuse", "next_epoch"] = option(
        "with load, where the data are not those of the checkpoint: refuse, or begin the next epoch with them", "refuse"
    )
    start_from_scratch: bool = option("with load: take weights and optimizer, start at step 0", default=False)

    def problems(self) -> list[str]:
        problems = super().problems()
        problems += self.without_effect(
            (self.on_nonfinite != "skip", "without on_nonfinite='skip'", ["max_skipped"]),
            (self.load is None, "without load", ["load_check", "start_from_scratch", "other_data"]),
            (self.keep_last_n is None, "without keep_last_n: all are kept", ["keep_every_m"]),
        )
        if self.load == "latest" and self.exp_name is None:
            problems.append("load='latest' needs exp_name, the run to continue.")
        if self.start_from_scratch and self.load == "latest":
            problems.append(
                "start_from_scratch=True cannot use the folder of the run that load='latest' continues; set load to the "
                "checkpoint's folder, and a new exp_name."
            )
        if self.keep_every_m is not None and self.ckpt_every and self.keep_every_m % self.ckpt_every:
            problems.append(
                f"keep_every_m={self.keep_every_m} is not a multiple of ckpt_every={self.ckpt_every}, so most such steps "
                "have no checkpoint."
            )
        return problems


@dataclass(frozen=True, kw_only=True)
class TrainConfig(LoopConfig):
    """Training of a denoiser: scripts/train.py."""

    aliases: ClassVar[Mapping[str, Alias]] = GENERATION_ALIASES
    removed: ClassVar[Mapping[str, Removed]] = REMOVED_TRAIN

    model: Component = option("denoiser component")
    vae: Component = option("VAE component")
    text_encoder: Component = option("text encoder component")
    scheduler: Component = option("diffusion component")
    num_frames: int = option("frames of a clip", 16, bounds=AT_LEAST_ONE)
    image_size: tuple[int, int] = option("height and width of a clip in pixels", (256, 256), bounds=AT_LEAST_ONE)
    use_image_transform: bool = option("the data are images", default=False)
    bucket_config: dict[str, dict[int | str, Any]] | None = option(
        "resolution -> frames -> (probability, batch size); needs a VariableVideoTextDataset and replaces num_frames, "
        "image_size and batch_size",
        None,
    )
    bucket_tail: Literal["keep", "pad", "drop"] = option(
        "samples that fill no whole batch of their bucket: keep them in a smaller batch, pad it with others, drop them",
        "keep",
    )
    bucket_order: Literal["mixed", "same"] = option(
        "same: in each step all processes take a batch of one bucket, so that none waits for a larger one", "mixed"
    )
    dry_run: bool = option("print what an epoch of the data would be, and stop", default=False)
    mask_ratios: dict[str, float] | None = option(
        "how often frames of a clip are conditioning frames: kind of mask -> probability; see schedulers.md",
        None,
    )
    cache_text: bool = option("keep encoded captions in memory", default=False)
    grad_checkpoint: str = option(
        "activation checkpointing: none, block, every:k for each k-th block, mlp, mlp:1/3 and mlp:2/3 "
        "(MLPs of so many of the blocks, of NOVA one and two of its stacks), selective (all but matrix products), selective:k (that "
        "for each k-th block, the others whole), selective+every:k (each k-th block whole, the others selective)",
        "none",
    )
    activation_offload: bool = option(
        "keep what the backward pass needs in the CPU's memory, if it is 1 MiB or more", default=False
    )
    cuda_graphs: bool = option(
        "ddp: record the forward and backward pass of each size once and replay it, for small batches, which the host is too slow "
        "for; see acceleration.md",
        default=False,
    )
    peak_tflops: float | None = option(
        "dense TFLOP/s of one device in dtype, for the MFU; None: by the name of the GPU", None, bounds=POSITIVE
    )
    plugin: Literal["ddp", "fsdp2", "zero2", "zero2-seq"] = option(
        "engine of distributed training: ddp holds everything in each process, fsdp2 shards it; zero2 and, with sp_size > 1, "
        "zero2-seq are ColossalAI's",
        "ddp",
    )
    fsdp_reshard: Literal["zero2", "zero3"] = option(
        "fsdp2 between a block's forward and backward pass: keep its weights, or drop them and gather them again",
        "zero2",
    )
    sp_size: int = option("processes that share one sample; 1 switches it off", 1, bounds=AT_LEAST_ONE)
    lora: Component | None = option(
        "train low-rank adapters and freeze the model: dict(rank=16, alpha=16, target_modules='attention', dropout=0.0), where "
        "target_modules may also be 'all-linear' or a list of layers' names; see fine-tuning.md",
        None,
    )
    val_every: int = option("optimizer steps between two validations; 0: none", 0, bounds=COUNT)
    val_data_path: str | None = option("table of held-out clips for a loss, read with the settings of dataset", None)
    val_num_samples: int = option("clips of that table, evenly picked", 64, bounds=AT_LEAST_ONE)
    val_num_timesteps: int = option(
        "timesteps at which each of those clips' loss is taken, evenly spread", 4, bounds=AT_LEAST_ONE
    )
    val_prompts: list[str] | None = option("prompts of the videos that each validation samples", None)
    val_prompt_path: str | None = option("file of those prompts, as prompt_path of sampling", None)
    val_num_frames: int | None = option("frames of those videos; None: num_frames", None, bounds=AT_LEAST_ONE)
    val_image_size: tuple[int, int] | None = option(
        "height and width of those videos in pixels; None: image_size", None, bounds=AT_LEAST_ONE
    )
    val_fps: int | float | None = option(
        "frames per second of those videos, as conditioning; None: 24 / frame_interval, 120 for an image",
        None,
        bounds=POSITIVE,
    )
    val_scheduler: Component | None = option("sampler of those videos; None: scheduler, with 30 sampling steps", None)

    def problems(self) -> list[str]:
        problems = super().problems() + level_problems(self.grad_checkpoint)
        if self.activation_offload and self.grad_checkpoint.startswith("selective"):
            problems.append(
                f"activation_offload does not reach what grad_checkpoint={self.grad_checkpoint!r} keeps: use 'block' or 'mlp'."
            )
        problems += self._engine_problems()
        if self.lora is not None:
            problems += lora_problems(self.lora)
            if self.model.get("freeze") is not None:
                problems.append("model.freeze has no effect with lora, which freezes the whole model.")
            problems += [
                f"model.{name}=True has no effect with lora, which freezes the whole model; lora.target_modules says where adapters are."
                for name in ("only_train_temporal", "freeze_y_embedder")
                if self.model.get(name)
            ]
            if self.compile and self.lora.get("dropout"):
                problems.append(
                    "lora.dropout draws inside the blocks, which compile=True cannot; switch one of them off."
                )
        return problems + self._data_problems() + self._validation_problems()

    def _engine_problems(self) -> list[str]:
        """Settings that this engine does not have."""
        engine, colossalai = f"with plugin={self.plugin!r}", self.plugin in ("zero2", "zero2-seq")
        same = f"with shard_size={self.shard_size}, which says the same"
        problems = self.without_effect(
            (self.plugin != "fsdp2", engine, ["fsdp_reshard"]),
            (colossalai, engine, ["hybrid_zero", "optimizer_offload", "shard_size"]),
            (self.plugin == "ddp" and not self.hybrid_zero, f"{engine} without hybrid_zero=True", ["shard_size"]),
            (self.plugin == "fsdp2" and self.shard_size is not None, same, ["hybrid_zero"]),
        )
        if colossalai and to_torch_dtype(self.dtype) not in HALF:
            problems.append(
                f"dtype={self.dtype!r}: plugin={self.plugin!r} computes in bf16 or fp16; use fsdp2, or bf16."
            )
        rivals = {
            f"plugin={self.plugin!r}": self.plugin != "ddp",
            "activation_offload=True": self.activation_offload,
            "lora.dropout, which draws inside the model": bool(self.lora and self.lora.get("dropout")),
        }
        return problems + [
            f"cuda_graphs=True does not work with {name}: leave one of them out."
            for name, on in rivals.items()
            if self.cuda_graphs and on
        ]

    def _data_problems(self) -> list[str]:
        """Buckets and masks that contradict other settings."""
        buckets, variable = self.bucket_config is not None, "VariableVideoText" in str(self.dataset.get("type"))
        problems = self.without_effect((not buckets, "without bucket_config", ["bucket_tail", "bucket_order"]))
        if buckets and not variable:
            problems.append("bucket_config has no effect without dataset=dict(type='VariableVideoTextDataset').")
        if variable and not buckets:
            problems.append("a VariableVideoTextDataset needs a bucket_config.")
        if self.mask_ratios is not None and self.num_frames == 1 and not buckets:
            problems.append("mask_ratios has no effect with num_frames=1: an image has no conditioning frames.")
        return problems

    def _validation_problems(self) -> list[str]:
        """`val_*` that contradict each other or do nothing."""
        samples = self.val_prompts is not None or self.val_prompt_path is not None
        all_of_them = [name for name in schema_fields(type(self)) if name.startswith("val_")]
        of_samples = ["val_num_frames", "val_image_size", "val_fps", "val_scheduler"]
        problems = self.without_effect(
            (not self.val_every, "without val_every", all_of_them),
            (self.val_data_path is None, "without val_data_path", ["val_num_samples", "val_num_timesteps"]),
            (not samples, "without val_prompts or val_prompt_path", of_samples),
        )
        if self.val_every and self.val_data_path is None and not samples:
            problems.append(f"val_every={self.val_every} has nothing to do: set val_data_path or val_prompts.")
        if self.val_prompts is not None and self.val_prompt_path is not None:
            problems.append("val_prompts and val_prompt_path both name the prompts of validation; keep one.")
        sized = self.val_num_frames is not None and self.val_image_size is not None
        if self.bucket_config is not None and samples and self.val_every and not sized:
            problems.append(
                "with a bucket_config, say how large validation's videos are: val_num_frames, val_image_size."
            )
        return problems


@dataclass(frozen=True, kw_only=True)
class InferenceConfig(RunConfig):
    """Sampling: scripts/inference.py."""

    aliases: ClassVar[Mapping[str, Alias]] = GENERATION_ALIASES
    replaces: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "num_frames": ("duration",),
        "duration": ("num_frames",),
        "image_size": ("resolution", "aspect_ratio"),
        "resolution": ("image_size",),
    }

    model: Component = option("denoiser component")
    vae: Component = option("VAE component")
    text_encoder: Component = option("text encoder component")
    scheduler: Component = option("diffusion component")
    num_frames: int | str | None = option(
        'frames to generate; 1 is an image. "4s": about 4 seconds in whole chunks of the VAE, "2x": twice two seconds',
        None,
        bounds=AT_LEAST_ONE,
    )
    duration: float | None = option("seconds to generate, in place of num_frames", None, bounds=POSITIVE)
    fps: int | float = option("frames per second, as the model sees it", bounds=POSITIVE)
    image_size: tuple[int, int] | None = option("height and width in pixels", None, bounds=AT_LEAST_ONE)
    resolution: str | None = option(
        "in place of image_size: an area by its name, such as 480p, with aspect_ratio; or HEIGHTxWIDTH", None
    )
    aspect_ratio: str | None = option("shape of a resolution: 9:16, read as aspect_ratio_order says, or 0.56", None)
    aspect_ratio_order: Literal["height:width", "width:height"] = option(
        "height:width as in Open-Sora 1.x, where 9:16 is landscape; width:height as in 2.0, where 9:16 is portrait",
        "height:width",
    )
    multi_resolution: Literal["PixArtMS", "STDiT2", "OpenSora"] | bool = option(
        "Open-Sora's name for models with size conditioning; has no effect, but must fit the model",
        default=False,
    )
    frame_interval: int = option(
        "the saved video has fps / frame_interval, unless save_fps is set", 1, bounds=AT_LEAST_ONE
    )
    save_fps: int | float | None = option("frames per second of the saved video", None, bounds=POSITIVE)
    batch_size: int = option("prompts per forward pass", 1, bounds=AT_LEAST_ONE)
    prompt: list[str] | None = option("prompts; they win over prompt_path", None)
    prompt_path: str | None = option("text file with one prompt per line, or csv file with a column `text`", None)
    start_index: int | None = option("first prompt to use, counted from 0", None, bounds=COUNT)
    end_index: int | None = option("prompt before which to stop", None, bounds=COUNT)
    reference_path: list[str] | None = option(
        'images and videos that a prompt starts from, one entry for each prompt: files or URLs joined by ";"', None
    )
    mask_strategy: list[str] | None = option(
        "what a prompt takes from its references, one entry for each prompt; see inference.md", None
    )
    mask_strategy_format: Literal["six-fields", "five-fields"] = option(
        "order of a mask_strategy's fields: of Open-Sora 1.1 and 1.2, or of the oldest documents", "six-fields"
    )
    align: int | None = option(
        "latent frames to whose multiples references are moved; None: the chunks of the VAE", None, bounds=AT_LEAST_ONE
    )
    image: str | None = option("image that is the first frame of every video", None)
    last_image: str | None = option("image that is the last frame of every video", None)
    extend: str | None = option("video that every result continues", None)
    edit: str | None = option("video that every result is a variant of", None)
    edit_ratio: float = option("how far edit changes its video: 0 not at all, 1 wholly", 0.5, bounds=FRACTION)
    reference_cache: str = option("folder for references that are fetched from URLs", "./cache/references")
    aes: int | float | str | None = option("aesthetic score, added to every prompt that has none", None)
    flow: int | float | str | None = option("motion score, added to every prompt that has none", None)
    camera_motion: str | None = option("camera motion, added to every prompt that has none", None)
    motion_flow: int | float | None = option("optical-flow score for NOVA's video models; None: 5", None, bounds=COUNT)
    num_sample: int = option("videos for each prompt", 1, bounds=AT_LEAST_ONE)
    save_dir: str = option("folder for the results", "./samples")
    sample_name: str | None = option("start of the names of the result files", None)
    prompt_as_path: bool = option("name a result file after its prompt", default=False)
    lora: str | None = option(
        "adapter to merge into the model: a folder of peft, or a checkpoint folder of a run with lora", None
    )
    lora_scale: float = option("how much of it; 0 is the model alone", 1.0)
    save_format: Literal["mp4", "webm", "gif"] = option("of the videos; a single frame is a PNG", "mp4")
    verbose: int = option("0 errors only, 1 progress, 2 details", 1, bounds=COUNT)
    negative_prompt: list[str] | None = option(
        "what to steer away from: one for all prompts or one for each, encoded by the text encoder; None: the model's own "
        '"no text", or an empty prompt where its weights came without',
        None,
    )
    loop: int = option(
        "segments of a long video, each of num_frames and continuing the one before", 1, bounds=AT_LEAST_ONE
    )
    condition_frame_length: int | None = option(
        "latent frames that a segment shares with the one before; None: a quarter of a segment, as the VAE allows",
        None,
        bounds=AT_LEAST_ONE,
    )
    condition_frame_edit: float = option(
        "0 keeps the shared frames; above 0 they are edited from that noise level on", 0.0, bounds=FRACTION
    )
    sp_size: int = option("processes that share one video's tokens; 1 switches it off", 1, bounds=AT_LEAST_ONE)
    cfg_parallel: bool = option(
        "with guidance: one half of the processes of a video predicts with the prompt, the other half without",
        default=False,
    )
    offload: Literal["none", "model", "block"] = option(
        "model: text encoder, denoiser and VAE are on the device only while they work; block: the denoiser's blocks too, one "
        "by one",
        "none",
    )
    vae_tiling: int | None = option(
        "encode and decode frames larger than this (pixels) in tiles of that size; None: as the VAE's config says",
        None,
        bounds=AT_LEAST_ONE,
    )
    step_cache: Component | None = option(
        "reuse between sampling steps: dict(type='pab') or dict(type='teacache'); changes the videos slightly", None
    )
    compiler: Literal["nexfort", "inductor", "aot_eager"] | None = option(
        "compile the pipeline's parts with OneDiff's options: see compiler.md. `compile` is the plain way", None
    )
    compiler_config: str | None = option('JSON for compiler, such as {"mode": "O3", "dynamic": true}', None)

    def problems(self) -> list[str]:
        kind = str(self.model.get("type"))
        problems = super().problems()
        problems += self.without_effect(
            (not kind.startswith("NOVA"), f"on a {kind}: use flow", ["motion_flow"]),
            (self.lora is None, "without lora", ["lora_scale"]),
            (self.num_frames == 1, "on an image: num_frames=1 makes a PNG", ["save_format"]),
            (self.loop == 1 and self.extend is None, "with loop=1", ["condition_frame_length"]),
            (self.loop == 1, "with loop=1", ["condition_frame_edit"]),
            (self.compiler is None, "without compiler", ["compiler_config"]),
            (self.resolution is None, "without resolution", ["aspect_ratio"]),
            (":" not in (self.aspect_ratio or ""), "without aspect_ratio='H:W'", ["aspect_ratio_order"]),
            (self.edit is None, "without edit", ["edit_ratio"]),
            (
                self.text_encoder.get("type") == "classes",
                "on classes, which are numbers, not texts",
                ["aes", "flow", "camera_motion"],
            ),
        )
        if self.start_index is not None and self.end_index is not None and self.start_index >= self.end_index:
            problems.append(f"start_index={self.start_index} and end_index={self.end_index} leave no prompt.")
        if self.compiler is not None and self.compile:
            problems.append("compile and compiler both compile the model; keep one.")
        if self.compiler is not None and self.step_cache is not None:
            problems.append("compiler does not work around a step_cache; use compile=True with it.")
        if self.compiler is not None and self.offload == "block":
            problems.append("compiler does not work around offload='block'; use compile=True with it.")
        return problems + self._size_problems() + self._reference_problems()

    def _size_problems(self) -> list[str]:
        """Size and length: missing, or set in two ways."""
        problems = []
        for one, other in (("num_frames", "duration"), ("image_size", "resolution")):
            values = getattr(self, one), getattr(self, other)
            if values == (None, None):
                problems.append(f"{one} is missing; set it, or {other}.")
            elif None not in values:
                problems.append(f"{one}={values[0]!r} and {other}={values[1]!r} say the same; keep one.")
        if isinstance(self.num_frames, str) and not re.fullmatch(NUM_FRAMES, self.num_frames):
            problems.append(f"num_frames={self.num_frames!r}: expected a number, or seconds such as '4s', or '2x'.")
        family = "PixArtMS" if self.multi_resolution is True else self.multi_resolution or ""
        if not re.match(MULTI_RESOLUTION.get(family, ""), str(self.model.get("type"))):
            problems.append(
                f"multi_resolution={self.multi_resolution!r} does not fit model.type={self.model.get('type')!r}; set it to "
                "False: a model with size conditioning gets the size anyway."
            )
        return problems

    def _reference_problems(self) -> list[str]:
        """References that contradict each other."""
        used = [name for name in ("reference_path", "image", "extend", "edit") if getattr(self, name) is not None]
        if self.last_image is not None and (clash := [name for name in used if name in ("reference_path", "edit")]):
            used = [*clash, "last_image"]
        problems = []
        if len(used) > 1:
            problems.append(f"{', '.join(used)} say different things of the same frames; keep one.")
        if self.mask_strategy is not None and used and used != ["reference_path"]:
            problems.append(f"mask_strategy has no effect with {used[0]}, which has its own; use reference_path.")
        return problems


@dataclass(frozen=True, kw_only=True)
class VAETrainConfig(LoopConfig):
    """Training of a VAE: scripts/train_vae.py."""

    aliases: ClassVar[Mapping[str, Alias]] = VAE_ALIASES
    removed: ClassVar[Mapping[str, Removed]] = REMOVED_VAE_TRAIN

    vae: Component = option("VAE component")
    loss: dict[str, float] = option(
        f"weights of the terms {', '.join(LOSS_TERMS)}; a term left out has weight 0",
        {"l1": 1.0, "mse": 1.0, "pooled": 1.0, "kl": 1e-5, "lpips": 0.0},
    )
    lpips: str = option("network of the term lpips: vgg or alex (package stlpips-pytorch), or a weight file", "vgg")
    lpips_frames: int | None = option(
        "frames of a clip that the term lpips looks at; None: all", None, bounds=AT_LEAST_ONE
    )
    trained: Literal["all", "decoder"] = option(
        "decoder: keep the encoder, and so the latents that a denoiser knows", "all"
    )
    reconstruction: Literal["plain", "nll"] = option(
        "nll: the pixels' part of the loss is rec / exp(s) + s, with a learned log variance s", "plain"
    )
    logvar_init: float = option("s at the start of nll", 0.0)
    discriminator: Component | None = option("discriminator component; None trains without a GAN", None)
    adversarial_weight: float = option("weight of the GAN's part of the loss", 0.5, bounds=POSITIVE)
    adversarial_scale: Literal["adaptive", "fixed"] = option(
        "adaptive: multiply that weight by |grad rec| / |grad gan| at the decoder's last layer", "adaptive"
    )
    adversarial_start: int = option("optimizer steps before the GAN begins", 0, bounds=COUNT)
    discriminator_lr: float | None = option("learning rate of the discriminator; None: lr", None, bounds=POSITIVE)
    num_frames: int = option("frames of a clip; 1 trains on images", 1, bounds=AT_LEAST_ONE)
    mixed_lengths: list[int] | None = option(
        "every batch is split into chunks of one of these numbers of frames, drawn anew; list one twice to draw it twice as often",
        None,
    )
    image_size: tuple[int, int] = option("height and width of the crop in pixels", (96, 96), bounds=AT_LEAST_ONE)
    eval_data_path: str | None = option("table of held-out clips for PSNR, SSIM and LPIPS of the EMA weights", None)
    eval_every: int = option(
        "optimizer steps between two such measurements; the last one is at the end", 1000, bounds=AT_LEAST_ONE
    )
    eval_num_samples: int = option("clips of that table, evenly picked", 16, bounds=AT_LEAST_ONE)

    def __post_init__(self) -> None:
        object.__setattr__(self, "loss", {**dict.fromkeys(LOSS_TERMS, 0.0), **self.loss})  # frozen

    def problems(self) -> list[str]:
        problems = super().problems()
        for term, weight in self.loss.items():
            if term not in LOSS_TERMS:
                hint = did_you_mean(term, list(LOSS_TERMS))
                problems.append(f"loss has no term {term!r}.{hint} Terms: {', '.join(LOSS_TERMS)}.")
            elif weight < 0:
                problems.append(f"loss.{term}={weight}: must be at least 0.")
        if not any(self.loss.values()):
            problems.append("loss: every weight is 0, nothing would be learnt.")
        if self.trained == "decoder" and self.loss.get("kl"):
            problems.append(f"loss.kl={self.loss['kl']} has no effect with trained='decoder': set it to 0.")
        if self.mixed_lengths == []:
            problems.append("mixed_lengths is empty; None keeps whole clips.")
        if wrong := [n for n in self.mixed_lengths or [] if not 1 <= n <= self.num_frames]:
            problems.append(f"mixed_lengths: {wrong} must be from 1 to num_frames={self.num_frames}.")
        gan = ["adversarial_weight", "adversarial_scale", "adversarial_start", "discriminator_lr"]
        return problems + self.without_effect(
            (not self.hybrid_zero, "without hybrid_zero=True", ["shard_size"]),
            (self.discriminator is None, "without a discriminator", gan),
            (self.reconstruction != "nll", "without reconstruction='nll'", ["logvar_init"]),
            (not self.loss.get("lpips"), "without a weight of loss.lpips", ["lpips_frames"]),
        )


@dataclass(frozen=True, kw_only=True)
class VAEInferenceConfig(RunConfig):
    """Reconstruction by a VAE: scripts/inference_vae.py."""

    aliases: ClassVar[Mapping[str, Alias]] = VAE_ALIASES

    vae: Component = option("VAE component")
    files: list[str] | None = option("videos and images; they win over data_path", None)
    data_path: str | None = option("csv, jsonl or parquet table with one video or image per row", None)
    root: str | None = option("folder that the paths in the data file are relative to", None)
    num_frames: int | None = option(
        "frames of each video, from its first; None: all that make a legal number", None, bounds=AT_LEAST_ONE
    )
    frame_interval: int = option("take every n-th frame of the video", 1, bounds=AT_LEAST_ONE)
    image_size: tuple[int, int] | None = option(
        "height and width to resize and crop to; None: the file's own, cut to whole latent cells",
        None,
        bounds=AT_LEAST_ONE,
    )
    save_dir: str = option("folder for the results", "./samples/vae")
    save_fps: int | float | None = option(
        "frames per second of the saved video; None: the file's", None, bounds=POSITIVE
    )

    def problems(self) -> list[str]:
        if not self.files and self.data_path is None:
            return ["nothing to reconstruct: name --files a.mp4 b.png or --data-path table.csv."]
        if self.files and self.root is not None:
            return ["root has no effect with files."]
        return []


class Field(NamedTuple):
    """One field of a schema, as help, docs and checks need it."""

    name: str
    annotation: Any
    default: Any  # REQUIRED when there is none
    doc: str
    bounds: Bounds | None
    choices: tuple[str, ...]

    @property
    def takes_keys(self) -> bool:
        """Whether `--name.key` makes sense."""
        return any(member in (Component, dict[str, float]) for member in members(self.annotation))

    def problem(self, value: Any) -> str:
        """What limit a value of the right type breaks, or an empty string."""
        if self.choices and value not in self.choices:
            hint = did_you_mean(str(value), list(self.choices))
            return f"must be one of {', '.join(self.choices)}.{hint}"
        if self.bounds is None or value is None or isinstance(value, str):
            return ""
        numbers = value if isinstance(value, tuple) else (value,)
        return next((problem for number in numbers if (problem := self.bounds.problem(number))), "")


Schema = type[RunConfig]


def schema_fields(schema: Schema) -> dict[str, Field]:
    """The fields of a schema by name, its own components first."""
    hints = typing.get_type_hints(schema)
    own = [f for f in fields(schema) if f.name in schema.__annotations__]
    inherited = [f for f in fields(schema) if f.name not in schema.__annotations__]
    return {
        f.name: Field(
            f.name,
            hints[f.name],
            f.default_factory() if f.default_factory is not MISSING else f.default,
            f.metadata["doc"],
            f.metadata["bounds"],
            f.metadata["choices"],
        )
        for f in [*own, *inherited]
    }


def members(annotation: Any) -> tuple[Any, ...]:
    """The alternatives of a union; a plain type is its own only alternative."""
    if typing.get_origin(annotation) in (Union, types.UnionType):
        return typing.get_args(annotation)
    return (annotation,)


def describe(annotation: Any) -> str:
    """A type in words: `int`, `(int, int)`, `list of str`, `'constant' or 'cosine'`."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if len(members(annotation)) > 1:
        return " or ".join(describe(member) for member in members(annotation))
    if annotation is types.NoneType:
        return "None"
    if annotation == Component:
        return "dict(type=NAME, ...)"
    if origin is Literal:
        return " or ".join(repr(arg) for arg in args)
    if origin is tuple:
        return f"({', '.join(map(describe, args))})"
    if origin in (list, Sequence):
        return f"list of {describe(args[0])}"
    if origin is dict:
        return f"dict of {describe(args[0])} to {describe(args[1])}"
    return "anything" if annotation is Any else annotation.__name__


def coerce(value: Any, annotation: Any) -> Any:
    """`value` as the annotated type: an int where a float is due, a list where a tuple is due.

    Raises:
        TypeError: it is not of that type.
    """
    for member in members(annotation):
        try:
            return _coerce_member(value, member)
        except TypeError:
            continue
    raise TypeError(f"expected {describe(annotation)}")


def _coerce_member(value: Any, annotation: Any) -> Any:
    """`coerce` for one alternative of a union."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    is_bool = isinstance(value, bool)
    if annotation is Any or (origin is Literal and isinstance(value, str) and value in args):
        return value
    if annotation is float and isinstance(value, int | float) and not is_bool and isfinite(value):
        return float(value)
    if origin is dict and isinstance(value, Mapping):
        return {_key(key, args[0]): coerce(item, args[1]) for key, item in value.items()}
    if origin is list and isinstance(value, list | tuple):
        return [coerce(item, args[0]) for item in value]
    if origin is tuple and isinstance(value, list | tuple) and len(value) == len(args):
        return tuple(coerce(item, arg) for item, arg in zip(value, args, strict=True))
    if (
        origin is None
        and annotation is not float
        and isinstance(value, annotation)
        and not (annotation is int and is_bool)
    ):
        return value
    raise TypeError


def _key(key: Any, annotation: Any) -> Any:
    """JSON knows string keys only, so a dumped `{16: ...}` comes back as `{"16": ...}`."""
    was_int = int in members(annotation) and isinstance(key, str) and key.isdecimal()
    return int(key) if was_int else coerce(key, annotation)
