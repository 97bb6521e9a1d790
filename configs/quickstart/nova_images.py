"""Train a small NOVA on single frames of the repository's clips, from random weights: the first part of `make quickstart-nova`.

python -m tools.cache_features configs/quickstart/nova_images.py
python scripts/train.py configs/quickstart/nova_images.py

`make quickstart-nova` takes a third more steps, in bf16, where the CPU has bf16 arithmetic: as long, and nearer to the clips.

Most patches of a frame are hidden: of so few clips, a few visible patches say which one it is, and the text would be ignored.

Weights: random.
Hardware: 2 CPU cores.
"""

_base_ = ["train.py"]

num_frames = 1
frame_interval = 1

model = dict(
    _delete_=True,
    type="NOVA",
    width=192,
    num_heads=3,
    video_depth=2,
    image_depth=4,
    head_depth=3,
    motion=False,
    class_dropout_prob=0.0,  # nothing is sampled with guidance
)
scheduler = dict(_delete_=True, type="nova", losses="first", loss_repeat=1, min_mask_ratio=0.9, shift=3.0)

epochs = 2000
max_steps = 1200
log_every = 25
ckpt_every = 400

batch_size = 32
lr = 2e-3
lr_schedule = "cosine"
warmup_steps = 50
adam_betas = (0.9, 0.99)
ema_decay = 0.99
