"""Train a small NOVA on the repository's clips from random weights: `make quickstart-nova`, 2 CPU cores.

python -m tools.cache_features configs/quickstart/nova.py
python scripts/train.py configs/quickstart/nova.py
"""

_base_ = ["train.py"]

model = dict(
    _delete_=True, type="NOVA", width=192, num_heads=3, video_depth=4, image_depth=6, head_depth=3, motion=False
)
scheduler = dict(_delete_=True, type="nova", loss_repeat=4)

max_steps = 600
log_every = 20
ckpt_every = 200

lr = 1e-3
lr_schedule = "cosine"
warmup_steps = 50
adam_betas = (0.9, 0.99)
ema_decay = 0.99
