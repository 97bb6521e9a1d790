"""Sample 121 frames of 704x1280 from text, or from an image too, with Wan 2.2's TI2V 5B, with the settings of its authors.

python scripts/inference.py configs/wan/inference/ti2v-5b.py --prompt "a calm lake at dawn" [--image first.png] [--lora ADAPTER]

Weights: hub: Wan-AI/Wan2.2-TI2V-5B-Diffusers.
Hardware: 1 GPU.
"""

_base_ = "../../_base_/wan_sample.py"

model = dict(type="Wan2.2-TI2V-5B", from_pretrained="Wan-AI/Wan2.2-TI2V-5B-Diffusers")
vae = dict(from_pretrained="Wan-AI/Wan2.2-TI2V-5B-Diffusers")
text_encoder = dict(from_pretrained="Wan-AI/Wan2.2-TI2V-5B-Diffusers")
scheduler = dict(shift=5.0)

num_frames = 121
fps = 24
image_size = (704, 1280)
