"""Train DiT-XL/2 on captioned images of 256x256 from random weights, with the settings of Open-Sora 1.0.

    torchrun --standalone --nproc_per_node 8 scripts/train.py configs/dit/train/1x256x256.py \
        --data-path pictures.csv
"""

# Define sampling size
num_frames = 1
frame_interval = 1
image_size = (256, 256)

# Define dataset
root = None
data_path = None  # --data-path
use_image_transform = True
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
    no_temporal_pos_emb=True,  # a picture has no time
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

batch_size = 128
lr = 1e-4
grad_clip = 1.0
