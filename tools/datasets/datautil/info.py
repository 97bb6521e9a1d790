"""Operations that look at the files: what they are, how large, and whether they can be read at all."""

import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from opensora.datasets.video.files import is_image
from opensora.datasets.video.read_video import probe
from opensora.utils.errors import UserError
from tools.datasets.datautil.operations import Result, TableState, keep, operation
from tools.datasets.datautil.parallel import map_rows

GROUP = "look at the files"
OK = "ok"
INFO_COLUMNS = ("num_frames", "height", "width", "aspect_ratio", "resolution", "fps", "status")
MIB = 1024 * 1024


class Measured(NamedTuple):
    """What a file is. Numbers are None where it cannot be read; an image has no fps."""

    num_frames: int | None
    height: int | None
    width: int | None
    fps: float | None
    status: str


def measure(path: Path) -> Measured:
    """Size as displayed, number of frames and rate of one file, or why it cannot be read; raises nothing."""
    try:
        info = probe(path)
    except UserError as error:
        return _broken(str(error))
    # on damaged files decoders raise more than FFmpeg's own errors
    except Exception as error:  # noqa: BLE001
        return _broken(f"{path} cannot be read: {type(error).__name__}: {error}")
    return Measured(info.num_frames, info.height, info.width, None if is_image(path) else info.fps, OK)


def crashed(path: Path) -> Measured:
    """For a file that ended the process that read it."""
    return _broken(f"{path} crashes its decoder")


def _broken(why: str) -> Measured:
    return Measured(None, None, None, None, " ".join(why.split()))


@operation("video-info", "info", group=GROUP, help="the same as --info", nargs=0)
@operation("info", "info", group=GROUP)
def add_info(table: TableState, _: Any) -> Result:
    """add num_frames, height, width, aspect_ratio, resolution, fps and status; broken files stay, with empty numbers"""
    rows = map_rows(measure, table.files(), workers=table.workers, label="reading files", crashed=crashed)
    frames, heights, widths = (
        pd.array([row[i] for row in rows], dtype="Int64")
        for i in range(3)  # num_frames, height, width
    )
    height, width = (array.to_numpy(np.float64, na_value=np.nan) for array in (heights, widths))
    columns = {
        "num_frames": frames,
        "height": heights,
        "width": widths,
        "aspect_ratio": height / width,
        "resolution": heights * widths,
        "fps": np.array([np.nan if row.fps is None else row.fps for row in rows], np.float64),
        "status": np.array([row.status for row in rows], dtype=object),
    }
    broken = [row.status for row in rows if row.status != OK]
    note = f"{len(rows) - len(broken)} files measured, {len(broken)} broken"
    if broken:
        note += f", such as: {broken[0]} (see the column status; --remove-broken drops them)"
    if again := [name for name in INFO_COLUMNS if name in table.frame.columns]:
        note += f"; replaced: {', '.join(again)}"
    return Result(table.with_columns(**columns), note=note)


@operation("ext", "ext", group=GROUP)
def ext(table: TableState, _: Any) -> Result:
    """keep rows whose file exists"""
    exists = np.array(map_rows(os.path.isfile, table.files(), workers=table.workers, label="looking for files"), bool)
    missing = np.flatnonzero(~exists)
    note = f"missing is, for one: {table.files()[missing[0]]}" if len(missing) else ""
    return keep(table, exists, [("whose file does not exist", ~exists)], note)


@operation("filesize", "filesize", group=GROUP)
def filesize(table: TableState, _: Any) -> Result:
    """add filesize, in MiB; empty where there is no file"""
    sizes = np.array(map_rows(_size, table.files(), workers=table.workers, label="file sizes"), np.float64)
    missing = int(np.isnan(sizes).sum())
    return Result(table.with_columns(filesize=sizes), note=f"{missing} files do not exist" if missing else "")


def _size(path: Path) -> float:
    try:
        return path.stat().st_size / MIB
    except OSError:
        return float("nan")
