"""What LoRA trainings of Wan share, on top of `wan_train.py`: the adapters that other trainers of Wan take."""

_base_ = "wan_train.py"

lora = dict(
    rank=32,
    alpha=32,
    target_modules=["to_q", "to_k", "to_v", "to_out.0", "ffn.net.0.proj", "ffn.net.2"],
)
frozen_weights = "bf16"
lr = 1e-4
