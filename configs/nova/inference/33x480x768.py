"""Sample 33 frames of 480x768 with NOVA's video model.

python scripts/inference.py configs/nova/inference/33x480x768.py --ckpt-path WEIGHTS --prompt "a calm lake at dawn"

Weights: from configs/nova/train/33x480x768.py.
Hardware: 1 GPU.
"""

_base_ = "../../_base_/sample.py"
num_frames = 33
fps = 12
image_size = (480, 768)

model = dict(type="NOVA-d48w1024-T2V", base_size=(16, 60, 96), from_pretrained="PRETRAINED_MODEL")  # --ckpt-path
vae = dict(type="DiffusersVideoVAE", from_pretrained="Wan-AI/Wan2.1-T2V-1.3B-Diffusers", subfolder="vae")
text_encoder = dict(type="hf", from_pretrained="microsoft/phi-2", model_max_length=256, dtype="bf16")
scheduler = dict(
    type="nova",
    num_sampling_steps=64,  # 128 for the best videos
    num_diffusion_steps=25,  # 100 for the best videos
    cfg_scale=5.0,
)
motion_flow = 5  # how much moves
dtype = "bf16"

batch_size = 1
