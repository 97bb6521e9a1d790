"""Sample images of ImageNet's classes with DiT-XL/2 and its released weights (Peebles & Xie 2023).

    torchrun --standalone --nproc_per_node 1 scripts/inference.py configs/dit/inference/1x256x256-class.py \
        --ckpt-path DiT-XL-2-256x256.pt --prompt-path assets/texts/imagenet_id.txt

A prompt is a class number, 0 to 999: `--prompt 340` is a zebra. assets/texts/imagenet_labels.txt names the classes of
the file.
"""

# Define sampling size
num_frames = 1
fps = 1  # a picture; the model is not told
image_size = (256, 256)

# Define model
model = dict(
    type="DiT-XL/2",
    condition="label_1000",
    no_temporal_pos_emb=True,  # a picture has no time
    enable_flash_attn=True,
    enable_layernorm_kernel=True,
    from_pretrained="PRETRAINED_MODEL",  # --ckpt-path
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
    num_sampling_steps=250,
    cfg_scale=4.0,
    cfg_channel=3,  # as DiT's published samples; None guides all channels
)
dtype = "fp16"

# Others
batch_size = 2
seed = 42
prompt_path = "./assets/texts/imagenet_id.txt"
save_dir = "./samples"
