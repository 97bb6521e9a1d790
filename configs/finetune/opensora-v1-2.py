"""Fine-tune all of STDiT3-XL/2, Open-Sora 1.2's released model, on a folder of a few clips and images of any shape.

    python -m tools.finetune FOLDER --model opensora-v1-2
    python scripts/train.py configs/finetune/opensora-v1-2.py --data-path FOLDER

On eight GPUs: `torchrun --standalone --nproc_per_node 8 scripts/train.py ...`. `--val-every 200 --val-prompts "a calm lake"` shows
samples on the way; on held-out clips, `--val-data-path`, the loss says when the model begins to copy.

Weights: hub: hpcai-tech/OpenSora-STDiT-v3.
Hardware: 1 GPU, 43 GiB.
"""

_base_ = ["../_base_/buckets.py", "../_base_/stdit3.py"]

# resolution: {frames: (probability, batch size)}; each clip is taken at the largest and longest that it allows
bucket_config = {
    "360p": {1: (1.0, 8), 17: (1.0, 2), 34: (1.0, 1), 51: (1.0, 1)},
    "240p": {1: (1.0, 16), 17: (1.0, 4), 34: (1.0, 2), 51: (1.0, 2)},
    "144p": {1: (1.0, 32), 17: (1.0, 8), 34: (1.0, 4), 51: (1.0, 4)},
}

model = dict(from_pretrained="hpcai-tech/OpenSora-STDiT-v3", freeze_y_embedder=True)
scheduler = dict(type="rflow", shift="resolution", timestep_sampling="logit-normal")
cache_text = True

epochs = 1000000
max_steps = 1000
ckpt_every = 200
keep_last_n = 2

lr = 1e-5
warmup_steps = 50
adam_eps = 1e-15
ema_decay = 0.99

# of the samples
val_num_frames = 51
val_image_size = (240, 424)
val_scheduler = dict(type="rflow", shift="resolution", num_sampling_steps=30, cfg_scale=7.0)
