"""How long it takes to plan an epoch of a large table over buckets: assignment, shuffling, batches. One core.

python -m tools.benchmark.buckets [--rows 10000000]
"""

import argparse
import resource
import time
from typing import Any

import numpy as np

from opensora.datasets.bucket import Buckets
from opensora.datasets.epoch_plan import EpochPlan

CONFIG: dict[str, dict[int, Any]] = {  # stage 1 of Open-Sora 1.2
    "144p": {1: (1.0, 475), 51: (1.0, 51), 102: ((1.0, 0.33), 27), 204: ((1.0, 0.1), 13), 408: ((1.0, 0.1), 6)},
    "256": {1: (0.4, 297), 51: (0.5, 20), 102: ((0.5, 0.33), 10), 204: ((0.5, 0.1), 5), 408: ((0.5, 0.1), 2)},
    "240p": {1: (0.3, 297), 51: (0.4, 20), 102: ((0.4, 0.33), 10), 204: ((0.4, 0.1), 5), 408: ((0.4, 0.1), 2)},
    "360p": {1: (0.2, 141), 51: (0.15, 8), 102: ((0.15, 0.33), 4), 204: ((0.15, 0.1), 2), 408: ((0.15, 0.1), 1)},
    "512": {1: (0.1, 141)},
    "480p": {1: (0.1, 89)},
    "720p": {1: (0.05, 36)},
    "1024": {1: (0.05, 36)},
    "1080p": {1: (0.1, 5)},
    "2048": {1: (0.1, 5)},
}


def main() -> None:
    """Print a markdown table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=10_000_000)
    rows = parser.parse_args().rows
    rng = np.random.default_rng(0)
    frames, height, width = (
        rng.integers(low, high, rows, np.int32) for low, high in ((1, 600), (100, 1200), (100, 2000))
    )
    buckets = Buckets(CONFIG)
    print("| step | seconds | peak GB so far |\n|---|---|---|")
    start = time.perf_counter()
    assignment = buckets.assign(frames, height, width, seed=42, epoch=0)
    row("bucket of every row", start)
    for order in ("mixed", "same"):
        start = time.perf_counter()
        plan = EpochPlan(
            assignment.bucket, buckets.batch_sizes, seed=42, epoch=0, world_size=64, tail="keep", order=order
        )
        row(f"all batches of 64 processes, {order} ({plan.steps} steps)", start)
    start = time.perf_counter()
    for step in range(1000):
        plan.batch(step, 0)
    row("1000 batches of one process", start)


def row(name: str, start: float) -> None:
    """One line of the table."""
    gigabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    print(f"| {name} | {time.perf_counter() - start:.2f} | {gigabytes:.2f} |")


if __name__ == "__main__":
    main()
