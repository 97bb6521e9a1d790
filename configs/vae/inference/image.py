"""Reconstruct images, or videos frame by frame, with Stable Diffusion's VAE.

python scripts/inference_vae.py configs/vae/inference/image.py --files image.png --save-dir samples/vae
python scripts/inference_vae.py configs/vae/inference/image.py --ckpt-path assets/models/vae-quickstart --data-path clips.csv

Weights: hub: stabilityai/sd-vae-ft-ema.
Hardware: 1 GPU.
"""

vae = dict(type="VideoAutoencoderKL", from_pretrained="stabilityai/sd-vae-ft-ema", micro_batch_size=8)
dtype = "fp32"
save_dir = "./samples/vae"
