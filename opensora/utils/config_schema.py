"""The fields of each kind of config: name, type, default and meaning, declared once.

`--help`, `docs/config.md` and every check read these classes; nothing else in the project states a default of a config.
How a file and a command line become one of them is in `config.py`.
"""
# ruff: noqa: RUF009  `option` returns a dataclass field, so nothing is shared between instances

import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from math import isfinite
from typing import Any, ClassVar, Literal, NamedTuple, Union

from opensora.registry import did_you_mean
from opensora.utils.dtype import DTYPES

Component = dict[str, Any]  # dict(type=NAME, ...): a registered name and the arguments of its constructor

REQUIRED: Any = MISSING
LOSS_TERMS = ("l1", "mse", "pooled", "lpips", "kl")
# older spellings of keys inside components
KEY_ALIASES: dict[str, dict[str, str]] = {"model": {"enable_flashattn": "enable_flash_attn"}}


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


class Alias(NamedTuple):
    """A short command-line name for a key inside a component."""

    path: tuple[str, str]
    annotation: Any


def option(doc: str, default: Any = REQUIRED, *, bounds: Bounds | None = None, choices: Sequence[str] = ()) -> Any:
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

    seed: int = option("every random number follows from it", 42)
    dtype: str = option("computation type", "bf16", choices=tuple(DTYPES))
    device: Literal["auto", "cpu", "cuda"] = option("auto: the GPU when there is one", "auto")
    compile: bool = option("torch.compile the blocks of the model", default=False)

    def problems(self) -> list[str]:
        """What is wrong between fields, each of which has the right type."""
        return []


@dataclass(frozen=True, kw_only=True)
class LoopConfig(RunConfig):
    """What every training loop has: data, optimizer, checkpoints."""

    root: str | None = option("folder that the paths in the data file are relative to", None)
    data_path: str | None = option("csv or parquet file with one clip a row", None)
    num_workers: int = option("worker processes of each data loader", 4, bounds=COUNT)
    dataset: Component = option(
        "dataset component, a VideoTextDataset when left out; keys it leaves out come from the fields of the same name",
        {},
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
    ema_decay: float = option("decay of the averaged weights", 0.9999, bounds=FRACTION)
    outputs: str = option("folder that holds one folder for each experiment", "outputs")
    exp_name: str | None = option("name of the experiment's folder; made from the config when None", None)
    wandb: bool = option("log to Weights & Biases too", default=False)
    log_every: int = option("optimizer steps between two lines of the log", 10, bounds=AT_LEAST_ONE)
    ckpt_every: int = option("optimizer steps between two checkpoints; 0: only at the end", 250, bounds=COUNT)
    load: str | None = option("checkpoint folder to resume from", None)


_GENERATION_ALIASES = {
    "ckpt_path": Alias(("model", "from_pretrained"), str | None),
    "cfg_scale": Alias(("scheduler", "cfg_scale"), float),
    "num_sampling_steps": Alias(("scheduler", "num_sampling_steps"), int),
    "cfg_channel": Alias(("scheduler", "cfg_channel"), int | None),
    "flash_attn": Alias(("model", "enable_flash_attn"), bool),
    "layernorm_kernel": Alias(("model", "enable_layernorm_kernel"), bool),
}


@dataclass(frozen=True, kw_only=True)
class TrainConfig(LoopConfig):
    """Training of a denoiser: scripts/train.py."""

    aliases: ClassVar[Mapping[str, Alias]] = _GENERATION_ALIASES

    model: Component = option("denoiser component")
    vae: Component = option("VAE component")
    text_encoder: Component = option("text encoder component")
    scheduler: Component = option("diffusion component")
    num_frames: int = option("frames of a clip", 16, bounds=AT_LEAST_ONE)
    frame_interval: int = option("take every n-th frame of the video", 1, bounds=AT_LEAST_ONE)
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
    prefetch_gib: float = option(
        "memory that batches read ahead may take in each process, in GiB", 8.0, bounds=POSITIVE
    )
    other_data: Literal["refuse", "next_epoch"] = option(
        "with load, where the data are not those of the checkpoint: refuse, or begin the next epoch with them", "refuse"
    )
    dry_run: bool = option("print what an epoch of the data would be, and stop", default=False)
    cache_text: bool = option("keep encoded captions in memory", default=False)
    grad_checkpoint: bool = option("recompute activations in the backward pass to save memory", default=False)
    plugin: Literal["ddp", "fsdp2", "zero2", "zero2-seq"] = option(
        "engine of distributed training; this version has ddp", "ddp"
    )
    sp_size: int = option("processes that share one sample; 1 switches it off", 1, bounds=AT_LEAST_ONE)
    start_from_scratch: bool = option("with load: take weights and optimizer, start at step 0", default=False)

    def problems(self) -> list[str]:
        problems = super().problems()
        if self.start_from_scratch and self.load is None:
            problems.append("start_from_scratch=True has no effect without load.")
        if self.bucket_config is not None and "VariableVideoText" not in str(self.dataset.get("type")):
            problems.append("bucket_config has no effect without dataset=dict(type='VariableVideoTextDataset').")
        if self.bucket_config is None:
            if "VariableVideoText" in str(self.dataset.get("type")):
                problems.append("a VariableVideoTextDataset needs a bucket_config.")
            for name, default in (("bucket_tail", "keep"), ("bucket_order", "mixed")):
                if getattr(self, name) != default:
                    problems.append(f"{name}={getattr(self, name)!r} has no effect without bucket_config.")
        if self.other_data != "refuse" and self.load is None:
            problems.append(f"other_data={self.other_data!r} has no effect without load.")
        return problems


@dataclass(frozen=True, kw_only=True)
class InferenceConfig(RunConfig):
    """Sampling: scripts/inference.py."""

    aliases: ClassVar[Mapping[str, Alias]] = _GENERATION_ALIASES

    model: Component = option("denoiser component")
    vae: Component = option("VAE component")
    text_encoder: Component = option("text encoder component")
    scheduler: Component = option("diffusion component")
    num_frames: int = option("frames to generate; 1 is an image", bounds=AT_LEAST_ONE)
    fps: int | float = option("frames per second, as the model sees it", bounds=POSITIVE)
    image_size: tuple[int, int] = option("height and width in pixels", bounds=AT_LEAST_ONE)
    frame_interval: int = option(
        "the saved video has fps / frame_interval, unless save_fps is set", 1, bounds=AT_LEAST_ONE
    )
    save_fps: int | float | None = option("frames per second of the saved video", None, bounds=POSITIVE)
    batch_size: int = option("prompts per forward pass", 1, bounds=AT_LEAST_ONE)
    prompt: list[str] | None = option("prompts; they win over prompt_path", None)
    prompt_path: str | None = option("text file with one prompt a line, or csv file with a column `text`", None)
    start_index: int | None = option("first prompt to use, counted from 0", None, bounds=COUNT)
    end_index: int | None = option("prompt before which to stop", None, bounds=COUNT)
    num_sample: int = option("videos for each prompt", 1, bounds=AT_LEAST_ONE)
    save_dir: str = option("folder for the results", "./samples")
    sample_name: str | None = option("start of the names of the result files", None)
    prompt_as_path: bool = option("name a result file after its prompt", default=False)
    verbose: int = option("0 errors only, 1 progress, 2 details", 1, bounds=COUNT)

    def problems(self) -> list[str]:
        if self.start_index is not None and self.end_index is not None and self.start_index >= self.end_index:
            return [f"start_index={self.start_index} and end_index={self.end_index} leave no prompt."]
        return []


@dataclass(frozen=True, kw_only=True)
class VAETrainConfig(LoopConfig):
    """Training of a VAE: scripts/train_vae.py."""

    aliases: ClassVar[Mapping[str, Alias]] = {"ckpt_path": Alias(("vae", "from_pretrained"), str | None)}

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
        "every batch is split into pieces of one of these numbers of frames, drawn anew; name one twice to see it twice as often",
        None,
    )
    frame_interval: int = option("take every n-th frame of the video", 1, bounds=AT_LEAST_ONE)
    image_size: tuple[int, int] = option("height and width of the crop in pixels", (96, 96), bounds=AT_LEAST_ONE)
    eval_data_path: str | None = option(
        "table of held-out clips for PSNR, SSIM and LPIPS of the averaged weights", None
    )
    eval_every: int = option(
        "optimizer steps between two such measurements; the last one is at the end", 1000, bounds=AT_LEAST_ONE
    )
    eval_num_samples: int = option("clips of that table, evenly picked", 16, bounds=AT_LEAST_ONE)
    prefetch_gib: float = option(
        "memory that batches read ahead may take in each process, in GiB", 8.0, bounds=POSITIVE
    )
    plugin: Literal["ddp", "fsdp2", "zero2"] = option("engine of distributed training", "ddp")

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
        return problems + self._without_effect() + self._bad_lengths()

    def _without_effect(self) -> list[str]:
        """Fields that something else in the config makes idle."""
        reasons = {
            "a discriminator": (
                self.discriminator is None,
                ("adversarial_weight", "adversarial_scale", "adversarial_start", "discriminator_lr"),
            ),
            "reconstruction='nll'": (self.reconstruction != "nll", ("logvar_init",)),
            "a weight of loss.lpips": (not self.loss.get("lpips"), ("lpips_frames",)),
        }
        defaults = {name: f.default for name, f in schema_fields(type(self)).items()}
        return [
            f"{name}={getattr(self, name)!r} has no effect without {what}."
            for what, (idle, names) in reasons.items()
            for name in names
            if idle and getattr(self, name) != defaults[name]
        ]

    def _bad_lengths(self) -> list[str]:
        wrong = [n for n in self.mixed_lengths or [] if not 1 <= n <= self.num_frames]
        if self.mixed_lengths == []:
            return ["mixed_lengths is empty; None keeps whole clips."]
        return [f"mixed_lengths: {wrong} must be from 1 to num_frames={self.num_frames}."] if wrong else []


@dataclass(frozen=True, kw_only=True)
class VAEInferenceConfig(RunConfig):
    """Reconstruction by a VAE: scripts/inference_vae.py."""

    aliases: ClassVar[Mapping[str, Alias]] = {"ckpt_path": Alias(("vae", "from_pretrained"), str | None)}

    vae: Component = option("VAE component")
    files: list[str] | None = option("videos and pictures; they win over data_path", None)
    data_path: str | None = option("csv or parquet file with one video or picture a row", None)
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
    def is_component(self) -> bool:
        """Whether its value is `dict(type=..., ...)`."""
        return Component in members(self.annotation)

    @property
    def takes_keys(self) -> bool:
        """Whether `--name.key` makes sense."""
        return any(member in (Component, dict[str, float]) for member in members(self.annotation))

    def problem(self, value: Any) -> str:
        """What limit a value of the right type breaks, or an empty string."""
        if self.choices and value not in self.choices:
            hint = did_you_mean(str(value), list(self.choices))
            return f"must be one of {', '.join(self.choices)}.{hint}"
        if self.bounds is None or value is None:
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
    if origin is list:
        return f"list of {describe(args[0])}"
    if origin is dict:
        return f"dict of {describe(args[0])} to {describe(args[1])}"
    return "anything" if annotation is Any else annotation.__name__


def coerce(value: Any, annotation: Any) -> Any:
    """`value` as the annotated type: an int where a float is due, a list where a tuple is due.

    Raises:
        TypeError: it is something else.
    """
    for member in members(annotation):
        for fitting in _fit(value, member):
            return fitting
    raise TypeError(f"expected {describe(annotation)}")


def _fit(value: Any, annotation: Any) -> Iterator[Any]:
    """Yield `value` as the annotated type, once, if it fits."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is Any:
        yield value
    elif origin is Literal:
        if isinstance(value, str) and value in args:
            yield value
    elif annotation is float:
        if isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value):
            yield float(value)
    elif origin is None:
        if isinstance(value, annotation) and not (annotation is int and isinstance(value, bool)):
            yield value
    else:
        yield from _fit_container(value, origin, args)


def _fit_container(value: Any, origin: type, args: tuple[Any, ...]) -> Iterator[Any]:
    try:
        if origin is dict and isinstance(value, Mapping):
            yield {_key(key, args[0]): coerce(item, args[1]) for key, item in value.items()}
        elif origin is list and isinstance(value, list | tuple):
            yield [coerce(item, args[0]) for item in value]
        elif origin is tuple and isinstance(value, list | tuple) and len(value) == len(args):
            yield tuple(coerce(item, arg) for item, arg in zip(value, args, strict=True))
    except TypeError:
        return


def _key(key: Any, annotation: Any) -> Any:
    """JSON knows string keys only, so a dumped `{16: ...}` comes back as `{"16": ...}`."""
    was_int = int in members(annotation) and isinstance(key, str) and key.isdecimal()
    return int(key) if was_int else coerce(key, annotation)
