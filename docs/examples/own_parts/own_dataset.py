"""White squares that move to the left or right."""

import torch

from opensora.registry import DATASETS
from opensora.utils.seed import generator


@DATASETS.register_module()
class MovingSquares:
    # num_frames, image_size and seed are the config's
    def __init__(self, num_clips=64, num_frames=8, image_size=(32, 32), seed=42):
        self.num_clips, self.num_frames, self.image_size, self.seed = num_clips, num_frames, tuple(image_size), seed

    def __len__(self):
        return self.num_clips

    def __getitem__(self, key):  # SampleKey(epoch, index); the sample depends on nothing else but the seed
        rng = generator(self.seed, "squares", key.epoch, key.index)
        (height, width), step = self.image_size, 1 if key.index % 2 == 0 else -1
        top, left = torch.randint(min(height, width) // 2, (2,), generator=rng).tolist()
        video = torch.full((3, self.num_frames, height, width), -1.0)  # in [-1, 1]
        for t in range(self.num_frames):
            video[:, t, top : top + 8, (torch.arange(8) + left + step * t) % width] = 1.0
        sizes = {"fps": 8, "num_frames": self.num_frames, "height": height, "width": width}
        text = f"a white square moves {'right' if step > 0 else 'left'}"
        numbers = {name: torch.tensor(float(value)) for name, value in sizes.items()}
        index = torch.tensor(key.index)
        return {"video": video, "text": text, "index": index, "path": f"square {key.index}", **numbers}

    def fingerprint(self):
        return repr((self.num_clips, self.num_frames, self.image_size, self.seed))
