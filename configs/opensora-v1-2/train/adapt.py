"""Adapt PixArt-Sigma's weights to STDiT3-XL/2 on 480p images: the first step of Open-Sora 1.2.

STDiT3 has spatial and temporal blocks; images train the spatial ones.

    torchrun --standalone --nproc_per_node 8 scripts/train.py configs/opensora-v1-2/train/adapt.py \
        --data-path pictures.csv --ckpt-path PixArt-Sigma-XL-2-2K-MS.pth

Before it, see what becomes of your data: `python -m tools.datasets.doctor configs/opensora-v1-2/train/adapt.py
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
    "480p": {1: (1.0, 14)},
}

# Define acceleration
dtype = "bf16"
grad_checkpoint = "none"
plugin = "ddp"
sp_size = 1

# Define model
model = dict(
    type="STDiT3-XL/2",
    input_sq_size=512,  # pixels of the square at which positions count patches
    qk_norm=True,
    from_pretrained=None,  # --ckpt-path
    enable_flash_attn=True,
    enable_layernorm_kernel=True,
)
vae = dict(
    type="VideoAutoencoderKL",
    from_pretrained="PixArt-alpha/pixart_sigma_sdxlvae_T5_diffusers",
    subfolder="vae",
    micro_batch_size=4,
)
text_encoder = dict(
    type="t5",
    from_pretrained="DeepFloyd/t5-v1_1-xxl",
    model_max_length=300,
    clean="legacy",  # as Open-Sora 1.2 cleans captions, and sampling does
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
