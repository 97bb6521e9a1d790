"""Train STDiT-XL/2 on 16 frames of 256x256, with the settings of Open-Sora 1.0.

Open-Sora 1.0 starts from PixArt-XL-2-512x512 and took 80,000 steps on 64 GPUs (its authors' figure).

    torchrun --standalone --nproc_per_node 8 scripts/train.py configs/opensora/train/16x256x256.py \
        --data-path clips.csv
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
grad_checkpoint = "block"
plugin = "ddp"
sp_size = 1

# Define model
model = dict(
    type="STDiT-XL/2",
    space_scale=0.5,  # new / old height
    time_scale=1.0,
    from_pretrained=None,  # --ckpt-path
    enable_flash_attn=True,
    enable_layernorm_kernel=True,
)
vae = dict(
    type="VideoAutoencoderKL",
    from_pretrained="stabilityai/sd-vae-ft-ema",
)
text_encoder = dict(
    type="t5",
    from_pretrained="DeepFloyd/t5-v1_1-xxl",
    model_max_length=120,
    clean="legacy",  # as Open-Sora 1.0 cleans captions, and sampling does
    shardformer=True,
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
