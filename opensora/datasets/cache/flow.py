"""The optical-flow score of each clip where no table gives it: CACHE/flow, which `tools.cache_features` writes with `tools.scoring`
(`docs/scoring.md`). Datasets only read it, for models that are conditioned on it (NOVA).
"""

from pathlib import Path
from typing import Any

from opensora.datasets.cache.records import RecordReader
from opensora.utils.errors import UserError

FOLDER = "flow"
FEATURES = {"flow": "float64", "source": "string"}


class StoredFlow:
    """The scores of a cache, by the key of a clip; a `UserError` where there are none."""

    def __init__(self, cache_dir: str | Path) -> None:
        self.remedy = (
            f"Measure it with `python -m tools.cache_features TRAIN_CONFIG --cache-dir {cache_dir} --what flow`."
        )
        self.records = RecordReader(Path(cache_dir) / FOLDER, remedy=self.remedy)

    def of(self, key: str, source: str) -> float:
        """The score of a clip; a `UserError` where it was measured on other content than `source`."""
        record = self.records.read(key)
        if record["source"] != source:
            raise UserError(f"{self.records.path}: {key} was changed after its flow was measured. {self.remedy}")
        return record["flow"]

    def fingerprint(self) -> list[Any]:
        """What decides the scores."""
        return [sorted(self.records.settings.items()), self.records.content_names()]
