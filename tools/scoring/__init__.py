"""Numbers about clips, one tool each: `python -m tools.scoring.NAME TABLE` (docs/data-processing.md)."""
