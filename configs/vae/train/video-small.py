"""Train the small video VAE of assets/models/vae-video-small: 4x8x8, 16 channels, causal in time.

    python -m assets.build.fetch_sources --out data/sources
    python -m assets.build.collect_clips --out data/vae @assets/build/clips.txt
    python -m assets.build.start_vae configs/vae/train/video-small.py --out outputs/vae-start --clips 48
    python scripts/train_vae.py configs/vae/train/video-small.py --vae.from_pretrained outputs/vae-start --vae.architecture None
    python -m tools.eval_vae --vae outputs/vae/video-small/vae --data-path assets/clips/held_out.csv

The network is Wan 2.2's in small: pixels folded 2 x 2, residual paths around every change of size, no GroupNorm, so that
no frame sees a later one. One step sees 8 clips of 17 x 128 x 128, and takes 0.06 s on one H200, compiled; docs/how-to/vae-training.md gives
the reasons of the settings, the model card the figures. Without the third line (and the fourth's options) it starts from random
weights, and is behind that start after 881 steps.

Weights: random, or the linear start of assets/build/start_vae.py.
Hardware: 1 GPU.
"""

data_path = "data/vae/train.csv"
eval_data_path = "assets/clips/held_out.csv"
eval_every = 1566
dataset = dict(type="InMemoryVideoDataset", pictures="pan", repeat_clips=2)  # seven of ten samples are images
num_frames = 17  # no single frames: a clip's first frame is one, for this VAE
image_size = (128, 128)
num_workers = 14

vae = dict(
    type="DiffusersVideoVAE",
    memory_format="channels_last",
    architecture=dict(
        type="AutoencoderKLWan",
        base_dim=48,
        decoder_base_dim=56,
        z_dim=16,
        dim_mult=[1, 2, 2],
        num_res_blocks=1,
        temperal_downsample=[True, True],
        is_residual=True,
        patch_size=2,
        in_channels=12,
        out_channels=12,
    ),
)
loss = dict(l1=1.0, mse=1.0, pooled=0.5, lpips=0.1, kl=1e-5)
lpips = "alex"
lpips_frames = 2

dtype = "bf16"
compile = True
seed = 42
outputs = "outputs/vae"
exp_name = "video-small"
epochs = 100000
max_steps = 6263
log_every = 50
ckpt_every = 0

batch_size = 8
lr = 3e-4
lr_schedule = "cosine"
warmup_steps = 782  # a linear start needs it
adam_betas = (0.9, 0.99)
weight_decay = 1e-4
grad_clip = 1.0
ema_decay = 0.998
