"""Detecting and cutting as jobs on tables (`tools.scoring.job`): resumable row by row, on many processes and machines."""

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.scene_cut.cutting import cut_video
from tools.scene_cut.detectors import find_cuts, resolve, scenes_of
from tools.scene_cut.frames import Footage
from tools.scene_cut.pieces import Rules, from_timestamp, to_timestamp
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
        cells = dict(zip(paths, needed["timestamp"], strict=True))

        def cut(path: Path) -> Row:
            footage = Footage(path)
            scenes = from_timestamp(str(cells[path] or ""), footage.times())
            clips, lost = cut_video(footage, scenes, self.rules, Path(self.folder), stem_of(path))
            return {"clips": [clip._asdict() for clip in clips], "lost": [part._asdict() for part in lost]}

        return each_file(paths, self.columns, cut)


def stem_of(path: Path) -> str:
    """The name of a video's clips: its own, and a hash of its place, since videos in two folders may share a name."""
    return f"{path.stem}-{hashlib.blake2b(str(path).encode(), digest_size=4).hexdigest()}"


def clips_of(row: Mapping[str, Any]) -> Iterator[Row]:
    """The rows of a video's clips: the clip's own columns, then what was known of the video."""
    inherited = {name: value for name, value in row.items() if name not in OF_THE_CLIP}
    for clip in row["clips"] or ():
        size = {"aspect_ratio": clip["height"] / clip["width"], "resolution": clip["height"] * clip["width"]}
        place = {"id": Path(clip["path"]).stem, "source": row["path"]}
        yield {**inherited, **clip, **size, **place, "status": "ok"}


def lost_of(row: Mapping[str, Any]) -> Iterator[Row]:
    """A row for each part of a video that became no clip, with the reason."""
    for part in row["lost"] or ():
        yield {"path": row["path"], "source": row["path"], **part}


def rules_of(settings: Mapping[str, Any]) -> Rules:
    """Rules from a dict of their fields."""
    return Rules(**{name.name: settings[name.name] for name in dataclasses.fields(Rules) if name.name in settings})
