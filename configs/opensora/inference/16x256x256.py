"""Sample 16 frames of 256x256 with STDiT-XL/2, with the settings of Open-Sora 1.0.

    torchrun --standalone --nproc_per_node 1 scripts/inference.py configs/opensora/inference/16x256x256.py \
        --ckpt-path WEIGHTS --prompt-path assets/texts/t2v_samples.txt

Weights: Open-Sora 1.0's, or from configs/opensora/train/16x256x256.py.
Hardware: 1 GPU.
"""

_base_ = ["../../_base_/sample.py", "../../_base_/sd_vae.py", "../../_base_/t5.py"]
num_frames = 16
fps = 24 // 3  # the model was trained on every 3rd frame
image_size = (256, 256)

model = dict(
    type="STDiT-XL/2",
    space_scale=0.5,
    time_scale=1.0,
    enable_flash_attn=True,
    enable_layernorm_kernel=True,
    from_pretrained="PRETRAINED_MODEL",  # --ckpt-path
)
scheduler = dict(
    type="iddpm",
    num_sampling_steps=100,
    cfg_scale=7.0,
    cfg_channel=3,  # as the released weights were sampled; None guides all channels
)
