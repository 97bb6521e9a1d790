"""Train my_model.py on the clips of the repository, from random weights, on a CPU.

python -m tools.cache_features docs/examples/own_model/train.py
python scripts/train.py docs/examples/own_model/train.py

Weights: random.
Hardware: 2 CPU cores.
"""

_base_ = "../../../configs/quickstart/scratch.py"
imports = ["docs/examples/own_model/my_model.py"]

model = dict(_delete_=True, type="MeanTextDiT", hidden_size=192, depth=4, num_heads=4, patch_size=(1, 4, 4))

outputs = "outputs/own-model"
max_steps = 100
