"""Train DiT-XL/2 on 16 frames of 256x256, with the settings of Open-Sora 1.0.

Every token of the clip attends to every other. Start from DiT's ImageNet weights (their classes are left out) or from
configs/dit/train/1x256x256.py.

    torchrun --standalone --nproc_per_node 8 scripts/train.py configs/dit/train/16x256x256.py \
        --data-path clips.csv --ckpt-path DiT-XL-2-256x256.pt
"""

# Define sampling size
num_frames = 16
frame_interval = 3  # sample every 3rd frame
image_size = (256, 256)

# Define dataset
root = None
data_path = None  # --data-path
use_image_transform = False
num_workers = 4

# Define acceleration
dtype = "bf16"
grad_checkpoint = "none"
plugin = "ddp"
sp_size = 1

# Define model
model = dict(
    type="DiT-XL/2",
    condition="text",  # a caption is one vector
    from_pretrained=None,  # --ckpt-path
    enable_flash_attn=True,
    enable_layernorm_kernel=True,
)
vae = dict(
    type="VideoAutoencoderKL",
    from_pretrained="stabilityai/sd-vae-ft-ema",
)
text_encoder = dict(
    type="clip",
    from_pretrained="openai/clip-vit-base-patch32",
    model_max_length=77,
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
ckpt_every = 1000
load = None

batch_size = 8
lr = 2e-5
grad_clip = 1.0
