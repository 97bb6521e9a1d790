"""Train STDiT3-XL/2 on images and videos of 144p to 1024x1024: the second stage of Open-Sora 1.2.

Start from stage 1. Batch sizes are its authors', for 80 GB.

    torchrun --standalone --nproc_per_node 8 scripts/train.py configs/opensora-v1-2/train/stage2.py \
        --data-path clips.csv --ckpt-path STAGE_1

Before it, see what becomes of your data: `python -m tools.datasets.doctor configs/opensora-v1-2/train/stage2.py
--data-path clips.csv --processes 8`. How to read bucket_config: docs/datasets.md.
"""

# Define dataset
dataset = dict(
    type="VariableVideoTextDataset",
    transform_name="resize_crop",
)
root = None
data_path = None  # --data-path
frame_interval = 1
num_workers = 8

# resolution: {frames: (probability, batch size of each process)}
bucket_config = {
    "144p": {1: (1.0, 475), 51: (1.0, 51), 102: ((1.0, 0.33), 27), 204: ((1.0, 0.1), 13), 408: ((1.0, 0.1), 6)},
    "256": {1: (0.4, 297), 51: (0.5, 20), 102: ((0.5, 0.33), 10), 204: ((0.5, 1.0), 5), 408: ((0.5, 1.0), 2)},
    "240p": {1: (0.3, 297), 51: (0.4, 20), 102: ((0.4, 0.33), 10), 204: ((0.4, 1.0), 5), 408: ((0.4, 1.0), 2)},
    "360p": {1: (0.5, 141), 51: (0.15, 8), 102: ((0.3, 0.5), 4), 204: ((0.3, 1.0), 2), 408: ((0.5, 0.5), 1)},
    "512": {1: (0.4, 141), 51: (0.15, 8), 102: ((0.2, 0.4), 4), 204: ((0.2, 1.0), 2), 408: ((0.4, 0.5), 1)},
    "480p": {1: (0.5, 89), 51: (0.2, 5), 102: (0.2, 2), 204: (0.1, 1)},
    "720p": {1: (0.1, 36), 51: (0.03, 1)},
    "1024": {1: (0.1, 36), 51: (0.02, 1)},
    "1080p": {1: (0.01, 5)},
    "2048": {1: (0.01, 5)},
}

# frames given at random, so that the model learns to continue and to fill in; the rest, 80 %, get none
mask_ratios = {
    "random": 0.05,
    "interpolate": 0.005,
    "quarter_random": 0.005,
    "quarter_head": 0.005,
    "quarter_tail": 0.005,
    "quarter_head_tail": 0.005,
    "image_random": 0.025,
    "image_head": 0.05,
    "image_tail": 0.025,
    "image_head_tail": 0.025,
}

# Define acceleration
dtype = "bf16"
grad_checkpoint = "block"
plugin = "ddp"
sp_size = 1

# Define model
model = dict(
    type="STDiT3-XL/2",
    input_sq_size=512,  # pixels of the square at which positions count patches
    qk_norm=True,
    freeze_y_embedder=True,
    from_pretrained=None,  # --ckpt-path
    enable_flash_attn=True,
    enable_layernorm_kernel=True,
)
vae = dict(
    type="OpenSoraVAE_V1_2",
    from_pretrained="hpcai-tech/OpenSora-VAE-v1.2",
    micro_frame_size=17,
    micro_batch_size=4,
)
text_encoder = dict(
    type="t5",
    from_pretrained="DeepFloyd/t5-v1_1-xxl",
    model_max_length=300,
    clean="legacy",  # as Open-Sora 1.2 cleans captions, and sampling does
)
scheduler = dict(
    type="rflow",
    shift="resolution",
    timestep_sampling="logit-normal",
)

# Others
seed = 42
outputs = "outputs"
wandb = False

epochs = 1000  # just large enough, stop when satisfied
log_every = 10
ckpt_every = 200
load = None

lr = 1e-4
warmup_steps = 1000
adam_eps = 1e-15
ema_decay = 0.99
grad_clip = 1.0
