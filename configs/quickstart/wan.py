"""Train a small Wan on the repository's clips from random weights: `make quickstart-wan`, 2 CPU cores, minutes.

    python -m tools.cache_features configs/quickstart/wan.py --epochs 4
    python scripts/train.py configs/quickstart/wan.py

The network is Wan's own class, small, and the VAE Wan 2.2's in small: 9 frames are 3 latent frames, and 180 tokens in all. As that VAE
compresses time, the cache holds samples (here of 4 epochs, that is 4 windows of each clip) in place of whole clips.

Weights: random.
Hardware: 2 CPU cores.
"""

_base_ = ["train.py"]

num_frames = 9
frame_interval = 2  # 17 source frames; the shortest clip has 24

dataset = dict(content="samples")

model = dict(
    _delete_=True,
    type="Wan",
    hidden_size=256,
    depth=4,
    num_heads=4,
    ffn_dim=768,
    class_dropout_prob=0.0,  # nothing is sampled with guidance
)
vae = dict(_delete_=True, type="DiffusersVideoVAE", from_pretrained="assets/models/vae-video-small")
scheduler = dict(_delete_=True, type="rflow", shift=12.0)

max_steps = 1500
log_every = 25
ckpt_every = 500

lr = 3e-3
lr_schedule = "cosine"
warmup_steps = 50
adam_betas = (0.9, 0.99)
ema_decay = 0.99
