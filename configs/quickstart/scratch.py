"""Train a small STDiT on the clips from random weights: `make quickstart FROM=scratch`, 2 CPU cores.

    python -m tools.cache_features configs/quickstart/scratch.py
    python scripts/train.py configs/quickstart/scratch.py

A quarter of the tokens of configs/quickstart/train.py (patches of 4x4 latent cells), so that a CPU takes enough steps
to learn the layout and colours of the clips.

Weights: random.
Hardware: 2 CPU cores.
"""

_base_ = ["train.py"]

model = dict(type="STDiT-XS/2", depth=4, num_heads=4, patch_size=(1, 4, 4), pred_sigma=False, from_pretrained=None)

max_steps = 1500
log_every = 25
ckpt_every = 500

lr = 1e-3
lr_schedule = "cosine"
warmup_steps = 50
adam_betas = (0.9, 0.99)
ema_decay = 0.99
