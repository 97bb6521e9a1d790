"""Train the small image VAE that the repository ships (assets/models/vae-quickstart), on one GPU.

    python -m assets.build.fetch_sources --out data/sources
    python -m assets.build.collect_images --out data/images @assets/build/images.txt
    python scripts/train_vae.py configs/quickstart/train_vae.py
    python -m tools.eval_vae --vae outputs/quickstart-vae/000-VideoAutoencoderKL/vae \
        --data-path data/images/held_out.csv --train-path data/images/train.csv --sheet outputs/vae.png

3.3 M parameters, 6.5 MB in fp16; latents of 4 channels at an eighth of the size. `loss.pooled` is what brings colour.

Weights: random.
Hardware: 1 GPU.
"""

data_path = "data/images/train.csv"
dataset = dict(type="VideoTextDataset", transform_name="random_crop", text_columns=())
num_frames = 1
image_size = (96, 96)
num_workers = 14

vae = dict(
    type="VideoAutoencoderKL",
    memory_format="channels_last",
    architecture=dict(
        block_out_channels=(32, 64, 96, 128),
        layers_per_block=1,
        mid_block_add_attention=False,
        norm_num_groups=8,
        latent_channels=4,
    ),
)
loss = dict(l1=1.0, mse=4.0, pooled=1.0, kl=1e-5)

dtype = "bf16"
compile = False

seed = 42
outputs = "outputs/quickstart-vae"
epochs = 100000
max_steps = 6000
log_every = 50
ckpt_every = 2000

batch_size = 64
lr = 1.5e-3
lr_schedule = "cosine"
warmup_steps = 200
adam_betas = (0.9, 0.99)
grad_clip = 1.0
ema_decay = 0.999
