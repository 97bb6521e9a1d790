"""Train STDiT2-XL/2 on captioned images of 512x512.

Open-Sora 1.1 mixes sizes and lengths in buckets, and masks frames; neither is here yet. This is its
bucket of 512x512 images alone, with its batch size. Start from PixArt's weights.

    torchrun --standalone --nproc_per_node 8 scripts/train.py configs/opensora-v1-1/train/image.py \
        --data-path pictures.csv --ckpt-path PixArt-XL-2-1024-MS.pth
"""

# Define sampling size
num_frames = 1
frame_interval = 1
image_size = (512, 512)

# Define dataset
root = None
data_path = None  # --data-path
use_image_transform = True
num_workers = 4

# Define acceleration
dtype = "bf16"
grad_checkpoint = True
plugin = "ddp"
sp_size = 1

# Define model
model = dict(
    type="STDiT2-XL/2",
    input_sq_size=512,  # pixels of the square at which positions count patches
    qk_norm=True,
    from_pretrained=None,  # --ckpt-path
    enable_flash_attn=True,
    enable_layernorm_kernel=True,
)
vae = dict(
    type="VideoAutoencoderKL",
    from_pretrained="stabilityai/sd-vae-ft-ema",
    micro_batch_size=4,
)
text_encoder = dict(
    type="t5",
    from_pretrained="DeepFloyd/t5-v1_1-xxl",
    model_max_length=200,
)
scheduler = dict(
    type="iddpm",
    timestep_respacing="",  # all 1000 timesteps
)

# Others
seed = 42
outputs = "outputs"
wandb = False

epochs = 1000  # just large enough, stop when satisfied
log_every = 10
ckpt_every = 500
load = None

batch_size = 80
lr = 2e-5
grad_clip = 1.0
