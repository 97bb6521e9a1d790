"""The fields of each kind of config: name, type, default and meaning, declared once.

`--help`, `docs/config.md` and every check read these classes; nothing else in the project states a default of a config.
`load.py` makes one of them from a file and a command line.
"""
# ruff: noqa: RUF009  `option` returns a dataclass field, so nothing is shared between instances

import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from math import isfinite
from typing import Any, ClassVar, Literal, NamedTuple, TypeGuard, Union

from opensora.config.upgrade import (
    GENERATION_ALIASES,
    INFERENCE_NAMES,
    INFERENCE_OPEN,
    MULTI_RESOLUTION,
    REMOVED_INFERENCE,
    REMOVED_TRAIN,
    REMOVED_VAE_TRAIN,
    TRAIN_NAMES,
    TRAIN_OPEN,
    VAE_ALIASES,
    VAE_INFERENCE_NAMES,
    VAE_INFERENCE_OPEN,
    VAE_TRAIN_NAMES,
    VAE_TRAIN_OPEN,
    Alias,
    Removed,
    translate_level,
)
from opensora.registry import did_you_mean
from opensora.utils.errors import UserError

Component = dict[str, Any]  # dict(type=NAME, ...): a registered name and the arguments of its constructor

REQUIRED: Any = MISSING
SAMPLING_STEPS = 30  # of a validation's videos, where the config names no sampler of its own
FULL_FPS = 24  # of the videos that models are trained on, where nothing else is known
LOSS_TERMS = ("l1", "mse", "pooled", "lpips", "kl")
DTYPES = ("fp32", "float32", "bf16", "bfloat16", "fp16", "half", "float16")  # here, as `utils.dtype` imports torch
NUM_FRAMES = r"[0-9]{1,9}|[0-9]{1,6}(\.[0-9]{1,6})?[sx]"  # a number, seconds, or multiples of two seconds


FIRST = "Set first"
# groups of --help and docs/config.md; what people set first is in FIRST instead (`RunConfig.first`)
GROUPS = {
    "Model": "model vae text_encoder image_encoder scheduler ckpt_path lora lora_scale flash_attn layernorm_kernel imports",
    "Data": "data_path files root dataset num_workers prefetch_gib num_samples cache_text dry_run",
    "Frames and size": "num_frames duration fps frame_interval image_size resolution aspect_ratio aspect_ratio_order "
    "multi_resolution use_image_transform bucket_config bucket_tail bucket_order mixed_lengths mask_ratios",
    "Prompts": "prompt prompt_path start_index end_index negative_prompt aes flow camera_motion motion_flow llm_refine",
    "Images and videos as conditions": "image last_image extend edit edit_ratio reference_path mask_strategy mask_strategy_format "
    "align reference_cache",
    "Long videos": "loop condition_frame_length condition_frame_edit",
    "Sampling": "num_sampling_steps cfg_scale guidance_scale cfg_channel",
    "Training": "batch_size accumulation_steps epochs max_steps optimizer lr lr_schedule warmup_steps weight_decay adam_betas adam_eps "
    "grad_clip ema_decay ema_every ema_device on_nonfinite max_skipped step_timeout_min",
    "Loss": "loss lpips lpips_frames trained reconstruction logvar_init discriminator adversarial_weight adversarial_scale "
    "adversarial_start discriminator_lr",
    "Checkpoints": "outputs exp_name load load_check other_data start_from_scratch ckpt_every ckpt_async keep_last_n keep_every_m",
    "Validation": "val_every val_data_path val_num_samples val_num_timesteps val_prompts val_prompt_path val_num_frames "
    "val_image_size val_fps val_scheduler eval_data_path eval_every eval_num_samples",
    "Output": "save_dir save_fps sample_name prompt_as_path num_sample save_format",
    "Logging": "log_every wandb peak_tflops verbose",
    "Speed and memory": "dtype frozen_weights device compile compiler compiler_config grad_checkpoint activation_offload weight_streaming "
    "encoder_offload cuda_graphs offload vae_tiling step_cache",
    "Distributed": "plugin fsdp_reshard fsdp_gather fsdp_reduce shard_size hybrid_zero optimizer_offload sp_size cfg_parallel",
    "Randomness": "seed",
}


FROZEN_WEIGHTS = (
    "storage of weights that are not trained: bf16 takes half of the memory; fp8 and int8 a quarter, and are less exact"
)
FrozenWeights = Literal["fp32", "bf16", "fp8", "int8"]


class Bounds(NamedTuple):
    """Limits of a number, or of each number of a tuple: in words, and as a check."""

    text: str
    hold: Callable[[float], bool]


POSITIVE = Bounds("greater than 0", lambda x: x > 0)
COUNT = Bounds("at least 0", lambda x: x >= 0)
AT_LEAST_ONE = Bounds("at least 1", lambda x: x >= 1)
FRACTION = Bounds("at least 0 and less than 1", lambda x: 0 <= x < 1)


def option(doc: str, default: Any = REQUIRED, bounds: Bounds | None = None, choices: Sequence[str] = ()) -> Any:
    """A dataclass field with its documentation and limits."""
    metadata = {"doc": doc, "bounds": bounds, "choices": tuple(choices)}
    if isinstance(default, dict):
        return field(default_factory=lambda: dict(default), metadata=metadata)
    return field(default=default, metadata=metadata)


class NoEffect(str):
    """A problem that changes no result: an error where the command line sets it, a note where a file does."""

    path: tuple[str, ...]  # what is set: (field,) or (field, key)

    @classmethod
    def of(cls, value: Any, reason: str, *path: str) -> "NoEffect":
        """What is set at `path`, and why it does nothing."""
        problem = cls(f"{'.'.join(path)}={value!r} has no effect {reason}.")
        problem.path = path
        return problem


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """What training and inference share."""

    aliases: ClassVar[Mapping[str, Alias]] = {}
    removed: ClassVar[Mapping[str, Removed]] = {}
    # a field on the command line takes the place of these fields of the file
    replaces: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    # other codes' names for fields, aliases and keys of components; and those that leave something open, with what to write
    other_names: ClassVar[Mapping[str, str]] = {}
    open_names: ClassVar[Mapping[str, str]] = {}
    first: ClassVar[str] = ""  # fields and aliases that people set first
    example: ClassVar[str] = ""  # command line

    seed: int = option("seed of all random numbers", 42)
    dtype: str = option("computation type", "bf16", choices=DTYPES)
    device: Literal["auto", "cpu", "cuda"] = option("auto: the GPU when there is one", "auto")
    compile: bool = option("torch.compile the blocks of the model", False)
    imports: list[str] | None = option("Python files and modules to import, which register parts of your own", None)

    def problems(self) -> list[str]:
        """What is wrong between fields, each of which has the right type."""
        return []

    def without_effect(self, *reasons: tuple[bool, str, Sequence[str]]) -> list[str]:
        """Fields that are set and do nothing: of each (holds, reason, fields) those that are not their default."""
        known, found = schema_fields(type(self)), dict[str, str]()
        for holds, reason, names in reasons:
            for name in names if holds else ():
                if (value := getattr(self, name)) != known[name].default:
                    found.setdefault(name, NoEffect.of(value, reason, name))
        return [*found.values()]


@dataclass(frozen=True, kw_only=True)
class LoopConfig(RunConfig):
    """What every training loop has: data, optimizer, checkpoints."""

    root: str | None = option("folder that the paths in the data file are relative to", None)
    data_path: str | None = option("csv, jsonl or parquet table with one clip per row; of some datasets a folder", None)
    num_workers: int = option("worker processes of each data loader", 4, COUNT)
    dataset: Component = option("dataset component; keys it leaves out come from the fields of the same name", {})
    frame_interval: int = option("take every n-th frame of the video", 1, AT_LEAST_ONE)
    prefetch_gib: float = option("memory for batches read ahead, of each process in GiB", 8.0, POSITIVE)
    batch_size: int = option("samples per process and step", 1, AT_LEAST_ONE)
    accumulation_steps: int = option("batches per optimizer step", 1, AT_LEAST_ONE)
    epochs: int = option("passes over the data; training also ends at max_steps", 1000, AT_LEAST_ONE)
    max_steps: int | None = option("optimizer steps after which training ends", None, AT_LEAST_ONE)
    lr: float = option("learning rate", 2e-5, POSITIVE)
    lr_schedule: Literal["constant", "cosine"] = option("learning rate after the warm-up", "constant")
    warmup_steps: int = option("optimizer steps over which the learning rate rises linearly", 0, COUNT)
    weight_decay: float = option("decoupled weight decay", 0.0, COUNT)
    adam_betas: tuple[float, float] = option("AdamW's averaging coefficients", (0.9, 0.999), FRACTION)
    adam_eps: float = option("AdamW's epsilon", 1e-8, POSITIVE)
    grad_clip: float = option("largest gradient norm; 0 switches clipping off", 1.0, COUNT)
    ema_decay: float = option("decay of the EMA weights in one optimizer step", 0.9999, FRACTION)
    ema_every: int = option("optimizer steps between two updates of the EMA weights", 1, AT_LEAST_ONE)
    ema_device: Literal["model", "cpu"] = option("device of the EMA weights, which take 4 bytes per weight", "model")
    shard_size: int | None = option("processes with one copy of the state; None: all, or of a node", None, AT_LEAST_ONE)
    hybrid_zero: bool = option("shard inside each node: ddp the optimizer's state, fsdp2 everything", False)
    optimizer_offload: bool = option("ddp, fsdp2: keep optimizer state and step on the CPU", False)
    outputs: str = option("folder that holds one folder for each experiment", "outputs")
    exp_name: str | None = option("name of the experiment's folder; None: made from the config", None)
    wandb: bool = option("log to Weights & Biases too", False)
    log_every: int = option("optimizer steps between two lines of the log", 10, AT_LEAST_ONE)
    ckpt_every: int = option("optimizer steps between two checkpoints; 0: only at the end", 250, COUNT)
    ckpt_async: bool = option("write checkpoints while training continues, from a copy on the host", True)
    keep_last_n: int | None = option("newest checkpoints to keep; None: all", None, AT_LEAST_ONE)
    keep_every_m: int | None = option("also keep those at multiples of so many steps", None, AT_LEAST_ONE)
    step_timeout_min: float = option("minutes until a step counts as hung; 4 times as many at first", 30.0, POSITIVE)
    on_nonfinite: Literal["stop", "skip"] = option("at a NaN or infinite loss or gradient", "stop")
    max_skipped: int = option("with on_nonfinite='skip': skipped steps above which training ends", 10, COUNT)
    load: str | None = option("checkpoint folder to resume from; latest: the newest of the run exp_name", None)
    load_check: Literal["size", "checksum"] = option("with load: how files are compared with the manifest", "size")
    other_data: Literal["refuse", "next_epoch"] = option("with load, if the data changed", "refuse")
    start_from_scratch: bool = option("with load: take weights and optimizer, start at step 0", False)

    def problems(self) -> list[str]:
        problems = self.without_effect(
            (self.on_nonfinite != "skip", "without on_nonfinite='skip'", ["max_skipped"]),
            (self.load is None, "without load", ["load_check", "start_from_scratch", "other_data"]),
            (self.keep_last_n is None, "without keep_last_n: all are kept", ["keep_every_m"]),
        )
        if not -(2**63) <= self.seed < 2**64:
            problems.append(f"seed={self.seed} has more than PyTorch's 64 bits; use a smaller one.")
        if self.load == "latest" and self.exp_name is None:
            problems.append("load='latest' needs exp_name, the run to continue.")
        if self.load == "latest" and self.start_from_scratch:
            problems.append("start_from_scratch=True needs a new exp_name, and the checkpoint's folder as load.")
        if self.keep_every_m is not None and self.ckpt_every and self.keep_every_m % self.ckpt_every:
            problems.append(
                f"keep_every_m={self.keep_every_m} is not a multiple of ckpt_every={self.ckpt_every}: most such steps have "
                "no checkpoint."
            )
        return problems


@dataclass(frozen=True, kw_only=True)
class TrainConfig(LoopConfig):
    """Training of a denoiser: scripts/train.py."""

    aliases: ClassVar[Mapping[str, Alias]] = GENERATION_ALIASES
    removed: ClassVar[Mapping[str, Removed]] = REMOVED_TRAIN
    other_names: ClassVar[Mapping[str, str]] = TRAIN_NAMES
    open_names: ClassVar[Mapping[str, str]] = TRAIN_OPEN
    first: ClassVar[str] = (
        "data_path ckpt_path lora num_frames image_size batch_size lr max_steps val_every exp_name load"
    )
    example: ClassVar[str] = (
        "configs/opensora/train/16x256x256.py --data-path clips.csv --ckpt-path PixArt-XL-2-512x512.pth --lr 1e-4"
    )

    model: Component = option("denoiser component")
    vae: Component = option("VAE component")
    text_encoder: Component = option("text encoder component")
    image_encoder: Component | None = option("image encoder component, of models that read features of images", None)
    scheduler: Component = option("diffusion component")
    num_frames: int = option("frames of a clip", 16, AT_LEAST_ONE)
    image_size: tuple[int, int] = option("height and width of a clip in pixels", (256, 256), AT_LEAST_ONE)
    use_image_transform: bool = option("the data are images", False)
    bucket_config: dict[str, dict[int | str, Any]] | None = option(
        "resolution -> frames -> (probability, batch size), of a VariableVideoTextDataset; replaces num_frames, image_size "
        "and batch_size",
        None,
    )
    bucket_tail: Literal["keep", "pad", "drop"] = option("the last, smaller batch of a bucket", "keep")
    bucket_order: Literal["mixed", "same"] = option("same: in a step all processes have batches of one bucket", "mixed")
    dry_run: bool = option("print what an epoch of the data would be, and stop", False)
    mask_ratios: dict[str, float] | None = option("conditioning frames: kind of mask -> probability", None)
    cache_text: bool = option("keep encoded captions in memory", False)
    grad_checkpoint: str = option(
        "activation checkpointing: none, block, every:k (each k-th block), mlp, mlp:1/3, mlp:2/3, attention (all but "
        "attention), selective (all but attention and matrix products), selective:k (of each k-th block, the others whole), selective+every:k (each k-th block whole)",
        "none",
    )
    activation_offload: bool = option("keep activations of 1 MiB or more in the CPU's memory", False)
    weight_streaming: int = option(
        "ddp: how many blocks' weights are on the GPU, the others come from the CPU's memory in time; 0: all. Without lora their "
        "gradients go there, and the optimizer steps there (one process)",
        0,
        COUNT,
    )
    optimizer: Literal["adamw", "adamw8bit", "muon"] = option(
        "adamw8bit: torchao's, moments in 8 bits; muon: torch's, of the matrices of the blocks, AdamW of all else; see memory.md",
        "adamw",
    )
    encoder_offload: bool = option("VAE, text and image encoder are on the GPU only while they work", False)
    cuda_graphs: bool = option("ddp: record forward and backward of each size once and replay it", False)
    peak_tflops: float | None = option("dense TFLOP/s of a device, for the MFU; None: by its name", None, POSITIVE)
    plugin: Literal["ddp", "fsdp2", "zero2", "zero2-seq"] = option(
        "engine: ddp holds everything in each process, fsdp2 shards it; zero2 and zero2-seq are ColossalAI's", "ddp"
    )
    fsdp_reshard: Literal["zero2", "zero3"] = option("fsdp2: zero3 gathers weights again in the backward pass", "zero2")
    fsdp_gather: Literal["fp32", "bf16"] = option("fsdp2: dtype in which the weights of blocks travel", "fp32")
    fsdp_reduce: Literal["fp32", "bf16"] = option("fsdp2: dtype in which gradients are added up over processes", "fp32")
    sp_size: int = option("processes that share one sample; 1: no sequence parallelism", 1, AT_LEAST_ONE)
    lora: Component | None = option(
        "train low-rank adapters: dict(rank=16, alpha=16, target_modules='attention', dropout=0.0); see fine-tuning.md",
        None,
    )
    frozen_weights: FrozenWeights = option(f"{FROZEN_WEIGHTS}; with lora, of its base", "fp32")
    val_every: int = option("optimizer steps between two validations; 0: none", 0, COUNT)
    val_data_path: str | None = option("table of held-out clips for a loss, read with the settings of dataset", None)
    val_num_samples: int = option("clips of that table, evenly picked", 64, AT_LEAST_ONE)
    val_num_timesteps: int = option("timesteps at which each clip's loss is taken", 4, AT_LEAST_ONE)
    val_prompts: list[str] | None = option("prompts of the videos that each validation samples", None)
    val_prompt_path: str | None = option("file of those prompts, as prompt_path of sampling", None)
    val_num_frames: int | None = option("frames of those videos; None: num_frames", None, AT_LEAST_ONE)
    val_image_size: tuple[int, int] | None = option("their height and width; None: image_size", None, AT_LEAST_ONE)
    val_fps: int | float | None = option("their fps; None: 24 / frame_interval, 120 for an image", None, POSITIVE)
    val_scheduler: Component | None = option("their sampler; None: scheduler, with 30 sampling steps", None)

    def problems(self) -> list[str]:
        engine, buckets, lora = f"with plugin={self.plugin!r}", self.bucket_config is not None, self.lora or {}
        colossalai, variable = self.plugin.startswith("zero2"), "VariableVideoText" in str(self.dataset.get("type"))
        samples = self.val_prompts is not None or self.val_prompt_path is not None
        # a checkpoint is sampled from with these, whether validation does it too or not
        of_samples = ("val_num_frames", "val_image_size", "val_fps", "val_scheduler")
        validation = [name for name in schema_fields(type(self)) if name.startswith("val_") and name not in of_samples]
        same = f"with shard_size={self.shard_size}, which says the same"
        problems = super().problems() + self.without_effect(
            (self.plugin != "fsdp2", engine, ["fsdp_reshard", "fsdp_gather", "fsdp_reduce"]),
            (self.lora is None, "without lora: what is trained stays in fp32", ["frozen_weights"]),
            (colossalai, engine, ["hybrid_zero", "optimizer_offload", "shard_size"]),
            (self.plugin == "ddp" and not self.hybrid_zero, f"{engine} without hybrid_zero=True", ["shard_size"]),
            (self.plugin == "fsdp2" and self.shard_size is not None, same, ["hybrid_zero"]),
            (not buckets, "without bucket_config", ["bucket_tail", "bucket_order"]),
            (not buckets and self.num_frames == 1, "with num_frames=1: an image has no conditioning frames", ["mask_ratios"]),
            (not self.val_every, "without val_every", validation),
            (self.val_data_path is None, "without val_data_path", ["val_num_samples", "val_num_timesteps"]),
        )  # fmt: skip
        for check in (lambda: checkpointed_parts(self.grad_checkpoint, 0), lambda: LoraOptions.of(lora)):
            try:
                check()
            except UserError as error:
                problems += str(error).splitlines()
        problems += [
            NoEffect.of(self.model[name], "with lora, which freezes the whole model", "model", name)
            for name in ("freeze", "only_train_temporal", "freeze_y_embedder")
            if self.lora is not None and self.model.get(name)
        ]
        problems += [
            f"cuda_graphs=True does not work with {name}: leave one of them out."
            for name, on in (
                (f"plugin={self.plugin!r}", self.plugin != "ddp"),
                ("activation_offload=True", self.activation_offload),
                ("weight_streaming", bool(self.weight_streaming)),
                ("lora.dropout, which draws inside the model", bool(lora.get("dropout"))),
            )
            if self.cuda_graphs and on
        ]
        problems += frozen_in_fp32(self)
        muon = self.optimizer == "muon"
        problems += [
            f"optimizer={self.optimizer!r} does not work {reason}. Use optimizer='adamw'{other}."
            for wrong, reason, other in (
                (self.optimizer != "adamw" and colossalai,
                 f"{engine}, whose optimizer cuts flattened weights into chunks", ", or plugin='ddp'"),
                (muon and self.plugin == "fsdp2",
                 f"{engine}: it needs whole matrices, and a process has a shard", ", or plugin='ddp' with hybrid_zero=True"),
                (muon and self.optimizer_offload,
                 "with optimizer_offload=True: its matrix products would take a CPU minutes a step", " or 'adamw8bit'"),
                (muon and self.weight_streaming and self.lora is None,
                 "with weight_streaming, whose steps are taken on the CPU: its matrix products would take it minutes", " or 'adamw8bit'"),
                (muon and self.lora is not None,
                 "with lora: it makes the update of a whole matrix orthogonal, which low-rank factors are not", " or 'adamw8bit'"),
            )
            if wrong
        ]  # fmt: skip
        level, sized = self.grad_checkpoint, self.val_num_frames is not None and self.val_image_size is not None
        return problems + [
            message
            for wrong, message in (
                (self.activation_offload and not self.compile and level.startswith(("attention", "selective")),
                 f"activation_offload reaches what grad_checkpoint={level!r} keeps with compile=True only: set it, or use 'block' or 'mlp'."),
                (self.weight_streaming and self.lora is None and self.optimizer_offload,
                 "optimizer_offload does nothing that weight_streaming without lora does not do: leave it out."),
                (self.weight_streaming and self.plugin != "ddp",
                 f"weight_streaming does not work with plugin={self.plugin!r}, which shards the weights itself: use plugin='ddp'."),
                (self.fsdp_gather == "bf16" and self.plugin == "fsdp2" and self.dtype not in ("bf16", "bfloat16"),
                 f"fsdp_gather='bf16' is for dtype='bf16': with dtype={self.dtype!r} keep fsdp_gather='fp32'."),
                (self.frozen_weights in ("fp8", "int8") and colossalai,
                 f"frozen_weights={self.frozen_weights!r} does not work {engine}, which casts the whole model: use 'bf16', or ddp or fsdp2."),
                (self.frozen_weights in ("fp8", "int8") and self.fsdp_gather == "bf16",
                 f"fsdp_gather='bf16' would cast weights in {self.frozen_weights}, which travel as they are stored: leave it out."),
                (self.compile and lora.get("dropout"),
                 "lora.dropout draws inside the blocks, which compile=True cannot; switch one of them off."),
                (buckets and not variable,
                 "bucket_config has no effect without dataset=dict(type='VariableVideoTextDataset')."),
                (variable and not buckets, "a VariableVideoTextDataset needs a bucket_config."),
                (self.val_every and self.val_data_path is None and not samples,
                 f"val_every={self.val_every} has nothing to do: set val_data_path or val_prompts."),
                (self.val_prompts is not None and self.val_prompt_path is not None,
                 "val_prompts and val_prompt_path both name the prompts of validation; keep one."),
                (buckets and samples and self.val_every and not sized,
                 "with a bucket_config, set the size of validation's videos: val_num_frames and val_image_size."),
            )
            if wrong
        ]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class InferenceConfig(RunConfig):
    """Sampling: scripts/inference.py."""

    aliases: ClassVar[Mapping[str, Alias]] = GENERATION_ALIASES
    removed: ClassVar[Mapping[str, Removed]] = REMOVED_INFERENCE
    other_names: ClassVar[Mapping[str, str]] = INFERENCE_NAMES
    open_names: ClassVar[Mapping[str, str]] = INFERENCE_OPEN
    first: ClassVar[str] = (
        "prompt ckpt_path lora num_frames image_size resolution num_sampling_steps cfg_scale seed save_dir"
    )
    example: ClassVar[str] = (
        'configs/opensora-v1-2/inference/sample.py --prompt "a lake at dawn" --num-frames 4s --resolution 480p'
    )
    replaces: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "num_frames": ("duration",),
        "duration": ("num_frames",),
        "image_size": ("resolution", "aspect_ratio"),
        "resolution": ("image_size",),
    }

    model: Component = option("denoiser component")
    vae: Component = option("VAE component")
    text_encoder: Component = option("text encoder component")
    image_encoder: Component | None = option("image encoder component, of models that read features of images", None)
    scheduler: Component = option("diffusion component")
    num_frames: int | str | None = option(
        'frames to generate; 1: an image, "4s": about 4 seconds, "2x": twice two seconds', None, AT_LEAST_ONE
    )
    duration: float | None = option("seconds to generate, in place of num_frames", None, POSITIVE)
    fps: int | float = option("frames per second, as the model sees it", REQUIRED, POSITIVE)
    image_size: tuple[int, int] | None = option("height and width in pixels", None, AT_LEAST_ONE)
    resolution: str | None = option("in place of image_size: 480p and the like, or HEIGHTxWIDTH", None)
    aspect_ratio: str | None = option("shape of a resolution: 9:16, read as aspect_ratio_order says, or 0.56", None)
    aspect_ratio_order: Literal["height:width", "width:height"] = option("2.0: width:height", "height:width")
    multi_resolution: Literal["PixArtMS", "STDiT2", "OpenSora"] | bool = option(
        "Open-Sora's name for size conditioning; has no effect, but must fit the model", False
    )
    frame_interval: int = option("the video is saved with fps / frame_interval", 1, AT_LEAST_ONE)
    save_fps: int | float | None = option("frames per second of the saved video, instead", None, POSITIVE)
    batch_size: int = option("prompts per forward pass", 1, AT_LEAST_ONE)
    prompt: list[str] | None = option("prompts; they win over prompt_path", None)
    prompt_path: str | None = option("text file with one prompt per line, or csv file with a column `text`", None)
    start_index: int | None = option("first prompt to use, counted from 0", None, COUNT)
    end_index: int | None = option("prompt before which to stop", None, COUNT)
    reference_path: list[str] | None = option('for each prompt: images and videos, joined by ";"', None)
    mask_strategy: list[str] | None = option("for each prompt: use of its references; see inference.md", None)
    mask_strategy_format: Literal["six-fields", "five-fields"] = option(
        "fields of mask_strategy: those of Open-Sora 1.1 and 1.2, or of the oldest documents", "six-fields"
    )
    align: int | None = option("latent frames that references are aligned to; None: the VAE's", None, AT_LEAST_ONE)
    image: str | None = option("image that is the first frame of every video", None)
    last_image: str | None = option("image that is the last frame of every video", None)
    extend: str | None = option("video that every result continues", None)
    edit: str | None = option("video that every result is a variant of", None)
    edit_ratio: float = option("how far edit changes its video: 0 not at all, 1 wholly", 0.5, FRACTION)
    reference_cache: str = option("folder for references that are fetched from URLs", "./cache/references")
    aes: int | float | str | None = option("aesthetic score, added to every prompt that has none", None)
    flow: int | float | str | None = option("motion score, added to every prompt that has none", None)
    camera_motion: str | None = option("camera motion, added to every prompt that has none", None)
    llm_refine: bool = option("let a language model rewrite the prompts; see inference.md", False)
    motion_flow: int | float | None = option("optical-flow score for NOVA's video models; None: 5", None, COUNT)
    num_sample: int = option("videos for each prompt", 1, AT_LEAST_ONE)
    save_dir: str = option("folder for the results", "./samples")
    sample_name: str | None = option("start of the names of the result files", None)
    prompt_as_path: bool = option("name a result file after its prompt", False)
    lora: str | list[str] | dict[str, str | list[str]] | None = option(
        "adapters to merge into the model: files, folders of peft, runs or checkpoints with lora; of two experts dict(high=..., low=...)",
        None,
    )
    lora_scale: float | list[float] = option("their strength, one or one for each; 0 is the model alone", 1.0)
    frozen_weights: FrozenWeights = option(f"{FROZEN_WEIGHTS}; of the whole model", "fp32")
    save_format: Literal["mp4", "webm", "gif"] = option("of the videos; a single frame is a PNG", "mp4")
    verbose: int = option("0 errors only, 1 progress, 2 details", 1, COUNT)
    negative_prompt: list[str] | None = option("one for all prompts, or one for each; None: no text", None)
    loop: int = option("segments of a long video, each continuing the one before", 1, AT_LEAST_ONE)
    condition_frame_length: int | None = option(
        "latent frames that two segments share; None: a quarter, as the VAE allows", None, AT_LEAST_ONE
    )
    condition_frame_edit: float = option("above 0: edit shared frames from that noise level on", 0.0, FRACTION)
    sp_size: int = option("processes that share one video; 1: no sequence parallelism", 1, AT_LEAST_ONE)
    cfg_parallel: bool = option("guidance: half of the processes predict without the prompt", False)
    offload: Literal["none", "model", "block"] = option(
        "model: models are on the device only while they work; block: the denoiser's blocks too, one by one", "none"
    )
    vae_tiling: int | None = option("size of the VAE's tiles in pixels; None: as its config says", None, AT_LEAST_ONE)
    step_cache: Component | None = option("dict(type='pab') or dict(type='teacache'); see inference.md", None)
    compiler: Literal["nexfort", "inductor", "aot_eager"] | None = option("see compiler.md", None)
    compiler_config: str | None = option('JSON for compiler, such as {"mode": "O3", "dynamic": true}', None)

    def problems(self) -> list[str]:
        kind = str(self.model.get("type"))
        of_texts, edits = ["aes", "flow", "camera_motion", "llm_refine"], self.loop == 1 and self.extend is None
        classes = self.text_encoder.get("type") == "classes"
        problems = frozen_in_fp32(self) + self.without_effect(
            (not kind.startswith("NOVA"), f"on a {kind}: use flow", ["motion_flow"]),
            (self.lora is None, "without lora", ["lora_scale"]),
            (self.num_frames == 1, "on an image: num_frames=1 makes a PNG", ["save_format"]),
            (edits, "with loop=1", ["condition_frame_length"]),
            (self.loop == 1, "with loop=1", ["condition_frame_edit"]),
            (self.compiler is None, "without compiler", ["compiler_config"]),
            (self.resolution is None, "without resolution", ["aspect_ratio"]),
            (":" not in (self.aspect_ratio or ""), "without aspect_ratio='H:W'", ["aspect_ratio_order"]),
            (self.edit is None, "without edit", ["edit_ratio"]),
            (classes, "on classes, which are numbers, not texts", of_texts),
        )
        for one, other in (("num_frames", "duration"), ("image_size", "resolution")):
            values = getattr(self, one), getattr(self, other)
            if values == (None, None):
                problems.append(f"{one} is missing; set it, or {other}.")
            elif None not in values:
                problems.append(f"{one}={values[0]!r} and {other}={values[1]!r} say the same; keep one.")
        if isinstance(self.num_frames, str) and not re.fullmatch(NUM_FRAMES, self.num_frames):
            problems.append(f"num_frames={self.num_frames!r}: expected a number, or seconds such as '4s', or '2x'.")
        family = "PixArtMS" if self.multi_resolution is True else self.multi_resolution or ""
        if not re.match(MULTI_RESOLUTION.get(family, ""), kind):
            problems.append(
                f"multi_resolution={self.multi_resolution!r} does not fit model.type={kind!r}; set it to False: a model with "
                "size conditioning gets the size anyway."
            )
        if self.start_index is not None and self.end_index is not None and self.start_index >= self.end_index:
            problems.append(f"start_index={self.start_index} and end_index={self.end_index} leave no prompt.")
        rivals = {"compile": self.compile, "step_cache": self.step_cache, "offload='block'": self.offload == "block"}
        problems += [
            f"compiler does not work with {name}; keep one." for name, on in rivals.items() if on and self.compiler
        ]
        used = [name for name in ("reference_path", "image", "extend", "edit") if getattr(self, name) is not None]
        if self.last_image is not None and (clash := [name for name in used if name in ("reference_path", "edit")]):
            used = [*clash, "last_image"]
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
    other_names: ClassVar[Mapping[str, str]] = VAE_TRAIN_NAMES
    open_names: ClassVar[Mapping[str, str]] = VAE_TRAIN_OPEN
    first: ClassVar[str] = "data_path ckpt_path num_frames image_size batch_size lr max_steps loss exp_name load"
    example: ClassVar[str] = "configs/vae/train/video-small.py --data-path clips.csv --lr 1e-5"

    vae: Component = option("VAE component")
    loss: dict[str, float] = option(
        f"weights of the terms {', '.join(LOSS_TERMS)}; a term left out has weight 0",
        {"l1": 1.0, "mse": 1.0, "pooled": 1.0, "kl": 1e-5, "lpips": 0.0},
    )
    lpips: str = option("network of the term lpips: vgg or alex (package stlpips-pytorch), or a weight file", "vgg")
    lpips_frames: int | None = option("frames of a clip in the term lpips; None: all", None, AT_LEAST_ONE)
    trained: Literal["all", "decoder"] = option("decoder: keep the encoder, and so the latents", "all")
    reconstruction: Literal["plain", "nll"] = option("nll: rec / exp(s) + s, with a learned s", "plain")
    logvar_init: float = option("s at the start of nll", 0.0)
    discriminator: Component | None = option("discriminator component; None trains without a GAN", None)
    adversarial_weight: float = option("weight of the GAN's part of the loss", 0.5, POSITIVE)
    adversarial_scale: Literal["adaptive", "fixed"] = option("adaptive: times |grad rec| / |grad gan|", "adaptive")
    adversarial_start: int = option("optimizer steps before the GAN begins", 0, COUNT)
    discriminator_lr: float | None = option("learning rate of the discriminator; None: lr", None, POSITIVE)
    num_frames: int = option("frames of a clip; 1 trains on images", 1, AT_LEAST_ONE)
    mixed_lengths: list[int] | None = option("frames of the chunks that batches are cut into, drawn", None)
    image_size: tuple[int, int] = option("height and width of the crop in pixels", (96, 96), AT_LEAST_ONE)
    eval_data_path: str | None = option("table of held-out clips for PSNR, SSIM and LPIPS of the EMA weights", None)
    eval_every: int = option("optimizer steps between two such measurements", 1000, AT_LEAST_ONE)
    eval_num_samples: int = option("clips of that table, evenly picked", 16, AT_LEAST_ONE)

    def __post_init__(self) -> None:
        object.__setattr__(self, "loss", {**dict.fromkeys(LOSS_TERMS, 0.0), **self.loss})  # frozen

    def problems(self) -> list[str]:
        gan = ["adversarial_weight", "adversarial_scale", "adversarial_start", "discriminator_lr"]
        problems = super().problems() + self.without_effect(
            (not self.hybrid_zero, "without hybrid_zero=True", ["shard_size"]),
            (self.discriminator is None, "without a discriminator", gan),
            (self.reconstruction != "nll", "without reconstruction='nll'", ["logvar_init"]),
            (not self.loss.get("lpips"), "without a weight of loss.lpips", ["lpips_frames"]),
        )
        for term, weight in self.loss.items():
            if term not in LOSS_TERMS:
                hint = did_you_mean(term, list(LOSS_TERMS))
                problems.append(f"loss has no term {term!r}.{hint} Terms: {', '.join(LOSS_TERMS)}.")
            elif weight < 0:
                problems.append(f"loss.{term}={weight}: must be at least 0.")
        if not any(self.loss.values()):
            problems.append("loss: every weight is 0, nothing would be learnt.")
        if self.trained == "decoder" and self.loss.get("kl"):
            problems.append(NoEffect.of(self.loss["kl"], "with trained='decoder': set it to 0", "loss", "kl"))
        if self.mixed_lengths is not None:
            wrong = [n for n in self.mixed_lengths if not 1 <= n <= self.num_frames]
            if wrong or not self.mixed_lengths:
                problems.append(f"mixed_lengths={self.mixed_lengths}: must be from 1 to num_frames={self.num_frames}.")
        return problems


@dataclass(frozen=True, kw_only=True)
class VAEInferenceConfig(RunConfig):
    """Reconstruction by a VAE: scripts/inference_vae.py."""

    aliases: ClassVar[Mapping[str, Alias]] = VAE_ALIASES
    other_names: ClassVar[Mapping[str, str]] = VAE_INFERENCE_NAMES
    open_names: ClassVar[Mapping[str, str]] = VAE_INFERENCE_OPEN
    first: ClassVar[str] = "files data_path ckpt_path num_frames image_size save_dir"
    example: ClassVar[str] = "configs/vae/inference/video.py --files a.mp4 b.png"

    vae: Component = option("VAE component")
    files: list[str] | None = option("videos and images; they win over data_path", None)
    data_path: str | None = option("csv, jsonl or parquet table with one video or image per row", None)
    root: str | None = option("folder that the paths in the data file are relative to", None)
    num_frames: int | None = option("first frames of each video; None: all", None, AT_LEAST_ONE)
    frame_interval: int = option("take every n-th frame of the video", 1, AT_LEAST_ONE)
    image_size: tuple[int, int] | None = option("height and width; None: the file's own", None, AT_LEAST_ONE)
    num_samples: int | None = option("first rows of the table; None: all", None, AT_LEAST_ONE)
    save_dir: str = option("folder for the results", "./samples/vae")
    save_fps: int | float | None = option("fps of the saved video; None: the file's", None, POSITIVE)

    def problems(self) -> list[str]:
        if not self.files and self.data_path is None:
            return ["nothing to reconstruct: name --files a.mp4 b.png or --data-path table.csv."]
        return self.without_effect((bool(self.files), "with files", ["root", "num_samples"]))


def validation_sampler(scheduler: Component, val_scheduler: Component | None) -> Component:
    """The sampler of a training's validation: its own, or the training's with few steps."""
    if val_scheduler is not None:
        return val_scheduler
    return {
        "num_sampling_steps": SAMPLING_STEPS,
        **{key: value for key, value in scheduler.items() if key != "timestep_respacing"},
    }


def frozen_in_fp32(cfg: TrainConfig | InferenceConfig) -> list[str]:
    """What is wrong where weights are stored in less than fp32, and products are not: only autocast makes both the same."""
    if cfg.frozen_weights == "fp32" or cfg.dtype not in ("fp32", "float32"):
        return []
    return [
        f"frozen_weights={cfg.frozen_weights!r} needs dtype='bf16' (or 'fp16'); with dtype={cfg.dtype!r} leave it out."
    ]


# --- the values of `lora` and of `grad_checkpoint`


@dataclass(frozen=True, kw_only=True)
class LoraOptions:
    """A config's `lora` (LoRA, Hu et al. 2021): adapters on linear layers of the blocks."""

    rank: int = option("rows of A", 16, AT_LEAST_ONE)
    alpha: float = option("the update B A is scaled by alpha / rank", 16.0, POSITIVE)
    target_modules: Literal["attention", "all-linear"] | list[str] = option("or names of layers", "attention")
    dropout: float = option("how often an input of A is set to zero in training", 0.0, FRACTION)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "LoraOptions":
        """The options of a config.

        Raises:
            UserError: lists everything that is wrong.
        """
        known, problems, typed = schema_fields(cls), [], {}
        for key, value in values.items():
            if key not in known:
                hint = did_you_mean(str(key), list(known))
                problems.append(f"lora takes no {key!r}.{hint} It takes: {', '.join(known)}.")
                continue
            whole = key == "rank" and isinstance(value, float) and value.is_integer()  # 16.0 will do
            try:
                typed[key] = coerce(int(value) if whole else value, known[key].annotation)
                problem = known[key].problem(typed[key])
            except TypeError as error:
                problem = str(error)
            if problem or value == []:
                problems.append(f"lora.{key}={value!r}: {problem or 'names no layer'}.")
        if problems:
            raise UserError("\n".join(problems))
        return cls(**typed)

    @property
    def scale(self) -> float:
        """Of the product B A."""
        return self.alpha / self.rank


def is_number(value: Any) -> TypeGuard[float]:
    """Whether a value is a finite number; True and False are not."""
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)


def checkpointed_parts(level: str, depth: int, stacks: Sequence[int] | None = None) -> list[str]:
    """What a value of `grad_checkpoint` checkpoints of each block: "nothing", "block", "mlp", "attention" or "selective".

    "mlp:1/3" and "mlp:2/3" are levels 1 and 2 of NOVA (Deng et al. 2024): the MLPs of the first, of the first two of its
    three stacks. Other denoisers are one stack, of which they take thirds.

    Args:
        level: a value of `grad_checkpoint`.
        depth: how many blocks there are.
        stacks: how many of them are in each of three stacks, where a model has these.

    Raises:
        UserError: there is no such level.
    """
    found = re.fullmatch(
        r"(none|block|mlp|attention|selective)|mlp:([12])/3|(every|selective|selective\+every):0*([1-9]\d*)", level
    )
    if found is None:
        raise UserError(
            f"grad_checkpoint={level!r} is not one of none, block, every:k, mlp, mlp:1/3, mlp:2/3, attention, selective, selective:k, "
            "selective+every:k (k from 1)."
        )
    word, thirds, numbered, k = found.groups()
    if word:
        return ["nothing" if word == "none" else word] * depth
    if thirds:
        end = -(-depth * int(thirds) // 3) if stacks is None else sum(stacks[: int(thirds)])
        return ["mlp" if i < end else "nothing" for i in range(depth)]
    each, other = {"every": ("block", "nothing"), "selective": ("selective", "block")}.get(
        numbered, ("block", "selective")
    )
    return [other if i % int(k) else each for i in range(depth)]


def level_of(text: str) -> str:
    """A value of `grad_checkpoint` from a command line, in its current spelling.

    Raises:
        UserError: it is not such a value.
    """
    level: str = translate_level(text)
    checkpointed_parts(level, 0)
    return level


# --- fields and their types


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
        return any(
            member in (Component, dict[str, float], dict[str, str | list[str]]) for member in members(self.annotation)
        )

    def problem(self, value: Any) -> str:
        """Which limit a value of the right type breaks, or an empty string."""
        if self.choices and value not in self.choices:
            return f"must be one of {', '.join(self.choices)}.{did_you_mean(str(value), list(self.choices))}"
        if self.bounds is None or value is None or isinstance(value, str):
            return ""
        fits = all(map(self.bounds.hold, value if isinstance(value, tuple) else (value,)))
        return "" if fits else f"must be {self.bounds.text}"


Schema = type[RunConfig]


def schema_fields(schema: type) -> dict[str, Field]:
    """The fields of a schema by name, its own components first."""
    hints = typing.get_type_hints(schema)
    found = {}
    for f in sorted(fields(schema), key=lambda f: f.name not in schema.__annotations__):
        default = f.default_factory() if f.default_factory is not MISSING else f.default
        found[f.name] = Field(f.name, hints[f.name], default, **f.metadata)
    return found


def grouped(schema: Schema) -> dict[str, list[Field]]:
    """The fields and the aliases of a schema by group; an alias has no default, and names its component's key in its doc."""
    known = schema_fields(schema)
    for name, alias in schema.aliases.items():
        known[name] = Field(name, alias.annotation, None, f"{alias.doc} ({'.'.join(alias.path)})", None, ())
    groups: dict[str, list[Field]] = {}
    for group, names in {FIRST: schema.first, **GROUPS}.items():
        if found := [known.pop(name) for name in names.split() if name in known]:
            groups[group] = found
    assert not known, f"fields without a group in schema.py: {', '.join(known)}"
    return groups


def members(annotation: Any) -> tuple[Any, ...]:
    """The alternatives of a union; a plain type is its own only alternative."""
    if typing.get_origin(annotation) in (Union, types.UnionType):
        return typing.get_args(annotation)
    return (annotation,)


def describe(annotation: Any) -> str:
    """A type in words: `int`, `(int, int)`, `list of str`, `'constant' or 'cosine'`."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if len(members(annotation)) > 1:
        return " or ".join(map(describe, members(annotation)))
    if annotation == Component:
        return "dict(type=NAME, ...)"
    if origin is Literal:
        return " or ".join(map(repr, args))
    if origin is tuple:
        return f"({', '.join(map(describe, args))})"
    if origin in (list, Sequence):
        return f"list of {describe(args[0])}"
    if origin is dict:
        return f"dict of {describe(args[0])} to {describe(args[1])}"
    return {types.NoneType: "None", Any: "anything"}.get(annotation) or annotation.__name__


def coerce(value: Any, annotation: Any) -> Any:
    """`value` as the annotated type: an int where a float is due, a list where a tuple is due.

    Raises:
        TypeError: it is not of that type.
    """
    for member in members(annotation):
        origin, args = typing.get_origin(member), typing.get_args(member)
        try:
            if member is Any or (origin is Literal and value in args and not isinstance(value, bool | float)):
                return value
            if member is float and is_number(value):
                return float(value)
            if origin is dict and isinstance(value, Mapping):
                return {_key(key, args[0]): coerce(item, args[1]) for key, item in value.items()}
            if origin is list and isinstance(value, list | tuple):
                return [coerce(item, args[0]) for item in value]
            if origin is tuple and isinstance(value, list | tuple) and len(value) == len(args):
                return tuple(map(coerce, value, args))
            plain = origin is None and member is not float and isinstance(value, member)
            if plain and not (member is int and isinstance(value, bool)):
                return value
        except TypeError:
            continue
    raise TypeError(f"expected {describe(annotation)}")


def _key(key: Any, annotation: Any) -> Any:
    """JSON has string keys only, so a dumped `{16: ...}` comes back as `{"16": ...}`."""
    was_int = int in members(annotation) and isinstance(key, str) and key.isdecimal()
    return int(key) if was_int else coerce(key, annotation)
