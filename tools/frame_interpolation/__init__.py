"""More frames between those of a video: `python -m tools.frame_interpolation.interpolation` (docs/data-processing.md)."""
