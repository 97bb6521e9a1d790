"""The quickstart's clips in sizes and lengths that the shipped model was not trained on: its loss in each bucket.

python -m tools.eval.held_out_loss configs/quickstart/held_out_buckets.py

Weights: assets/models/stdit-quickstart.
Hardware: 2 CPU cores.
"""

_base_ = "./buckets.py"

dataset = dict(type="VariableVideoTextDataset", text_columns=("paraphrase",))
bucket_config = {
    "96px": {4: (1.0, 4), 8: (1.0, 4), 16: (1.0, 2)},
}

model = dict(_delete_=True, type="STDiT-XS/2", pred_sigma=False, from_pretrained="assets/models/stdit-quickstart")

val_every = 1
val_data_path = "assets/clips/clips.csv"
val_num_timesteps = 4
