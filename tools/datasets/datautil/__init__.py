"""Operations on tables of clips: `python -m tools.datasets.datautil` (see docs/data-tools.md)."""
