"""What lies beside a sample: a JSON file ("sidecar") that says how to make it again, and to know it when it is there.

The sidecars of a folder are its manifest. Each is written by the process that makes the sample, so nothing is shared and
nothing can be torn: the sidecar first, then the sample under a temporary name, which is its own only when complete. A
finished sample is therefore one that has both files, and an interrupted run goes on with those that have not.

Made again bit for bit means: with the same weights, versions, hardware and *batch*. A matrix product may sum in another
order for another number of rows, so the sidecar names the prompts that shared the forward pass; `tools/remake.py` samples
them together (`remake.py`) and compares the frames with the hash that the sidecar holds.
"""

import dataclasses
import hashlib
import json
import logging
import platform
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from opensora.checkpoint.load import MANIFEST
from opensora.config.load import changed_settings
from opensora.config.schema import InferenceConfig
from opensora.inference.output import EXTENSIONS, exact_fps, replace_file, save_sample, to_uint8, with_extension
from opensora.inference.video_files import VideoFormat
from opensora.utils.errors import UserError, first_few

logger = logging.getLogger(__name__)

# fields of the config that say which samples are made, where they go and how the work is shared out, but not what a
# sample looks like
NOT_OF_A_SAMPLE = {
    "prompt",
    "prompt_path",
    "start_index",
    "end_index",
    "num_sample",
    "batch_size",
    "save_dir",
    "sample_name",
    "prompt_as_path",
    "verbose",
    "device",
    "sp_size",
    "cfg_parallel",
    "offload",
    "reference_cache",
}
OF_A_SAMPLE = {
    "prompt",
    "prompt_index",
    "sample_index",
    "seed",
    "image_size",
    "num_frames",
    "fps",
    "save_fps",
    "checkpoint",
    "inputs",
}
# fields of the config, as they are for one prompt, in which the samples of a batch may differ
OF_A_BATCH = ("seed", "reference_path", "mask_strategy", "negative_prompt")


class Finished(NamedTuple):
    """A sample that is complete: its file, and what its sidecar says."""

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
    """What the sidecar of one sample holds, as plain JSON values.

    Args:
        config: the resolved config; its `seed`, `image_size`, `num_frames` and `fps` are repeated on top.
        prompt, prompt_index, sample_index: with the config's seed they fix the noise.
        save_fps: frame rate of the file (`fps` is the one that the model was told).
        checkpoint: what `describe_checkpoint` says.
        made_with: what `opensora.training.run.environment` says: versions, commit, command.
        inputs: what `opensora.inference.manifest_inputs.inputs_of` says: the other files that it is made from; None: not known.
    """
    record = {
        "prompt": prompt,
        "prompt_index": prompt_index,
        "sample_index": sample_index,
        "seed": config["seed"],
        "image_size": config["image_size"],
        "num_frames": config["num_frames"],
        "fps": config["fps"],
        "save_fps": str(exact_fps(save_fps)),
        "checkpoint": checkpoint,
        "config": dict(config),
        **made_with,
        **({} if inputs is None else {"inputs": inputs}),
    }
    return json.loads(json.dumps(record))  # tuples become lists: what a reader of the file gets


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
        videos: B videos [3, T, H, W] in [-1, 1].
        paths_without_ext: where each goes.
        records: what `sidecar` says of each; `batch`, `place`, `hardware` and `frames` (a hash) are added.
        device: what they were made on.
        save_format: of the videos; a single frame is a PNG.

    Raises:
        UserError: a file cannot be written.
    """
    batch = [_place_in_batch(record) for record in records]
    written = []
    for place, (video, path, record) in enumerate(zip(videos, paths_without_ext, records, strict=True)):
        made = {"batch": batch, "place": place, "hardware": hardware(device), "frames": frames_hash(video)}
        try:
            write_sidecar({**record, **made}, path)  # first: a video without one is taken for another program's
            written.append(save_sample(video, path, Fraction(record["save_fps"]), save_format=save_format))
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
        record = json.loads(Path(path).read_text(encoding="utf-8"))
        _settings(record)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}). Name the .json file beside a sample.") from error
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{path} is no sidecar of a sample: name the .json file beside a sample.") from None
    return record


def finished(folder: str | Path) -> Iterator[Finished]:
    """The complete samples of a folder that have a sidecar, by name."""
    for path in sorted(Path(folder).glob("*.json")):
        stem = path.with_name(path.name.removesuffix(".json"))
        files = _files_of(stem)
        if files:
            try:
                yield Finished(files[0], read_sidecar(path))
            except UserError:
                continue  # a JSON file of something else, such as the scores of an evaluation


def already_made(path_without_ext: str | Path, record: Mapping[str, Any]) -> bool:
    """True when a finished sample of that name was made with the settings of `record`, False when there is none.

    Versions and commit are not compared; weights' paths and times of change are, and what is in reference files. A field of the
    config that the sidecar does not know, being older, counts as having its default; files of which it does not know what
    was in them count as unchanged, and that is told.

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
            f"{taken[0]} exists, but {path.name} beside it does not tell how it was made. "
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
    """The weights that a config names: path, time of change (UTC), and training step and commit where they are known.

    The time tells a checkpoint from a later one of the same name.
    """
    if path is None:
        return None
    place = Path(path).expanduser()
    files = [file for file in [place, *place.rglob("*")] if file.is_file()]
    changed = max((file.stat().st_mtime for file in files), default=None)
    manifest = json.loads((place / MANIFEST).read_text()) if (place / MANIFEST).is_file() else {}
    return {
        "path": str(path),
        "changed": None
        if changed is None
        else datetime.fromtimestamp(changed, timezone.utc).isoformat(timespec="seconds"),
        "step": manifest.get("step"),
        "git_commit": manifest.get("git_commit"),
    }


def hardware(device: torch.device | str) -> dict[str, Any]:
    """What bits depend on besides weights and versions: the device, and on a CPU how many threads share a sum."""
    if torch.device(device).type == "cuda":
        return {"device": torch.cuda.get_device_name(device), "threads": None}
    return {"device": platform.machine(), "threads": torch.get_num_threads()}


def frames_hash(video: Tensor) -> str:
    """A hash of the pixels of `video [3, T, H, W]` as they are handed to the encoder."""
    frames = to_uint8(video)
    return hashlib.blake2b(str(frames.shape).encode() + frames.tobytes(), digest_size=16).hexdigest()


def _place_in_batch(record: Mapping[str, Any]) -> dict[str, Any]:
    """What makes one sample of a batch another than its neighbours."""
    top = {key: record[key] for key in ("prompt", "prompt_index", "sample_index")}
    return top | {key: record["config"].get(key) for key in OF_A_BATCH}


def _files_of(path_without_ext: str | Path) -> list[Path]:
    return [path for ext in EXTENSIONS if (path := with_extension(path_without_ext, ext)).exists()]


def _settings(record: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a sidecar that decide what its sample looks like, the config's under their own names."""
    top = {key: value for key, value in record.items() if key in OF_A_SAMPLE}
    config = {key: value for key, value in (_defaults() | record["config"]).items() if key not in NOT_OF_A_SAMPLE}
    return config | top


@cache
def _defaults() -> dict[str, Any]:
    """The config's defaults, as JSON gives them back."""
    missing, values = dataclasses.MISSING, {}
    for field in dataclasses.fields(InferenceConfig):
        if field.default is not missing:
            values[field.name] = field.default
        elif field.default_factory is not missing:
            values[field.name] = field.default_factory()
    return json.loads(json.dumps(values))
