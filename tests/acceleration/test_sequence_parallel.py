"""Sequence parallelism against one process: outputs, gradients, training, for every denoiser; and what it refuses."""

from contextlib import contextmanager
from copy import deepcopy
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from opensora.acceleration.checkpointing import checkpoint_activations
from opensora.acceleration.compile import compile_blocks
from opensora.acceleration.distributed import World, init_world
from opensora.acceleration.engine import build_engine
from opensora.acceleration.sequence_parallel import check_sequence_parallel, parallelise
from opensora.acceleration.sequence_parallel.collectives import Ranks, all_gather
from opensora.utils.errors import UserError
from tests.acceleration.sequence_parallel_cases import SIZES, assert_near, compare, gradients, masked_inputs
from tests.models.denoisers import FAMILIES, build, inputs
from tools.benchmark.volume import volume

FEW = ("STDiT2", "LatteT2V", "PixArt-Sigma-compressed")
"""Families that between them have every exchange, both kinds of block and rotary positions."""


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("world_size", [2, *(pytest.param(n, marks=pytest.mark.nightly) for n in (3, 4))])
def test_processes_that_share_samples_equal_one(spawn, tmp_path, world_size):
    spawn(share_samples, world_size, tmp_path, timeout_s=500)


@pytest.mark.nightly
@pytest.mark.multiprocess
@pytest.mark.slow
def test_compiled_blocks_equal_eager_ones(spawn, tmp_path):
    spawn(compiled_blocks_equal_eager_ones, 2, tmp_path, timeout_s=500)


def share_samples(rank, world_size, _):
    """All cases of a world size: starting processes takes longer than any of them."""
    exchanges_move_what_they_say(world_size, rank)
    for family in FAMILIES:
        model = build(family).train()
        compare(model, [masked_inputs(model, size) for size in SIZES], family)
    sixteen_heads = build("PixArt", hidden_size=96, num_heads=16)
    compare(sixteen_heads, [inputs(sixteen_heads)], "16 heads")
    for changes in ({"num_heads": 3}, {"image_dim": 20, "condition_channels": 3, "depth": 1}):
        wan = build("Wan", **changes).train()
        compare(wan, [masked_inputs(wan, size) for size in SIZES], f"Wan, {changes}")
    images = build("LatteT2V", mode="images").train()
    compare(images, [masked_inputs(images, (3, 6, 8))], "frames without temporal blocks")
    for family in FEW:
        model = build(family).train()
        conds = [masked_inputs(model, size) for size in SIZES]
        compare(model, conds, f"{family} checkpointed", lambda m: checkpoint_activations(m.transformer_blocks()))
        sizes_may_cross(model, conds)
        predictions_are_alike(model, conds[0])
    other_inputs_are_refused(rank)
    five_steps_equal_one_process(world_size, FAMILIES if world_size == 2 else FEW)
    if world_size == 2:
        counted_bytes_are_the_sent_ones()
        bf16_is_as_near_as_in_one_process()
    if world_size == 4:
        two_pairs_equal_one_process(rank)


def exchanges_move_what_they_say(world_size, rank):
    """By hand, from values that say where they are from; views that are not contiguous too."""
    group = dist.group.WORLD.group_name
    view = torch.arange(6.0).reshape(2, 3).T + 10 * rank
    gathered = torch.stack([torch.arange(6.0).reshape(2, 3).T + 10 * r for r in range(world_size)])
    assert torch.equal(all_gather(view, group, world_size), gathered)

    ranks = Ranks.of(dist.group.WORLD)
    x = torch.arange(2 * 3 * 7 * 2.0).reshape(2, 3, 7, 2)  # 7 tokens a frame, 3 frames
    part = ranks.split(x)
    assert torch.equal(ranks.gather(part, 7), x)
    frames = ranks.all_to_all(part, scatter=1, gather=2, length=7)  # all tokens of some frames
    first = rank * ranks.share(3)
    mine = x[:, first : first + ranks.share(3)]
    assert torch.equal(frames[:, : mine.shape[1]], mine)
    assert torch.equal(ranks.all_to_all(frames, scatter=2, gather=1, length=3), part)


def sizes_may_cross(whole, conds):
    """Three forward passes of different sizes before the backward pass, which computes them again."""
    sharded = deepcopy(whole)
    checkpoint_activations(sharded.transformer_blocks())
    parallelise(sharded, dist.group.WORLD)
    results = []
    for model in (whole, sharded):
        model.zero_grad()
        sum(model(**cond).square().mean() for cond in conds).backward()
        results.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    dist.all_reduce(results[1])
    assert_near(results[1] / dist.get_world_size(), results[0], "gradients of crossing sizes")


@torch.no_grad()
def predictions_are_alike(whole, cond):
    """To the last bit in all processes, or their losses would differ; and a model can be put together again."""
    model = deepcopy(whole)
    parallelise(model, dist.group.WORLD)
    out = model(**cond)
    first = out.clone()
    dist.broadcast(first, 0)
    assert torch.equal(out, first)
    parallelise(model, None)
    assert torch.equal(model(**cond), whole(**cond))


def train(model, world, conds, engine="ddp"):
    """AdamW steps towards fixed targets, through an engine; returns the losses."""
    # a key's bias has a gradient of rounding errors alone, which a small eps would make as large as any other
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)
    engine = build_engine(engine, model, optimizer, world, dtype="fp32", grad_clip=1.0)
    losses = []
    for cond in conds:
        with engine.micro_step(last=True):
            loss = (engine.model(**cond) - 1).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def five_steps_equal_one_process(world_size, families):
    world = init_world("cpu", world_size)
    for family in families:
        one, sharded = build(family).train(), build(family).train()
        parallelise(sharded, world.sp_group)
        conds = [masked_inputs(one, SIZES[step % len(SIZES)], seed=step) for step in range(5)]
        expected = train(one, World(0, 1, torch.device("cpu")), conds)
        assert_near(train(sharded, world, conds), expected, f"{family}: losses of 5 steps")
        for (name, a), b in zip(sharded.named_parameters(), one.parameters(), strict=True):
            assert_near(a, b, f"{family}: {name} after 5 steps")


def two_pairs_equal_one_process(rank):
    """Data parallelism over two pairs, each of which shares a sample."""
    world = init_world("cpu", 2)
    assert (world.dp_rank, world.sp_rank, world.dp_size) == (rank // 2, rank % 2, 2)
    for family, engine in [*((family, "ddp") for family in FEW), ("STDiT2", "fsdp2")]:
        one, sharded = build(family).train(), build(family).train()
        parallelise(sharded, world.sp_group)
        conds = [masked_inputs(one, (3, 6, 8), seed=step) for step in range(5)]
        mine = [{name: value[world.dp_rank :][:1] for name, value in cond.items()} for cond in conds]
        expected = train(one, World(0, 1, torch.device("cpu")), conds)
        losses = train(sharded, world, mine, engine)
        dist.all_reduce(losses)
        assert_near(losses / 4, expected, f"{family}, {engine}: losses of 2 x 2 processes")
        for (name, a), b in zip(sharded.named_parameters(), one.parameters(), strict=True):
            whole = a.full_tensor() if isinstance(a, DTensor) else a
            assert_near(whole, b, f"{family}, {engine}: {name} after 5 steps of 2 x 2 processes")


def other_inputs_are_refused(rank):
    """In all processes, with the name of what differs; the second call is not compared any more."""
    model = build("STDiT3")
    parallelise(model, dist.group.WORLD)
    cond = inputs(model)
    with pytest.raises(UserError, match="different x, y"):
        model(**{**cond, "x": cond["x"] + rank, "y": cond["y"].roll(rank, dims=-1)})
    assert model(**cond).isfinite().all()


def compiled_blocks_equal_eager_ones(rank, world_size, _):
    """Without graph breaks, with no more programs than one process needs: one for videos of any size, one for images."""
    programs = 0

    def backend(graph, _):
        nonlocal programs
        programs += 1
        return graph.forward

    def compiled(model):
        compile_blocks(model.transformer_blocks(), varying_sizes=True, backend=backend)

    model = build("STDiT2").train()
    conds = [masked_inputs(model, size) for size in [(4, 8, 8), (5, 6, 10), (1, 8, 8), (3, 10, 6)]]
    compare(model, conds, "compiled", compiled)
    assert programs == 2
    compare(
        model,
        conds[:1],
        "compiled and checkpointed",
        lambda m: (compiled(m), checkpoint_activations(m.transformer_blocks())),
    )


@contextmanager
def counted():
    """What goes through all_to_all_single meanwhile: [calls, bytes that leave this process]."""
    count, real = [0, 0], dist.all_to_all_single

    def counting(output, parts, **kwargs):
        count[0] += 1
        count[1] += parts[1:].numel() * parts.itemsize
        return real(output, parts, **kwargs)

    dist.all_to_all_single = counting
    try:
        yield count
    finally:
        dist.all_to_all_single = real


def counted_bytes_are_the_sent_ones():
    for method, family in product(("auto", "ulysses"), ("DiT-text", "STDiT", *FEW)):
        model = build(family)
        parallelise(model, dist.group.WORLD, method=method)
        for size in [*SIZES, (2, 6, 8)]:
            cond = inputs(model, size=size)
            expected = volume(model, 2, size, batch=2, itemsize=4, method=method)
            with counted() as forward:
                out = model(**cond)
            assert forward == [expected.all_to_alls, expected.all_to_all_bytes]
            with counted() as backward:
                out.sum().backward()
            assert backward == forward


def bf16_is_as_near_as_in_one_process():
    for family in FEW:
        model = build(family)
        cond = masked_inputs(model, (3, 6, 8))
        sharded = deepcopy(model)
        parallelise(sharded, dist.group.WORLD)
        exact, right = gradients(model, cond)
        with torch.autocast("cpu", torch.bfloat16):
            (short, grads), (out, sharded_grads) = gradients(model, cond), gradients(sharded, cond)
        assert (out - exact).norm() < 1.5 * (short - exact).norm() + 1e-3
        flat = [torch.cat([g.flatten() for g in each]) for each in (right, grads, sharded_grads)]
        dist.all_reduce(flat[2])
        assert (flat[2] / 2 - flat[0]).norm() < 1.5 * (flat[1] - flat[0]).norm() + 1e-3


class TestWhatIsRefused:
    def test_a_model_without_hooks(self):
        with pytest.raises(UserError, match="Linear cannot be sharded over processes: it is no denoiser"):
            check_sequence_parallel(torch.nn.Linear(2, 2), 2)

    def test_frames_where_tokens_see_all_frames(self):
        with pytest.raises(UserError, match="use 'ulysses' or 'auto'"):
            check_sequence_parallel(build("PixArt"), 2, method="dsp")

    def test_numbers_and_names_that_are_none(self):
        with pytest.raises(UserError, match="1 or more"):
            check_sequence_parallel(build("STDiT"), 0)
        with pytest.raises(UserError, match="auto, dsp, ulysses"):
            check_sequence_parallel(build("STDiT"), 2, method="ring")

    def test_much_padding_is_reported_with_what_would_have_none(self):
        with pytest.warns(UserWarning, match="50% of the attention's work is padding.* with 1, 2"):
            check_sequence_parallel(build("DiT-text"), 4)

    def test_an_sp_size_that_does_not_divide_the_processes(self):
        with pytest.raises(UserError, match="sp_size=2 does not divide the number of processes, 1"):
            init_world("cpu", 2)

    def test_one_process_is_left_alone(self):
        model = build("STDiT")
        parallelise(model, None)
        assert model.sp_ranks is None


def test_dsp_sends_half_of_what_ulysses_does():
    model = build("STDiT")
    for sp_size in (2, 4, 8):
        dsp, ulysses = (volume(model, sp_size, (16, 32, 32), method=m) for m in ("auto", "ulysses"))
        # 8 heads and more processes than that: 2 heads are padded
        assert ulysses.all_to_all_bytes == max(1, sp_size / 2) * 2 * dsp.all_to_all_bytes


def test_volume_of_a_block_in_closed_form():
    """2 all-to-alls of B T S D / p elements of which (p - 1) / p leave, for a block of STDiT-XL/2."""
    from opensora.registry import MODELS

    with torch.device("meta"):
        model = MODELS.build({"type": "STDiT-XL/2"})
    sent = volume(model, 4, (64, 64, 64), itemsize=2)
    assert sent.all_to_all_bytes == 28 * 2 * (64 * 1024 * 1152 / 4) * 3 / 4 * 2
    assert sent.all_to_alls == 2 * 28
