"""Fine-tune the shipped small STDiT on clips that it was not trained on: what `make quickstart` does, 2 CPU cores, minutes.

python -m tools.cache_features configs/quickstart/finetune.py
python scripts/train.py configs/quickstart/finetune.py

Weights: assets/models/stdit-quickstart.
Hardware: 2 CPU cores.
"""

_base_ = ["train.py"]

dataset = dict(data_path="assets/unseen_clips/clips.csv")

max_steps = 120
ckpt_every = 60

batch_size = 4
lr = 8e-4
lr_schedule = "cosine"
adam_betas = (0.9, 0.99)
