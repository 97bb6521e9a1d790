"""The quickstart's clips with captions that were never trained on: the held-out loss of the shipped model at its own size.

python -m tools.eval.held_out_loss configs/quickstart/held_out.py

Weights: assets/models/stdit-quickstart.
Hardware: 2 CPU cores.
"""

_base_ = "./train.py"

dataset = dict(_delete_=True, type="VideoTextDataset", data_path="assets/clips/clips.csv", text_columns=("paraphrase",))

val_every = 1
val_data_path = "assets/clips/clips.csv"
val_num_timesteps = 4
