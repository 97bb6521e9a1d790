"""Clips as the VAE's moments, encoded once: one file for each clip, and a manifest that says what they belong to.

Moments, not latents, are kept, so that training still draws from the posterior. Only for VAEs that encode frame by frame:
with them, any window of a clip's frames is a window of its moments. What does not fit the manifest is refused.

    CACHE/manifest.json                 {"format", "settings": {"vae", ...}, "clips": {path in the table: entry}}
    CACHE/<stem>-<hash>.safetensors     moments [2C, T, h, w] fp16; its metadata repeats settings and entry
"""

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from opensora.datasets.datasets import ClipRows, Item, describe, last_start, wrong_length
from opensora.datasets.read_video import IMAGE_FPS, TooFewFrames, is_image, probe, read_frames
from opensora.datasets.sampler import SampleKey
from opensora.datasets.table import MAX_CHECKED_FILES, Table, complain_about_rows, read_table
from opensora.datasets.transforms import Transform, get_transform, is_random
from opensora.registry import DATASETS
from opensora.utils.errors import UserError

logger = logging.getLogger(__name__)

FORMAT = 1
MANIFEST = "manifest.json"
PART = 64 * 1024  # bytes of a source file that are hashed at its head, middle and tail
REBUILD = "Write it with `python -m tools.cache_features TRAIN_CONFIG --cache-dir {}`."


class Encoder(Protocol):
    """What the cache asks of a VAE."""

    def moments(self, x: Tensor) -> Tensor: ...

    def latent_size(self, size: tuple[int, int, int]) -> tuple[int, int, int]: ...

    def fingerprint(self) -> str: ...


class Entry(NamedTuple):
    """A cached clip."""

    file: str
    source: str  # `source_hash` of the clip
    num_frames: int  # as `probe` counts them
    stored: int  # as many as could be decoded
    fps: float


@DATASETS.register_module()
class CachedVideoTextDataset:
    """`VideoTextDataset` with `moments` [2C, T, h, w] float32 in place of `video`; the choices are the same.

    Args:
        data_path: As for `VideoTextDataset`, like everything not named here.
        cache_dir: Folder that `tools.cache_features` wrote.
        image_size: Must be the cache's, like `transform_name`.
        vae_fingerprint: Of the VAE in use: the cache must be its own. None: it is not checked.
    """

    def __init__(  # noqa: PLR0913
        self,
        data_path: str,
        cache_dir: str,
        num_frames: int = 16,
        frame_interval: int = 1,
        image_size: tuple[int, int] = (256, 256),
        root: str | None = None,
        transform_name: str = "center",
        text_columns: Sequence[str] = ("text",),
        seed: int = 42,
        short_clips: Literal["error", "drop"] = "error",
        vae_fingerprint: str | None = None,
    ) -> None:
        # the clips themselves may be elsewhere by now
        self.table = read_table(data_path, root, text_columns, check_files=False)
        self.cache_dir = Path(cache_dir)
        self.image_size = (int(image_size[0]), int(image_size[1]))
        self.settings, self.entries = read_manifest(self.cache_dir)
        expected = make_settings(vae_fingerprint or self.settings["vae"], self.image_size, transform_name)
        refuse_other_settings(self.cache_dir, self.settings, expected)
        self._refuse_missing()
        self.clips = ClipRows(self.table, num_frames, frame_interval, seed, short_clips, count=self._count)
        self._verified: set[int] = set()

    def __len__(self) -> int:
        return len(self.clips)

    def __getitem__(self, key: SampleKey) -> Item:
        row = self.clips.row(key.index)
        clips, entry, path, stated = self.clips, self._entry(row), self.table.path(row), int(self.table.num_frames[row])
        if stated > entry.stored:
            raise UserError(f"{self.table.where(row)}: {wrong_length(stated, entry.stored, path)}")
        self._refuse_changed(row, entry, path)
        choice = clips.choose(key.epoch, row, stated or entry.num_frames)
        start = choice.start
        if start + clips.needed > entry.stored:
            start = last_start(entry.stored, clips.needed, clips.too_short(row, entry.stored))
        moments = self._read(entry, start, clips.needed)[:, :: clips.frame_interval].float()
        fps = IMAGE_FPS if is_image(path) else entry.fps / clips.frame_interval
        return {"moments": moments, **describe(row, path, choice.caption, (moments.shape[1], *self.image_size), fps)}

    def fingerprint(self) -> str:
        """A hash of everything that decides the samples."""
        parts = type(self).__name__, self.table.fingerprint(), self.clips.settings(), sorted(self.settings.items())
        return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()

    def _entry(self, row: int) -> Entry:
        return self.entries[self.table.name(row)]

    def _count(self, row: int) -> int:
        return self._entry(row).num_frames

    def _read(self, entry: Entry, start: int, length: int) -> Tensor:
        path = self.cache_dir / entry.file
        try:
            with safe_open(path, framework="pt") as file:
                return file.get_slice("moments")[:, start : start + length]  # [2C, length, h, w] fp16
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path} cannot be read ({error}); delete it. {_rebuild(self.cache_dir)}") from error

    def _refuse_missing(self) -> None:
        names = self.table.rows["path"].tolist()
        missing = [row for row, name in enumerate(names) if name not in self.entries]
        if not missing and len(names) <= MAX_CHECKED_FILES:
            missing = [row for row in range(len(names)) if not (self.cache_dir / self._entry(row).file).is_file()]
        if missing:
            what = f"are not in the latent cache {self.cache_dir}"
            raise complain_about_rows(self.table, missing, what, _rebuild(self.cache_dir))
        if len(names) <= MAX_CHECKED_FILES:
            sizes = [_size(self.table.path(row)) for row in range(len(names))]
            known = [int(self._entry(row).source.partition("-")[0]) for row in range(len(names))]
            if changed := [
                i for i, (size, old) in enumerate(zip(sizes, known, strict=True)) if size not in (None, old)
            ]:
                what = f"were changed after the latent cache {self.cache_dir} was written"
                raise complain_about_rows(self.table, changed, what, _rebuild(self.cache_dir))

    def _refuse_changed(self, row: int, entry: Entry, path: Path) -> None:
        """Compare contents, once in each process; sizes were compared at the start."""
        if row in self._verified:
            return
        if path.is_file() and source_hash(path) != entry.source:
            raise UserError(
                f"{self.table.where(row)}: {path} was changed after the latent cache {self.cache_dir} was written. "
                f"{_rebuild(self.cache_dir)}"
            )
        self._verified.add(row)


# ---------------------------------------------------------------------------------------------------- manifest


def make_settings(vae_fingerprint: str, image_size: tuple[int, int], transform_name: str) -> dict[str, Any]:
    """What all clips of a cache share."""
    height, width = image_size
    return {"vae": vae_fingerprint, "image_size": [height, width], "transform_name": transform_name, "dtype": "fp16"}


def read_manifest(cache_dir: Path) -> tuple[dict[str, Any], dict[str, Entry]]:
    """Settings of a cache, and its clips by their path in the table.

    Raises:
        UserError: there is no cache, or it is of another version.
    """
    path = cache_dir / MANIFEST
    if not path.is_file():
        raise UserError(f"there is no latent cache in {cache_dir} (no {MANIFEST}). {_rebuild(cache_dir)}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise UserError(f"{path} has format {content['format']}, not {FORMAT}. {_rebuild('ANOTHER_FOLDER')}")
        return content["settings"], {name: Entry(**entry) for name, entry in content["clips"].items()}
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise UserError(f"{path} is no manifest of a latent cache: {error!r}. {_rebuild('ANOTHER_FOLDER')}") from error


def refuse_other_settings(cache_dir: Path, found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Raise a `UserError` that names what differs."""
    if wrong := [
        f"{key} is {found.get(key)}, not {value}" for key, value in expected.items() if found.get(key) != value
    ]:
        raise UserError(
            f"the latent cache {cache_dir} was made with other settings: {'; '.join(wrong)}. {_rebuild('ANOTHER_FOLDER')}"
        )


def source_hash(path: Path) -> str:
    """Size and a hash of head, middle and tail: tells files apart without reading long ones, whatever their dates."""
    size = path.stat().st_size
    digest = hashlib.blake2b(digest_size=8)
    with path.open("rb") as file:
        for offset in sorted({0, max(0, (size - PART) // 2), max(0, size - PART)}):
            file.seek(offset)
            digest.update(file.read(PART))
    return f"{size}-{digest.hexdigest()}"


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def _rebuild(cache_dir: Path | str) -> str:
    return REBUILD.format(cache_dir)


# ----------------------------------------------------------------------------------------------------- writing


@torch.inference_mode()
def write_cache(
    table: Table,
    cache_dir: Path,
    vae: Encoder,
    *,
    image_size: tuple[int, int],
    transform_name: str = "center",
    device: torch.device | str = "cpu",
    chunk: int = 32,
) -> tuple[int, int]:
    """Encode all frames of all clips; returns how many clips were encoded and how many were there already.

    An interrupted call goes on where it stopped. One process at a time for each folder.

    Args:
        chunk: Frames that are decoded and encoded at a time.

    Raises:
        UserError: VAE or transform cannot be cached, or the folder holds a cache with other settings.
    """
    _refuse_uncacheable(vae, image_size, transform_name)
    settings = make_settings(vae.fingerprint(), image_size, transform_name)
    cache_dir.mkdir(parents=True, exist_ok=True)
    entries: dict[str, Entry] = {}
    if (cache_dir / MANIFEST).exists():
        found, entries = read_manifest(cache_dir)
        refuse_other_settings(cache_dir, found, settings)
    _write_manifest(cache_dir, settings, entries)  # claims the folder
    transform = get_transform(transform_name, image_size)
    rows: dict[str, int] = {}
    for row in range(len(table)):
        rows.setdefault(table.name(row), row)  # a clip with several captions is encoded once
    encoded = 0
    for name, row in tqdm(rows.items(), desc="encode", unit="clip"):
        path, file = table.path(row), cache_dir / cache_file(name)
        source = source_hash(path)
        entry = _finished(file, settings)
        if entry is None or entry.source != source:
            try:
                moments, num_frames, fps = _encode(path, vae, transform, device, chunk)
            except UserError as error:
                raise UserError(f"{table.where(row)}: {error}") from error
            entry = Entry(file.name, source, num_frames, moments.shape[1], fps)
            _save(file, moments, settings, entry)
            encoded += 1
        entries[name] = entry
    _write_manifest(cache_dir, settings, entries)
    return encoded, len(rows) - encoded


def cache_file(name: str) -> str:
    """The file for a path of the table: readable, and different for different paths."""
    stem = "".join(letter if letter.isalnum() or letter in "._-" else "_" for letter in Path(name).stem)
    return f"{stem[:60]}-{hashlib.blake2b(name.encode(), digest_size=8).hexdigest()}.safetensors"


def _refuse_uncacheable(vae: Encoder, image_size: tuple[int, int], transform_name: str) -> None:
    if vae.latent_size((5, *image_size))[0] != 5:
        raise UserError(
            f"{type(vae).__name__} compresses time, so windows of its latents are no latents of windows; "
            "train on pixels with VideoTextDataset."
        )
    if is_random(transform_name) or transform_name == "none":
        raise UserError(
            f"transform_name={transform_name!r} gives no fixed crop of image_size to cache; use 'center', or train on "
            "pixels with VideoTextDataset."
        )


def _encode(
    path: Path, vae: Encoder, transform: Transform, device: torch.device | str, chunk: int
) -> tuple[Tensor, int, float]:
    """All frames of a clip: moments [2C, T, h, w] fp16, the frames that `probe` counts, and the rate."""
    info = probe(path)
    parts: list[Tensor] = []
    start, end = 0, info.num_frames
    while start < end:
        try:
            frames = read_frames(path, start, min(chunk, end - start))
        except TooFewFrames as error:
            end = error.available
            continue
        x = transform(frames)[None].to(device)  # [1, 3, n, H, W]
        parts.append(vae.moments(x)[0].half().cpu())
        start += len(frames)
    moments = torch.cat(parts, dim=1)
    if not moments.isfinite().all():
        raise UserError(f"the VAE's moments of {path} are not finite in fp16; is it a VAE that runs in this dtype?")
    return moments, info.num_frames, info.fps


def _save(file: Path, moments: Tensor, settings: Mapping[str, Any], entry: Entry) -> None:
    metadata = {"settings": json.dumps(settings), "entry": json.dumps(entry._asdict())}
    temporary = file.with_suffix(".tmp")
    save_file({"moments": moments.contiguous()}, temporary, metadata=metadata)
    temporary.replace(file)


def _finished(file: Path, settings: Mapping[str, Any]) -> Entry | None:
    """What an earlier call wrote, if it is whole and belongs to these settings."""
    if not file.is_file():
        return None
    try:
        with safe_open(file, framework="pt") as opened:
            metadata = opened.metadata() or {}
    except SafetensorError:
        return None
    if metadata.get("settings") != json.dumps(settings) or "entry" not in metadata:
        return None
    return Entry(**json.loads(metadata["entry"]))


def _write_manifest(cache_dir: Path, settings: Mapping[str, Any], entries: Mapping[str, Entry]) -> None:
    clips = {name: entry._asdict() for name, entry in entries.items()}
    temporary = cache_dir / f"{MANIFEST}.tmp"
    temporary.write_text(
        json.dumps({"format": FORMAT, "settings": settings, "clips": clips}, indent=1), encoding="utf-8"
    )
    temporary.replace(cache_dir / MANIFEST)
