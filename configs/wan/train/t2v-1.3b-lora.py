"""Fine-tune a LoRA of Wan 2.1's T2V 1.3B on a folder of clips, at 480p and up to 81 frames.

    python -m tools.finetune FOLDER --model configs/wan/train/t2v-1.3b-lora.py
    python scripts/train.py configs/wan/train/t2v-1.3b-lora.py --data-path FOLDER

Not measured; all weights, as in t2v-1.3b.py, take 1.87 s and 61.9 GiB a step at 81x480x832 on one H200.

Weights: hub: Wan-AI/Wan2.1-T2V-1.3B-Diffusers.
Hardware: 1 GPU.
"""

_base_ = "../../_base_/wan_lora.py"

model = dict(type="Wan2.1-T2V-1.3B", from_pretrained="Wan-AI/Wan2.1-T2V-1.3B-Diffusers")
