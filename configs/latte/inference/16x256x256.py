"""Sample 16 frames of 256x256 from captions with Latte-XL/2, trained by configs/latte/train/16x256x256.py.

    torchrun --standalone --nproc_per_node 1 scripts/inference.py configs/latte/inference/16x256x256.py \
        --ckpt-path WEIGHTS --prompt-path assets/texts/t2v_samples.txt

As in Open-Sora, 20 steps of DPM-Solver; `--scheduler.type iddpm --num-sampling-steps 100` takes longer. For captions with
released weights see 16x512x512-t2v.py.

Weights: none released.
Hardware: 1 GPU.
"""

_base_ = ["../../_base_/sample.py", "../../_base_/sd_vae.py", "../../_base_/clip.py"]
num_frames = 16
fps = 24 // 3  # the model was trained on every 3rd frame
image_size = (256, 256)

model = dict(
    type="Latte-XL/2",
    condition="text",
    enable_flash_attn=True,
    enable_layernorm_kernel=True,
    from_pretrained="PRETRAINED_MODEL",  # --ckpt-path
)
scheduler = dict(
    type="dpm-solver",  # DPM-Solver++, second order, multistep
    num_sampling_steps=20,
    cfg_scale=4.0,
    cfg_channel=None,  # all channels are guided
)
