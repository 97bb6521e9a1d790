"""What the ADM evaluator measures: Inception's features against torchvision, scores against closed forms, SciPy and scikit-learn."""

import json
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn
from torchvision.models.inception import Inception3

from opensora.utils.errors import UserError
from tests.models.vae.lpips_files import random_alex
from tools.eval import extractors, frechet
from tools.eval.extractors import Extractor
from tools.eval.frechet import SPLIT, Gaussian, frechet_distance, inception_score, main, precision_recall
from tools.eval.inception import POOLED, Inception


@pytest.fixture(scope="module")
def torchvisions() -> nn.Module:
    """Inception with random weights and statistics, and without the branches that pool otherwise in TensorFlow."""
    torch.manual_seed(0)
    net = Inception3(1008, aux_logits=False, init_weights=False).requires_grad_(False).eval()
    for name, module in net.named_modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 1.5)
        elif name.endswith("branch_pool.conv"):
            module.weight.zero_()
    return net


@pytest.fixture(scope="module")
def ours(torchvisions, tmp_path_factory) -> Inception:
    path = tmp_path_factory.mktemp("inception") / "weights.pth"
    torch.save(torchvisions.state_dict(), path)
    return Inception(path)


def test_inception_is_torchvisions_but_for_its_pooling(torchvisions, ours):
    maps, pixels = [], torch.randint(0, 256, (1, 3, 1, 299, 299)).float()
    hooks = [torchvisions.Mixed_6d.branch1x1.register_forward_hook(lambda module, args, out: maps.append(out))]
    pooled = []
    hooks.append(torchvisions.fc.register_forward_pre_hook(lambda module, args: pooled.append(args[0])))
    torchvisions.fc.bias.zero_()  # which the score leaves out
    logits = torchvisions((pixels[:, :, 0] - 128) / 128)
    features = ours(pixels / 127.5 - 1)
    for hook in hooks:
        hook.remove()
    torch.testing.assert_close(features[:, :POOLED], pooled[0], atol=1e-5, rtol=1e-4)
    spatial = maps[0][0, :7].permute(1, 2, 0).flatten()  # rows, columns, channels
    torch.testing.assert_close(features[0, POOLED:], spatial, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(ours.probabilities(features[:, :POOLED]), logits.softmax(1), atol=1e-6, rtol=1e-4)


def test_pooling_leaves_padding_out_and_ends_with_a_maximum(ours):
    for block, count in ((ours.net.Mixed_5b, 32), (ours.net.Mixed_6b, 192), (ours.net.Mixed_7b, 192)):
        width = block.branch_pool.conv.weight.normal_().shape[1]
        x, inside = torch.rand(1, width, 4, 5), torch.ones(1, 1, 4, 5)
        box = torch.ones(1, 1, 3, 3)
        sums = F.conv2d(x.transpose(0, 1), box, padding=1).transpose(0, 1)
        expected = block.branch_pool(sums / F.conv2d(inside, box, padding=1))
        torch.testing.assert_close(block(x)[:, -count:], expected, atol=1e-4, rtol=1e-4)
    last = ours.net.Mixed_7c
    last.branch_pool.conv.weight.normal_()
    x = torch.rand(1, 2048, 2, 2)  # each of whose cells has all others as neighbours
    expected = last.branch_pool(x.amax((2, 3), keepdim=True).expand_as(x))
    torch.testing.assert_close(last(x)[:, -192:], expected, atol=1e-4, rtol=1e-4)


def test_resizing_has_no_half_pixel_offset(ours):
    """As TensorFlow's: column i of 299 shows 150 / 299 i, and a ramp keeps its values up to its last column."""
    ramp, seen = torch.arange(150.0).expand(1, 3, 1, 40, 150), []
    hook = ours.net.Conv2d_1a_3x3.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    ours(ramp / 127.5 - 1)
    hook.remove()
    columns = (torch.arange(299) * 150 / 299).clamp(max=149)
    torch.testing.assert_close(seen[0], ((columns - 128) / 128).expand(1, 3, 299, 299), atol=1e-5, rtol=0)


def test_other_weights_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"alex.safetensors is not pt_inception-2015-12-05-6726825d.pth"):
        Inception(random_alex(tmp_path / "alex.safetensors"))


def test_the_inception_score_of_known_classes():
    assert inception_score(torch.full((50, 10), 0.1)) == pytest.approx(1)  # nothing is told apart
    assert inception_score(torch.eye(10).repeat(7, 1)) == pytest.approx(10)  # sure, and all classes
    # two halves, sure of one of two classes each with probability 0.9: exp(log 2 - H(0.9))
    p = torch.tensor([[0.9, 0.1], [0.1, 0.9]]).double().repeat(20, 1)
    entropy = -(0.9 * np.log(0.9) + 0.1 * np.log(0.1))
    assert inception_score(p) == pytest.approx(2 * np.exp(-entropy))
    sorted_by_class = torch.eye(2).repeat_interleave(SPLIT, 0)
    assert inception_score(sorted_by_class) == pytest.approx(1)  # each part has one class
    assert inception_score(sorted_by_class[torch.arange(2 * SPLIT).view(2, SPLIT).T.flatten()]) == pytest.approx(2)


def test_precision_and_recall_are_those_of_nearest_neighbours():
    neighbours = pytest.importorskip("sklearn.neighbors")
    rng = np.random.default_rng(0)
    real, fake = (
        rng.normal(size=(1100, 3)),
        np.concatenate([rng.normal(size=(200, 3)) * 0.3, rng.normal(size=(50, 3)) + 4]),
    )

    def share_inside(points: np.ndarray, manifold: np.ndarray) -> float:
        radii = neighbours.NearestNeighbors(n_neighbors=4).fit(manifold).kneighbors(manifold)[0][:, 3]
        distances = np.linalg.norm(points[:, None] - manifold[None], axis=2)
        return float((distances <= radii).any(1).mean())

    precision, recall = precision_recall(torch.from_numpy(real).float(), torch.from_numpy(fake).float())
    assert precision == pytest.approx(share_inside(fake, real))
    assert recall == pytest.approx(share_inside(real, fake))
    assert 0 < recall < precision < 1
    assert precision_recall(torch.from_numpy(real), torch.from_numpy(real)) == (1, 1)
    with pytest.raises(UserError, match="more than 3 samples"):
        precision_recall(torch.zeros(3, 2), torch.zeros(9, 2))


def test_precision_of_points_on_a_line():
    """Real points 0 to 4 reach 3, 2, 2, 2 and 3 far: everything from -3 to 7 is inside."""
    real, fake = torch.arange(5.0)[:, None], torch.tensor([-3.5, -3, 7, 7.5])[:, None]
    assert precision_recall(real, fake) == (0.5, 1.0)


def test_a_distance_is_not_below_zero():
    root = torch.randn(40, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    one = Gaussian(torch.zeros(40).double(), root @ root.T, 99)
    assert f"{frechet_distance(one, one):.4f}" == "0.0000"
    for scale in np.geomspace(1e-3, 1e3, 7):
        scaled = one._replace(covariance=scale * one.covariance)
        assert str(frechet_distance(scaled, scaled))[0] != "-"


# ------------------------------------------------------------------------------------------------ files and the command


def features(videos: torch.Tensor) -> torch.Tensor:
    """Four "pooled" features, which are class probabilities too, and three for sFID."""
    frames = videos.transpose(1, 2).flatten(0, 1)
    return torch.cat([frames.mean((2, 3)), frames[:, :1].amax((2, 3)), frames.amin((2, 3))], dim=1)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """`options -> scores`: the command with a small extractor that has all that Inception has."""
    toy = Extractor("toy", "none", (299, 299), features, 1, "none", 4, lambda pooled: pooled.softmax(1))
    monkeypatch.setitem(extractors.EXTRACTORS, "toy", lambda args: toy)
    monkeypatch.chdir(tmp_path)

    def run(*options) -> dict:
        measures = [] if "--write-npz" in options else ["--extractor", "toy", "--out", "score.json"]
        monkeypatch.setattr(sys, "argv", ["frechet", *map(str, options), "--device", "cpu", *measures])
        main()
        return json.loads((tmp_path / "score.json").read_text())["scores"] if measures else {}

    return run


def images(count, seed, side=6):
    return np.random.default_rng(seed).integers(0, 256, (count, side, side + 2, 3), np.uint8)


def test_all_scores_of_two_batches(run, capsys):
    real, fake = images(30, 0), images(20, 1)
    np.savez("real.npz", arr_0=real)
    np.savez("fake.npz", arr_0=fake)
    scores = run("--real", "real.npz", "--fake", "fake.npz")
    x, y = (features(torch.from_numpy(a).permute(0, 3, 1, 2)[:, :, None] / 127.5 - 1).double() for a in (real, fake))

    def distance(a, b):
        linalg = pytest.importorskip("scipy.linalg")
        covariances = [np.cov(side.numpy(), rowvar=False) for side in (a, b)]
        root = linalg.sqrtm(covariances[0] @ covariances[1])
        return float((a.mean(0) - b.mean(0)).square().sum()) + np.trace(covariances[0] + covariances[1] - 2 * root.real)

    assert scores["frechet_distance"] == pytest.approx(distance(x[:, :4], y[:, :4]), rel=1e-5)
    assert scores["sfid"] == pytest.approx(distance(x[:, 4:], y[:, 4:]), rel=1e-5)
    assert scores["inception_score"] == pytest.approx(inception_score(y[:, :4].softmax(1)), rel=1e-6)
    assert (scores["precision"], scores["recall"]) == precision_recall(x[:, :4].float(), y[:, :4].float())
    assert "sfid: " in capsys.readouterr().out


def test_a_reference_batchs_statistics_win_over_its_images(run, capsys):
    np.savez("fake.npz", arr_0=images(20, 1))
    zero = {"mu": np.zeros(4), "sigma": np.zeros((4, 4)), "mu_s": np.zeros(3), "sigma_s": np.zeros((3, 3))}
    np.savez("real.npz", arr_0=images(30, 0), **zero)
    y = features(torch.from_numpy(images(20, 1)).permute(0, 3, 1, 2)[:, :, None] / 127.5 - 1).double()
    scores = run("--real", "real.npz", "--fake", "fake.npz")
    for name, part in (("frechet_distance", y[:, :4]), ("sfid", y[:, 4:])):  # from a point at 0: |mean|^2 + trace
        assert scores[name] == pytest.approx(float(part.mean(0).square().sum() + part.var(0).sum()), rel=1e-5)
    assert {"precision", "recall"} <= scores.keys()
    assert "all real and 20 generated" in capsys.readouterr().out
    np.savez("few.npz", mu=zero["mu"], sigma=zero["sigma"])  # as pytorch-fid writes
    assert run("--real", "few.npz", "--fake", "fake.npz").keys() == {"frechet_distance", "inception_score"}
    for options, message in (
        (("--num-samples", 5), "holds statistics of all its images"),
        (("--save-statistics", "kept.safetensors"), "is a file of statistics already"),
        (("--num-frames", 2), "a clip is --num-frames 1"),
    ):
        with pytest.raises(SystemExit, match="2"):
            run("--real", "real.npz", "--fake", "fake.npz", *options)
        assert message in capsys.readouterr().err


def test_a_folder_of_samples_becomes_a_file_and_scores_alike(run, tmp_path, capsys):
    pixels = images(12, 2)
    (tmp_path / "samples").mkdir()
    for i, image in enumerate(pixels):
        Image.fromarray(image).save(tmp_path / "samples" / f"sample_{i:04d}.png")
    run("--fake", "samples", "--write-npz", "samples.npz")
    packed = np.load("samples.npz")["arr_0"]
    assert packed.dtype == np.uint8
    assert not np.array_equal(packed, pixels)  # sorted by class they were, and parts of the score would have few
    assert sorted(image.tobytes() for image in packed) == sorted(image.tobytes() for image in pixels)
    np.savez("real.npz", arr_0=images(30, 0))
    assert run("--real", "real.npz", "--fake", "samples.npz") == pytest.approx(
        run("--real", "real.npz", "--fake", "samples")
    )
    run("--fake", "samples", "--write-npz", "small.npz", "--size", 4, 4, "--num-samples", 3)
    assert np.load("small.npz")["arr_0"].shape == (3, 4, 4, 3)
    Image.fromarray(images(1, 3, side=8)[0]).save(tmp_path / "samples" / "other.png")
    for options, message in (
        (("--write-npz", "all.npz"), "13 images of 2 sizes"),
        (("--write-npz", "all.npz", "--size", 4, 4, "--num-samples", 14), "asked for are 14"),
        (("--write-npz", "all.npy"), "the name ends in .npz"),
        (("--write-npz", "all.npz", "--real", "real.npz"), "nothing is measured"),
        ((), "--real is missing"),
    ):
        with pytest.raises(SystemExit, match="2"):
            run("--fake", "samples", *options)
        assert message in capsys.readouterr().err


def test_samples_in_the_order_of_their_classes_are_mixed(run, tmp_path, monkeypatch):
    """Each part of the Inception Score would else have one class, as here the file has that keeps the order."""
    monkeypatch.setattr(frechet, "SPLIT", 10)
    dark_and_bright = np.repeat(np.array([0, 255], np.uint8), 20)[:, None, None, None] * np.array([1, 0, 0], np.uint8)
    pixels = dark_and_bright * np.ones((1, 6, 8, 1), np.uint8)
    (tmp_path / "samples").mkdir()
    for i, image in enumerate(pixels):
        Image.fromarray(image).save(tmp_path / "samples" / f"sample_{i:04d}.png")
    np.savez("sorted.npz", arr_0=pixels)
    np.savez("real.npz", arr_0=images(30, 0))
    run("--fake", "samples", "--write-npz", "mixed.npz")
    scores = {
        fake: run("--real", "real.npz", "--fake", fake)["inception_score"]
        for fake in ("sorted.npz", "samples", "mixed.npz")
    }
    assert scores["sorted.npz"] == pytest.approx(1)
    assert min(scores["samples"], scores["mixed.npz"]) > 1.05


@pytest.mark.parametrize("content", [b"no", {"arr_1": np.zeros(3)}, {"arr_0": np.zeros((4, 6, 6, 3))}])
def test_files_that_hold_no_images(run, capsys, content):
    if isinstance(content, bytes):
        open("other.npz", "wb").write(content)  # noqa: PTH123, SIM115
    else:
        np.savez("other.npz", **content)
    with pytest.raises(SystemExit, match="2"):
        run("--real", "other.npz", "--fake", "other.npz")
    assert "other.npz" in (message := capsys.readouterr().err)
    assert "is no .npz file" in message or "expected images, arr_0 of uint8[N, H, W, 3]" in message
