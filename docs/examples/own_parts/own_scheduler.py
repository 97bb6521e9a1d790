"""A straight path from noise to data, with a model that predicts the data."""

from opensora.registry import SCHEDULERS
from opensora.schedulers.guidance import guidance_from_config
from opensora.schedulers.sampling import Sampler
from opensora.schedulers.training import frame_mean, keep_conditioning_frames, predict
from opensora.utils.seed import rand, randn_like


class Euler:  # one sampling run
    def __init__(self, num_steps):
        self.levels = [1 - i / num_steps for i in range(num_steps)]  # noise left before each step
        self.timesteps = [1000 * level for level in self.levels]  # what the model is given

    def noised(self, x_0, noise, index):
        return (1 - self.levels[index]) * x_0 + self.levels[index] * noise

    def step(self, denoise, x, index, active):
        x_0 = denoise(x, self.timesteps[index])
        kept = [*self.levels, 0.0][index + 1] / self.levels[index]
        return kept * x + (1 - kept) * x_0, x_0


@SCHEDULERS.register_module("data-flow")
class DataFlow(Sampler):
    def __init__(self, num_sampling_steps=10, cfg_scale=1.0):
        self.num_sampling_steps, self.guidance = num_sampling_steps, guidance_from_config(cfg_scale, None, None)

    def solver(self, z, generators):
        return Euler(self.num_sampling_steps)

    def training_losses(self, model, x0, cond, *, mask, generators):
        t, noise = 1000 * rand(generators, x0.device), randn_like(x0, generators)  # [B], [B, C, T, H, W]
        level = (t / 1000)[:, None, None, None, None]
        x_t = keep_conditioning_frames((1 - level) * x0 + level * noise, x0, mask)
        return frame_mean((predict(model, x_t, t, cond, mask) - x0) ** 2, mask)  # [B]
