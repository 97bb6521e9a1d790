"""Train STDiT-XL/2 on 64 frames of 512x512, with the settings of Open-Sora 1.0.

Start from the weights of configs/opensora/train/16x512x512.py.

    torchrun --standalone --nproc_per_node 8 scripts/train.py configs/opensora/train/64x512x512.py \
        --data-path clips.csv --ckpt-path WEIGHTS
"""

# Define sampling size
num_frames = 64
frame_interval = 2  # sample every 2nd frame
image_size = (512, 512)

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
    space_scale=1.0,
    time_scale=2 / 3,  # new / old frame interval
    from_pretrained=None,  # --ckpt-path
    enable_flash_attn=True,
    enable_layernorm_kernel=True,
)
vae = dict(
    type="VideoAutoencoderKL",
    from_pretrained="stabilityai/sd-vae-ft-ema",
    micro_batch_size=128,
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
ckpt_every = 250
load = None

batch_size = 4
lr = 2e-5
grad_clip = 1.0
