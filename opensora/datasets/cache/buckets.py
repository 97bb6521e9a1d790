"""Caches for buckets: clips in every size that they may be trained in, for any VAE and any transform.

    CACHE/files             length, size and rate of each file
    CACHE/buckets-HASH      moments of each sample
    CACHE/conditions-HASH   latents of its conditioning frames, for models that read them as channels
    CACHE/images-HASH       CLIP's features of these frames

A sample is a row of the table, a window of its clip, and a bucket's size. Window k is the one that training from videos takes in
epoch k, with its crop; of a clip that has only one, that is stored once. HASH is of the settings that decide a folder's records:
what was made with others stays, and a config that comes back to them finds it.
"""

import csv
import hashlib
import json
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from opensora.datasets.buckets.bucket import NONE, DropReason
from opensora.datasets.cache.moments import Counts, Job, Part, occurrences_of_rows, stored, write_parts
from opensora.datasets.cache.records import METADATA, read_metadata
from opensora.datasets.dataloader import MIN_SAMPLES
from opensora.datasets.datasets import Item
from opensora.datasets.sampler import BucketKey
from opensora.datasets.summary import drop_reasons
from opensora.datasets.table.table import Table, read_table
from opensora.datasets.variable_dataset import VariableVideoTextDataset
from opensora.datasets.video.files import DEFAULT
from opensora.datasets.video.read_video import CLOSE, FrameRule, VideoInfo, probe
from opensora.utils.errors import UserError, first_few

logger = logging.getLogger(__name__)

FILES, BUCKETS, CONDITIONS, IMAGES = "files", "buckets", "conditions", "images"
FILE_FEATURES = {
    "num_frames": "int64", "height": "int64", "width": "int64", "fps": "float64", "source": "string", "problem": "string",
}  # fmt: skip
FEATURES: dict[str, dict[str, Any]] = {
    BUCKETS: {"moments": "tensor", "fps": "float64", "source": "string", "problem": "string"},  # [2C, t, h, w]
    # [K, C, t, h, w] of K masks, and the latent frames that each of them gives, [K, t] bool
    CONDITIONS: {"latents": "tensor", "given": "tensor", "source": "string"},
    IMAGES: {"features": "tensor", "source": "string"},  # [n L, D]
}
NOT_HASHED = ("dtype", "size_multiples")  # of what is the same sample: another is refused, not kept beside it
DROPPED = "dropped.csv"


class Encoder(NamedTuple):
    """What makes the records of a part from a video [1, 3, T, H, W], and the settings that they depend on."""

    encode: Callable[[Tensor], dict[str, Tensor]]
    settings: dict[str, Any]


def sample_settings(dataset: VariableVideoTextDataset) -> dict[str, Any]:
    """What decides the pixels of a sample next to its key and the table."""
    decode = {name: value for name, value in asdict(dataset.decoding).items() if value != getattr(DEFAULT, name)}
    names = ("frame_interval", "target_fps", "seed")
    return {"transforms": list(dataset.transform_names), "decode": decode, **{n: getattr(dataset, n) for n in names}}


def settings_in(cache_dir: Path, part: str) -> dict[Path, dict[str, Any]]:
    """The folders of a part, and the settings of each."""
    paths = sorted(path.parent for path in cache_dir.glob(f"{part}-*/{METADATA}"))
    return {path: read_metadata(path, "Write the cache anew.")["settings"] for path in paths}


def left_out_key(name: str) -> str:
    """The key in CACHE/files of a file that did not exist, so that its rows were left out."""
    return f"{name}\nleft out"


def record_key(dataset: VariableVideoTextDataset, key: BucketKey, occurrence: int) -> str:
    """The key of a sample, whose window is `key.epoch`.

    It is made of what the window depends on, and the size: the path in the table, how many rows above have the same one, the
    window's number, the frames that the clip has, by the table or the file, and frames x height x width.
    """
    frames = int(dataset.num_frames[key.index])
    return f"{dataset.table.name(key.index)}\n{occurrence}\n{key.epoch}\n{frames}\n{'x'.join(map(str, key[2:]))}"


def has_one_window(dataset: VariableVideoTextDataset, row: int, num_frames: int) -> bool:
    """Whether a row gives the same frames and the same crop in every epoch, as far as its length and rate say that."""
    if "random_crop" in dataset.transform_names:
        return False
    if num_frames == 1:
        return True
    rule, frames = FrameRule(num_frames, dataset.frame_interval, dataset.target_fps), int(dataset.num_frames[row])
    if dataset.target_fps is None:
        return frames <= rule.needed
    return (frames - 2) / float(dataset.fps[row]) < rule.span - CLOSE  # not if it began one frame later


def buckets_of_rows(reachable: np.ndarray) -> list[tuple[int, int]]:
    """The pairs of a row and a bucket in [N, n] bucket or NONE."""
    rows, columns = np.nonzero(reachable != NONE)
    return list(zip(rows.tolist(), reachable[rows, columns].tolist(), strict=True))


@torch.inference_mode()
def write_buckets(
    dataset: VariableVideoTextDataset, encoders: Mapping[str, Encoder], job: Job, windows: int = 1
) -> dict[str, Counts]:
    """Encode the samples of a dataset in all buckets that they may be in, whose sizes must be legal by now; see `write_parts`.

    Logs the samples of each bucket, and how many rows are dropped; CACHE/dropped.csv names these with their reasons. A file
    that cannot be read is dropped too, unless the dataset's `bad_files` is "error", and tried again by the next call.

    Args:
        encoders: By part: BUCKETS, and what else is wanted.
        windows: How many of each clip.

    Raises:
        UserError: more clips than `max_bad_share` cannot be read.
    """
    table, occurrence = dataset.table, occurrences_of_rows(dataset.table)
    drops_bad = dataset.bad_files.policy == "substitute"
    problems: dict[str, str] = {}
    done = {FILES: _write_files(table, job)}

    settings = {
        part: {**sample_settings(dataset), **encoder.settings, "dtype": job.dtype} for part, encoder in encoders.items()
    }
    folders = {part: _folder(part, each) for part, each in settings.items()}
    if job.world.is_main:
        for part, each in settings.items():
            _say_what_changed(job.cache_dir, part, each, folders[part])

    samples: dict[str, BucketKey] = {}
    per_bucket: dict[int, list[str]] = {}
    for row, index in buckets_of_rows(dataset.reachable()):
        size = dataset.buckets[index][2:5]
        for window in range(1 if has_one_window(dataset, row, size[0]) else windows):
            sample = BucketKey(window, row, *size)
            samples[key := record_key(dataset, sample, occurrence[row])] = sample
            per_bucket.setdefault(index, []).append(key)

    def encode(key: str, lacking: Collection[str], item: Item) -> dict[str, dict[str, Any]]:
        video, path = item["video"][None].to(job.world.device), table.path(samples[key].index)
        made: dict[str, dict[str, Any]] = {}
        for part in [part for part in encoders if folders[part] in lacking]:
            values = encoders[part].encode(video)
            made[folders[part]] = {
                name: stored(value, job.dtype, path) if value.is_floating_point() else value
                for name, value in values.items()
            }
        if folders[BUCKETS] in made:
            made[folders[BUCKETS]] |= {"fps": float(item["fps"]), "problem": ""}
        return made

    def drop(key: str, error: UserError) -> dict[str, dict[str, Any]]:
        problems[key] = str(error)
        return {folders[BUCKETS]: {"moments": torch.empty(0), "fps": 0.0, "problem": str(error)}}

    parts = [Part(folders[part], FEATURES[part], settings[part]) for part in encoders]
    path_of = cache(table.path)
    sources = {key: path_of(sample.index) for key, sample in samples.items()}
    load, on_bad_file = lambda key: dataset[samples[key]], drop if drops_bad else None
    counts = write_parts(job, parts, encode, sources, load=load, on_bad_file=on_bad_file)
    if dist.is_initialized():
        found: list[Any] = [None] * job.world.size
        dist.all_gather_object(found, problems)
        problems = {key: text for each in found for key, text in each.items()}
    by_row = {samples[key].index: text for key, text in problems.items()}
    if job.world.is_main:
        _report(
            dataset,
            job.cache_dir,
            {i: [key for key in keys if key not in problems] for i, keys in per_bucket.items()},
            by_row,
        )
    least = max(len(table), MIN_SAMPLES)
    if len(by_row) > dataset.bad_files.max_share * least:
        first = next(iter(by_row.values()))
        raise UserError(
            f"{len(by_row)} of {len(table)} clips cannot be read, more than max_bad_share={dataset.bad_files.max_share:g} of {least}; the "
            f"first: {first}\nThe others are cached. Mend the table and run this again, or raise dataset.max_bad_share."
        )
    return done | {part: counts[folders[part]] for part in encoders}


def _write_files(table: Table, job: Job) -> Counts:
    """CACHE/files: what is known of each file, also of those that do not exist."""
    paths = {table.name(row): table.path(row) for row in range(len(table))}
    if table.left_out:
        root = None if table.source.is_dir() else table.folder
        every = read_table(table.source, root, (), check_files=False, max_bad_share=1.0)
        paths |= {left_out_key(name): every.folder / name for name in {*every.rows["path"]} - paths.keys()}
    nothing = {"num_frames": 0, "height": 0, "width": 0, "fps": 0.0}

    def made(_key: str, _lacking: Collection[str], info: VideoInfo) -> dict[str, dict[str, Any]]:
        return {FILES: {**info._asdict(), "problem": ""}}

    def unreadable(_: str, error: UserError) -> dict[str, dict[str, Any]]:
        return {FILES: {**nothing, "problem": str(error)}}

    parts = [Part(FILES, FILE_FEATURES, {})]
    return write_parts(job, parts, made, paths, load=lambda key: probe(paths[key]), on_bad_file=unreadable)[FILES]


def _folder(part: str, settings: Mapping[str, Any]) -> str:
    decides = {name: value for name, value in settings.items() if name not in NOT_HASHED}
    return f"{part}-{hashlib.blake2b(json.dumps(decides, sort_keys=True).encode(), digest_size=4).hexdigest()}"


def _say_what_changed(cache_dir: Path, part: str, settings: Mapping[str, Any], folder: str) -> None:
    others = settings_in(cache_dir, part)
    if cache_dir / folder in others:
        return
    expected = json.loads(json.dumps(settings))
    for path, other in others.items():
        changed = [f"{n} was {other.get(n)}, is {expected[n]}" for n in expected if other.get(n) != expected[n]]
        logger.info(
            "%s: %s: encoded anew in %s; %s stays, for configs of before.", part, "; ".join(changed), folder, path
        )


def _report(
    dataset: VariableVideoTextDataset, cache_dir: Path, kept: Mapping[int, Sequence[str]], bad: Mapping[int, str]
) -> None:
    """Log counts by bucket, and write what is dropped, and why."""
    table = dataset.table
    reasons = drop_reasons(dataset)
    reasons[DropReason.CHANCE] = ("every entry that it could be in has probability 0", "Raise it.")
    in_none, why = (dataset.reachable() == NONE).all(axis=1), dataset.assign(0).drop_reason
    dropped = [
        (int(table.numbers[row]), table.name(row), text.removeprefix(f"{table.where(row)}: "))
        for row, text in bad.items()
    ]
    for row in np.flatnonzero(in_none).tolist():
        dropped.append((int(table.numbers[row]), table.name(row), ". ".join(reasons[DropReason(why[row])])))
    if table.left_out:
        total = len(table) + sum(table.left_out.values())
        unread = sorted(set(range(total)) - set(table.numbers.tolist()))
        dropped += [(row, "", " or ".join(table.left_out)) for row in unread]
    with (cache_dir / DROPPED).open("w", newline="", encoding="utf-8", errors="surrogateescape") as file:
        writer = csv.writer(file)
        writer.writerow(["row", "path", "reason"])
        writer.writerows([row + 1, name, reason] for row, name, reason in sorted(dropped))
    lines = [f"{'bucket':<28} {'clips':>8} {'samples':>8}"]
    for index, keys in sorted(kept.items()):
        clips = len({tuple(key.split("\n")[:2]) for key in keys})
        lines.append(f"{dataset.buckets[index].name:<28} {clips:>8} {len(keys):>8}")
    lines.append(f"{len(dropped)} rows dropped{f' ({cache_dir / DROPPED})' if dropped else ''}")
    lines += first_few([f"  row {row + 1}: {reason}" for row, _, reason in sorted(dropped)])
    logger.info("%s", "\n".join(lines))
