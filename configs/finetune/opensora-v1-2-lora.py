"""Fine-tune a LoRA of STDiT3-XL/2, Open-Sora 1.2's released model, on a folder of a few clips and images of any shape.

    python -m tools.finetune FOLDER --model opensora-v1-2-lora
    python scripts/train.py configs/finetune/opensora-v1-2-lora.py --data-path FOLDER

It needs peft: `pip install -e '.[lora]'`.

Weights: hub: hpcai-tech/OpenSora-STDiT-v3.
Hardware: 1 GPU, 26 GiB.
"""

_base_ = "opensora-v1-2.py"

model = dict(freeze_y_embedder=False)  # a LoRA freezes all but itself
lora = dict(rank=16, alpha=16)
lr = 1e-4
