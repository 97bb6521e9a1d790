"""Train STDiT2-XL/2 on captioned images from 256x256 to 1080p, with the buckets of Open-Sora 1.1.

Start from PixArt's weights.

    torchrun --standalone --nproc_per_node 8 scripts/train.py configs/opensora-v1-1/train/image.py \
        --data-path pictures.csv --ckpt-path PixArt-XL-2-1024-MS.pth

Before it, see what becomes of your data: `python -m tools.datasets.doctor configs/opensora-v1-1/train/image.py
--data-path pictures.csv --processes 8`. How to read bucket_config: docs/datasets.md.
"""

# Define dataset
dataset = dict(
    type="VariableVideoTextDataset",
    transform_name="resize_crop",
)
root = None
data_path = None  # --data-path
frame_interval = 1
use_image_transform = True
num_workers = 4

# resolution: {frames: (probability, batch size of each process)}
bucket_config = {
    "256": {1: (1.0, 256)},
    "512": {1: (1.0, 80)},
    "480p": {1: (1.0, 52)},
    "1024": {1: (1.0, 20)},
    "1080p": {1: (1.0, 8)},
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
