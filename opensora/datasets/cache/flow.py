"""How much moves in each clip, where no table says it: CACHE/flow, beside the moments, which `tools.cache_features` measures.

The score itself is `tools.scoring`'s (`docs/scoring.md`); datasets only read it, for models that are told of it (NOVA).
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from opensora.datasets.cache.moments import Counts, Job, write_missing
from opensora.datasets.cache.records import METADATA, RecordReader
from opensora.utils.errors import UserError

FOLDER = "flow"
FEATURES = {"flow": "float64", "source": "string"}
REMEDY = "Measure it with `python -m tools.cache_features TRAIN_CONFIG --cache-dir {} --what flow`."


def write_flow(
    keys: Sequence[str],
    measure: Callable[[str], float],
    source: Callable[[str], str],
    job: Job,
    settings: dict[str, Any],
) -> Counts:
    """Measure what is not measured yet; every process of `job.world` calls it.

    Args:
        keys: of the clips.
        measure: the score of one of them.
        source: what tells its content from another's.
        settings: how it is measured; a folder with other settings is refused.
    """

    def encode(key: str) -> dict[str, Any]:
        return {"flow": measure(key), "source": source(key)}

    def is_current(key: str, record: dict[str, Any]) -> bool:
        return record["source"] == source(key)

    return write_missing(job, FOLDER, FEATURES, settings, keys, encode, is_current)


class StoredFlow:
    """Reads the scores of a cache.

    Raises:
        UserError: there are none.
    """

    def __init__(self, cache_dir: str | Path) -> None:
        self.remedy = REMEDY.format(cache_dir)
        self.records = RecordReader(Path(cache_dir) / FOLDER, remedy=self.remedy)

    @classmethod
    def beside(cls, cache_dir: str | Path) -> "StoredFlow | None":
        """Those of a cache, if it has any."""
        return cls(cache_dir) if (Path(cache_dir) / FOLDER / METADATA).is_file() else None

    def missing(self, keys: Iterable[str]) -> list[str]:
        """Those that were not measured."""
        return [key for key in keys if key not in self.records]

    def of(self, key: str, source: str) -> float:
        """The score of a clip with this content.

        Raises:
            UserError: it was measured on other content.
        """
        record = self.records.read(key)
        if record["source"] != source:
            raise UserError(f"{self.records.path}: {key} was changed after its flow was measured. {self.remedy}")
        return record["flow"]

    def fingerprint(self) -> list[Any]:
        """What decides the scores."""
        return [sorted(self.records.settings.items()), self.records.content_names()]
