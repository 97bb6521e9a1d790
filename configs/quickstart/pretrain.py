"""Train the small STDiT that the repository ships (assets/models/stdit-quickstart), on one GPU.

    python -m tools.cache_features configs/quickstart/pretrain.py
    python scripts/train.py configs/quickstart/pretrain.py
    python -m tools.export_weights outputs/quickstart-pretrain/000-STDiT-XS-2/epoch*-global_step4361 \
        assets/models/stdit-quickstart/model.safetensors --dtype fp16

Weights: random.
Hardware: 1 GPU.
"""

_base_ = ["train.py"]

dataset = dict(
    type="CachedVideoTextDataset",
    data_path="assets/clips/clips.csv",
    cache_dir="outputs/quickstart/cache",
    text_columns=("text", "text_2", "text_3", "text_4", "text_5", "text_6"),
)
num_workers = 6

dtype = "bf16"

model = dict(type="STDiT-XS/2", pred_sigma=False, from_pretrained=None)

outputs = "outputs/quickstart-pretrain"
epochs = 100000
max_steps = 4361
log_every = 100
ckpt_every = 2000

batch_size = 64
lr = 1e-3
lr_schedule = "cosine"
warmup_steps = 300
adam_betas = (0.9, 0.99)
weight_decay = 0.01
ema_decay = 0.999
