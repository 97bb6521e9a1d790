"""Which checkpoints of a run are kept, and what interrupted attempts leave behind.

A checkpoint is renamed before it is deleted, so a crash in between leaves no folder that looks whole and is not. Only
folders with names that a run gives are ever touched.
"""

import logging
import re
import shutil
from pathlib import Path

from opensora.utils.ckpt import complete_checkpoints

logger = logging.getLogger(__name__)

NAME = r"epoch\d+-global_step(\d+)"
OWN = re.compile(NAME)
LEFT = re.compile(rf"\.({NAME})\.(partial|old|removed)-[\w-]+")


def remove_old(run: Path, *, keep_last_n: int | None, keep_every_m: int | None, token: str) -> list[Path]:
    """Delete the checkpoints that are not to be kept; call it when a newer one is complete.

    Args:
        keep_last_n: how many of the newest to keep; None = all.
        keep_every_m: keep those at multiples of so many steps too; None = no others.
        token: part of a name that nobody else uses.

    Returns:
        The folders that are gone.
    """
    if keep_last_n is None:
        return []
    own = [(int(found[1]), path) for path in complete_checkpoints(run) if (found := OWN.fullmatch(path.name))]
    old = sorted(own)[:-keep_last_n]
    gone = [path for step, path in old if not keep_every_m or step % keep_every_m]
    for path in gone:
        doomed = path.with_name(f".{path.name}.removed-{token}")
        path.rename(doomed)
        shutil.rmtree(doomed)
    return gone


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
        else:
            shutil.rmtree(path)
            logger.info("removed %s, left by an interrupted run", path)
