"""What failed in a chain is tried again: `python -m tools.footage RECIPE --out WORK --retry-failed`.

The stages from the first one in which a row failed are no longer done, and their rows that failed are opened again
(`tools.scoring.parts`); what the others gave stays in the parts. From then on it is a run like any other, which may be killed and
started again: rows that an earlier stage lets through now are new to the later ones (`tools.scoring.carry`).
"""

from collections.abc import Sequence

from tools.footage.stages import Work
from tools.scoring.carry import hold_table
from tools.scoring.parts import failed_in, parts_in, reopen


def open_failed(works: Sequence[Work]) -> None:
    """Have the rows that failed looked at again by the stages in which they did, and all stages behind the first done anew."""
    failed = [sum(map(failed_in, parts_in(work.parts))) for work in works]
    first = next((number for number, count in enumerate(failed) if count), len(works))
    # the last first: where this is killed, no table is there that is made of one that is not
    for number in reversed(range(first, len(works))):
        work = works[number]
        if number + 1 < len(works):
            hold_table(works[number + 1].parts, work.kept)
        work.kept.unlink(missing_ok=True)
        work.scored.unlink(missing_ok=True)
        for part in parts_in(work.parts):
            reopen(part)
    for work, count in zip(works, failed, strict=True):
        if count:
            print(f"{work.stage.name}: {count} rows that failed are tried again")
    if not any(failed):
        print("no row failed in a run before")
