"""Old and foreign spellings, in one place: what files, command lines and checkpoints may have, and what it is called now.

Older values and keys of our own, Open-Sora's names, and the values of NOVA's YACS configs and of DeepSpeed's JSON files.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple


class Alias(NamedTuple):
    """A short command-line name for a key inside a component."""

    path: tuple[str, str]
    annotation: Any


class Legacy(NamedTuple):
    """Older values of a field."""

    annotation: Any  # of all that may be written
    translate: Callable[[Any], Any]  # returns the current spelling, or the value itself


class Removed(NamedTuple):
    """A field that is gone. Values under which it did nothing are still accepted."""

    annotation: Any
    why: str
    accepted: tuple[Any, ...] = (None, False)

    def problem(self, name: str, value: Any) -> str:
        """What is wrong with a value, or an empty string."""
        return "" if value in self.accepted else f"{name}={value!r}: {self.why}"


# --- Open-Sora

GENERATION_ALIASES = {
    "ckpt_path": Alias(("model", "from_pretrained"), str | None),
    "cfg_scale": Alias(("scheduler", "cfg_scale"), float),
    "num_sampling_steps": Alias(("scheduler", "num_sampling_steps"), int),
    "cfg_channel": Alias(("scheduler", "cfg_channel"), int | None),
    "flash_attn": Alias(("model", "enable_flash_attn"), bool),
    "layernorm_kernel": Alias(("model", "enable_layernorm_kernel"), bool),
}
VAE_ALIASES = {"ckpt_path": Alias(("vae", "from_pretrained"), str | None)}
KEY_ALIASES: dict[str, dict[str, str]] = {"model": {"enable_flashattn": "enable_flash_attn"}}  # inside components
MULTI_RESOLUTION = {"PixArtMS": "PixArt(MS|[-_]1B|[-_]?Sigma)", "STDiT2": "STDiT[23]", "OpenSora": "STDiT[23]"}
"""`multi_resolution` -> regular expression of the model types that it is for."""
NONE_IS_EMPTY = ("reference_path", "mask_strategy")  # lists with one entry for each prompt, where None is ""
NOT_NEEDED = ("num_bucket_build_workers",)

# --- fields of our own


def translate_level(value: Any) -> Any:
    """The current spelling of a value of `grad_checkpoint`, such as "block" for True; any other value unchanged."""
    text = str(value) if isinstance(value, int) else value
    return _LEVELS.get(text.lower(), text) if isinstance(text, str) else value


_LEVELS = {
    **dict.fromkeys(("false", "no", "f", "n", "0"), "none"),
    **dict.fromkeys(("true", "yes", "t", "y"), "block"),
    **{"1": "mlp:1/3", "2": "mlp:2/3", "3": "mlp"},  # levels of NOVA, and so 1 is not True
}
LEGACY: Mapping[str, Legacy] = {"grad_checkpoint": Legacy(int | bool | str, translate_level)}
REMOVED_TRAIN: Mapping[str, Removed] = {
    "cast_once": Removed(
        bool | None,
        "this field was removed: it gained less than 3 % of a step. Leave it out, the results are the same.",
    ),
    "float8": Removed(
        bool | str | None,
        "this field was removed: training in float8 was slower than in bf16, and failed with STDiT3. Leave it out to train in bf16.",
    ),
}
_ENGINE_OF_VAES = "a VAE is trained with ddp. hybrid_zero=True spreads its optimizer's state."
REMOVED_VAE_TRAIN: Mapping[str, Removed] = {
    "plugin": Removed(Literal["ddp", "fsdp2", "zero2", "zero2-seq"], _ENGINE_OF_VAES, ("ddp",)),
    "fsdp_reshard": Removed(Literal["zero2", "zero3"], _ENGINE_OF_VAES, ("zero2",)),
}

# --- NOVA's training guide (YACS), see `yacs.py`

YACS_DEFAULTS: dict[str, Any] = {
    "NUM_GPUS": 1,
    "RNG_SEED": 3,
    "GPU_ID": 0,
    "PIPELINE": {"TYPE": "", "MODULES": {}},
    "MODEL": {"TYPE": "transformer", "CONFIG": {}, "WEIGHTS": "", "PRECISION": "bfloat16"},
    "SOLVER": {
        "BASE_LR": 1e-4, "MIN_LR": 0.0, "WARM_UP_STEPS": 250, "WARM_UP_FACTOR": 0.001, "LR_POLICY": "", "DECAY_STEPS": [],
        "DECAY_GAMMA": 0.5, "MAX_STEPS": 2**31 - 1, "OPTIMIZER": "AdamW", "ADAM_BETA2": 0.95, "WEIGHT_DECAY": 0.02,
        "ACCUM_STEPS": 1, "DISPLAY": 20, "EMA_EVERY": 100, "SNAPSHOT_EVERY": 5000, "SNAPSHOT_PREFIX": "model",
    },
    "TRAIN": {
        "DATASET": "", "DATASET2": "", "LOADER": "vae_train", "NUM_THREADS": 4, "BATCH_SIZE": 1, "MODEL_EMA": 0.99,
        "DEVICE_EMA": "gpu", "LOSS_REPEAT": 4, "CHECKPOINTING": 2,
    },
}  # fmt: skip
PIPELINE_MODULES = ("vae", "text_encoder", "tokenizer", "transformer", "scheduler")
YACS_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
YACS_FIELDS = {
    "seed": "RNG_SEED",
    "data_path": "TRAIN.DATASET",
    "num_workers": "TRAIN.NUM_THREADS",
    "batch_size": "TRAIN.BATCH_SIZE",
    "accumulation_steps": "SOLVER.ACCUM_STEPS",
    "lr": "SOLVER.BASE_LR",
    "warmup_steps": "SOLVER.WARM_UP_STEPS",
    "weight_decay": "SOLVER.WEIGHT_DECAY",
    "log_every": "SOLVER.DISPLAY",
    "ckpt_every": "SOLVER.SNAPSHOT_EVERY",
}
"""Our field -> the key with the same meaning."""
YACS_RULES: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    (
        "PIPELINE.TYPE",
        ("nova_train_t2i", "nova_train_t2v").__contains__,
        "there are nova_train_t2i and nova_train_t2v.",
    ),
    ("NUM_GPUS", lambda n: n == 1, "leave it 1 and start torchrun --nproc_per_node N scripts/train.py FILE."),
    (
        "PIPELINE.MODULES",
        lambda names: set(names) <= set(PIPELINE_MODULES) and all(isinstance(folder, str) for folder in names.values()),
        f"there are {', '.join(PIPELINE_MODULES)}, each with the name of a folder.",
    ),
    ("GPU_ID", lambda n: n == 0, "leave it 0 and set CUDA_VISIBLE_DEVICES in the environment."),
    ("MODEL.PRECISION", YACS_DTYPES.__contains__, f"there are {', '.join(YACS_DTYPES)}."),
    ("MODEL.TYPE", lambda name: name == "transformer", "the model is in the folder 'transformer' of MODEL.WEIGHTS."),
    ("MODEL.WEIGHTS", bool, "name the folder that has vae, text_encoder and transformer."),
    ("TRAIN.DATASET", bool, "name the folder of records."),
    ("TRAIN.DATASET2", lambda name: not name, "write all fields into one folder of records."),
    ("TRAIN.LOADER", lambda name: name == "vae_train", "there is vae_train."),
    ("SOLVER.LR_POLICY", ("", "cosine_decay").__contains__, "there are '' (constant) and cosine_decay."),
    (
        "SOLVER.DECAY_STEPS",
        lambda steps: not steps,
        "the learning rate does not fall in steps; leave it [] and set LR_POLICY to 'cosine_decay' for one that falls.",
    ),
    (
        "SOLVER.DECAY_GAMMA",
        lambda x: x == 0.5,
        "the learning rate does not fall in steps, by this factor or another; leave it 0.5.",
    ),
    ("SOLVER.MIN_LR", lambda lr: lr == 0, "the learning rate falls to 0."),
    ("SOLVER.OPTIMIZER", lambda name: name == "AdamW", "there is AdamW."),
    (
        "SOLVER.WARM_UP_FACTOR",
        lambda x: x == 0.001,
        "the warm-up rises from 1 / (steps + 1) of the rate; leave it 0.001.",
    ),
    ("TRAIN.CHECKPOINTING", (0, 1, 2, 3).__contains__, "there are levels 0 to 3."),
    ("TRAIN.DEVICE_EMA", ("cpu", "cuda", "gpu", "").__contains__, "there are cpu and cuda."),
    ("SOLVER.EMA_EVERY", lambda steps: steps >= 1, "a number of steps is at least 1; MODEL_EMA = 0 makes no EMA."),
    ("TRAIN.MODEL_EMA", lambda decay: 0 <= decay < 1, "a decay is in [0, 1)."),
)
"""(key, whether its value is supported, what to do otherwise)."""

# --- DeepSpeed

DEEPSPEED_FIELDS = {
    "train_micro_batch_size_per_gpu": "batch_size",
    "gradient_accumulation_steps": "accumulation_steps",
    "gradient_clipping": "grad_clip",
}
DEEPSPEED_STAGES: dict[int, dict[str, Any]] = {
    0: {"plugin": "ddp"},
    1: {"plugin": "ddp", "hybrid_zero": True},
    2: {"plugin": "fsdp2"},
    3: {"plugin": "fsdp2", "fsdp_reshard": "zero3"},
}
