"""What is done of a long job, row by row, in a file that survives being killed: the rows that are there are not done again.

A journal is lines of JSON: the first says what the job is, each other the result of one row. A job that is not the same
(other settings, another table) begins a new journal. A line that was cut off in the middle of writing counts as not there.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tools.datasets.datautil.parallel import map_rows

Item = TypeVar("Item")
PER_PROCESS = 2  # rows between two writings: with more, fewer waits for the slowest; with fewer, less is lost by a kill


def fingerprint(*parts: Any) -> str:
    """A short name for anything that JSON can say; equal for equal things, on every machine."""
    text = json.dumps(parts, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


class Journal:
    """Results by row number, in a file.

    Args:
        path: of the file; made with the first result.
        job: what the results depend on, beside the row: see `fingerprint`.
    """

    def __init__(self, path: Path, job: str) -> None:
        self.path, self.job = path, job
        self.done: dict[int, Any] = {}
        self._keep = 0  # bytes of the file that are whole lines of this job
        if path.is_file():
            self._read()

    def add(self, results: dict[int, Any]) -> None:
        """Write results down; they are on disk when this returns."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps({"row": row, "result": result}, ensure_ascii=False) for row, result in results.items()]
        head = [] if self._keep else [json.dumps({"job": self.job})]
        data = "".join(f"{line}\n" for line in [*head, *lines]).encode()
        with self.path.open("r+b" if self.path.exists() else "wb") as file:
            file.truncate(self._keep)
            file.seek(self._keep)
            file.write(data)
        self._keep += len(data)
        self.done.update(results)

    def remove(self) -> None:
        """The job is complete and its table written."""
        self.path.unlink(missing_ok=True)

    def _read(self) -> None:
        for number, line in enumerate(self.path.read_bytes().splitlines(keepends=True)):
            try:
                record = json.loads(line) if line.endswith(b"\n") else None
            except ValueError:
                record = None
            if record is None or (number == 0 and record.get("job") != self.job):
                return
            if number:
                self.done[record["row"]] = record["result"]
            self._keep += len(line)


def map_with_journal(
    function: Callable[[Item], Any],
    items: Sequence[Item],
    journal: Journal,
    *,
    workers: int,
    label: str,
    crashed: Callable[[Item], Any] | None = None,
) -> list[Any]:
    """`[function(item) for item in items]`, of which the rows in the journal are taken from there.

    Args:
        function: gives what JSON can say; defined at the top of a module.
        workers: processes; 1 = this one.
        crashed: see `map_rows`.
    """
    rows = [row for row in range(len(items)) if row not in journal.done]
    size = max(1, PER_PROCESS * workers)
    for start in range(0, len(rows), size):
        batch = rows[start : start + size]
        values = map_rows(function, [items[row] for row in batch], workers=workers, label=label, crashed=crashed)
        journal.add(dict(zip(batch, values, strict=True)))
    return [journal.done[row] for row in range(len(items))]
