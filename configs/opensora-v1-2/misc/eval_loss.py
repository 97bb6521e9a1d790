"""The held-out loss of STDiT3-XL/2 in each bucket of 144p to 2048, at 10 timesteps, as Open-Sora 1.2 evaluates it.

    torchrun --standalone --nproc_per_node 8 -m tools.eval.held_out_loss configs/opensora-v1-2/misc/eval_loss.py \
        --data-path held_out.csv --val-data-path held_out.csv --ckpt-path WEIGHTS

Weights: any of STDiT3-XL/2.
Hardware: 8 GPUs.
"""

_base_ = ["../../_base_/buckets.py", "../../_base_/stdit3.py"]

# resolution: {frames: (probability, batch size of each process)}
bucket_config = {
    "144p": {1: (1.0, 100), 51: (1.0, 30), 102: (1.0, 20), 204: (1.0, 8), 408: (1.0, 4)},
    "240p": {1: (0.5, 100), 51: (0.5, 24), 102: (0.5, 12), 204: (0.5, 4), 408: (0.5, 2)},
    "360p": {1: (0.5, 60), 51: (0.5, 12), 102: (0.5, 6), 204: (0.5, 2), 408: (0.5, 1)},
    "480p": {1: (0.5, 40), 51: (0.5, 6), 102: (0.5, 3), 204: (0.5, 1)},
    "720p": {1: (0.5, 20), 51: (0.5, 2), 102: (0.5, 1)},
    "1080p": {1: (0.5, 10)},
    "2048": {1: (0.5, 5)},
}

scheduler = dict(type="rflow")

val_every = 1
val_data_path = "HELD_OUT"  # --val-data-path
val_num_samples = 1000
val_num_timesteps = 10
