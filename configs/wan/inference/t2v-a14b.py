"""Sample 81 frames from text with the two experts of Wan 2.2's T2V A14B, with the settings of its authors.

python scripts/inference.py configs/wan/inference/t2v-a14b.py --prompt "a calm lake at dawn"

Weights: hub: Wan-AI/Wan2.2-T2V-A14B-Diffusers.
Hardware: 1 GPU.
"""

_base_ = "../../_base_/wan_sample.py"

model = dict(type="Wan2.2-T2V-A14B", from_pretrained="Wan-AI/Wan2.2-T2V-A14B-Diffusers")
scheduler = dict(
    shift=12.0,
    num_sampling_steps=40,
    cfg_scale=4.0,  # of the high-noise expert
    guidance=dict(schedule="stages", boundary=0.875, low_scale=3.0),
)
