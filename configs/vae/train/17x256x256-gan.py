"""Train a video VAE of full size from scratch, 4x8x8 and 16 channels, images and videos together, with a GAN at the end.

    torchrun --standalone --nproc_per_node 8 scripts/train_vae.py configs/vae/train/17x256x256-gan.py --data-path clips.csv

The network is Wan 2.1's (127 M parameters), the loss LDM's: L1 and LPIPS as a likelihood with learned variance, KL, and a
hinge GAN whose weight adapts. The KL weight of Open-Sora and LDM, 1e-6 of sums, is 2.1e-8 of means here (256 x 3 pixel
numbers for 16 latent numbers). Not run to its end: no figures.

Weights: random.
Hardware: 8 GPUs.
"""

num_frames = 17
frame_interval = 1
image_size = (256, 256)
mixed_lengths = [17, 17, 17, 9, 1]  # one batch in five is images, as in Open-Sora's stage 1
dataset = dict(type="VideoTextDataset", transform_name="random_crop", text_columns=())
num_workers = 8

vae = dict(type="DiffusersVideoVAE", architecture=dict(type="AutoencoderKLWan"))
loss = dict(l1=1.0, lpips=0.1, kl=2.1e-8, mse=0.0, pooled=0.0)
lpips = "vgg"
lpips_frames = 4
reconstruction = "nll"
discriminator = dict(type="PatchDiscriminator", dims=3, channels=64, num_layers=3)
adversarial_weight = 0.5
adversarial_start = 100000

dtype = "bf16"

seed = 42
outputs = "outputs"
epochs = 1000
max_steps = 200000
log_every = 50
ckpt_every = 5000

batch_size = 1
lr = 1e-4
warmup_steps = 1000
adam_betas = (0.9, 0.95)
grad_clip = 1.0
ema_decay = 0.999
