"""Sample images of 1024x1024 with NOVA-d48w1024.

python scripts/inference.py configs/nova/inference/1x1024x1024.py --ckpt-path WEIGHTS --prompt "a calm lake at dawn"

Weights: from configs/nova/train/1x1024x1024.py.
Hardware: 1 GPU.
"""

_base_ = "../../_base_/sample.py"
num_frames = 1
fps = 12
image_size = (1024, 1024)

model = dict(type="NOVA-d48w1024", motion=False, from_pretrained="PRETRAINED_MODEL")  # --ckpt-path
vae = dict(type="VideoAutoencoderKL", from_pretrained="stabilityai/sdxl-vae")
text_encoder = dict(type="hf", from_pretrained="microsoft/phi-2", model_max_length=256, dtype="bf16")
scheduler = dict(
    type="nova",
    num_sampling_steps=64,  # 128 for the best images
    num_diffusion_steps=25,  # 100 for the best images
    cfg_scale=5.0,
)
dtype = "bf16"

batch_size = 1
