"""Sample 64 frames of 512x512 with STDiT-XL/2, with the settings of Open-Sora 1.0.

    torchrun --standalone --nproc_per_node 1 scripts/inference.py configs/opensora/inference/64x512x512.py \
        --ckpt-path WEIGHTS --prompt-path assets/texts/t2v_samples.txt

Weights: from configs/opensora/train/64x512x512.py.
Hardware: 1 GPU.
"""

_base_ = "16x512x512.py"
num_frames = 64
fps = 24 // 2  # the model was trained on every 2nd frame

model = dict(time_scale=2 / 3)

batch_size = 1
