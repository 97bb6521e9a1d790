"""Train DiT-XL/2 on images with classes, 256x256, with the settings of DiT (Peebles & Xie 2023, section 4).

    torchrun --standalone --nproc_per_node 8 scripts/train.py configs/dit/train/1x256x256-class.py \
        --data-path imagenet/train

The data are a folder with a folder of images for each class, or a table with the columns path and label. For other data
than ImageNet set the number of classes in three places:

    --dataset.num_classes 10 --text_encoder.num_classes 10 --model.condition label_10
"""

# Define sampling size
num_frames = 1
frame_interval = 1
image_size = (256, 256)

# Define dataset
root = None
data_path = None  # --data-path
dataset = dict(
    type="ImageFolderDataset",
    num_classes=1000,
)
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
    condition="label_1000",  # N of label_N is the number of classes
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
    type="classes",
    num_classes=1000,  # the N of label_N
)
scheduler = dict(
    type="iddpm",
    timestep_respacing="",  # all 1000 timesteps
)

# Others
seed = 42
outputs = "outputs"
wandb = False

epochs = 1400  # 7 M steps of 256 on ImageNet are the published model
log_every = 10
ckpt_every = 1000
load = None

batch_size = 32  # 256 on 8 processes
lr = 1e-4
grad_clip = 1.0
