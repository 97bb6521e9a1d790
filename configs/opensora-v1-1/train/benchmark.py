"""Find batch sizes of STDiT2-XL/2 for 720p: images, 32 and 64 frames. It is for the search, and trains as stage3.py does.

    python -m tools.search_batch_size configs/opensora-v1-1/train/benchmark.py outputs/benchmark.py \
        --memory-gib 70 --data-path clips.csv

The sizes below are where the search starts, and the upper ends of Open-Sora 1.1's ranges.

Weights: random.
Hardware: 1 GPU of 80 GB.
"""

_base_ = "stage3.py"

# resolution: {frames: (probability, batch size of each process)}
bucket_config = {
    "_delete_": True,
    "720p": {1: (1.0, 40), 32: (0.5, 4), 64: (0.5, 1)},
}

mask_ratios = None

ckpt_every = 1000
