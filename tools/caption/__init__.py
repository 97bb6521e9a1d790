"""Captions by models that look at frames: `python -m tools.caption TABLE --model FOLDER --out OUT` (docs/how-to/scoring.md)."""
