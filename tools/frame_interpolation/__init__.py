"""More frames between those of a video: `python -m tools.frame_interpolation.interpolation` (docs/how-to/data-processing.md)."""
