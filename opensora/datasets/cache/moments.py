"""Writing the VAE's moments of a table: encoded once, by as many processes as there are.

Moments (mean and log variance), not latents, are kept, so that training still draws from the posterior. Two forms:

    CACHE/clips      all frames of each clip. For VAEs that encode frame by frame and transforms without chance: any window
                     of a clip's frames is then a window of its moments.
    CACHE/samples    what the dataset gives in epochs 0 ... E - 1. For any VAE and any transform; epoch E repeats epoch 0.

fp16 keeps 11 bits of each value: a relative error of at most 2^-11 = 0.05 % where |value| >= 6e-5, and at most 3e-8 below.
"""

import hashlib
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from opensora.acceleration.distributed import World, barrier, broadcast_from_rank0, mean_over_ranks
from opensora.datasets.cache.records import SHARD_BYTES, RecordReader, RecordWriter, consolidate, prepare_folder
from opensora.datasets.datasets import VideoTextDataset
from opensora.datasets.sampler import SampleKey
from opensora.datasets.table.table import Table
from opensora.datasets.transforms import get_transform
from opensora.datasets.video.files import DEFAULT, BadFile, Decoding, TooFewFrames, is_image
from opensora.datasets.video.read_video import probe, read_frames
from opensora.utils.dtype import to_torch_dtype
from opensora.utils.errors import UserError
from opensora.utils.logging import progress_bar

T = TypeVar("T")
CLIPS, SAMPLES = "clips", "samples"
CLIP_FEATURES = {
    "moments": "tensor",  # [2C, T, h, w]
    "source": "string",  # `source_hash` of the clip
    "num_frames": "int64",  # as `probe` counts them; as many as could be decoded are stored
    "fps": "float64",
}
SAMPLE_FEATURES = {"moments": "tensor", "source": "string", "num_frames": "int64", "size": ["int64"], "fps": "float64"}
PART = 64 * 1024  # bytes of a source file that are hashed at its head, middle and tail
REMEDY = "Write it with `python -m tools.cache_features TRAIN_CONFIG --cache-dir {}`."
DTYPES = ("fp16", "fp32")


class Counts(NamedTuple):
    """Records of the whole job: made now, and there already."""

    written: int
    present: int


class Job(NamedTuple):
    """How to write: where, by whom, and in what dtype."""

    cache_dir: Path
    world: World
    dtype: str = "fp16"  # of moments: fp16 or fp32
    shard_bytes: int = SHARD_BYTES
    threads: int = 0  # that read samples ahead


class Choices(NamedTuple):
    """What decides the pixels of a `VideoTextDataset` next to window and transform; its defaults."""

    use_image_transform: bool = False
    decode: Decoding = DEFAULT
    target_fps: float | None = None


DEFAULTS = Choices()


def cache_settings(
    vae: str, image_size: Sequence[int], transform_name: str, dtype: str, choices: Choices = DEFAULTS, **window: int
) -> dict[str, Any]:
    """What all records of CACHE/clips depend on; those of CACHE/samples also on `num_frames`, `frame_interval` and `seed`.

    Choices that are the default are left out: caches that were written before there was a choice have none of these.
    """
    decode = {name: value for name, value in asdict(choices.decode).items() if value != getattr(DEFAULT, name)}
    chosen = {name: value for name, value in {**choices._asdict(), "decode": decode}.items() if value}
    size = [int(n) for n in image_size]
    return {"vae": vae, "image_size": size, "transform_name": transform_name, "dtype": dtype, **chosen, **window}


@torch.inference_mode()
def write_clips(
    table: Table,
    vae: Any,
    job: Job,
    *,
    image_size: tuple[int, int],
    transform_name: str = "center",
    choices: Choices = DEFAULTS,
    chunk: int = 32,
) -> Counts:
    """Encode all frames of all clips, decoding and encoding `chunk` of them at a time; see `write_missing`. A `UserError` where VAE,
    transform or target_fps cannot be cached so, or the folder holds a cache with other settings."""
    other_way = "cache the samples of some epochs instead, with --epochs N and dataset.content='samples'."
    if vae.latent_size((5, *image_size))[0] != 5:
        raise UserError(
            f"{type(vae).__name__} compresses time, so windows of its latents are no latents of windows; {other_way}"
        )
    if transform_name in ("random_crop", "none"):
        raise UserError(
            f"transform_name={transform_name!r} gives no fixed crop of image_size to cache; use 'center', or {other_way}"
        )
    refuse_rate_of_clips(choices.target_fps)
    settings = cache_settings(vae.fingerprint(), image_size, transform_name, job.dtype, choices)
    video_transform = get_transform(transform_name, image_size)
    image_transform = get_transform("adm_center" if choices.use_image_transform else transform_name, image_size)
    rows: dict[str, int] = {}
    for row in range(len(table)):
        rows.setdefault(table.name(row), row)  # a clip with several captions is encoded once

    def encode(name: str) -> dict[str, Any]:
        path = table.path(rows[name])
        transform = image_transform if is_image(path) else video_transform
        parts: list[Tensor] = []
        try:
            info = probe(path)
            start, end = 0, info.num_frames
            while start < end:
                try:
                    frames = read_frames(path, start, min(chunk, end - start), decoding=choices.decode)
                except TooFewFrames as error:
                    end = error.available
                    continue
                x = transform(frames)[None].to(job.world.device)  # [1, 3, n, H, W]
                parts.append(stored(vae.moments(x)[0], job.dtype, path))
                start += len(frames)
        except UserError as error:
            raise UserError(f"{table.where(rows[name])}: {error}") from error
        return {"moments": torch.cat(parts, dim=1), "num_frames": info.num_frames, "fps": info.fps}

    sources = {name: table.path(row) for name, row in rows.items()}
    return write_missing(job, CLIPS, CLIP_FEATURES, settings, encode, sources)


@torch.inference_mode()
def write_samples(dataset: VideoTextDataset, vae: Any, job: Job, settings: dict[str, Any], epochs: int) -> Counts:
    """Encode the samples of the first `epochs` epochs of a dataset of pixels; `settings`: see `cache_settings`."""
    table = dataset.table
    occurrence = occurrences_of_rows(table)
    samples = {}
    for index in range(len(dataset)):
        row = int(dataset.rows[index])
        for epoch in range(epochs):
            samples[sample_key(table.name(row), occurrence[row], epoch)] = (table.path(row), SampleKey(epoch, index))

    def encode(key: str) -> dict[str, Any]:
        path, sample = samples[key]
        item = dataset[sample]
        moments = vae.moments(item["video"][None].to(job.world.device))[0]  # of [1, 3, T, H, W]
        record = {"moments": stored(moments, job.dtype, path), "num_frames": probe(path).num_frames}
        return {**record, "size": list(item["video"].shape[1:]), "fps": float(item["fps"])}

    sources = {key: path for key, (path, _) in samples.items()}
    return write_missing(job, SAMPLES, SAMPLE_FEATURES, settings, encode, sources)


def sample_key(name: str, occurrence: int, epoch: int) -> str:
    """The key of a row's sample: its path in the table, how many rows above it have the same one, and the epoch."""
    return f"{name}\n{occurrence}\n{epoch}"


def occurrences_of_rows(table: Table) -> np.ndarray:
    """[N] int64, how many rows above each have the same path."""
    seen: Counter[str] = Counter()
    occurrence = np.empty(len(table), np.int64)
    for row, name in enumerate(table.rows["path"]):
        occurrence[row] = seen[name]
        seen[name] += 1
    return occurrence


class Part(NamedTuple):
    """A folder of records in a cache."""

    folder: str
    features: Mapping[str, Any]
    settings: Mapping[str, Any]  # that all of its records depend on


def write_missing(
    job: Job,
    folder: str,
    features: dict[str, Any],
    settings: dict[str, Any],
    encode: Callable[[str], dict[str, Any]],
    sources: Mapping[str, Path | str | None],
) -> Counts:
    """`write_parts` of a single part."""
    part = Part(folder, features, settings)
    return write_parts(job, [part], lambda key, _lacking, _loaded: {folder: encode(key)}, sources)[folder]


def write_parts(
    job: Job,
    parts: Sequence[Part],
    encode: Callable[[str, Collection[str], Any], Mapping[str, Mapping[str, Any]]],
    sources: Mapping[str, Path | str | None],
    *,
    load: Callable[[str], Any] = lambda _key: None,
    on_bad_file: Callable[[str, UserError], Mapping[str, Mapping[str, Any]]] | None = None,
) -> dict[str, Counts]:
    """Write the records of CACHE/part that are missing or out of date. Every process of `job.world` calls it, and writes
    those of its own keys; an interrupted call continues where it stopped.

    Args:
        encode: Part -> the fields of the record with a key, of at least those parts that lack it, from what `load` gave.
        sources: Key -> what its record is made of, a file or a hash, kept in its field `source`; None: the key says it all.
        load: What the records with a key are made from; `job.threads` read ahead.
        on_bad_file: What to store instead where a file cannot be read; its field `problem` says why, and it is tried again
            by the next call. None: the error is raised.
    """
    remedy = REMEDY.format("ANOTHER_FOLDER")
    paths = {part.folder: job.cache_dir / part.folder for part in parts}

    def prepare() -> None:
        for part in parts:
            prepare_folder(paths[part.folder], part.features, part.settings, remedy)
            consolidate(paths[part.folder])  # also what an interrupted call had finished

    broadcast_from_rank0(prepare)
    options: Any = {"shard_bytes": job.shard_bytes, "remedy": remedy}
    writers = {p.folder: RecordWriter(paths[p.folder], p.features, settings=p.settings, **options) for p in parts}
    readers = {part.folder: RecordReader(paths[part.folder], remedy=remedy) for part in parts}
    written = dict.fromkeys(paths, 0)

    def is_there(reader: RecordReader, key: str, source: str | None) -> bool:
        if key not in reader or source is None:
            return key in reader
        found = reader.read(key, ("source", "problem"))
        return found["source"] == source and not found.get("problem")

    def look(key: str) -> tuple[str | None, list[str], Any]:
        source = sources[key]
        source = _readable_hash(source) if isinstance(source, Path) else source
        lacking = [name for name, reader in readers.items() if not is_there(reader, key, source)]
        return source, lacking, load(key) if lacking else None

    try:
        mine = list(sources)[job.world.rank :: job.world.size]
        what = " and ".join(name.partition("-")[0] for name in paths)
        ready = _read_ahead(look, mine, job.threads)
        bar = {"total": len(mine), "desc": f"caching {what}", "unit": "record", "disable": not job.world.is_main}
        for key, looked in progress_bar(ready, **bar):
            try:
                source, lacking, loaded = looked()
                made = encode(key, lacking, loaded) if lacking else {}
            except BadFile as error:
                if on_bad_file is None:
                    raise
                file, made = sources[key], on_bad_file(key, error)
                is_gone = isinstance(file, Path) and not file.exists()  # what was made of it stays
                lacking = [name for name, reader in readers.items() if not (is_gone and key in reader)]
                source = "" if isinstance(file, Path) else file
            for name in lacking:
                if name in made:
                    writers[name].write({**made[name], **({} if source is None else {"source": source})}, key)
                    written[name] += 1
    finally:
        for writer in writers.values():
            writer.flush()  # also when this process is stopped by an error
    barrier()
    broadcast_from_rank0(lambda: [consolidate(path) for path in paths.values()])
    total = mean_over_ranks(torch.tensor([float(n) for n in written.values()], device=job.world.device))
    totals = [round(float(n) * job.world.size) for n in total]
    return {name: Counts(n, len(sources) - n) for name, n in zip(paths, totals, strict=True)}


def _read_ahead(work: Callable[[str], T], keys: Sequence[str], threads: int) -> Iterator[tuple[str, Callable[[], T]]]:
    """Each key with a function that gives `work(key)`, or raises what it raised; so many threads have begun with the next ones."""
    if not threads:
        yield from ((key, partial(work, key)) for key in keys)
        return
    pool = ThreadPoolExecutor(threads)
    try:
        begun: deque[tuple[str, Callable[[], T]]] = deque()
        for key in keys:
            begun.append((key, pool.submit(work, key).result))
            if len(begun) > threads:
                yield begun.popleft()
        yield from begun
    finally:
        pool.shutdown(cancel_futures=True)


def _readable_hash(path: Path) -> str:
    try:
        return source_hash(path)
    except OSError as error:
        raise BadFile(f"{path} cannot be read: {error.strerror}.") from error


def source_hash(path: Path) -> str:
    """Size and a hash of head, middle and tail: distinguishes files without reading long ones in full, whatever their dates."""
    size = path.stat().st_size
    digest = hashlib.blake2b(digest_size=8)
    with path.open("rb") as file:
        for offset in sorted({0, max(0, (size - PART) // 2), max(0, size - PART)}):
            file.seek(offset)
            digest.update(file.read(PART))
    return f"{size}-{digest.hexdigest()}"


def refuse_rate_of_clips(target_fps: float | None) -> None:
    """Raise a `UserError` where whole clips are wanted at a rate: which frames these are depends on where a window begins."""
    if target_fps is not None:
        raise UserError(
            f"target_fps={target_fps:g} has no place in a cache of whole clips, whose windows are every frame_interval-th "
            "frame; cache the samples of some epochs instead, with --epochs N and dataset.content='samples'."
        )


def stored(features: Tensor, dtype: str, path: Path, what: str = "the VAE's moments") -> Tensor:
    """Features in the dtype of the cache; a `UserError` where they are not finite in it."""
    converted = features.to(to_torch_dtype(dtype)).cpu()
    if not converted.isfinite().all():
        raise UserError(f"{what} of {path} are not finite in {dtype}; does this encoder run in this dtype?")
    return converted
