"""Writing a checkpoint folder, by one process or by many at once.

    .epoch0-global_step5.partial-<token>/    while it is written
        model/model-00001-of-00004.safetensors
        .done-00001.json                     rank 1's note: its files, with sizes and checksums, or what went wrong
        .failed-00001-ENOSPC                 the same without a byte, where a disk took no note
    epoch0-global_step5/                     when the manifest, its last file, is on the disk

Every process writes its own files and then its note. Rank 0 waits for all notes, writes the state and the manifest, and
renames the folder. Processes communicate through these files alone: a collective call next to the training's own could
deadlock, and a save may take longer than a step is allowed to.
"""

import contextlib
import errno
import json
import logging
import os
import re
import shutil
import threading
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opensora.checkpoint.tensors import FileRecord, Shard, write_tensors
from opensora.utils.errors import UserError

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
STATE = "state.json"
TIMEOUT_S = 3600.0  # for the slowest process to have its files on the disk
GRACE_S = 30.0  # the same, where the program has ended meanwhile
POLL_S = 0.02
FAILED = re.compile(r"\.failed-(\d+)-(\w+)")  # rank, name of an errno or of an exception


@dataclass(frozen=True)
class Writing:
    """One attempt to write one checkpoint.

    Args:
        path: the folder to make. One that is already there is replaced when the new one is complete.
        token: names the attempt: the same in all processes, never used before.
        rank, size: this process, of how many.
    """

    path: Path
    token: str
    rank: int = 0
    size: int = 1

    @property
    def partial(self) -> Path:
        """The folder while it is written."""
        return self.path.with_name(f".{self.path.name}.partial-{self.token}")

    def write_own(self, parts: Mapping[str, Mapping[str, Shard]], header: Mapping[str, str]) -> None:
        """Write this process's files, then its note.

        A failure is noted too, so that nobody waits for it, and raised; what was written of the files is deleted.

        Args:
            parts: name -> what this process is to write of it; rank 0 names all parts.
            header: for the header of each file.
        """
        files = {}
        for part, shards in parts.items():
            whole = self.rank == 0 and all(shard.shape == tuple(shard.local.shape) for shard in shards.values())
            name = part if whole else f"{part}-{self.rank:05d}-of-{self.size:05d}"
            if shards or self.rank == 0:  # rank 0 writes one of each
                files[part] = self.partial / part / f"{name}.safetensors"
        note = self._note(self.rank)
        unfinished = note.with_suffix(".tmp")
        try:
            self.partial.mkdir(parents=True, exist_ok=True)
            unfinished.touch()  # first, so that a disk which is full by then need only give it another name
            records = {}
            for part, file in files.items():
                file.parent.mkdir(parents=True, exist_ok=True)
                record = write_tensors(file, parts[part], {**header, "part": part})
                records[str(file.relative_to(self.partial))] = record
            unfinished.write_text(json.dumps({"files": records}))
            unfinished.rename(note)
        except Exception as error:
            for file in files.values():  # makes room for the note
                with contextlib.suppress(OSError):
                    file.unlink()
            try:
                unfinished.write_text(json.dumps({"error": f"rank {self.rank}: {type(error).__name__}: {error}"}))
                unfinished.rename(note)
            except OSError:
                kind = errno.errorcode.get(getattr(error, "errno", None) or 0, type(error).__name__)
                try:
                    unfinished.rename(self.partial / f".failed-{self.rank:05d}-{kind}")
                except OSError:  # then `error`, which is raised, and the log are all there is
                    logger.error("rank %d can write nothing at all to %s: %s", self.rank, self.partial, error)
            raise

    def commit(self, state: Mapping[str, Any], manifest: Mapping[str, Any], *, timeout_s: float = TIMEOUT_S) -> Path:
        """Rank 0: wait for all files, add `state` and the manifest, and give the folder its name.

        Raises:
            UserError: a process failed to write, or did not in `timeout_s`.
        """
        records = self._await_notes(timeout_s)
        for rank in range(self.size):
            self._note(rank).unlink()
        records[STATE] = _write_json(self.partial / STATE, state)
        files = {name: record.size for name, record in sorted(records.items())}
        checksums = {name: f"{record.crc32:08x}" for name, record in sorted(records.items())}
        # by the attempt `remove_old` knows the checkpoint that was written last, whatever its step
        content = {**manifest, "attempt": self.token, "files": files, "crc32": checksums}
        _write_json(self.partial / MANIFEST, content)
        for folder in (*{(self.partial / name).parent for name in files}, self.partial):
            _flush_folder(folder)
        old = self.path.with_name(f".{self.path.name}.old-{self.token}")
        replaces = self.path.exists()
        if replaces:
            self.path.rename(old)
        self.partial.rename(self.path)
        if replaces:
            shutil.rmtree(old)
        _flush_folder(self.path.parent)
        return self.path

    def discard(self) -> None:
        """Remove what was written of an attempt that failed."""
        shutil.rmtree(self.partial, ignore_errors=True)

    def _note(self, rank: int) -> Path:
        return self.partial / f".done-{rank:05d}.json"

    def _await_notes(self, timeout_s: float) -> dict[str, FileRecord]:
        records: dict[str, FileRecord] = {}
        waiting, begin, ended = list(range(self.size)), time.monotonic(), False
        while True:
            there = sorted(path.name for path in self.partial.iterdir())
            for failed in filter(None, map(FAILED.fullmatch, there)):
                number = getattr(errno, failed[2], None)  # an errno's number is each system's own, its name is not
                why = os.strerror(number) if isinstance(number, int) else "the disk took no more of its message"
                raise UserError(f"rank {int(failed[1])}: {failed[2]}: {why}")
            for rank in [rank for rank in waiting if self._note(rank).name in there]:
                records |= self._read_note(rank)
                waiting.remove(rank)
            if not waiting:
                return records
            if not ended and not threading.main_thread().is_alive():
                ended, timeout_s = True, min(timeout_s, time.monotonic() - begin + GRACE_S)
            if time.monotonic() - begin > timeout_s:
                raise UserError(
                    f"after {timeout_s:.0f} s the files of rank {', '.join(map(str, waiting))} are not in {self.partial}. "
                    "All processes must see one `outputs` folder, and may write there: is it on a file system that all "
                    "machines share?"
                )
            time.sleep(POLL_S)

    def _read_note(self, rank: int) -> dict[str, FileRecord]:
        note = json.loads(self._note(rank).read_text())
        if "error" in note:
            raise UserError(note["error"])
        records = {name: FileRecord(*record) for name, record in note["files"].items()}
        for name, record in records.items():
            found = (self.partial / name).stat().st_size
            if found != record.size:
                raise UserError(f"{self.partial / name} has {found} bytes here, rank {rank} wrote {record.size}.")
        return records


def _flush_folder(folder: Path) -> None:
    """Wait until a folder's list of names is on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_json(path: Path, content: Mapping[str, Any]) -> FileRecord:
    data = (json.dumps(content, indent=1, default=str) + "\n").encode()
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return FileRecord(len(data), zlib.crc32(data))
