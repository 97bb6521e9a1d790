"""Operations on tables of clips: `python -m tools.datasets.datautil` (see docs/how-to/data-tools.md)."""
