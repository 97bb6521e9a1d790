"""Fine-tune the shipped small STDiT on clips that it was not trained on: what `make quickstart` does, 2 CPU cores, minutes.

python -m tools.cache_features configs/quickstart/finetune.py
python scripts/train.py configs/quickstart/finetune.py

Weights: assets/models/stdit-quickstart.
Hardware: 2 CPU cores.
"""

_base_ = ["train.py"]

dataset = dict(data_path="assets/unseen_clips/clips.csv")

max_steps = 480  # the same clips in 240 steps of batch 4 give samples that are 1.6 to 3.1 dB further from them
ckpt_every = 120

batch_size = 2
lr = 8e-4
lr_schedule = "cosine"
adam_betas = (0.9, 0.99)
