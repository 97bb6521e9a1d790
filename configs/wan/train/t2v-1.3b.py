"""Fine-tune all of Wan 2.1's T2V 1.3B on a folder of clips, at 480p and up to 81 frames.

    python scripts/train.py configs/wan/train/t2v-1.3b.py --data-path FOLDER
    torchrun --standalone --nproc_per_node 8 scripts/train.py configs/wan/train/t2v-1.3b.py --data-path clips.csv --max-steps 10000

A step takes 1.87 s and 61.9 GiB, VAE and text encoder apart (random weights of full size, 81x480x832, one H200, `python -m tools.benchmark wan`).

Weights: hub: Wan-AI/Wan2.1-T2V-1.3B-Diffusers.
Hardware: 1 GPU.
"""

_base_ = "../../_base_/wan_train.py"

model = dict(type="Wan2.1-T2V-1.3B", from_pretrained="Wan-AI/Wan2.1-T2V-1.3B-Diffusers")
grad_checkpoint = "selective"
lr = 1e-5
