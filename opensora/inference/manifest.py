"""Sidecars: the JSON file next to each sample, from which the sample can be recognised and made again.

The sidecars of a folder are its manifest. The process that makes a sample writes it under a temporary name, then the sidecar, and
then gives the sample its name, unless another run has made one of that name meanwhile. A finished sample has both files, and an
interrupted run continues with those that do not.

"Again" means bit for bit, with the same weights, versions, hardware and *batch*: a matrix product may sum in another order for
another number of rows, so the sidecar names the prompts that shared the forward pass (see `jobs.remake`).
"""

import dataclasses
import hashlib
import json
import logging
import platform
import secrets
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from fractions import Fraction
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from opensora.checkpoint.load import MANIFEST
from opensora.checkpoint.lora import lora_files
from opensora.config.load import changed_settings
from opensora.config.schema import InferenceConfig
from opensora.config.upgrade import upgrade_all
from opensora.inference.output import (
    EXTENSIONS,
    VideoFormat,
    exact_fps,
    replace_file,
    save_sample,
    to_uint8,
    with_extension,
)
from opensora.utils.errors import UserError, first_few
from opensora.utils.folders import parse_json, read_json

logger = logging.getLogger(__name__)

# fields of the config that do not change what a sample looks like
_NOT_OF_A_SAMPLE = {
    "prompt", "prompt_path", "start_index", "end_index", "num_sample", "batch_size", "save_dir", "sample_name",
    "prompt_as_path", "verbose", "device", "sp_size", "cfg_parallel", "offload", "reference_cache",
}  # fmt: skip
# entries of the sidecar, next to its config, that do
_OF_A_SAMPLE = {
    "prompt", "prompt_index", "sample_index", "seed", "image_size", "num_frames", "fps", "save_fps", "checkpoint", "inputs",
}  # fmt: skip
KINDS = {"prompt": str, "batch": list, "place": int, "frames": str, "inputs": dict, "versions": dict}
# fields of the config in which the samples of a batch may differ
OF_A_BATCH = ("seed", "reference_path", "mask_strategy", "negative_prompt")


class Finished(NamedTuple):
    """A complete sample: its file and its sidecar."""

    path: Path
    record: dict[str, Any]


def sidecar(
    config: Mapping[str, Any],
    *,
    prompt: str,
    prompt_index: int,
    sample_index: int,
    save_fps: float,
    checkpoint: Mapping[str, Any] | None,
    made_with: Mapping[str, Any],
    inputs: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """What the sidecar of one sample holds, as plain JSON values; some of the resolved config is repeated on top.

    `checkpoint` is from `describe_checkpoint`, `made_with` from `opensora.utils.environment.environment`, `inputs` from
    `inputs_of` (None: not known).
    """
    record = {
        "prompt": prompt,
        "prompt_index": prompt_index,
        "sample_index": sample_index,
        **{name: config[name] for name in ("seed", "image_size", "num_frames", "fps")},
        "save_fps": str(exact_fps(save_fps)),
        "checkpoint": checkpoint,
        "config": dict(config),
        **made_with,
        **({} if inputs is None else {"inputs": inputs}),
    }
    return json.loads(json.dumps(record))  # tuples become lists, as in the file


def write_samples(
    videos: Sequence[Tensor],
    paths_without_ext: Sequence[Path],
    records: Sequence[Mapping[str, Any]],
    *,
    device: torch.device | str,
    save_format: VideoFormat = "mp4",
) -> list[Path]:
    """Write the samples of one batch with their sidecars; returns the samples' files.

    Args:
        videos: B videos [3, T, H, W] in [-1, 1], made on `device`.
        records: the `sidecar` of each; `batch`, `place` (its index in the batch), `hardware` and `frames` (a hash) are added.
        save_format: of the videos; a single frame is a PNG.

    Raises:
        UserError: a file cannot be written.
    """
    batch = [
        {key: record[key] for key in ("prompt", "prompt_index", "sample_index")}
        | {key: record["config"].get(key) for key in OF_A_BATCH}
        for record in records
    ]
    written = []
    for index, (video, path, record) in enumerate(zip(videos, paths_without_ext, records, strict=True)):
        made = {"batch": batch, "place": index, "hardware": hardware(device), "frames": frames_hash(video)}
        hidden = path.with_name(f".{secrets.token_hex(4)}.{path.name}")
        try:
            file = save_sample(video, hidden, Fraction(record["save_fps"]), save_format=save_format)
            try:
                if already_made(path, record):
                    logger.warning(
                        "%s: another run has made it meanwhile, with the same settings; that one stays.", path
                    )
                else:
                    write_sidecar({**record, **made}, path)  # first: a video without one is taken for another program's
                    file.replace(with_extension(path, file.suffix))
                written += _files_of(path)
            finally:
                file.unlink(missing_ok=True)
        except OSError as error:
            raise UserError(
                f"{path}: the sample cannot be written ({error.strerror or error}). Those before it are complete: make room there, and "
                "the same command goes on."
            ) from error
    return written


def write_sidecar(record: Mapping[str, Any], path_without_ext: str | Path) -> Path:
    """Write `record` as `<path>.json`, complete or not at all."""
    path = with_extension(path_without_ext, ".json")
    text = json.dumps(record, indent=2, ensure_ascii=False) + "\n"
    replace_file(path, lambda file: file.write_text(text, encoding="utf-8"))
    return path


def read_sidecar(path: str | Path) -> dict[str, Any]:
    """The sidecar at `path`.

    Raises:
        UserError: it cannot be read, or is none.
    """
    try:
        record = parse_json(Path(path).read_text(encoding="utf-8"))
        _settings(record)
        Fraction(record.get("save_fps", "1"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}). Name the .json file next to a sample.") from error
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{path} is no sidecar of a sample: name the .json file next to a sample.") from None
    wrong = [name for name, kind in KINDS.items() if not isinstance(record.get(name, kind()), kind)]
    inputs = record["inputs"].items() if "inputs" in record and "inputs" not in wrong else ()
    if wrong := wrong + [f"inputs.{name}" for name, each in inputs if not isinstance(each, dict)]:
        raise UserError(f"{path} has another type of {', '.join(wrong)} than the sidecar of a sample: was it edited?")
    return record


def finished(folder: str | Path) -> Iterator[Finished]:
    """The complete samples of a folder that have a sidecar, by name."""
    for path in sorted(Path(folder).glob("*.json")):
        files = _files_of(path.with_name(path.name.removesuffix(".json")))
        if files:
            try:
                yield Finished(files[0], read_sidecar(path))
            except UserError:
                continue  # a JSON file of something else, such as the scores of an evaluation


def already_made(path_without_ext: str | Path, record: Mapping[str, Any]) -> bool:
    """True when a finished sample of that name was made with the settings of `record`, False when there is none.

    Compared are settings, paths and times of change of weights, and the content of reference files, but not versions. A config
    field that an older sidecar lacks counts as its default; inputs that it lacks count as unchanged, which is logged.

    Raises:
        UserError: the name is taken by something else. A sample is never overwritten.
    """
    taken = _files_of(path_without_ext)
    if not taken:
        return False
    path = with_extension(path_without_ext, ".json")
    try:
        old = _settings(read_sidecar(path))
    except UserError:
        raise UserError(
            f"{taken[0]} exists, but {path.name} next to it does not show how it was made. "
            "Choose another save_dir or delete the file."
        ) from None
    new = _settings(record)
    if "inputs" not in old and new.pop("inputs", None) is not None:
        logger.info(
            "%s: an older version wrote it, so that references, adapter, VAE and text encoder count as unchanged.", path
        )
    if any(old.get(key) != new.get(key) for key in old.keys() | new.keys()):
        changes = [textwrap.shorten(change, 200, placeholder="...") for change in changed_settings(old, new)]
        raise UserError(
            f"{taken[0]} exists and was made with other settings ({'; '.join(first_few(changes))}). "
            "Choose another save_dir or sample_name, or delete the file."
        )
    return True


def describe_checkpoint(path: str | Path | None) -> dict[str, Any] | None:
    """Weights named by a config: path, time of change (UTC), and training step and commit where they are known.

    The time tells a checkpoint from a later one of the same name.
    """
    if path is None:
        return None
    root = Path(path).expanduser()
    changed = max((file.stat().st_mtime for file in [root, *root.rglob("*")] if file.is_file()), default=None)
    manifest = read_json(root / MANIFEST, "Name another checkpoint.") if (root / MANIFEST).is_file() else {}
    time = None if changed is None else datetime.fromtimestamp(changed, timezone.utc).isoformat(timespec="seconds")
    return {"path": str(path), "changed": time, **{name: manifest.get(name) for name in ("step", "git_commit")}}


def inputs_of(config: Mapping[str, Any], sources: Sequence[str]) -> dict[str, Any]:
    """The files that a sample of a resolved config is made from besides its checkpoint.

    Returns:
        `references`: a hash of the content of each local image or video of `sources`; a URL is known by its name alone.
        `weights`: `describe_checkpoint` of adapter, VAE and text encoder, since hashing gigabytes may take longer than sampling.
    """
    loras = lora_files(config.get("lora") or [])  # a sidecar may be older than the field
    weights = {f"lora{f'.{i}' if len(loras) > 1 else ''}": path for i, (_, path) in enumerate(loras)}
    for part in ("model", "vae", "text_encoder", "image_encoder"):
        weights.update(_files_in(config.get(part) or {}, part))
    weights.pop("model.from_pretrained", None)  # the sidecar's `checkpoint`
    return {
        "references": {source: content_hash(source) for source in dict.fromkeys(sources) if "://" not in source},
        "weights": {name: describe_checkpoint(value) for name, value in weights.items()},
    }


def content_hash(path: str | Path) -> str | None:
    """A hash of a file's content; None where there is no file. A file is read again only when size or time have changed."""
    try:
        stat = Path(path).stat()
        return _hash_of(str(path), stat.st_size, stat.st_mtime_ns)
    except OSError:
        return None


@lru_cache(maxsize=4096)
def _hash_of(path: str, size: int, mtime_ns: int) -> str:
    digest = hashlib.blake2b(digest_size=8)
    with Path(path).open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _files_in(component: Mapping[str, Any], name: str) -> Iterator[tuple[str, str]]:
    """(`vae.vae_2d.from_pretrained`, path) for each argument of a component, nested ones too, that names files."""
    for key, value in component.items():
        if isinstance(value, Mapping):
            yield from _files_in(value, f"{name}.{key}")
        elif key in ("from_pretrained", "from_pretrained_2", "tokenizer") and isinstance(value, str):
            yield f"{name}.{key}", value


def hardware(device: torch.device | str) -> dict[str, Any]:
    """What bits depend on besides weights and versions: the device, and on a CPU how many threads share a sum."""
    if torch.device(device).type == "cuda":
        return {"device": torch.cuda.get_device_name(device), "threads": None}
    return {"device": platform.machine(), "threads": torch.get_num_threads()}


def frames_hash(video: Tensor) -> str:
    """A hash of the pixels of `video [3, T, H, W]` as they are handed to the encoder."""
    frames = to_uint8(video)
    return hashlib.blake2b(str(frames.shape).encode() + frames.tobytes(), digest_size=16).hexdigest()


def _files_of(path_without_ext: str | Path) -> list[Path]:
    return [path for ext in EXTENSIONS if (path := with_extension(path_without_ext, ext)).exists()]


def _settings(record: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a sidecar that decide what its sample looks like, the config's under their own names."""
    top = {key: value for key, value in record.items() if key in _OF_A_SAMPLE}
    config = upgrade_all(_defaults() | record["config"])
    config = {key: value for key, value in config.items() if key not in _NOT_OF_A_SAMPLE}
    return config | top


@cache
def _defaults() -> dict[str, Any]:
    """The config's defaults, as JSON gives them back."""
    values = {}
    for field in dataclasses.fields(InferenceConfig):
        if field.default_factory is not dataclasses.MISSING:
            values[field.name] = field.default_factory()
        elif field.default is not dataclasses.MISSING:
            values[field.name] = field.default
    return json.loads(json.dumps(values))
