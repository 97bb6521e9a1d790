"""LPIPS against its formula, and with real weights against the package that they come from."""

import sys
import types

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

from opensora.models.vae.metrics import LPIPS
from opensora.utils.errors import UserError
from opensora.utils.seed import generator
from tests.models.vae.lpips_files import package_folder, random_alex


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    return random_alex(tmp_path_factory.mktemp("lpips") / "alex.safetensors")


@pytest.fixture(scope="module")
def lpips(weights):
    return LPIPS(str(weights))


def pair(*shape):
    rng = generator(0)
    return torch.rand(*shape, generator=rng) * 2 - 1, torch.rand(*shape, generator=rng) * 2 - 1


def by_the_formula(w, x_hat, x):
    """Zhang et al.'s distance with AlexNet, layer by layer from the file's tensors."""

    def conv(v, name, padding):
        return F.conv2d(v, w[f"{name}.weight"], w[f"{name}.bias"], padding=padding)

    def blur(v, name):
        return F.conv2d(F.pad(v, (2, 2, 2, 2), mode="reflect"), w[f"{name}.filt"], stride=2, groups=v.shape[1])

    def features(v):
        v = (v - w["scaling_layer.shift"]) / w["scaling_layer.scale"]
        one = blur(conv(v, "net.slice1.0", 2), "net.slice1.1").relu()
        two = conv(blur(F.max_pool2d(one, 3, 1), "net.slice2.4"), "net.slice2.5", 2).relu()
        three = conv(blur(F.max_pool2d(two, 3, 1), "net.slice3.8"), "net.slice3.9", 1).relu()
        four = conv(three, "net.slice4.11", 1).relu()
        return [one, two, three, four, conv(four, "net.slice5.13", 1).relu()]

    total = 0
    for i, (a, b) in enumerate(zip(features(x_hat), features(x), strict=True)):
        a, b = (f / (f.square().sum(1, keepdim=True).sqrt() + 1e-10) for f in (a, b))
        total = total + ((a - b).square() * w[f"lin{i}.model.1.weight"]).sum(1).mean((1, 2))
    return total


def test_it_is_the_formula(lpips, weights):
    x_hat, x = pair(2, 3, 40, 56)
    assert lpips.net == "alex"
    assert_close(lpips(x_hat, x), by_the_formula(load_file(weights), x_hat, x), rtol=1e-4, atol=1e-6)


def test_equal_images_have_distance_0_and_videos_the_mean_of_their_frames(lpips):
    x_hat, x = pair(2, 3, 3, 32, 40)
    assert lpips(x, x).abs().max() == 0
    frames = torch.stack([lpips(x_hat[:, :, t], x[:, :, t]) for t in range(3)])
    assert_close(lpips(x_hat, x), frames.mean(0))


def test_gradients_are_finite_where_all_features_are_0(weights, tmp_path):
    """A dead layer has features of length 0, whose direction has no derivative."""
    state = load_file(weights)
    state["net.slice5.13.bias"] -= 1e3
    save_file(state, tmp_path / "dead.safetensors")
    x_hat, x = pair(1, 3, 32, 32)
    x_hat.requires_grad_()
    LPIPS(str(tmp_path / "dead.safetensors"))(x_hat, x).sum().backward()
    assert x_hat.grad.isfinite().all()
    assert x_hat.grad.abs().sum() > 0


def test_it_is_frozen_in_eval_mode(lpips):
    assert not any(p.requires_grad for p in lpips.parameters())
    assert not torch.nn.Sequential(lpips).train()[0].training


def test_what_cannot_be_measured_or_read_is_refused(lpips, tmp_path):
    with pytest.raises(UserError, match="at least 32 pixels"):
        lpips(*pair(1, 3, 16, 64))
    with pytest.raises(UserError, match="neither alex nor vgg nor a file"):
        LPIPS("squeeze")
    save_file({"conv.weight": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(UserError, match="holds no LPIPS network"):
        LPIPS(str(tmp_path / "other.safetensors"))


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "stlpips_pytorch", None)  # as if it were not installed
    with pytest.raises(UserError, match=r"pip install --no-deps stlpips-pytorch==0\.0\.2"):
        LPIPS("vgg")


@pytest.mark.skipif(package_folder() is None, reason="stlpips-pytorch is neither installed nor in data/sources")
@pytest.mark.parametrize("net", ["alex", pytest.param("vgg", marks=pytest.mark.slow)])
def test_it_equals_the_package_with_real_weights(net, monkeypatch):
    folder = package_folder()
    for name, attribute in (("IPython", "embed"), ("torchsummary", "summary")):  # imported there, never used
        stub = types.ModuleType(name)
        setattr(stub, attribute, None)
        monkeypatch.setitem(sys.modules, name, stub)
    monkeypatch.syspath_prepend(str(folder.parent))
    from stlpips_pytorch import stlpips

    reference = stlpips.LPIPS(net=net, variant="shift_tolerant", verbose=False)
    ours = LPIPS(str(folder / "weights" / "vST0.0" / f"{net}_shift_tolerant.pth"))
    from skimage import data

    photos = [torch.from_numpy(photo[40:130, 100:220].copy()) for photo in (data.astronaut(), data.chelsea())]
    x, other = (photo.permute(2, 0, 1)[None] / 127.5 - 1 for photo in photos)
    dim = F.avg_pool2d(F.pad(x, (1, 1, 1, 1), mode="reflect"), 3, 1)
    with torch.no_grad():
        theirs = torch.stack([reference(v, x).flatten() for v in (other, dim, x)])
        mine = torch.stack([ours(v, x) for v in (other, dim, x)])
    assert_close(mine, theirs, rtol=1e-4, atol=1e-6)
    assert mine[0] > mine[1] > 0.05
