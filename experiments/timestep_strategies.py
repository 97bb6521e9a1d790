"""What the choice of training timesteps does: SpeeD, SpeeDiT and Min-SNR against uniform timesteps, on a toy problem.

    python -m experiments.timestep_strategies [--steps 6000] [--seeds 4] [--plot docs/images/timestep_strategies.png]

Small networks learn the noise of a Gaussian mixture in the plane, whose exact answer is known. All networks of a seed start
equal and see the same data and noise; only their timesteps and the weights of their losses differ. Prints, after some numbers
of steps, the mean and the standard deviation over the seeds of

    excess loss   mean over all timesteps, uniformly, of |predicted - exact noise|^2: what a network still has to learn
    distance      sliced 2-Wasserstein distance of 4096 samples (20 steps of DPM-Solver++) from the data
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from experiments.toy_mixture import GaussianMixture
from opensora.schedulers.dpms import DPMSolver
from opensora.schedulers.iddpm import IDDPM
from opensora.schedulers.noise_schedule import named_schedule
from opensora.schedulers.timesteps import Tabulated, quantile
from opensora.utils.errors import exit_on_user_error
from opensora.utils.seed import generator
from tools.command import Parser

MIXTURE = GaussianMixture(num_modes=5, radius=1.5, std=0.15)
ALPHAS_CUMPROD = named_schedule("linear", 1000).table["alphas_cumprod"]
STRATEGIES: dict[str, dict[str, str]] = {  # arguments of the scheduler
    "uniform": {},
    "SpeeD, sampling only": {"timestep_sampling": "speed", "loss_weighting": "none"},
    "SpeeD, weighting only": {"loss_weighting": "speed"},
    "SpeeD, both": {"timestep_sampling": "speed"},
    "SpeeDiT, sampling only": {"timestep_sampling": "speedit", "loss_weighting": "none"},
    "SpeeDiT, both": {"timestep_sampling": "speedit"},
    "Min-SNR, weighting only": {"loss_weighting": "min-snr"},
}
EVAL_TIMESTEPS = torch.arange(5, 1000, 10)
EMA_DECAY = 0.998


class Law(NamedTuple):
    """Of one strategy: the distribution function of its timesteps [T + 1], and their weights [T]."""

    cumulative: Tensor
    weights: Tensor

    def draw(self, u: Tensor) -> Tensor:
        """Timesteps from uniform numbers, of any shape; the same numbers for every strategy."""
        return (quantile(self.cumulative, u) * len(self.weights)).long()


def law_of(strategy: dict[str, str]) -> Law:
    """As the scheduler itself has it."""
    scheduler = IDDPM(variance="fixed_small", **strategy)  # type: ignore[arg-type]
    sampling, ones = scheduler.timestep_sampling, torch.ones(scheduler.diffusion_steps, dtype=torch.float64)
    density = sampling.density if isinstance(sampling, Tabulated) else ones / len(ones)
    cumulative = torch.cat([density.new_zeros(1), density.cumsum(dim=0)])
    return Law(cumulative, ones.float() if scheduler.loss_weights is None else scheduler.loss_weights.table)


class Curves(NamedTuple):
    """[measurements, strategies, seeds] each, and the steps [measurements] at which they were taken."""

    steps: list[int]
    excess_loss: Tensor
    distance: Tensor


class Networks(nn.Module):
    """R multilayer perceptrons (x, t) -> eps side by side, so that all runs are one batched product."""

    frequencies: Tensor

    def __init__(self, seeds: Sequence[int], width: int = 64, depth: int = 3, num_frequencies: int = 16) -> None:
        super().__init__()
        sizes = [2 + 2 * num_frequencies, *[width] * depth, 2]
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        for layer, (fan_in, fan_out) in enumerate(pairwise(sizes)):
            rows = [torch.randn(fan_in, fan_out, generator=generator(seed, "weights", layer)) for seed in seeds]
            self.weights.append(torch.stack(rows) * math.sqrt((2 if layer < depth else 0.1) / fan_in))
            self.biases.append(torch.zeros(len(seeds), 1, fan_out))
        self.register_buffer("frequencies", torch.pi * 2 ** torch.linspace(-1, 6, num_frequencies))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        """x [R, N, 2], t [R, N] -> [R, N, 2]."""
        phase = t[..., None] / 1000 * self.frequencies
        h = torch.cat([x, phase.sin(), phase.cos()], dim=-1)  # [R, N, 2 + 2 F]
        for layer, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            h = torch.baddbmm(bias, h if layer == 0 else nn.functional.silu(h), weight)
        return h


def train(laws: Sequence[Law], seeds: Sequence[int], num_steps: int, batch: int, measure_at: Sequence[int]) -> Curves:
    """All runs together; run r has law r // len(seeds) and seed r % len(seeds)."""
    networks = Networks(list(seeds) * len(laws))
    ema = Networks(list(seeds) * len(laws))
    optimizer = torch.optim.Adam(networks.parameters(), lr=1e-3)
    alphas_cumprod = torch.from_numpy(ALPHAS_CUMPROD).float()
    rngs = [generator(seed, "batches") for seed in seeds]
    measured: list[tuple[Tensor, Tensor]] = []
    for step in range(1, num_steps + 1):
        x_0, eps, u = (torch.stack(part) for part in zip(*(_batch(rng, batch) for rng in rngs), strict=True))
        drawn = [law.draw(u) for law in laws]  # each [seeds, batch]
        t = torch.cat(drawn)  # [R, batch]
        weight = torch.cat([law.weights[part] for law, part in zip(laws, drawn, strict=True)])
        x_0, eps = (part.repeat(len(laws), 1, 1) for part in (x_0, eps))
        abar = alphas_cumprod[t][..., None]
        predicted = networks(abar.sqrt() * x_0 + (1 - abar).sqrt() * eps, t)
        loss = (weight * (predicted - eps).square().mean(dim=-1)).mean(dim=1).sum()  # the runs do not meet
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        _update(ema, networks, min(EMA_DECAY, step / (step + 10)))
        if step in measure_at:
            measured.append((excess_loss(ema), distances(ema, len(seeds))))
    curves = (torch.stack(part).reshape(len(measured), len(laws), len(seeds)) for part in zip(*measured, strict=True))
    return Curves(list(measure_at), *curves)


def _batch(rng: torch.Generator, batch: int) -> tuple[Tensor, Tensor, Tensor]:
    """Data and noise [batch, 2], and the uniform numbers [batch] that a law turns to timesteps."""
    x_0 = MIXTURE.sample(1, batch, rng)[0, :, 0, :, 0].T.float()
    return x_0, torch.randn(batch, 2, generator=rng), torch.rand(batch, generator=rng)


@torch.no_grad()
def _update(ema: Networks, networks: Networks, decay: float) -> None:
    for mean, parameter in zip(ema.parameters(), networks.parameters(), strict=True):
        mean.lerp_(parameter, 1 - decay)


@torch.no_grad()
def excess_loss(networks: Networks, num_points: int = 64) -> Tensor:
    """Per run [R]."""
    rng = generator(0, "evaluation")
    x_0 = MIXTURE.sample(len(EVAL_TIMESTEPS), num_points, rng)  # a sample for each timestep
    abar = torch.from_numpy(ALPHAS_CUMPROD)[EVAL_TIMESTEPS]
    alpha, sigma = abar.sqrt(), (1 - abar).sqrt()
    noise = torch.randn(x_0.shape, generator=rng, dtype=torch.float64)
    x = alpha.reshape(-1, 1, 1, 1, 1) * x_0 + sigma.reshape(-1, 1, 1, 1, 1) * noise
    exact = MIXTURE.x_0_and_eps(x, alpha, sigma)[1]
    points, target = (part[:, :, 0, :, 0].movedim(1, 2).reshape(1, -1, 2).float() for part in (x, exact))
    num_runs = len(networks.weights[0])
    t = EVAL_TIMESTEPS.repeat_interleave(num_points).expand(num_runs, -1)
    return (networks(points.expand(num_runs, -1, -1), t) - target).square().mean(dim=(1, 2))


@torch.no_grad()
def distances(networks: Networks, num_seeds: int, num_points: int = 4096) -> Tensor:
    """Per run [R]; all start from the same noise."""
    num_runs = len(networks.weights[0])
    noise = torch.randn(1, 2, 1, num_points, 1, generator=generator(0, "samples")).expand(num_runs, -1, -1, -1, -1)

    def model(x: Tensor, timestep: Tensor) -> Tensor:
        points = x[:, :, 0, :, 0].movedim(1, 2)  # [R, N, 2]
        eps = networks(points, timestep[:, None].expand(-1, num_points))
        return eps.movedim(2, 1)[:, :, None, :, None]

    solver = DPMSolver(20, skip_type="logSNR", final="denoise_to_zero")
    return torch.tensor([MIXTURE.distance(x[None]) for x in solver.sample(model, noise, {})])


@exit_on_user_error
def main() -> None:
    """The command line."""
    parser = Parser(__doc__, __spec__)
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--batch", type=int, default=96)
    parser.add_argument("--measurements", type=int, default=12)
    parser.add_argument("--plot", type=Path, help="draw the curves to this file")
    args = parser.parse_args()
    laws = {name: law_of(strategy) for name, strategy in STRATEGIES.items()}
    measure_at = [args.steps * (i + 1) // args.measurements for i in range(args.measurements)]
    curves = train(list(laws.values()), range(args.seeds), args.steps, args.batch, measure_at)
    own = [MIXTURE.distance(MIXTURE.sample(1, 4096, torch.Generator().manual_seed(i))) for i in range(20)]
    print(f"distance x 1000 of points of the mixture itself: {1e3 * sum(own) / len(own):.1f}\n")
    print_table(curves, list(laws))
    if args.plot:
        draw_curves(curves, list(laws), args.plot)


def print_table(curves: Curves, names: Sequence[str]) -> None:
    """A row for each strategy; columns after a quarter, a half and all of the steps."""
    at = [len(curves.steps) // 4 - 1, len(curves.steps) // 2 - 1, len(curves.steps) - 1]
    titles = [f"{what}, {curves.steps[i]} steps" for what in ("excess loss x 1000", "distance x 1000") for i in at]
    print(f"| timesteps and weights | {' | '.join(titles)} |")
    print("|---" * (1 + len(titles)) + "|")
    for row, name in enumerate(names):
        cells = [
            f"{1e3 * values[i, row].mean():.1f} ± {1e3 * values[i, row].std():.1f}"
            for values in (curves.excess_loss, curves.distance)
            for i in at
        ]
        print(f"| {name} | {' | '.join(cells)} |")


def draw_curves(curves: Curves, names: Sequence[str], path: Path) -> None:
    """Means over the seeds, with one standard deviation to either side."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4.4), layout="constrained")
    panels = ((axes[0], curves.excess_loss, "excess loss"), (axes[1], curves.distance, "distance of samples"))
    for axis, values, title in panels:
        for row, name in enumerate(names):
            mean, spread = values[:, row].mean(dim=1), values[:, row].std(dim=1)
            axis.plot(curves.steps, mean, marker=".", linewidth=1.2, label=name)
            axis.fill_between(curves.steps, mean - spread, mean + spread, alpha=0.12)
        axis.set(
            xlabel="training steps",
            ylabel=title,
            yscale="log",
            title=f"{title}: mean ± s.d. of {values.shape[2]} seeds",
        )
        axis.grid(alpha=0.3, which="both")
    axes[0].legend(fontsize=8)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
