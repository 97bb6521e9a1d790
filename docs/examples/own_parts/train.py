"""Train parts that are all one's own: seconds on a CPU.

python scripts/train.py docs/examples/own_parts/train.py
"""

imports = [
    "docs/examples/own_parts/own_denoiser.py",
    "docs/examples/own_parts/own_scheduler.py",
    "docs/examples/own_parts/own_vae.py",
    "docs/examples/own_parts/own_text_encoder.py",
    "docs/examples/own_parts/own_dataset.py",
]

num_frames = 8
image_size = (32, 32)
num_workers = 0

model = dict(type="TokenMLP", depth=2)
vae = dict(type="MeanColourVAE")
text_encoder = dict(type="ByteEncoder")
scheduler = dict(type="data-flow")
dataset = dict(type="MovingSquares", num_clips=64)

dtype = "fp32"
outputs = "outputs/own"
batch_size = 8
max_steps = 200
log_every = 20
lr = 1e-3
ema_decay = 0.9
