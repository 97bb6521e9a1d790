"""Go on with the small NOVA of nova_images.py, on videos: the second part of `make quickstart-nova`.

python scripts/train.py configs/quickstart/nova.py --ckpt-path CHECKPOINT

Weights: from nova_images.py.
Hardware: 2 CPU cores.
"""

_base_ = ["nova_images.py"]

num_frames = 8
frame_interval = 3
scheduler = dict(losses="all")

max_steps = 600
ckpt_every = 300

batch_size = 8
lr = 5e-4
