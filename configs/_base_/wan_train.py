"""What trainings of Wan share, on top of `buckets.py` and `wan.py`: a fine-tuning on a folder of clips, at 480p and 16 frames a second."""

_base_ = ["buckets.py", "wan.py"]

dataset = dict(target_fps=16)  # slower videos are left out, and counted
# sizes: {frames: (probability, batch size)}; each clip is taken at the nearest shape and as long as it allows
bucket_config = {
    "480x832,544x704,624x624,704x544,832x480": {81: (1.0, 1), 49: (1.0, 1), 33: (1.0, 1), 17: (1.0, 1), 1: (1.0, 4)},
}
cache_text = True
compile = True
grad_checkpoint = "attention"

epochs = 1000000
max_steps = 1000
ckpt_every = 200
keep_last_n = 2
warmup_steps = 50
weight_decay = 0.01
ema_decay = 0.99

# of the samples
val_num_frames = 81
val_image_size = (480, 832)
val_fps = 16
