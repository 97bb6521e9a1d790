"""Numbers about clips, one module each: `python -m tools.scoring TABLE --scorers NAME,...` (docs/how-to/scoring.md)."""
