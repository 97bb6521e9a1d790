"""Sample 81 frames from text with Wan 2.1's T2V 14B, with the settings of its authors.

python scripts/inference.py configs/wan/inference/t2v-14b.py --prompt "a calm lake at dawn" [--lora ADAPTER]
python scripts/inference.py configs/wan/inference/t2v-14b.py --prompt "a calm lake at dawn" --image-size 720 1280 --scheduler.shift 5

Weights: hub: Wan-AI/Wan2.1-T2V-14B-Diffusers.
Hardware: 1 GPU.
"""

_base_ = "../../_base_/wan_sample.py"

model = dict(type="Wan2.1-T2V-14B", from_pretrained="Wan-AI/Wan2.1-T2V-14B-Diffusers")
