"""Sample 16 frames of 512x512 from captions with LatteT2V and its released weights (Ma et al. 2024).

    torchrun --standalone --nproc_per_node 1 scripts/inference.py configs/latte/inference/16x512x512-t2v.py \
        --ckpt-path maxin-cn/Latte-1 --prompt-path assets/texts/t2v_samples.txt

The settings are Latte's: 50 steps of DDIM. Another source of the weights is a folder or file on disk.

Weights: hub: maxin-cn/Latte-1.
Hardware: 1 GPU.
"""

_base_ = ["../../_base_/sample.py", "../../_base_/sd_vae.py", "../../_base_/t5.py"]
num_frames = 16
fps = 24 // 3  # the model was trained on every 3rd frame
image_size = (512, 512)

model = dict(
    type="LatteT2V-XL/2",
    space_scale=1.0,
    time_scale=1.0,
    enable_flash_attn=True,
    enable_layernorm_kernel=True,
    from_pretrained="PRETRAINED_MODEL",  # --ckpt-path
)
vae = dict(micro_batch_size=128)
scheduler = dict(
    type="iddpm",
    sampler="ddim",
    num_sampling_steps=50,
    cfg_scale=7.5,
    cfg_channel=None,  # all channels are guided
)

batch_size = 1
