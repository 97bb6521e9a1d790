"""On a CUDA device: every VAE gives what it gives on the CPU; layout, compilation and slicing do what they are for."""

import pytest
import torch
from torch.testing import assert_close

from opensora.models.vae import VideoAutoencoderKL
from opensora.utils.seed import generator, generators
from tests.models.vaes import VAES, build, video_of

pytestmark = pytest.mark.gpu
WIDE = {"block_out_channels": (64, 64, 64, 64), "layers_per_block": 1}


@pytest.fixture(autouse=True)
def _exact():
    """fp32 without TF32, and no gradients."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    with torch.no_grad():
        yield
    torch.backends.cudnn.allow_tf32 = before


@pytest.mark.parametrize("memory_format", ["contiguous", "channels_last"])
@pytest.mark.parametrize("name", VAES)
def test_every_vae_equals_the_cpus(name, memory_format):
    vae = build(name)
    x = video_of(vae)
    moments = vae.moments(x)
    z = vae.sample(moments, generators(0, ids=range(len(x))))
    decoded = vae.decode(z, x.shape[2])
    on_gpu = build(name, memory_format=memory_format).cuda()
    assert_close(on_gpu.moments(x.cuda()).cpu(), moments, rtol=1e-3, atol=1e-3)
    assert_close(on_gpu.sample(moments.cuda(), generators(0, ids=range(len(x)))).cpu(), z)
    assert_close(on_gpu.decode(z.cuda(), x.shape[2]).cpu(), decoded, rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize("name", ["VideoAutoencoderKL", "KLHunyuanVideo", "VAE_Temporal_SD"])
def test_compiled_networks_agree_and_compile_once(name):
    torch._dynamo.reset()
    plain, compiled = build(name).cuda(), build(name, compile=True, micro_batch_size=2).cuda()
    x = video_of(plain, batch=5).cuda()
    torch._dynamo.utils.counters.clear()
    for _ in range(3):
        assert_close(compiled.moments(x), plain.moments(x), rtol=1e-3, atol=1e-3)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_bf16_stays_near_fp32():
    exact, short = (VideoAutoencoderKL(architecture=WIDE, dtype=dtype).cuda().eval() for dtype in ("fp32", "bf16"))
    short.autoencoder.load_state_dict(exact.autoencoder.state_dict())
    x = video_of(exact, 2).cuda()
    moments = exact.moments(x)
    assert (short.moments(x) - moments).norm() / moments.norm() < 0.05


def test_slicing_and_tiling_lower_the_peak():
    def peak(**settings) -> int:
        # in bf16: for fp32 without TF32 cuDNN takes 2 GB of room to work in, whatever the size
        vae = VideoAutoencoderKL(architecture=WIDE, posterior="mode", dtype="bf16", **settings).cuda().eval()
        x = (torch.rand(1, 3, 8, 512, 512, generator=generator(0)) * 2 - 1).cuda()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        vae.decode(vae.encode(x), 8)
        return torch.cuda.max_memory_allocated()

    whole, sliced, tiled, both = (
        peak(),
        peak(micro_batch_size=1),
        peak(tile_size=256),
        peak(micro_batch_size=1, tile_size=256),
    )
    assert sliced < 0.4 * whole
    assert tiled < 0.6 * whole
    assert both < sliced
