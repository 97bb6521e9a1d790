"""Sharpen the decoder of the small image VAE (assets/models/vae-quickstart) with LPIPS; its latents stay what they are.

    python -m assets.build.fetch_sources --out data/sources
    python -m assets.build.collect_clips --out data/vae @assets/build/clips.txt
    python scripts/train_vae.py configs/vae/train/image-small-decoder.py
    python -m tools.eval_vae --vae outputs/vae/image-small-decoder/vae --data-path data/vae/held_out.csv --num-frames 1

Denoisers trained on the shipped VAE go on working, for the encoder and the scale of the latents are kept: the way in which
sd-vae-ft-mse was made of Stable Diffusion's VAE. A minute or two of one H100.

Weights: assets/models/vae-quickstart.
Hardware: 1 GPU.
"""

data_path = "data/vae/train_all.csv"
eval_data_path = "assets/clips/held_out.csv"
eval_every = 500
dataset = dict(type="InMemoryVideoDataset")
num_frames = 1
image_size = (128, 128)
num_workers = 14

vae = dict(type="VideoAutoencoderKL", from_pretrained="assets/models/vae-quickstart", memory_format="channels_last")
trained = "decoder"
loss = dict(l1=1.0, mse=4.0, pooled=0.5, lpips=0.1, kl=0.0)
lpips = "vgg"

dtype = "bf16"
compile = False

seed = 42
outputs = "outputs/vae"
exp_name = "image-small-decoder"
epochs = 100000
max_steps = 1500
log_every = 50
ckpt_every = 0

batch_size = 64
lr = 5e-4
lr_schedule = "cosine"
warmup_steps = 100
adam_betas = (0.9, 0.99)
grad_clip = 1.0
ema_decay = 0.998
