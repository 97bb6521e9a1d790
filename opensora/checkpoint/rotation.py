"""Which checkpoints of a run are kept, and what interrupted attempts leave behind.

A checkpoint is renamed before it is deleted, so a crash in between leaves no folder that looks complete and is not. Only
folders with names that a run gives are ever touched.
"""

import logging
import re
import shutil
from pathlib import Path

from opensora.checkpoint.load import Checkpoint, complete_checkpoints, open_checkpoint
from opensora.utils.errors import UserError

logger = logging.getLogger(__name__)

NAME = r"epoch\d+-global_step(\d+)"
LEFTOVER = re.compile(rf"\.({NAME})\.(partial|old|removed)-[\w-]+")
_logged: set[Path] = set()  # checkpoints that were complained about


def remove_old(run: Path, *, keep_last_n: int | None, keep_every_m: int | None, token: str) -> list[Path]:
    """Delete the checkpoints that are not to be kept; call it when a newer one is complete.

    The newer one is never deleted, and if it is damaged nothing is. A damaged checkpoint stays uncounted, and is named in
    the log once; so do those of later steps, which a resume passed over.

    Args:
        keep_last_n: how many of the newest to keep; None = all.
        keep_every_m: keep those at multiples of so many steps too; None = no others.
        token: of the `Writing` of the newer one; part of a name that nobody else uses.

    Returns:
        The folders that are gone.
    """
    if keep_last_n is None:
        return []
    own = [(int(found[1]), path) for path in complete_checkpoints(run) if (found := re.fullmatch(NAME, path.name))]
    own.sort(reverse=True)
    attempts = (None if (opened := _opened(path)) is None else opened.manifest.get("attempt") for _, path in own)
    new = next((i for i, attempt in enumerate(attempts) if attempt == token), len(own))
    kept, gone = 1, []
    for step, path in own[new + 1 :]:
        milestone = keep_every_m is not None and step % keep_every_m == 0
        if (kept >= keep_last_n and milestone) or _opened(path) is None:  # many milestones take long to open
            continue
        kept += 1
        if kept > keep_last_n:
            gone.append(path)
    for path in reversed(gone):
        doomed = path.with_name(f".{path.name}.removed-{token}")
        try:
            path.rename(doomed)
            shutil.rmtree(doomed)
        except OSError as error:  # protected, or a file system is slow to let go: no reason to end a run
            if doomed.exists() and _opened(doomed) is not None:
                doomed.rename(path)
            _warn_once(path, f"{path} cannot be deleted ({error}), and stays.")
    return [path for path in gone if not path.exists()]


def clear_leftovers(run: Path) -> None:
    """Delete what interrupted attempts to write or to delete left in a run's folder; call it when nobody writes there.

    A checkpoint that was being replaced, and whose successor did not get its name, is put back.
    """
    for path in sorted(run.iterdir()):
        if not (left := LEFTOVER.fullmatch(path.name)):
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


def _opened(path: Path) -> Checkpoint | None:
    """A complete checkpoint; None = it is damaged, which the log says once."""
    try:
        return open_checkpoint(path, check="size")
    except (UserError, OSError, ValueError, KeyError) as error:
        _warn_once(path, f"neither counted nor deleted by keep_last_n, since it is damaged: {error}")
        return None


def _warn_once(path: Path, message: str) -> None:
    if path not in _logged:
        _logged.add(path)
        logger.warning("%s", message)
