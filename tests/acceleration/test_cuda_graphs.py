"""Training with CUDA graphs: the bits of training without, whatever is trained, checkpointed or compiled, with its EMA.

A CPU has no graphs. There the passes are called again on the same addresses, which is all of the code but the capture
itself; that is tested by tests/test_gpu.py.
"""

import copy
import gc

import pytest
import torch
import torch.distributed as dist

from opensora.acceleration.checkpointing import checkpoint_activations
from opensora.acceleration.compile import compile_blocks, cuda_graphs
from opensora.acceleration.compile.cuda_graphs import EagerCapture, capture_training
from opensora.acceleration.distributed import World, init_world, shutdown
from opensora.acceleration.engine import build_engine
from opensora.acceleration.sequence_parallel import parallelise
from opensora.config.load import TrainConfig, parse_config
from opensora.config.schema import LoraOptions
from opensora.registry import MODELS
from opensora.training.lora import add_lora
from opensora.utils.errors import UserError
from tests.conftest import start_ranks
from tests.models.denoisers import FAMILIES, build, inputs

CPU = torch.device("cpu")
ALONE = World(0, 1, CPU)
SIZES = [(3, 6, 8), (1, 6, 4), (3, 6, 8), (2, 4, 4)]
"""One returns; one is an image."""


def engine_of(model, *, dtype="bf16", graphs=True, world=ALONE):
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    return build_engine("ddp", model, optimizer, world, dtype=dtype, grad_clip=0.5, cuda_graphs=graphs)


def train(engine, model, *, steps=2, parts=2, seed=0, sizes=SIZES):
    """Losses and norms of a few steps of a few micro-batches, whose sizes take turns."""
    values = []
    for step in range(steps):
        for part in range(parts):
            number = parts * step + part
            cond = inputs(model, size=sizes[number % len(sizes)], seed=100 * seed + number)
            with engine.micro_step(last=part == parts - 1):
                loss = (engine.model(**cond) - 0.3).square().mean() / parts
            engine.backward(loss)
            values.append(float(loss.detach()))
        values.append(float(engine.step()))
    return values


def check_equal(model, **options):
    """The same model trains the same with graphs and without, bit by bit; returns what changed."""
    plain = copy.deepcopy(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    captured = train(engine_of(model, graphs=True, **options), model)
    assert captured == train(engine_of(plain, graphs=False, **options), plain)
    state, expected = model.state_dict(), plain.state_dict()
    assert all(torch.equal(state[name], expected[name]) for name in expected)
    return [name for name in state if not torch.equal(state[name], before[name])]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_training_gives_the_same_bits(family, dtype):
    assert check_equal(build(family).train(), dtype=dtype)


def test_fp16_scales_the_loss_as_ever():
    assert check_equal(build("STDiT").train(), dtype="fp16")


@pytest.mark.slow
@pytest.mark.parametrize("level", ["block", "mlp", "selective", "every:2"])
def test_checkpointing_inside(level):
    model = build("STDiT3").train()
    plain = copy.deepcopy(model)
    for each in (model, plain):
        checkpoint_activations(each.transformer_blocks(), level)
    assert train(engine_of(model), model) == train(engine_of(plain, graphs=False), plain)


@pytest.mark.nightly
@pytest.mark.slow
def test_compiled_blocks_inside():
    model = build("STDiT").train()
    plain = copy.deepcopy(model)
    for each in (model, plain):
        compile_blocks(each.transformer_blocks(), backend="aot_eager")
    two = {"sizes": SIZES[:2]}
    assert train(engine_of(model), model, **two) == train(engine_of(plain, graphs=False), plain, **two)


def test_frozen_weights_stay_and_adapters_train():
    assert all("attn_temp" in name for name in check_equal(build("STDiT", freeze="not_temporal").train()))
    pytest.importorskip("peft", reason="pip install peft")
    model = build("STDiT").train()
    add_lora(model, LoraOptions(rank=2), seed=0)
    assert all("lora" in name for name in check_equal(model))


def test_a_weight_without_a_gradient_is_not_decayed():
    """As without graphs: AdamW leaves it alone, where a gradient of zero would let it shrink."""
    model = build("STDiT").train()
    model.unused = torch.nn.Parameter(torch.ones(3))
    changed = check_equal(model)
    assert "unused" not in changed
    assert model.unused.grad is None


def test_one_graph_for_each_size_and_one_address_for_each_gradient():
    model = build("DiT-text").train()
    pool, addresses = capture_training(model), []
    for size in (*SIZES, *SIZES):
        model(**inputs(model, size=size)).sum().backward()
        addresses.append([weight.grad.data_ptr() for weight in model.parameters() if weight.grad is not None])
    assert len(pool.runners) == len(set(SIZES))
    assert all(each == addresses[0] for each in addresses)


def test_gradients_that_are_there_are_added_to():
    model = build("DiT-text").train()
    plain = copy.deepcopy(model)
    capture_training(model)
    for each in (model, plain):
        for weight in each.parameters():
            weight.grad = torch.ones_like(weight)
        each(**inputs(model)).sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_inputs_get_their_gradients():
    model = build("STDiT").train()
    plain = copy.deepcopy(model)
    capture_training(model)
    found = []
    for each in (model, model, plain):  # the second is a replay
        cond = inputs(model)
        x, y = cond["x"].requires_grad_(), cond["y"].requires_grad_()
        each(**cond).square().sum().backward()
        found.append((x.grad, y.grad))
    assert all(torch.equal(a, b) for other in found[:2] for a, b in zip(other, found[2], strict=True))


def test_without_gradients_nothing_is_captured():
    model = build("STDiT").train()
    plain = copy.deepcopy(model)
    pool = capture_training(model)
    with torch.no_grad():
        assert torch.equal(model(**inputs(model)), plain(**inputs(plain)))
    assert not pool.runners


def test_results_stay_when_the_next_pass_comes():
    model = build("STDiT").train()
    capture_training(model)
    first = model(**inputs(model, seed=1)).detach()
    kept = first.clone()
    model(**inputs(model, seed=2))
    assert torch.equal(first, kept)


def test_a_backward_pass_follows_its_own_forward_pass():
    model = build("STDiT").train()
    capture_training(model)
    first = model(**inputs(model, seed=1)).sum()
    second = model(**inputs(model, seed=2)).sum()
    with pytest.raises(RuntimeError, match="ran again before the backward pass of an earlier forward pass"):
        first.backward()
    second.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="cuda_graphs"):
        second.backward()


def test_sizes_that_never_return_are_reported_and_computed_without_graphs(monkeypatch, caplog):
    monkeypatch.setattr(cuda_graphs, "MAX_SIZES", 2)
    model = build("STDiT").train()
    plain = copy.deepcopy(model)
    pool = capture_training(model)
    for T in (1, 2, 3, 2, 4, 1):
        for each in (model, plain):
            each(**inputs(each, size=(T, 4, 4))).square().mean().backward()
    assert len(pool.runners) == 2
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        if ours.grad is not None:
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-7)
    assert caplog.text.count("more than 2 sizes of its input, the last one [2, 4, 3, 4, 4]") == 1


def test_what_cannot_be_captured_is_reported():
    class NoGraphs(EagerCapture):
        def capture(self, call):
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nmore")

    model = build("STDiT").train()
    capture_training(model, NoGraphs())
    with pytest.raises(
        UserError, match=r"STDiT cannot be captured.*when stream is capturing Nothing.*cuda_graphs=False"
    ):
        model(**inputs(model))


def test_an_error_of_the_model_itself_is_its_own():
    model = build("STDiT").train()
    capture_training(model)
    with pytest.raises(ValueError, match=r"expected \[B, 4, T, H, W\]") as error:
        model(**inputs(model) | {"x": torch.zeros(2, 5, 3, 6, 8)})
    assert "cuda_graphs" not in str(error.value)


def test_nova_whose_sequences_vary_is_refused():
    model = MODELS.build(
        {"type": "NOVA", "width": 32, "num_heads": 2, "video_depth": 1, "image_depth": 2, "head_depth": 1}
    )
    with pytest.raises(UserError, match="a NOVA sees another number of patches in each step"):
        engine_of(model)


@pytest.mark.parametrize("rival", ["--plugin=fsdp2", "--activation-offload=True", "--lora.dropout=0.1"])
def test_what_does_not_go_with_it_is_refused(rival):
    config = ["configs/quickstart/pretrain.py", "--cuda-graphs", *["--lora.rank=4"] * rival.startswith("--lora")]
    assert parse_config(TrainConfig, {}, config).cuda_graphs
    name = rival.removeprefix("--").partition("=")[0].replace("-", "_")
    with pytest.raises(UserError, match=f"cuda_graphs=True does not work with {name}"):
        parse_config(TrainConfig, {}, [*config, rival])


def test_engines_without_it_refuse():
    model = build("STDiT").train()
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(UserError, match="cuda_graphs=True has no effect with plugin='fsdp2'"):
        build_engine("fsdp2", model, optimizer, ALONE, cuda_graphs=True)


def test_a_cpu_says_that_it_gains_nothing(caplog):
    engine_of(build("STDiT").train())
    assert "cuda_graphs=True has no effect here" in caplog.text


def test_graphs_are_freed_before_the_process_group():
    """NCCL would wait for them for ever."""

    class Counting(EagerCapture):
        released = 0

        def release(self):
            self.released += 1

    model, capture = build("STDiT").train(), Counting()
    pool = capture_training(model, capture)
    expected = model(**inputs(model)).detach()
    assert pool.runners
    shutdown()
    assert not pool.runners
    assert capture.released == 1
    assert torch.equal(model(**inputs(model)), expected)  # made anew
    del pool
    model.forward = None
    gc.collect()
    shutdown()
    assert capture.released == 1  # nobody was left to ask it


def on_two_processes(rank, folder):
    """The same steps with and without, on different samples of each process."""
    dist.init_process_group("gloo", init_method=(folder / "rendezvous").as_uri(), rank=rank, world_size=2)
    world, found = World(rank, 2, CPU), []
    for graphs in (True, False):
        model = build("STDiT").train()
        engine = engine_of(model, world=world, graphs=graphs, dtype="fp32")
        found.append((train(engine, model, seed=rank), model.state_dict()))
    (values, state), (expected, wanted) = found
    assert values == pytest.approx(expected, rel=1e-5)
    assert all(torch.allclose(state[name], wanted[name], rtol=0, atol=1e-4) for name in wanted)
    dist.destroy_process_group()


def on_one_sample(rank, folder):
    """Two processes that share samples, against one; then gradients of several dtypes, which one process lacks."""
    dist.init_process_group("gloo", init_method=(folder / "rendezvous").as_uri(), rank=rank, world_size=2)
    for family in ("STDiT", "STDiT3", "DiT-text"):
        found = []
        for world in (init_world("cpu", sp_size=2), ALONE):
            model = build(family).train()
            parallelise(model, world.sp_group)
            engine = engine_of(model, world=world, graphs=world is not ALONE, dtype="fp32")
            found.append((train(engine, model, seed=0), model.state_dict()))
        (values, state), (expected, wanted) = found
        assert values == pytest.approx(expected, rel=1e-4), family
        assert all(torch.allclose(state[name], wanted[name], rtol=0, atol=1e-4) for name in wanted), family

    weights = [torch.ones(5), torch.ones(3, 2, dtype=torch.bfloat16), torch.ones(200), torch.ones(1)]
    gradients = cuda_graphs.GradientBuffers(weights)
    for step in range(2):
        if rank:
            gradients.attach(weights[:3])
            for weight, grad in zip(weights, (2.0, 4.0, 6.0 + step), strict=False):
                weight.grad.fill_(grad)
        gradients.average()
        *some, nobodys = weights
        assert [float(weight.grad.mean()) for weight in some] == [1, 2, 3 + step / 2]
        assert all(weight.grad.shape == weight.shape and weight.grad.dtype == weight.dtype for weight in some)
        assert all(weight.grad.data_ptr() % 16 == 0 for weight in some)
        assert nobodys.grad is None  # an optimizer leaves it alone, as in one process
        for weight in weights:
            weight.grad = None
    dist.destroy_process_group()


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("together", [on_two_processes, on_one_sample])
def test_two_processes(together, tmp_path):
    start_ranks(together, (tmp_path,), 2, "cuda_graphs", 120)
