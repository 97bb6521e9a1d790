"""Detecting and cutting as jobs on tables (`tools.scoring.job`): resumable row by row, on many processes and machines."""

import dataclasses
import fcntl
import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tools.footage.rows import shortened
from tools.scene_cut.cutting import cut_video
from tools.scene_cut.detectors import find_cuts, resolve, scenes_of
from tools.scene_cut.frames import Footage
from tools.scene_cut.rules import Rules, from_timestamp, to_timestamp
from tools.scoring.frames import Row, each_file

OF_THE_CLIP = ("id", "relpath", "filesize", "digest", "timestamp", "num_scenes", "clips", "lost", "status")
"""Columns of a video that are not true of its clips."""


@dataclass(frozen=True)
class SceneDetect:
    """Where scenes begin and end; settings as in `detectors.find_cuts`."""

    detector: str = "auto"
    threshold: float | None = None
    columns: tuple[str, ...] = field(default=("timestamp", "num_scenes"), init=False)
    needs: tuple[str, ...] = field(default=(), init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "detector", resolve(self.detector))  # "auto" must not mean two things in one table

    def score(self, paths: list[Path], **needed: list[Any]) -> list[Row]:
        """See `Scorer.score`: `timestamp` is JSON, [[start, end], ...] in seconds."""

        def detect(path: Path) -> Row:
            footage = Footage(path)
            scenes = scenes_of(find_cuts(footage, self.detector, self.threshold), footage.num_frames)
            return {"timestamp": to_timestamp(scenes, footage.times()), "num_scenes": len(scenes)}

        return each_file(paths, self.columns, detect)


@dataclass(frozen=True)
class Cut:
    """Cuts scenes out. `clips` are lists of `Clip` as dicts, `lost` lists of `Dropped`."""

    folder: str
    rules: Rules = field(default_factory=Rules)
    columns: tuple[str, ...] = field(default=("clips", "lost"), init=False)
    needs: tuple[str, ...] = field(default=("timestamp",), init=False)

    def score(self, paths: list[Path], **needed: list[Any]) -> list[Row]:
        """See `Scorer.score`."""
        cells = [str(cell or "") for cell in needed["timestamp"]]
        rows = zip(paths, cells, strict=True)  # one video may be in several rows, so they go by index, not by path
        return [row for path, cell in rows for row in each_file([path], self.columns, partial(self._cut, cell))]

    def _cut(self, cell: str, path: Path) -> Row:
        footage = Footage(path)
        scenes = from_timestamp(cell, footage.times())
        stem = stem_of(path, cell, self.rules)
        with _alone(Path(self.folder), stem):
            clips, lost = cut_video(footage, scenes, self.rules, Path(self.folder), stem)
        return {"clips": [clip._asdict() for clip in clips], "lost": [part._asdict() for part in lost]}


def stem_of(path: Path, cell: str, rules: Rules) -> str:
    """The name of a row's clips: the video's own, and a hash of what makes them, so that no other row has the same.

    Videos in two folders may share a name, a video may have several rows, and a folder may get clips by two rules. A row
    that is cut again gets the same names.
    """
    made_of = "\0".join((str(path.absolute()), cell, repr(rules)))
    return f"{shortened(path.stem)}-{hashlib.blake2b(made_of.encode(), digest_size=8).hexdigest()}"


@contextmanager
def _alone(folder: Path, stem: str) -> Iterator[None]:
    """Rows that are alike (as with two captions of a scene) have one set of clips; only one of them writes it at a time.

    It locks a byte of a file for all, whose offset is the row's: a file for each would stay behind.
    """
    folder.mkdir(parents=True, exist_ok=True)
    offset = int(hashlib.blake2b(stem.encode(), digest_size=7).hexdigest(), 16)  # below 2^63, as offsets have to be
    with (folder / ".lock").open("a") as file:
        fcntl.lockf(file, fcntl.LOCK_EX, 1, offset)
        yield


def clips_of(row: Mapping[str, Any]) -> Iterator[Row]:
    """The rows of a video's clips: the clip's own columns, then what was known of the video."""
    inherited = {name: value for name, value in row.items() if name not in OF_THE_CLIP}
    for clip in row["clips"] or ():
        size = {"aspect_ratio": clip["height"] / clip["width"], "resolution": clip["height"] * clip["width"]}
        origin = {"id": Path(clip["path"]).stem, "source": row["path"]}
        yield {**inherited, **clip, **size, **origin, "status": "ok"}


def lost_of(row: Mapping[str, Any]) -> Iterator[Row]:
    """A row for each part of a video that became no clip, with the reason."""
    for part in row["lost"] or ():
        yield {"path": row["path"], "source": row["path"], **part}


def rules_of(settings: Mapping[str, Any]) -> Rules:
    """Rules from a dict of their fields."""
    return Rules(**{name.name: settings[name.name] for name in dataclasses.fields(Rules) if name.name in settings})
