"""Train NOVA's video model on images of 512x512: what configs/nova/train/33x480x768.py starts from.

    torchrun --standalone --nproc_per_node 8 scripts/train.py configs/nova/train/1x512x512.py --data-path RECORDS

RECORDS is a folder of latents with captions; docs/how-to/nova.md shows how to write one. They are of the video's VAE, an image as a
video of one frame: a model's first layers and its head fit the latents of one VAE alone, and the head is the video model's. The
published video model began with images of this size.

Weights: random.
Hardware: 8 GPUs.
"""

_base_ = ["33x480x768.py"]

# Define sampling size
num_frames = 1
image_size = (512, 512)

# Define model
model = dict(
    motion=False,
    trained="image",
    base_size=None,  # positions count, from 0 as those of the videos
)

# Others
max_steps = 30_000
batch_size = 8
ema_decay = 0.98 ** (1 / 100)  # 0.98 once in 100 steps
