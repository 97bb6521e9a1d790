"""Train STDiT2-XL/2 on videos of 240p to 720p and on images: the bucket example of Open-Sora's documentation.

Start from PixArt's weights or from those of image.py.

    torchrun --standalone --nproc_per_node 8 scripts/train.py configs/opensora-v1-1/train/video.py \
        --data-path clips.csv --ckpt-path PixArt-XL-2-1024-MS.pth

Before it, see what becomes of your data: `python -m tools.datasets.doctor configs/opensora-v1-1/train/video.py
--data-path clips.csv --processes 8`. How to read bucket_config: docs/datasets.md.
"""

# Define dataset
dataset = dict(
    type="VariableVideoTextDataset",
    transform_name="resize_crop",
)
root = None
data_path = None  # --data-path
frame_interval = 3  # sample every 3rd frame
num_workers = 4

# resolution: {frames: (probability, batch size of each process)}
bucket_config = {
    "240p": {16: (1.0, 16), 32: (1.0, 8), 64: (1.0, 4), 128: (1.0, 2)},
    "256": {1: (1.0, 256)},
    "512": {1: (1.0, 80)},
    "480p": {1: (1.0, 52), 16: (0.5, 4), 32: (0.0, None)},
    "720p": {16: (1.0, 2), 32: (0.0, None)},
    "1024": {1: (1.0, 20)},
    "1080p": {1: (1.0, 8)},
}

# frames given at random, so that the model learns to continue and to fill in; the rest, 75 %, get none
mask_ratios = {
    "quarter_random": 0.025,
    "quarter_head": 0.025,
    "quarter_tail": 0.025,
    "quarter_head_tail": 0.05,
    "image_random": 0.025,
    "image_head": 0.025,
    "image_tail": 0.025,
    "image_head_tail": 0.05,
}

# Define acceleration
dtype = "bf16"
grad_checkpoint = "block"
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
    clean="legacy",  # as Open-Sora 1.1 cleans captions, and sampling does
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

lr = 2e-5
grad_clip = 1.0
