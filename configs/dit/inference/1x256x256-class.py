"""Sample images of ImageNet's classes with DiT-XL/2 and its released weights (Peebles & Xie 2023).

    torchrun --standalone --nproc_per_node 1 scripts/inference.py configs/dit/inference/1x256x256-class.py \
        --ckpt-path DiT-XL-2-256x256.pt --prompt-path assets/texts/imagenet_id.txt

A prompt is a class number, 0 to 999: `--prompt 340` is a zebra. assets/texts/imagenet_labels.txt names the classes of
the file.

Weights: released by DiT's authors.
Hardware: 1 GPU.
"""

_base_ = ["../../_base_/sample.py", "../../_base_/sd_vae.py"]
num_frames = 1
fps = 1  # an image; the model takes no frame rate
image_size = (256, 256)

model = dict(
    type="DiT-XL/2",
    condition="label_1000",
    no_temporal_pos_emb=True,  # an image has no time
    enable_flash_attn=True,
    enable_layernorm_kernel=True,
    from_pretrained="PRETRAINED_MODEL",  # --ckpt-path
)
text_encoder = dict(
    type="classes",
    num_classes=1000,  # the N of label_N
)
scheduler = dict(
    type="iddpm",
    num_sampling_steps=250,
    cfg_scale=4.0,
    cfg_channel=3,  # as DiT's published samples; None guides all channels
)

prompt_path = "./assets/texts/imagenet_id.txt"
