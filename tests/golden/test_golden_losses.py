"""Ten training steps of every denoiser with every scheduler it takes, and samples of what they made: a refactor moves none.

losses.json and how to write it anew: README.md.
"""

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from opensora.acceleration.distributed import World
from opensora.acceleration.engine import build_engine
from opensora.config.load import TrainConfig
from opensora.registry import MODELS, SCHEDULERS
from opensora.training.loop import build_ema, build_optimizer, engine_settings
from opensora.utils.errors import UserError
from opensora.utils.seed import generators
from tests.models import denoisers
from tests.models.nova import toy as nova

GOLDEN = Path(__file__).with_name("losses.json")
WRITE = "python -m tests.golden.test_golden_losses"
# SSE, AVX2 or AVX512, PyTorch 2.6 or 2.14 move a number by 2e-5 at most; timesteps 0.1 % too large, each pair by 2e-3 or more.
TOLERANCE = 1e-4

FAMILIES = [*(name for name in denoisers.FAMILIES if name != "Wan-I2V"), "NOVA"]  # whose condition the encoder makes
TRAINED_BY = {"dpm-solver": "iddpm"}  # schedulers that only sample


def fits(family: str, scheduler: str) -> bool:
    """NOVA makes patch after patch, the others whole videos."""
    return (family == "NOVA") == (scheduler == "nova")


def lacks_variance(family: str, scheduler: str) -> bool:
    """Wan predicts no variance, which these schedulers learn by default."""
    return family == "Wan" and scheduler.startswith("iddpm")


PAIRS = [
    (f, s)
    for f in FAMILIES
    for s in SCHEDULERS.choices()
    if fits(f, s) and s not in TRAINED_BY and not lacks_variance(f, s)
]


def build(family: str) -> Any:
    """Weights so large that every layer matters: a new model is nearly zero, and the loss that of no model at all."""
    # the positions that were these models' default when the numbers were written
    base = {"base_size": 32} if family.startswith(("PixArtMS", "PixArt-Sigma")) else {}
    model = nova.build() if family == "NOVA" else denoisers.build(family, **base)
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            std = parameter[0].numel() ** -0.5 if parameter.ndim > 1 else 0.2
            parameter.add_(torch.randn(parameter.shape, generator=rng), alpha=std)
    return model


def batch(model: Any, seed: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Latents, and the conditions that the train loop gives."""
    cond = nova.inputs(seed=seed) if isinstance(model, nova.NOVA) else denoisers.inputs(model, seed=seed)
    return cond["x"], {key: value for key, value in cond.items() if key in ("y", "mask", *model.micro_conditions)}


def run(family: str, trainer: str) -> tuple[dict[str, list[float]], list[str]]:
    """The pair's values, two for each name, and the parameters that no step gave a gradient."""
    cfg = TrainConfig(model={}, vae={}, text_encoder={}, scheduler={}, dataset={}, dtype="fp32", lr=1e-3)
    model, scheduler = build(family).train(), SCHEDULERS.build({"type": trainer})
    world = World(0, 1, torch.device("cpu"))
    engine = build_engine("ddp", model, build_optimizer(cfg, model), world, **engine_settings(cfg))
    ema, losses = build_ema(cfg, model, engine), []
    for step in range(10):
        z, cond = batch(model, seed=step)
        mask = torch.tensor([[False, True, True], [True, True, True]]) if step % 2 else None  # a given frame
        rngs = generators("golden", step, ids=range(2))
        with engine.micro_step(last=True):
            loss = scheduler.training_losses(engine.model, z, cond, mask=mask, generators=rngs).mean()
        engine.backward(loss)
        engine.step()
        ema.update(model, step + 1)
        losses.append(loss.item())
    moved = {name for name, tensor in engine.optimizer_state().items() if name.endswith("/exp_avg_sq") and tensor.any()}
    idle = [name for name, p in model.named_parameters() if p.requires_grad and f"{name}/exp_avg_sq" not in moved]

    values = {"losses": [sum(losses) / 10, losses[-1]]}
    z, cond = batch(model.eval(), seed=10)
    with ema.applied_to(model):
        for name in [trainer, *(name for name, by in TRAINED_BY.items() if by == trainer)]:
            few = {"num_sampling_steps": 4, **({"num_diffusion_steps": 4} if name == "nova" else {})}
            null, rngs = {"y": model.null_condition(2)}, generators("golden", ids=range(2))
            x = SCHEDULERS.build({"type": name, **few}).sample(
                model, z, cond, null=null, guidance_scale=2.0, generators=rngs
            )
            values[name] = [x.std().item(), (x - z).abs().mean().item()]
    return values, idle


def near(golden: dict[str, list[float]]) -> dict[str, Any]:
    return {name: pytest.approx(two, rel=TOLERANCE) for name, two in golden.items()}


@pytest.mark.parametrize(("family", "trainer"), PAIRS)
def test_ten_steps_and_a_sample(family, trainer):
    golden = json.loads(GOLDEN.read_text()).get(f"{family} {trainer}")
    assert golden is not None, f"{WRITE} writes the values of this pair"
    values, idle = run(family, trainer)
    assert idle == []
    assert values == near(golden), f"if it is meant: {WRITE}, and say why in the commit"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_scheduler_that_does_not_fit_is_refused(family):
    model = build(family)
    z, cond = batch(model, seed=0)
    for name in SCHEDULERS.choices():
        scheduler, rngs = SCHEDULERS.build({"type": name}), generators("golden", ids=range(2))
        if (family, name) not in PAIRS:
            why = "'iddpm' trains" if name in TRAINED_BY else "pred_sigma" if lacks_variance(family, name) else "'nova'"
            with pytest.raises(UserError, match=why):
                scheduler.training_losses(model, z, cond, generators=rngs)
        if not fits(family, name):
            with pytest.raises(UserError, match="'nova'"):
                scheduler.sample(model, z, cond, generators=rngs)


def test_every_registered_denoiser_is_in_a_pair_and_every_number_is_of_one():
    registered = {inspect.unwrap(MODELS.get(name)) for name in MODELS.choices()}
    denoising = {cls for cls in registered if hasattr(cls, "transformer_blocks")}
    left_out = denoising - {type(build(family)) for family in FAMILIES}
    assert not left_out, "give them toys in tests/models/denoisers.py, then run " + WRITE
    assert set(json.loads(GOLDEN.read_text())) == {" ".join(pair) for pair in PAIRS}, WRITE


if __name__ == "__main__":
    torch.set_num_threads(1)
    rows, known = [], json.loads(GOLDEN.read_text())
    for pair in PAIRS:
        name, (values, _) = " ".join(pair), run(*pair)
        if name not in known or values != near(known[name]):  # what another CPU rounds otherwise stays as it is
            known[name] = {what: [float(f"{x:.6g}") for x in two] for what, two in values.items()}
        rows.append(f"{json.dumps(name)}: {json.dumps(known[name])}")
    GOLDEN.write_text("{\n" + ",\n".join(rows) + "\n}\n")
