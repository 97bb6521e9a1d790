"""Which checkpoints of a run are kept, and what interrupted attempts leave behind.

A checkpoint is renamed before it is deleted, so a crash in between leaves no folder that looks whole and is not. Only
whole checkpoints count, and only folders with names that a run gives are ever touched.
"""

import logging
import re
import shutil
from pathlib import Path

from opensora.checkpoint.load import Checkpoint, complete_checkpoints, open_checkpoint
from opensora.utils.errors import UserError

logger = logging.getLogger(__name__)

NAME = r"epoch\d+-global_step(\d+)"
OWN = re.compile(NAME)
LEFT = re.compile(rf"\.({NAME})\.(partial|old|removed)-[\w-]+")
TOLD: set[Path] = set()  # damaged checkpoints that the log has named


def remove_old(run: Path, *, keep_last_n: int | None, keep_every_m: int | None, token: str) -> list[Path]:
    """Delete the checkpoints that are not to be kept; call it when a newer one is complete.

    The newer one is never deleted, and where it is not whole nothing is. Only whole checkpoints count: a damaged one
    stays, for it may be of use to somebody, and is named in the log once. So does, uncounted, what is of a later step
    than the newer one: a resume passed over it.

    Args:
        keep_last_n: how many of the newest to keep; None = all.
        keep_every_m: keep those at multiples of so many steps too; None = no others.
        token: of the `Writing` of the newer one; part of a name that nobody else uses.

    Returns:
        The folders that are gone.
    """
    if keep_last_n is None:
        return []
    own = [(int(found[1]), path) for path in complete_checkpoints(run) if (found := OWN.fullmatch(path.name))]
    own.sort(reverse=True)
    new = next((i for i, (_, path) in enumerate(own) if _attempt(path) == token), None)
    if new is None:
        return []
    gone = _not_kept(own[new + 1 :], keep_last_n - 1, keep_every_m)
    for path in gone:
        doomed = path.with_name(f".{path.name}.removed-{token}")
        try:
            path.rename(doomed)
            shutil.rmtree(doomed)
        except OSError as error:  # somebody protects it, or a file system is slow to let go: no reason to end a run
            if doomed.exists() and _opened(doomed) is not None:
                doomed.rename(path)
            if path not in TOLD:
                TOLD.add(path)
                logger.warning("%s cannot be deleted (%s), and stays.", path, error)
    return [path for path in gone if not path.exists()]


def clear_leftovers(run: Path) -> None:
    """Delete what interrupted attempts to write or to delete left in a run's folder; call it when nobody writes there.

    A checkpoint that was being replaced, and whose successor did not get its name, is put back.
    """
    for path in sorted(run.iterdir()):
        if not (left := LEFT.fullmatch(path.name)):
            continue
        if left[3] == "old" and not (run / left[1]).exists():
            path.rename(run / left[1])
            logger.warning("%s: put back, the writing of its successor was interrupted.", run / left[1])
            continue
        try:
            shutil.rmtree(path)
        except OSError as error:
            logger.warning("%s, left by an interrupted run, cannot be deleted (%s).", path, error)
        else:
            logger.info("removed %s, left by an interrupted run", path)


def _not_kept(older: list[tuple[int, Path]], most: int, keep_every_m: int | None) -> list[Path]:
    """Of step and folder, newest first, those that are whole and neither among the newest nor a milestone; oldest first."""
    gone, kept = [], 0
    for step, path in older:
        milestone = keep_every_m is not None and step % keep_every_m == 0
        if (kept >= most and milestone) or _opened(path) is None:  # files of many milestones take long to look at
            continue
        if kept < most:
            kept += 1
        else:
            gone.append(path)
    return gone[::-1]


def _attempt(path: Path) -> str | None:
    """The token of what wrote a checkpoint; None = it is damaged, or of an older version."""
    checkpoint = _opened(path)
    return None if checkpoint is None else checkpoint.manifest.get("attempt")


def _opened(path: Path) -> Checkpoint | None:
    """A checkpoint that is whole; None = it is damaged, which the log says once."""
    try:
        return open_checkpoint(path, check="size")
    except (UserError, OSError, ValueError, KeyError) as error:
        if path not in TOLD:
            TOLD.add(path)
            logger.warning("neither counted nor deleted by keep_last_n, since it is damaged: %s", error)
        return None
