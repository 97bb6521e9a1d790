"""Which update each step takes: multistep solvers remember earlier predictions, singlestep solvers take blocks.

Lu et al. 2022a, algorithms 1 and 2 (singlestep), and 2022b, algorithm 2 (multistep), with the order lists of the authors'
code. Everything is decided before sampling, so the loop itself has nothing to compute on the host.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from opensora.schedulers.dpms.process import Level
from opensora.schedulers.dpms.updates import Update, first_order, interpolating


class Step(NamedTuple):
    """A call of the model at `level`, and the update after it.

    `updates[n]` is for a frame that moved in n earlier steps (the last entry for that many or more): a frame that starts
    late has no history, so it begins with the first order.
    """

    level: Level
    updates: tuple[Update, ...]


class Solver(NamedTuple):
    """What does not change from step to step. `midpoint`: the second order of solver_type "dpmsolver"."""

    algorithm: str
    order: int
    midpoint: bool


def multistep(solver: Solver, levels: Sequence[Level], *, lower_order_final: bool) -> list[Step]:
    """From each level to the next, with the predictions of up to `order - 1` levels before."""
    num_steps = len(levels) - 1
    steps = []
    for i in range(num_steps):
        order = min(solver.order, i + 1)
        if lower_order_final:
            order = min(order, num_steps - i)
        if levels[i + 1].sigma == 0:  # infinitely far in lambda, where only the first order has a limit
            order = 1
        steps.append(Step(levels[i], tuple(_multistep_update(solver, levels, i, n) for n in range(1, order + 1))))
    return steps


def _multistep_update(solver: Solver, levels: Sequence[Level], i: int, order: int) -> Update:
    if order == 1:
        return first_order(solver.algorithm, levels[i], levels[i + 1])
    nodes = [levels[i - n] for n in range(order)]
    midpoint = solver.midpoint and order == 2
    return interpolating(solver.algorithm, levels[i], levels[i + 1], nodes, midpoint=midpoint)


def block_orders(num_steps: int, order: int, *, lower_order_final: bool, ends_clean: bool) -> list[int]:
    """The orders of the singlestep blocks; an order n costs n calls of the model, so that they sum to num_steps."""
    full, rest = divmod(num_steps, order)
    orders = [order] * full + [rest] * (rest > 0)
    ends_full = rest == 0 and order > 1
    if orders[-1] > 1 and (ends_clean or (lower_order_final and ends_full)):
        orders[-1:] = [orders[-1] - 1, 1]
    return orders


def blocks(levels: Sequence[Level], orders: Sequence[int]) -> list[Sequence[Level]]:
    """The levels cut in blocks of orders[i] steps; a block ends where the next begins."""
    ends = list(accumulate(orders))
    return [levels[end - order : end + 1] for order, end in zip(orders, ends, strict=True)]


def singlestep(solver: Solver, block_levels: Sequence[Sequence[Level]]) -> list[Step]:
    """Each block, of len - 1 steps, goes from its first level to its last with a solver of that order."""
    return [_stage(solver, levels, i) for levels in block_levels for i in range(len(levels) - 1)]


def _stage(solver: Solver, levels: Sequence[Level], i: int) -> Step:
    """The i-th call of a block: its update starts again from the block's first level."""
    alone = first_order(solver.algorithm, levels[i], levels[i + 1])
    if i == 0:
        return Step(levels[0], (alone,))
    last_of_second = i == 1 and len(levels) == 3
    nodes = [levels[i], levels[0]] if i == 1 or solver.midpoint else [levels[2], levels[1], levels[0]]
    midpoint = solver.midpoint and last_of_second
    update = interpolating(solver.algorithm, levels[0], levels[i + 1], nodes, base_steps_back=i, midpoint=midpoint)
    if i == 2 and len(nodes) == 2:  # the third order of the paper leaves out its middle prediction
        update = update._replace(weights=(update.weights[0], 0.0, update.weights[1]))
    return Step(levels[i], (*[alone] * i, update))
