"""A small NOVA scheduler, its conditions and generators."""

from opensora.registry import SCHEDULERS
from opensora.utils.seed import generators
from tests.models.nova.toy import inputs

SIZE = (3, 8, 8)


def scheduler(**changes):
    return SCHEDULERS.build({"type": "nova", "num_sampling_steps": 4, "num_diffusion_steps": 3, **changes})


def conditions(batch=2):
    cond = inputs(batch=batch)
    return {name: cond[name] for name in ("y", "mask", "fps", "flow")}


def rngs(*ids):
    return generators(1, "nova", ids=ids)
