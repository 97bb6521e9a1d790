"""Sample videos from references with STDiT2-XL/2: animate, continue, edit and join, with the settings of Open-Sora 1.1.

    torchrun --standalone --nproc_per_node 1 scripts/inference.py configs/opensora-v1-1/inference/sample-ref.py \
        --ckpt-path hpcai-tech/OpenSora-STDiT-v2-stage3

Two segments, 28 frames: the second continues the last 4 of the first. A prompt ends in what is made of its references, one
`loop, reference, first frame there, first frame here, frames, edit ratio` for each, separated by ";"; see docs/how-to/conditioning.md.

Weights: hub: hpcai-tech/OpenSora-STDiT-v2-stage3.
Hardware: 1 GPU.
"""

_base_ = "sample.py"

prompt_path = None
prompt = [
    'A white dog runs over a meadow. {"reference_path": "assets/clips/white_dog.mp4", "mask_strategy": "0"}',
    'A city at dusk. {"reference_path": "assets/clips/city_teal.mp4", "mask_strategy": "0,0,-8,0,8"}',
    'A snowy meadow. {"reference_path": "assets/clips/meadow_run.mp4", "mask_strategy": "0,0,0,0,15,0.8"}',
    'Clouds drift by. {"reference_path": "assets/clips/pink_clouds.mp4;assets/clips/city_white.mp4", '
    '"mask_strategy": "0;0,1,0,-1,1"}',
    '|0|A rabbit climbs out of its burrow.|1|The rabbit stands on a meadow. {"reference_path": '
    '"assets/clips/rabbit_climbs_out.mp4", "mask_strategy": "0,0,0,0,15"}',
]

loop = 2
condition_frame_length = 4
