"""Weights that come and activations that go: the same to the bit, no more on the device than there is room for, each copied once."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

from opensora.acceleration import streaming
from opensora.acceleration.checkpointing import checkpoint_activations
from opensora.acceleration.compile import compile_blocks
from opensora.acceleration.distributed import World
from opensora.acceleration.engine import build_engine
from opensora.acceleration.streaming import BlockStreams, HostBuffer, Saved, StreamedWeights, stream_blocks
from opensora.config.schema import LoraOptions
from opensora.models.loading import store_frozen
from opensora.training.ema import EMA
from opensora.training.lora import add_lora
from opensora.utils.errors import UserError
from tests.models.denoisers import build, inputs

DEPTH = 5
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small_activations(monkeypatch):
    monkeypatch.setattr(streaming, "OFFLOAD_BYTES", 64)


def toy(level: str, *, lora: bool, compiled: bool, family: str = "Wan") -> nn.Module:
    """In bf16 under autocast; compiled by what needs no compiler, which saves tensors as Inductor's programs do."""
    torch._dynamo.reset()
    model = build(family, depth=DEPTH).train()
    if lora:
        store_frozen(model, "bf16")
        add_lora(model, LoraOptions(rank=2, alpha=2, target_modules="all-linear"), seed=0)
        for parameter in model.parameters():
            if parameter.requires_grad and not parameter.any():
                nn.init.normal_(parameter, std=0.1)
    if compiled:
        compile_blocks(model.transformer_blocks(), backend="aot_eager")
    checkpoint_activations(model.transformer_blocks(), level)
    return model


def results(model: nn.Module, steps: int) -> list[Tensor]:
    """Of steps with two micro-batches: predictions and gradients, weights, and what their average predicts."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, fused=True)
    engine, ema, found = build_engine("ddp", model, optimizer, World(0, 1, CPU), grad_clip=0.1), EMA(model, 0.5), []
    for step in range(steps):
        for number in (0, 1):
            with engine.micro_step(last=number == 1):
                out = model(**inputs(model, seed=2 * step + number))
                engine.backward(out.square().mean())
            found.append(out.detach())
        found += [parameter.grad.clone() for parameter in model.parameters() if parameter.requires_grad]
        engine.step()
        ema.update(model, step + 1)
        with ema.applied_to(model), torch.no_grad(), engine.autocast():
            found.append(model(**inputs(model)))
    return [*found, *(parameter.detach().clone() for parameter in model.parameters()), *ema.state_dict().values()]


@pytest.mark.parametrize("lora", [True, False])
@pytest.mark.parametrize(
    ("level", "compiled"),
    [
        ("none", False),
        pytest.param("block", False, marks=pytest.mark.slow),
        pytest.param("mlp", False, marks=pytest.mark.slow),
        pytest.param("none", True, marks=[pytest.mark.slow, pytest.mark.nightly]),
        pytest.param("attention", True, marks=[pytest.mark.slow, pytest.mark.nightly]),
    ],
)
def test_everything_is_as_with_resident_weights_to_the_bit(level, compiled, lora):
    steps = 1 if compiled else 2
    expected = results(toy(level, lora=lora, compiled=compiled), steps)
    for resident, activations in ((2, False), (3, True)):
        model = toy(level, lora=lora, compiled=compiled)
        stream_blocks(model, CPU, resident=resident, adapters=lora, activations=activations)
        found = results(model, steps)
        assert len(found) == len(expected)
        assert all(map(torch.equal, found, expected))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["STDiT", "LatteT2V"])
def test_other_architectures(family):
    expected = results(toy("block", lora=False, compiled=False, family=family), 1)
    model = toy("block", lora=False, compiled=False, family=family)
    stream_blocks(model, CPU, resident=2, activations=True)
    assert all(map(torch.equal, results(model, 1), expected))


@contextmanager
def copies_of(weights: StreamedWeights) -> Iterator[list[int]]:
    """The blocks that are copied to the device inside."""
    seen: list[int] = []
    numbers = {master.bytes.data_ptr(): number for number, master in enumerate(weights.masters)}
    copy = weights.copies.copy
    weights.copies.copy = lambda pairs: [seen.append(numbers[source.data_ptr()]) for _, source in pairs] and copy(pairs)
    try:
        yield seen
    finally:
        del weights.copies.copy


def test_a_pass_copies_what_the_one_before_has_not_left():
    layers = [nn.Linear(8, 8) for _ in range(DEPTH)]
    for layer in layers:
        layer.requires_grad_(False)
    weights, held = StreamedWeights([layer.parameters() for layer in layers], 2, CPU), []
    BlockStreams(layers, CPU, weights=weights)
    for layer in layers:
        layer.register_forward_hook(lambda *_: held.append(len(weights.held)))
    before = [master.bytes.clone() for master in weights.masters]

    def forward() -> Tensor:
        x = torch.ones(1, 8, requires_grad=True)
        for layer in layers:
            x = layer(x)
        return x.sum()

    with copies_of(weights) as seen:
        loss = forward()
        assert seen == [0, 1, 2, 3, 4]
        loss.backward()
        assert seen[5:] == [2, 1, 0]  # 4 and 3 were there
        forward().backward()
        assert seen[8:] == [2, 3, 4, 2, 1, 0]
        with torch.no_grad():
            forward(), forward()
        assert seen[14:] == [2, 3, 4, 0, 1, 2, 3, 4, 0]  # round and round
    assert set(held) == {2}
    assert all(map(torch.equal, before, (master.bytes for master in weights.masters)))
    weights.release()
    assert [layer.weight.data_ptr() for layer in layers] == [master.bytes.data_ptr() for master in weights.masters]


def test_buffers_are_used_again_and_larger_ones_take_the_place_of_smaller_ones():
    streams = BlockStreams([nn.Linear(2, 2)], CPU, min_bytes=0)
    streams.pool += [HostBuffer(size, CPU) for size in (100, 300, 200)]
    assert len(streams._buffer(150).bytes) == 200
    assert len(streams._buffer(400).bytes) == 400
    assert [len(buffer.bytes) for buffer in streams.pool] == [100]


def test_what_is_moved_and_what_stays():
    model = toy("block", lora=False, compiled=False, family="STDiT")
    streams = BlockStreams(model.transformer_blocks(), CPU, min_bytes=4096)
    model(**inputs(model)).square().mean().backward()
    first = len(streams.pool)
    assert first >= DEPTH  # the input of each block at least
    assert all(len(buffer.bytes) >= 4096 for buffer in streams.pool)
    model(**inputs(model)).square().mean().backward()
    assert len(streams.pool) == first
    with torch.no_grad():
        model(**inputs(model))
    assert streams.last() is None


LAYOUTS = {
    "contiguous": torch.arange(24.0).view(2, 3, 4),
    "channels last": torch.arange(2 * 3 * 4 * 5.0).view(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "rows with a gap": torch.arange(4 * 8.0).view(4, 8)[:, :7],
    "repeated": torch.arange(2 * 8.0).view(2, 1, 1, 8)[..., :7].expand(2, 3, 5, 7),
    "a part of three": torch.arange(2 * 5 * 12.0).view(2, 5, 12).chunk(3, dim=-1)[1].transpose(0, 1),
    "sharing elements": torch.arange(9.0).unfold(0, 5, 1),
    "a number": torch.tensor(3.0),
    "nothing": torch.zeros(0, 4),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_comes_back_lies_as_it_lay(name):
    tensor = LAYOUTS[name]
    streams = BlockStreams([nn.Linear(2, 2)], CPU, min_bytes=0)
    saved = Saved(0, None, streams.pool)
    packed = streams._pack(saved, set(), tensor)
    ((_, host),) = saved.away.values()
    assert host.numel() == (14 if name == "repeated" else tensor.numel())
    saved.here.clear()  # as when the next block has ended
    back = streams._unpack(packed)
    assert torch.equal(back, tensor)
    assert back.stride() == tensor.stride()


@pytest.mark.gpu
@pytest.mark.parametrize(("level", "lora"), [("selective", True), ("block", False)])
def test_streams_change_no_bit_and_free_the_gpu(level, lora):
    """Copies on streams of their own, as fast as they go, behind blocks that take no time at all."""
    found, memory = [], []
    for resident in (0, 0, 2):  # the first compilation of a process may choose other kernels
        torch._dynamo.reset()
        # the plain formula: the order of sums in the backward pass of fused attention is left to chance
        model = build("Wan", depth=12, hidden_size=256, num_heads=2, ffn_dim=1024, enable_flash_attn=False)
        model = (model.cpu() if resident else model.cuda()).train()
        if lora:
            store_frozen(model, "bf16")
            torch.manual_seed(0)
            add_lora(model, LoraOptions(rank=2, alpha=2, target_modules="all-linear"), seed=0)
            for number, parameter in enumerate(p for p in model.parameters() if p.requires_grad):
                values = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
                parameter.data.copy_(0.1 * values)
        compile_blocks(model.transformer_blocks())
        checkpoint_activations(model.transformer_blocks(), level)
        stream_blocks(model, torch.device("cuda"), resident=resident, adapters=lora, activations=resident > 0)
        cond = {name: value.cuda() for name, value in inputs(model, size=(8, 32, 32)).items()}
        results = []
        for step in range(4):
            cond["x"] = cond["x"] + step
            torch.cuda.reset_peak_memory_stats()
            with torch.autocast("cuda", torch.bfloat16):
                out = model(**cond)
                out.square().mean().backward()
            torch.cuda.synchronize()
            results += [out.detach().cpu(), *(p.grad.cpu() for p in model.parameters() if p.requires_grad)]
        memory.append(torch.cuda.max_memory_allocated())
        found.append(results)
    differ = [
        (n, float((a - b).abs().max())) for n, (a, b) in enumerate(zip(*found[1:], strict=True)) if not a.equal(b)
    ]
    assert not differ
    assert memory[2] < 0.7 * memory[1]


@pytest.mark.parametrize(("resident", "words"), [(1, "from 2 to 4"), (5, "from 2 to 4, as the model has 5")])
def test_numbers_of_blocks_that_make_no_sense(resident, words):
    with pytest.raises(UserError, match=words):
        stream_blocks(toy("block", lora=False, compiled=False), CPU, resident=resident)
