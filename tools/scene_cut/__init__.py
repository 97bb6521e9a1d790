"""From long videos to clips of one scene: finding the cuts and cutting (docs/how-to/data-processing.md)."""
