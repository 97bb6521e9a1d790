"""From a folder of long videos to a table to train on, by one command: `python -m tools.footage RECIPE --out WORK`."""
