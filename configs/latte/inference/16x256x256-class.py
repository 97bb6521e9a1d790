"""Sample 16 frames of UCF101's classes with Latte-XL/2 and its released weights (Ma et al. 2024).

    torchrun --standalone --nproc_per_node 1 scripts/inference.py configs/latte/inference/16x256x256-class.py \
        --ckpt-path Latte-XL-2-256x256-ucf101.pt --prompt-path assets/texts/ucf101_id.txt

A prompt is a class number, 0 to 100, in the alphabetical order of UCF101's names; assets/texts/ucf101_labels.txt names
those of the file.

Weights: released by Latte's authors.
Hardware: 1 GPU.
"""

_base_ = ["../../_base_/sample.py", "../../_base_/sd_vae.py"]
num_frames = 16
fps = 24 // 3  # the model was trained on every 3rd frame
image_size = (256, 256)

model = dict(
    type="Latte-XL/2",
    condition="label_101",
    enable_flash_attn=True,
    enable_layernorm_kernel=True,
    from_pretrained="PRETRAINED_MODEL",  # --ckpt-path
)
text_encoder = dict(
    type="classes",
    num_classes=101,  # the N of label_N
)
scheduler = dict(
    type="iddpm",
    num_sampling_steps=250,
    cfg_scale=7.0,
    cfg_channel=None,  # all channels are guided
)

prompt_path = "./assets/texts/ucf101_id.txt"
