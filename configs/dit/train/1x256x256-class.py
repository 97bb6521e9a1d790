"""Train DiT-XL/2 on images with classes, 256x256, with the settings of DiT (Peebles & Xie 2023, section 4).

    torchrun --standalone --nproc_per_node 8 scripts/train.py configs/dit/train/1x256x256-class.py \
        --data-path imagenet/train

The data are a folder with a folder of images for each class, or a table with the columns path and label. For other data
than ImageNet set the number of classes three times:

    --dataset.num_classes 10 --text_encoder.num_classes 10 --model.condition label_10

Weights: random.
Hardware: 8 GPUs.
"""

_base_ = ["../../_base_/train.py", "../../_base_/sd_vae.py"]
num_frames = 1
frame_interval = 1
image_size = (256, 256)

dataset = dict(type="ImageFolderDataset", num_classes=1000)
use_image_transform = True

grad_checkpoint = "none"

model = dict(
    type="DiT-XL/2",
    condition="label_1000",  # N of label_N is the number of classes
    no_temporal_pos_emb=True,  # an image has no time
    from_pretrained=None,  # --ckpt-path
    enable_flash_attn=True,
    enable_layernorm_kernel=True,
)
text_encoder = dict(
    type="classes",
    num_classes=1000,  # the N of label_N
)
scheduler = dict(
    type="iddpm",
    timestep_respacing="",  # all 1000 timesteps
)

epochs = 1400  # 7 M steps of 256 on ImageNet are the published model
batch_size = 32  # 256 on 8 processes
lr = 1e-4
