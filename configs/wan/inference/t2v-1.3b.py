"""Sample 81 frames of 480x832 from text with Wan 2.1's T2V 1.3B, with the settings of its authors.

python scripts/inference.py configs/wan/inference/t2v-1.3b.py --prompt "a calm lake at dawn" [--lora ADAPTER]

Weights: hub: Wan-AI/Wan2.1-T2V-1.3B-Diffusers.
Hardware: 1 GPU.
"""

_base_ = "../../_base_/wan_sample.py"

model = dict(type="Wan2.1-T2V-1.3B", from_pretrained="Wan-AI/Wan2.1-T2V-1.3B-Diffusers")
