"""On a CUDA device: the same results as on the CPU, and a training step in every precision, compiled or not."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import opensora.acceleration.kernels.attention as attention_module
from opensora.acceleration.checkpointing import checkpoint_activations
from opensora.acceleration.compile import compile_blocks
from opensora.acceleration.compile.cuda_graphs import capture_training
from opensora.acceleration.distributed import World
from opensora.acceleration.engine import build_engine
from opensora.acceleration.kernels.attention import attention
from opensora.models.layers import modulation
from opensora.registry import MODELS, SCHEDULERS
from opensora.utils.seed import generators
from tests.acceleration import test_cuda_graphs as cuda_graphs
from tests.acceleration.kernels import test_adaln
from tests.acceleration.kernels import test_head_norm as head_norm
from tests.acceleration.kernels.short_attention_checks import SIZES, compare
from tests.models import test_quantised_linear as quantised_linear
from tests.models.denoisers import COMPILED_SIZES, FAMILIES, build, inputs

pytestmark = pytest.mark.gpu
NOVA = {
    "type": "NOVA", "width": 64, "num_heads": 1, "video_depth": 2, "image_depth": 4, "head_depth": 2, "motion": False,
    "caption_channels": 16, "model_max_length": 7,
}  # fmt: skip
TOY = {"type": "STDiT-XXS/2", "caption_channels": 16, "model_max_length": 5}


def toy():
    torch.manual_seed(0)
    model = MODELS.build(TOY)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():
                parameter.normal_(std=0.05)
    return model


@torch.no_grad()
def test_forward_equals_the_cpus():
    model = toy()
    x, t, y = torch.randn(2, 4, 3, 6, 8), torch.tensor([3, 700]), torch.randn(2, 1, 5, 16)
    mask = torch.tensor([[True, True, False, False, False], [True] * 5])
    expected = model(x, t, y, mask=mask)
    out = model.cuda()(x.cuda(), t.cuda(), y.cuda(), mask=mask.cuda()).cpu()
    torch.testing.assert_close(out, expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("compiled", [False, True])
def test_training_steps_lower_the_loss(dtype, compiled):
    device = torch.device("cuda")
    model = toy().to(device).train()
    if compiled:
        compile_blocks(model.transformer_blocks())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    engine = build_engine("ddp", model, optimizer, World(0, 1, device), dtype=dtype, grad_clip=1.0)
    scheduler = SCHEDULERS.build({"type": "iddpm"})
    z, cond = torch.randn(8, 4, 3, 6, 8, device=device), {"y": torch.randn(8, 1, 5, 16, device=device)}
    losses = []
    for _ in range(30):
        rngs = generators(0, "gpu", ids=range(8), device=device)  # the same noise again: a loss that must fall
        with engine.micro_step(last=True):
            loss = scheduler.training_losses(engine.model, z, cond, generators=rngs).mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("size", [*SIZES, (2, 5, 3, 33, 64), (1, 3, 2, 64, 128)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 3e-2), (torch.float16, 4e-3)])
def test_short_attention_equals_the_formula(size, dtype, tolerance):
    compare(size, "cuda", dtype, tolerance)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("backend", [None, "inductor"])
def test_the_queries_of_one_sample_keep_a_gpu_busy(masked, backend, monkeypatch):
    """300 tokens of one caption are too few programs for the backward pass of PyTorch's kernels."""
    parts, in_parts = [], attention_module._sdpa_in_parts
    monkeypatch.setattr(attention_module, "_sdpa_in_parts", lambda *args: parts.append(1) or in_parts(*args))
    torch._dynamo.reset()
    torch.manual_seed(0)
    leaves = [torch.randn(1, n, 16, 72, device="cuda", dtype=torch.bfloat16) for n in (8192, 300, 300)]
    mask = torch.arange(300, device="cuda")[None] < 200 if masked else None
    weight = torch.randn(1, 16, 8192, 72, device="cuda")
    run = torch.compile(attention, fullgraph=True, backend=backend) if backend else attention
    results = []
    for attend in (run, formula):
        inputs = [leaf.clone().requires_grad_() for leaf in leaves]
        out = attend(*(each.transpose(1, 2) for each in inputs), mask)
        (out.float() * weight).sum().backward()
        results.append([out.detach().float(), *(each.grad.float() for each in inputs)])
    assert len(parts) == 1  # so that it is this which was compared
    for ours, right in zip(*results, strict=True):
        assert (ours - right).norm() < 1e-2 * right.norm()


def formula(q, k, v, mask):
    scores = q.float() @ k.float().transpose(-2, -1) / q.shape[-1] ** 0.5
    if mask is not None:
        scores = scores.masked_fill(~mask[:, None, None], float("-inf"))
    return (scores.softmax(-1) @ v.float()).to(v.dtype)


@pytest.mark.parametrize("size", [*head_norm.SIZES, (2, 3, 70, 16, 72)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
@pytest.mark.parametrize("backend", [None, "inductor"])
def test_normalised_and_rotated_heads_equal_the_layers(size, dtype, tolerance, backend):
    torch._dynamo.reset()
    for axis in head_norm.AXES:
        head_norm.compare(size, axis, device="cuda", dtype=dtype, tolerance=tolerance, backend=backend)


@pytest.mark.parametrize("family", FAMILIES)
def test_compiled_training_in_bf16_has_the_gradients_of_fp32(family):
    """With all of our kernels, which fp32 does not take; the gradients of all parameters."""
    torch._dynamo.reset()
    model = build(family).train().cuda()
    cond = on_gpu(inputs(model))
    model(**cond).square().mean().backward()
    right = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    compile_blocks(model.transformer_blocks())
    optimizer = torch.optim.AdamW(model.parameters())
    engine = build_engine("ddp", model, optimizer, World(0, 1, torch.device("cuda")), dtype="bf16")
    with engine.micro_step(last=True):
        loss = engine.model(**cond).float().square().mean()
    engine.backward(loss)
    found = [p.grad for p in model.parameters()]
    assert [each is None for each in found] == [each is None for each in right]
    a, b = (torch.cat([each.flatten() for each in grads if each is not None]) for grads in (found, right))
    assert (a - b).norm() < 5e-2 * b.norm()


def test_sums_over_all_tokens_of_a_long_video_are_right():
    """Gradients of what modulates every token; a fusion of Inductor got them wrong, see `opensora/__init__.py`."""
    from tools.benchmark import wan

    for level in ("none", "selective"):
        setting = replace(wan.SETTINGS["wan-1.3b"], size={"depth": 1})
        error, gradient_error = wan.compare(setting, "ours", level, torch.device("cuda"))
        assert max(error, gradient_error) < 0.02
        torch._dynamo.reset()


def recorded_and_plain(family, *, compiled, level="none"):
    """Predictions and gradients of some passes, with CUDA graphs and without: sizes return in another order, gradients add up."""
    torch._dynamo.reset()
    found = []
    for graphs in (True, False):
        model = build(family).train().cuda()
        if compiled:
            compile_blocks(model.transformer_blocks())
        checkpoint_activations(model.transformer_blocks(), level)
        engine = cuda_graphs.engine_of(model, world=World(0, 1, torch.device("cuda")), graphs=graphs)
        results = []
        for number, size in enumerate([(3, 6, 8), (1, 6, 4), (3, 6, 8), (2, 4, 4), (1, 6, 4), (3, 6, 8)]):
            with engine.micro_step(last=True):
                out = engine.model(**on_gpu(inputs(model, size=size, seed=number)))
                loss = (out.float() - 0.3).square().mean()
            engine.backward(loss)
            results.append(out.detach())
            if number % 2:
                results += [p.grad.clone() for p in model.parameters() if p.grad is not None]
                model.zero_grad()
        found.append(torch.cat([result.flatten() for result in results]))
    return found


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("compiled", [False, True])
def test_recorded_passes_equal_plain_ones(family, compiled):
    recorded, plain = recorded_and_plain(family, compiled=compiled)
    assert (recorded - plain).norm() < 1e-3 * plain.norm()


@pytest.mark.parametrize("level", ["block", "selective", "mlp"])
def test_recordings_of_checkpointed_blocks(level):
    recorded, plain = recorded_and_plain("STDiT3", compiled=True, level=level)
    assert (recorded - plain).norm() < 1e-3 * plain.norm()


def test_a_recording_is_replayed_not_repeated(monkeypatch):
    model = build("STDiT").train().cuda()
    capture_training(model)
    cond, calls = on_gpu(inputs(model)), []
    model(**cond).sum().backward()
    monkeypatch.setattr(type(model.blocks[0]), "forward", lambda *_a, **_k: calls.append(1))
    model(**cond).sum().backward()
    assert not calls
    assert all(weight.grad.isfinite().all() for weight in model.parameters() if weight.grad is not None)


WAITS = """
import torch
from opensora.acceleration.compile.cuda_graphs import capture_training
from tests.models.denoisers import build, inputs
model = build("STDiT").train().cuda()
model.blocks[0].register_forward_hook(lambda _m, _i, out: out * float(out.sum().isfinite()))
capture_training(model)
model(**{name: value.cuda() for name, value in inputs(model).items()})
"""


def test_what_waits_for_the_gpu_cannot_be_recorded():
    """In a process of its own: a recording that failed leaves PyTorch's state behind."""
    root = Path(__file__).parent.parent
    done = subprocess.run(
        [sys.executable, "-c", WAITS], cwd=root, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode
    assert "cannot be captured" in done.stderr, done.stderr
    assert "cuda_graphs=False" in done.stderr


@pytest.mark.parametrize("size", [*test_adaln.SIZES, (2, 16, 256, 1152, 1), (1, 3, 300, 4096, 3)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
@pytest.mark.parametrize("backend", [None, "inductor"])
def test_adaln_equals_pytorchs(size, dtype, tolerance, backend):
    torch._dynamo.reset()
    for layer in (test_adaln.fused, test_adaln.wide):
        test_adaln.compare(size, device="cuda", dtype=dtype, tolerance=tolerance, backend=backend, layer=layer)


@pytest.mark.parametrize("family", ["STDiT", "STDiT2", "STDiT3", "DiT-text", "PixArt"])
@pytest.mark.parametrize("masked", [False, True])
def test_gradients_with_adalns_kernels_equal_those_without(family, masked, monkeypatch):
    model = build(family).train().cuda()
    cond = on_gpu(inputs(model))
    if masked:
        cond["x_mask"] = torch.arange(cond["x"].shape[2], device="cuda").remainder(2).bool().expand(len(cond["x"]), -1)
    found = []
    for fused in (True, False):
        if not fused:
            monkeypatch.setattr(modulation, "_is_fused", lambda *_: False)
        model.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            model(**cond).float().square().mean().backward()
        found.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    assert (found[0] - found[1]).norm() < 3e-2 * found[1].norm()
    assert not found[0].equal(found[1]), "the kernels did not run"


def on_gpu(cond):
    return {name: value.cuda() for name, value in cond.items()}


@pytest.mark.parametrize("kind", quantised_linear.KINDS)
@pytest.mark.parametrize("backend", [None, "inductor"])
def test_quantised_layers_equal_those_with_dequantised_weights(kind, backend):
    model, plain = (each.cuda() for each in quantised_linear.adapted("Wan", kind, "selective", backend=backend))
    found, expected = quantised_linear.step(model), quantised_linear.step(plain)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_every_denoiser_equals_the_cpus(family):
    model = build(family)
    cond = inputs(model)
    expected = model(**cond)
    torch.testing.assert_close(model.cuda()(**on_gpu(cond)).cpu(), expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("family", ["STDiT", "DiT-text", "PixArt", "STDiT3"])
def test_compiled_blocks_give_the_gradients_of_eager_ones_at_every_size(family):
    eager, compiled = build(family).cuda().train(), build(family).cuda().train()
    compile_blocks(compiled.transformer_blocks(), varying_sizes=True)
    for size in [(4, 6, 8), (7, 4, 12), (2, 8, 8), (1, 6, 8)]:
        cond = on_gpu(inputs(eager, size=size))
        for model in (eager, compiled):
            model.zero_grad()
            model(**cond).square().mean().backward()
        for a, b in zip(eager.parameters(), compiled.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("family", ["STDiT", "DiT-text", "PixArt", "STDiT3", "LatteT2V"])
def test_many_sizes_train_with_few_programs(family):
    """In bf16, with our kernels; sizes at which a GPU's kernels could want programs of their own."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = build(family).cuda().train()
    compile_blocks(model.transformer_blocks(), varying_sizes=True)
    for size in (*COMPILED_SIZES, (16, 32, 32), (17, 30, 34)):
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(**on_gpu(inputs(model, size=size))).float().square().mean()
        loss.backward()
    assert (
        0 < torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2 * 2 * 4
    )  # kinds of blocks, videos and images, and what Inductor distinguishes


def test_novas_numbers_of_visible_patches_share_programs():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = MODELS.build(NOVA).cuda().train()
    compile_blocks(model.transformer_blocks())
    scheduler = SCHEDULERS.build({"type": "nova"})
    x, cond = torch.randn(2, 4, 1, 64, 64, device="cuda"), {"y": torch.randn(2, 1, 7, 16, device="cuda")}
    for step in range(16):
        rngs = generators(0, "nova", step, ids=range(2), device=torch.device("cuda"))
        with torch.autocast("cuda", torch.bfloat16):
            loss = scheduler.training_losses(model, x, cond, generators=rngs).mean()
        loss.backward()
    # of the video encoder, of both halves of the image encoder, of the head: 4; Inductor wants up to 4 for many lengths
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 7
