"""Fine-tune a LoRA of Wan 2.1's T2V 14B on a folder of clips, at 480p and up to 81 frames.

    python -m tools.finetune FOLDER --model configs/wan/train/t2v-14b-lora.py
    python scripts/train.py configs/wan/train/t2v-14b-lora.py --data-path FOLDER

A step takes 9.76 s and 74.9 GiB, VAE and text encoder apart (random weights of full size, 81x480x832, one H200, `python -m tools.benchmark wan`).
On a card of 24 GB: --weight-streaming 3 --activation-offload True (9.78 s, 15.2 GiB); of 16 GB: --weight-streaming 2 --activation-offload True (9.99 s,
14.6 GiB). They take 65 GiB of the CPU's memory; with --grad-checkpoint block 40 (11.25 s, 18.1 GiB).

Weights: hub: Wan-AI/Wan2.1-T2V-14B-Diffusers.
Hardware: 1 GPU.
"""

_base_ = "../../_base_/wan_lora.py"

model = dict(type="Wan2.1-T2V-14B", from_pretrained="Wan-AI/Wan2.1-T2V-14B-Diffusers")
