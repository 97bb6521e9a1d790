"""Train the temporal part of Open-Sora 1.2's video VAE, 17 frames of 256x256, over PixArt-Sigma's image VAE, which stays as it is.

    torchrun --standalone --nproc_per_node 8 scripts/train_vae.py configs/vae/train/stage1.py --data-path clips.csv

One clip in five is cut into images. Open-Sora's first two stages compare image latents, and keep those of an image through the
temporal part in the first; here every stage compares pixels. Its KL weight, 1e-6 of sums, is 6e-9 of means (docs/how-to/vae-training.md).

Weights: hub: PixArt-alpha/pixart_sigma_sdxlvae_T5_diffusers.
Hardware: 8 GPUs of 80 GB.
"""

num_frames = 17
frame_interval = 1
image_size = (256, 256)
mixed_lengths = [17, 17, 17, 17, 1]
dataset = dict(type="VideoTextDataset", text_columns=())
num_workers = 16

vae = dict(
    type="VideoAutoencoderPipeline",
    freeze_vae_2d=True,
    vae_2d=dict(
        type="VideoAutoencoderKL",
        from_pretrained="PixArt-alpha/pixart_sigma_sdxlvae_T5_diffusers",
        subfolder="vae",
    ),
    vae_temporal=dict(type="VAE_Temporal_SD"),
    from_pretrained=None,  # --ckpt-path
)
loss = dict(l1=1.0, lpips=0.1, kl=6e-9, mse=0.0, pooled=0.0)
lpips = "vgg"

dtype = "bf16"

seed = 42
outputs = "outputs/vae_stage1"
epochs = 100
log_every = 10
ckpt_every = 1000

batch_size = 1
lr = 1e-5
grad_clip = 1.0
