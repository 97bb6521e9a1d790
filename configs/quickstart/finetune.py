"""Fine-tune the shipped small STDiT on clips that it was not trained on: what `make quickstart` does, 2 CPU cores, minutes.

python -m tools.cache_features configs/quickstart/finetune.py
python scripts/train.py configs/quickstart/finetune.py

Weights: assets/models/stdit-quickstart.
Hardware: 2 CPU cores.
"""

_base_ = ["train.py"]

dataset = dict(data_path="assets/unseen_clips/clips.csv")

max_steps = 80
log_every = 1
ckpt_every = 40

batch_size = 6
lr = 1e-3
lr_schedule = "cosine"
adam_betas = (0.9, 0.99)
