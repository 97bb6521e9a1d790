"""Sample 81 frames that begin with an image with Wan 2.1's I2V 14B, with the settings of its authors.

python scripts/inference.py configs/wan/inference/i2v-14b.py --image first.png --prompt "the dog turns its head" [--lora ADAPTER]

For 720p `--ckpt-path Wan-AI/Wan2.1-I2V-14B-720P-Diffusers --image-size 720 1280 --scheduler.shift 5`.

Weights: hub: Wan-AI/Wan2.1-I2V-14B-480P-Diffusers.
Hardware: 1 GPU.
"""

_base_ = "../../_base_/wan_sample.py"

model = dict(type="Wan2.1-I2V-14B", from_pretrained="Wan-AI/Wan2.1-I2V-14B-480P-Diffusers")
image_encoder = dict(type="clip-vision", from_pretrained="Wan-AI/Wan2.1-I2V-14B-480P-Diffusers", dtype="bf16")
scheduler = dict(num_sampling_steps=40)
