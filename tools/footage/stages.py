"""The stages of a chain. Each turns the table before it into one of kept rows and one of dropped rows with a `reason`.

Stages that look at files are jobs of `tools.scoring.job`: they resume where they were killed, row by row, and share their
rows among all processes. The others read one table and write two, which takes seconds, and are done by the first process.
"""

import hashlib
import itertools
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from opensora.datasets.table.files import cell_text
from opensora.datasets.table.folder import find_files
from opensora.datasets.video.files import VIDEO_EXTENSIONS
from opensora.registry import did_you_mean
from opensora.utils.errors import UserError
from tools.caption.captioner import Captioner
from tools.datasets.datautil.columns import TRAINING
from tools.datasets.datautil.filter import LIMITS
from tools.datasets.datautil.info import OK, measure
from tools.datasets.stream import as_number, columns_of, read_blocks
from tools.eval.record import file_hash
from tools.footage.recipe import Planned
from tools.footage.rows import Row, divide_rows, read_rows, shown_from, write_rows
from tools.scene_cut.scorers import Cut, SceneDetect, clips_of, lost_of, rules_of
from tools.scoring.carry import carry_over
from tools.scoring.job import Job, parts_of, run
from tools.scoring.registry import Scorer, scorer

PROVENANCE = ("source", "scene", "start", "end", "start_frame", "end_frame")
EDGE = 1 << 20  # bytes at the start, middle and end of a file that its digest looks at
POLL_S = 0.2


@dataclass
class Work:
    """Where a stage works.

    Attributes:
        folder: of all stages.
        stage: as in the recipe.
        before: the kept rows of the stage before; of the first stage a file that is not there.
        rank, world: this process and how many there are.
        workers: processes that this one may start.
    """

    folder: Path
    stage: Planned
    before: Path
    rank: int = 0
    world: int = 1
    workers: int = 1
    notes: list[str] = field(default_factory=list)

    @property
    def kept(self) -> Path:
        """The table of the stage; it is written last, so where it is the stage is done."""
        return self.folder / f"{self.stage.name}.jsonl"

    @property
    def dropped(self) -> Path:
        """What it left out."""
        return self.folder / f"{self.stage.name}.dropped.jsonl"

    @property
    def scored(self) -> Path:
        """Of a stage that looks at files, its table with what it found out of every row."""
        return self.folder / f"{self.stage.name}.all.jsonl"

    @property
    def parts(self) -> Path:
        """What it found out, row by row."""
        return parts_of(self.scored)

    def write(self, decided: Iterable[tuple[Row, str]]) -> None:
        """Write (row, reason) pairs; an empty reason keeps a row."""
        divide_rows(self.kept, self.dropped, decided)

    def job(self, scorers: Mapping[str, Scorer], batch_size: int, part_rows: int) -> Path:
        """Have scorers go over the table; returns the table with their columns once all processes are done."""
        if not self.scored.is_file():
            job = Job(self.before, self.scored, scorers, self.folder, batch_size, part_rows, title=self.stage.type)
            carry_over(job, self.world)
            run(job, self.workers)
        wait_for(self.scored)
        return self.scored


def wait_for(path: Path) -> None:
    """Until another process has written a file."""
    said = time.monotonic()
    while not path.is_file():
        time.sleep(POLL_S)
        if time.monotonic() - said > 60:
            said = time.monotonic()
            print(f"waiting for the other processes: {path.name}", flush=True)


def find(work: Work, folder: str, extensions: tuple[str, ...] = VIDEO_EXTENSIONS) -> None:
    """All videos below a folder, in the order of their paths."""
    found = find_files(Path(folder), tuple(extensions))
    files = (({"path": str(path.absolute()), "id": path.stem}, "") for path in found.files)
    others = (({"path": str(Path(folder).absolute())}, f"{count} {why}") for why, count in (+found.left_out).items())
    work.write(itertools.chain(files, others))


def read(work: Work, table: str, root: str | None = None) -> None:
    """The rows of a table; relative paths are relative to it, or to `root`."""
    base = (Path(root) if root else Path(table).parent).absolute()
    if "path" not in columns_of(Path(table)):
        raise UserError(f"{table} has no column 'path'.")

    def absolute(row: Row) -> Row:
        # `duplicate_of` is the path of another row, and must stay spelled as that is
        paths = {name: str(base / str(row[name])) for name in ("path", "duplicate_of") if row.get(name)}
        return {**row, "path": str(base / str(row["path"])), **paths}

    work.write((absolute(row), "") for row in read_rows(Path(table)))


@dataclass(frozen=True)
class Probe:
    """Size, length, rate and a digest of a file."""

    columns: tuple[str, ...] = field(
        default=("num_frames", "height", "width", "aspect_ratio", "resolution", "fps", "digest"), init=False
    )
    needs: tuple[str, ...] = field(default=(), init=False)

    def score(self, paths: list[Path], **needed: list[Any]) -> list[Row]:
        """See `Scorer.score`."""
        rows: list[Row] = []
        for path in paths:
            found = measure(path)
            if found.status != OK or found.height is None or found.width is None:
                rows.append({**dict.fromkeys(self.columns), "error": found.status})
                continue
            height, width = found.height, found.width
            values = (found.num_frames, height, width, height / width, height * width, found.fps, digest_of(path))
            rows.append(dict(zip(self.columns, values, strict=True)))
        return rows


def digest_of(path: Path) -> str:
    """Equal for copies of a file: its size, and a MiB each at its start, middle and end."""
    size = path.stat().st_size
    digest = hashlib.blake2b(str(size).encode(), digest_size=16)
    with path.open("rb") as file:
        for start in sorted({0, max(0, size // 2 - EDGE // 2), max(0, size - EDGE)}):
            file.seek(start)
            digest.update(file.read(EDGE))
    return digest.hexdigest()


def probe(work: Work, part_rows: int = 512) -> None:
    """Measure the files and leave out those that cannot be read."""
    _score(work, {"probe": Probe()}, 16, part_rows)


def score(work: Work, scorers: dict[str, dict[str, Any]], batch_size: int = 16, part_rows: int = 512) -> None:
    """Add scores (`tools.scoring`) and leave out what cannot be read."""
    _score(work, {name: scorer(name, **settings) for name, settings in scorers.items()}, batch_size, part_rows)


def caption(work: Work, batch_size: int = 16, part_rows: int = 512, **settings: Any) -> None:
    """Add captions; the settings are those of `tools.caption.captioner.Captioner`."""
    if isinstance(settings.get("scores"), list):
        settings["scores"] = tuple(settings["scores"])
    _score(work, {"caption": Captioner(**settings)}, batch_size, part_rows)


def _score(work: Work, scorers: Mapping[str, Scorer], batch_size: int, part_rows: int) -> None:
    out = work.job(scorers, batch_size, part_rows)
    if work.rank == 0:
        work.write((row, "" if row["status"] == OK else str(row["status"])) for row in read_rows(out))


def detect(work: Work, detector: str = "auto", threshold: float | None = None, part_rows: int = 64) -> None:
    """Find the scenes of each video."""
    _score(work, {"detect": SceneDetect(detector, threshold)}, 1, part_rows)


def cut(work: Work, part_rows: int = 64, **rules: Any) -> None:
    """Cut scenes into clips; the settings are those of `tools.scene_cut.rules.Rules`."""
    chosen = rules_of(rules)
    clips = work.folder / f"{work.stage.name}.clips"
    out = work.job({"cut": Cut(str(clips.absolute()), chosen)}, 1, part_rows)

    def decided() -> Iterator[tuple[Row, str]]:
        for row in read_rows(out):
            if row["status"] != OK:
                yield {"path": row["path"]}, str(row["status"])
                continue
            yield from ((clip, "") for clip in clips_of(row))
            for part in lost_of(row):
                yield part, part.pop("reason")

    if work.rank == 0:
        work.write(decided())


def unique(work: Work, column: str = "digest") -> None:
    """Keep the first row of each value of a column; rows without a value stay.

    By hashes of 8 bytes: among 10 million values a collision has a chance of 1 in 300 000.
    """
    hashes, kept = [np.empty(0, np.uint64)], [np.empty(0, bool)]
    for block in read_blocks(work.before, 1 << 14, [column]):
        texts = ["" if value is None else str(value) for value in block[column]]
        raw = b"".join(hashlib.blake2b(text.encode(), digest_size=8).digest() for text in texts)
        hashes.append(np.frombuffer(raw, np.uint64))
        kept.append(np.array([not text for text in texts]))
    is_kept = np.concatenate(kept)
    is_kept[np.unique(np.concatenate(hashes), return_index=True)[1]] = True
    reasons = ("" if keep else f"same {column} as an earlier row" for keep in is_kept)
    work.write(zip(read_rows(work.before), reasons, strict=False))


def filter_rows(work: Work, equals: dict[str, Any] | None = None, empty: tuple[str, ...] = (), **limits: float) -> None:
    """Keep rows by their numbers (`fmin`, `aesmin`, ... of datautil; `COLUMN_min`, `COLUMN_max` of any column), by equal
    values, and where a column is empty (such as `duplicate_of`). Cells mean the same in all formats, also as texts of a CSV. A
    cell that a row of JSONL lacks is empty."""
    bounds = {name: _bound(name) for name in limits}
    names = [column for column, _ in bounds.values()] + list(equals or {}) + list(empty)
    there = columns_of(work.before)
    if missing := [name for name in names if name not in there]:
        raise UserError(f"stage filter: there is no column {missing[0]!r}; the columns are: {', '.join(there)}.")

    def why(row: Row) -> str:
        for name, (column, side) in bounds.items():
            limit = limits[name]
            try:
                value = as_number(row[column])
            except (ValueError, TypeError) as error:
                raise UserError(f"stage filter: {column} holds {row[column]!r}, which is not a number.") from error
            if value is None:
                return f"without {column}"
            if value < limit if side == "min" else value > limit:
                return f"{column} {'<' if side == 'min' else '>'} {limit:g}"
        for column, value in (equals or {}).items():
            if not _equal(row[column], value):
                return f"{column} is not {value!r}"
        return next((f"{column} is not empty" for column in empty if row[column] not in (None, "")), "")

    work.write((row, why(row)) for row in read_rows(work.before))


def _bound(name: str) -> tuple[str, str]:
    """Column and side of `fmin` or `sharpness_min`."""
    prefix, side = name[:-3], name[-3:]
    if side not in ("min", "max"):
        raise UserError(f"{name!r} is unknown; limits end in min or max, such as fmin or sharpness_min")
    return (LIMITS[prefix][0] if prefix in LIMITS else prefix.rstrip("_")), side


def _equal(cell: Any, wanted: Any) -> bool:
    """As numbers where a number or a boolean is wanted, else as the texts that a CSV has of both; None is an empty cell."""
    if not isinstance(wanted, int | float):
        return cell_text(cell) == cell_text(wanted)
    if not isinstance(cell, str):
        return bool(cell == wanted)  # whole numbers of any length
    try:
        return as_number(cell) == wanted
    except ValueError:
        return False


def table(work: Work, output: str = "train.csv", columns: tuple[str, ...] | None = None) -> None:
    """The table to train on, in the folder of the chain: the columns that training reads, scores, and where clips are from."""
    there = columns_of(work.before)
    hidden = ("status", "digest", "timestamp", "num_scenes", "cut_by", "relpath", "id")
    first = [name for name in (*TRAINING, *PROVENANCE) if name in there]
    names = list(columns or [*first, *(name for name in there if name not in (*first, *hidden))])
    if missing := [name for name in names if name not in there]:
        raise UserError(f"stage table: there is no column {missing[0]!r}; the columns are: {', '.join(there)}.")
    base = work.folder.absolute()

    def rows() -> Iterator[Row]:
        for row in read_rows(work.before):
            if _has_text(row):
                shown = {name: shown_from(base, Path(row[name])) for name in ("path", "duplicate_of") if row.get(name)}
                yield {name: shown.get(name, row.get(name)) for name in names}

    target = work.folder / output
    _refuse_to_replace(target)
    fresh = target.with_name(f".new-{target.name}")
    write_rows(fresh, rows(), names)
    # of both, for it may be killed before the fresh one has its name
    hashes = [file_hash(file) for file in (fresh, target) if file.exists()]
    _note_of(target).write_text(json.dumps({"stage": work.stage.name, "hashes": hashes}) + "\n")
    fresh.replace(target)  # before the stage counts as done
    work.write((row, "" if _has_text(row) else "without a caption") for row in read_rows(work.before))


def is_anothers(work: Work) -> bool:
    """Whether the output of a stage `table` that was done is gone, or another recipe's by now.

    Raises:
        UserError: somebody has changed it since.
    """
    output = work.folder / work.stage.settings.get("output", "train.csv")
    note = _note_of(output)
    if not note.is_file():  # of a version that kept none
        return not output.exists()
    _refuse_to_replace(output)
    return not output.exists() or json.loads(note.read_text())["stage"] != work.stage.name


def _note_of(output: Path) -> Path:
    """The file that names the stage that wrote a table, and the hash of its content."""
    return output.with_name(f".{output.name}.written")


def _refuse_to_replace(output: Path) -> None:
    note = _note_of(output)
    if output.exists() and (not note.is_file() or file_hash(output) not in json.loads(note.read_text())["hashes"]):
        raise UserError(
            f"{output} is not as a chain has written it, and would be replaced. Give it another name, or set `output` of the "
            "stage `table`; captions of your own belong into a table that is made of it."
        )


def _has_text(row: Row) -> bool:
    return "text" not in row or bool(str(row["text"] or "").strip())


STAGES: dict[str, Callable[..., None]] = {
    "find": find,
    "read": read,
    "probe": probe,
    "unique": unique,
    "detect": detect,
    "cut": cut,
    "score": score,
    "filter": filter_rows,
    "caption": caption,
    "table": table,
}


def _check_cut(rules: Mapping[str, Any]) -> None:
    known = vars(rules_of(rules))
    if unknown := sorted(set(rules) - {*known, "part_rows"}):
        raise UserError(f"{unknown[0]!r} is unknown.{did_you_mean(unknown[0], list(known))} It has: {', '.join(known)}")


def _check_filter(settings: Mapping[str, Any]) -> None:
    for name in settings:
        if name not in ("equals", "empty"):
            _bound(name)


def _check_score(settings: Mapping[str, Any]) -> None:
    scorers = settings["scorers"]
    if not isinstance(scorers, Mapping) or not all(isinstance(own, Mapping) for own in scorers.values()):
        raise UserError(f"scorers={scorers!r} is no dict of dicts, such as dict(flow=dict(), sharpness=dict())")
    for name, own in scorers.items():
        scorer(name, **own)


def _check_caption(settings: Mapping[str, Any]) -> None:
    try:
        Captioner(**{name: value for name, value in settings.items() if name not in ("batch_size", "part_rows")})
    except TypeError as error:
        raise UserError(str(error)) from error


CHECKS: dict[str, Callable[[Mapping[str, Any]], None]] = {
    "cut": _check_cut,
    "filter": _check_filter,
    "score": _check_score,
    "caption": _check_caption,
}
"""Of stages whose settings are those of others, before hours of other stages; each raises a `UserError`."""
SHARED = ("probe", "detect", "cut", "score", "caption")
"""Stages that all processes work at."""
