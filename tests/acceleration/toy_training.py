"""A few steps of a small model under any engine, as one process and as several take them."""

import torch
import torch.distributed as dist

from opensora.acceleration.distributed import World
from opensora.acceleration.engine import build_engine
from tests.models.denoisers import build

CPU = torch.device("cpu")

ALONE = World(0, 1, CPU)

STEPS, BATCH = 2, 8


def toy():
    """A STDiT of odd sizes: 2 processes cannot cut its 75 hidden units evenly, 4 leave some without a part of its tables."""
    torch.manual_seed(0)
    return build("STDiT", hidden_size=60, num_heads=3, mlp_ratio=1.25).train()


def data(step):
    """A batch of 8 samples: the model's inputs, and what it should predict."""
    rng = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, 4, 2, 4, 4, generator=rng)
    t = torch.randint(0, 1000, (BATCH,), generator=rng)
    y = torch.randn(BATCH, 1, 7, 16, generator=rng)
    return (x, t, y), torch.randn(BATCH, 8, 2, 4, 4, generator=rng)


def engine_for(name, world, dtype="fp32", settings=None, model=None, lr=1e-2):
    model = toy() if model is None else model
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
    return build_engine(name, model, optimizer, world, dtype=dtype, grad_clip=0.5, **(settings or {}))


def train(engine, world, accumulation=1, steps=range(STEPS)):
    """Losses of the whole batch, and gradient norms, of some steps."""
    seen = []
    for step in steps:
        (x, t, y), target = data(step)
        own = torch.arange(BATCH).view(accumulation, world.dp_size, -1)[:, world.dp_rank]
        total = torch.zeros(())
        for i, rows in enumerate(own):
            with engine.micro_step(last=i == accumulation - 1):
                loss = (engine.model(x[rows], t[rows], y[rows]) - target[rows]).square().mean()
            engine.backward(loss / accumulation)
            total += loss.detach() / accumulation
        if world.size > 1:
            dist.all_reduce(total)
        seen.append((float(total) / world.size, float(engine.step())))
    return torch.tensor(seen)
