"""`make quickstart`: the whole job on the repository's own clips, and a measure of its result."""
