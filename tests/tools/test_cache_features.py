"""`python -m tools.cache_features`: from a training config to a cache that the config's dataset reads."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from opensora.config.load import TrainConfig, parse_config
from opensora.datasets.cache import CachedVideoTextDataset
from opensora.datasets.sampler import BucketKey, SampleKey
from opensora.inference.text import CachedTextEncoder
from opensora.models.vae.vae import VideoAutoencoderKL
from opensora.registry import DATASETS
from opensora.utils.errors import UserError
from tools.cache_features import COMPONENTS, cache_features, main

CONFIG = """
num_frames = 1
image_size = (16, 24)
dataset = dict(type={type!r}, {arguments})
model = dict(type="DiT-XL/2", condition="label_10")
vae = dict(type="VideoAutoencoderKL", from_pretrained={vae!r})
text_encoder = {text}
scheduler = dict(type="iddpm")
device = "cpu"
"""
CLASSES = 'dict(type="classes", num_classes=10)'
TINY = {"block_out_channels": (4, 4), "layers_per_block": 1, "norm_num_groups": 2, "latent_channels": 2}


@pytest.fixture
def folder(tmp_path):
    VideoAutoencoderKL(architecture=TINY).save_pretrained(tmp_path / "vae")
    rng = np.random.default_rng(0)
    for i in range(2):
        Image.fromarray(rng.integers(0, 256, (16, 24, 3), np.uint8)).save(tmp_path / f"{i}.png")
    (tmp_path / "clips.csv").write_text("path,text\n0.png,7\n1.png,3\n")
    return tmp_path


def write_config(folder, type="CachedVideoTextDataset", text=CLASSES, **arguments) -> str:
    written = ", ".join(f"{key}={str(value)!r}" for key, value in arguments.items())
    path = folder / "config.py"
    path.write_text(CONFIG.format(type=type, arguments=written, vae=str(folder / "vae"), text=text))
    return str(path)


def test_the_dataset_of_the_config_reads_what_was_written(folder):
    config = write_config(folder, data_path=folder / "clips.csv", cache_dir=folder / "cache")
    assert cache_features([config]) == {"clips": (2, 0)}
    assert cache_features([config, "--what", "moments", "text"]) == {"clips": (0, 2), "text": (2, 0)}
    assert cache_features([config, "--epochs", "3", "--moments-dtype", "fp32"]) == {"samples": (6, 0)}
    vae = VideoAutoencoderKL(str(folder / "vae")).eval()
    settings = (str(folder / "clips.csv"), str(folder / "cache"), 1, 1, (16, 24))
    pixels = torch.from_numpy(np.array(Image.open(folder / "1.png"))).permute(2, 0, 1)[None, :, None] / 127.5 - 1
    with torch.no_grad():
        expected = vae.moments(pixels)[0]
    for content, tolerance in (("clips", 2e-3), ("samples", 1e-5)):
        dataset = CachedVideoTextDataset(*settings, content=content, text="features", vae_fingerprint=vae.fingerprint())
        item = dataset[SampleKey(0, 1)]
        torch.testing.assert_close(item["moments"], expected, atol=tolerance, rtol=tolerance)
        assert (item["y"].item(), item["text"]) == (3, "3")


def test_a_cached_encoder_says_what_it_stands_for(folder):
    text = f'dict(type="cached", cache_dir={str(folder / "cache")!r}, encoder={CLASSES})'
    config = write_config(folder, text=text, data_path=folder / "clips.csv", cache_dir=folder / "cache")
    assert cache_features([config, "--what", "text"]) == {"text": (2, 0)}
    assert CachedTextEncoder(str(folder / "cache")).encode(["7"]).y.item() == 7
    config = write_config(
        folder,
        text=text.replace(f", encoder={CLASSES}", ""),
        data_path=folder / "clips.csv",
        cache_dir=folder / "cache",
    )
    with pytest.raises(UserError, match="give it encoder="):
        cache_features([config, "--what", "text"])


def test_overrides_and_options(folder):
    config = write_config(folder, "VideoTextDataset")
    data = [f"--data-path={folder / 'clips.csv'}", "--cache-dir", str(folder / "c")]
    assert cache_features([config, *data, "--image-size", "8", "8", "--chunk", "1"]) == {"clips": (2, 0)}
    assert json.loads((folder / "c" / "clips" / "METADATA").read_text())["settings"]["image_size"] == [8, 8]
    with pytest.raises(UserError, match="give --cache-dir"):
        cache_features([config, data[0]])
    with pytest.raises(UserError, match="--chunk 0 must be at least 1"):
        cache_features([config, *data, "--chunk", "0"])
    with pytest.raises(UserError, match="nonsense"):
        cache_features([config, *data, "--nonsense", "1"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, which would be used")
def test_a_gpu_that_is_not_there_is_refused(folder):
    config = write_config(folder, data_path=folder / "clips.csv", cache_dir=folder / "cache")
    with pytest.raises(UserError, match="device='cuda', but PyTorch sees no GPU"):
        cache_features([config, "--device", "cuda"])
    assert not (folder / "cache").exists()


def test_the_command_and_its_check(folder, monkeypatch, capsys):
    config = write_config(folder, data_path=folder / "clips.csv", cache_dir=folder / "cache")
    monkeypatch.setattr("sys.argv", ["cache_features", config])
    main()
    assert capsys.readouterr().out == "clips: 2 encoded, 0 were there already\n"
    monkeypatch.setattr("sys.argv", ["cache_features", "--check", str(folder / "cache")])
    main()
    assert "no record is damaged" in capsys.readouterr().out
    shard = next((folder / "cache" / "clips").glob("0*"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    assert f"1 records are damaged:\n{shard}, record" in capsys.readouterr().err
    (folder / "clips.csv").unlink()
    monkeypatch.setattr("sys.argv", ["cache_features", config])
    with pytest.raises(SystemExit):
        main()
    assert "clips.csv does not exist" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.nightly
@pytest.mark.parametrize("part", ["clips", "buckets"])
def test_a_killed_job_goes_on_and_redoes_no_finished_file(folder, repo_root, clips_csv, part):
    """SIGKILL while it works on some of the repository's clips; every shard holds one clip."""
    table = folder / "some.csv"
    table.write_text("".join(clips_csv.read_text().splitlines(keepends=True)[:9]))
    options = {"data_path": table, "root": clips_csv.parent}
    sizes = ["--num-frames=2", "--image-size", "64", "96"] if part == "clips" else []
    config = write_config(folder, "VideoTextDataset", **options) if sizes else write_buckets(folder, **options)
    options = [config, f"--cache-dir={folder / 'cache'}", "--shard-mb=0.001", *sizes]

    def finished():
        return {p: p.stat().st_mtime_ns for p in (folder / "cache").glob(f"{part}*/0*.safetensors")}

    def read():
        if sizes:
            return CachedVideoTextDataset(str(table), str(folder / "cache"), 2, 1, (64, 96), str(clips_csv.parent))
        cached = ["--dataset.type=CachedVariableVideoTextDataset", f"--dataset.cache_dir={folder / 'cache'}"]
        return DATASETS.build(parse_config(TrainConfig, COMPONENTS, [config, *cached]).dataset)

    job = subprocess.Popen(
        [sys.executable, "-m", "tools.cache_features", *options],
        cwd=repo_root,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 120
        while len(finished()) < 2:
            assert time.monotonic() < deadline
            assert job.poll() is None, "it ended before it could be killed"
            time.sleep(0.005)
    finally:
        job.send_signal(signal.SIGKILL)
        job.wait()
    before, total = finished(), 8 if sizes else 8 * 3
    with pytest.raises(UserError, match="are not in the cache"):
        read()
    assert len(before) < total
    assert cache_features(options)[part] == (total - len(before), len(before))
    assert before.items() <= finished().items()
    assert len(read()) == 8


def settings_of(folder, part):
    return json.loads((folder / part / "METADATA").read_text())["settings"]


def test_another_rate_is_another_cache(folder, repo_root):
    """target_fps 4 found a cache of 8 "present", and training took its samples for what it had asked for."""
    rows = "path,text\nwhite_dog.mp4,a\ncup_tilted.mp4,b\n"
    (folder / "videos.csv").write_text(rows)
    config = write_config(
        folder, "VideoTextDataset", data_path=folder / "videos.csv", root=repo_root / "assets" / "clips"
    )
    options = [config, "--num-frames=3", "--epochs=1", f"--cache-dir={folder / 'cache'}"]
    assert cache_features([*options, "--dataset.target_fps=8"]) == {"samples": (2, 0)}
    assert settings_of(folder / "cache", "samples")["target_fps"] == 8
    with pytest.raises(UserError, match=r"target_fps is 8, not 4\. .*--cache-dir ANOTHER_FOLDER"):
        cache_features([*options, "--dataset.target_fps=4"])
    with pytest.raises(UserError, match="target_fps is 8, not None"):
        cache_features(options)
    settings = (str(folder / "videos.csv"), str(folder / "cache"), 3, 1, (16, 24), str(repo_root / "assets" / "clips"))
    with pytest.raises(UserError, match="target_fps is 8, not None"):
        CachedVideoTextDataset(*settings, content="samples")
    assert float(CachedVideoTextDataset(*settings, content="samples", target_fps=8)[SampleKey(0, 0)]["fps"]) == 8
    # the same from the config of the cached dataset
    cached = ["--dataset.type=CachedVideoTextDataset", f"--dataset.cache_dir={folder / 'cache'}"]
    assert cache_features([*options, *cached, "--dataset.target_fps=8"]) == {"samples": (0, 2)}
    with pytest.raises(UserError, match="target_fps=8 has no place in a cache of whole clips"):
        cache_features([config, "--dataset.target_fps=8", f"--cache-dir={folder / 'clips'}"])
    assert not (folder / "clips").exists()


def test_the_choices_of_the_config_reach_the_cache(folder):
    config = write_config(folder, "VideoTextDataset", data_path=folder / "clips.csv")
    options = [config, "--use-image-transform=True", "--dataset.decode={'colors': 'fast'}"]
    for part, epochs in (("clips", 0), ("samples", 1)):
        job = [*options, f"--cache-dir={folder / part}", f"--epochs={epochs}"]
        assert cache_features(job) == {part: (2, 0)}
        found = settings_of(folder / part, part)
        assert (found["use_image_transform"], found["decode"]) == (True, {"colors": "fast"})


BUCKETS = "{'33x47': {4: ((1.0, 0.5), 1), 2: (0.5, 2)}, '16x24': {2: (1.0, 2)}}"


def write_buckets(folder, type="VariableVideoTextDataset", **arguments) -> str:
    path = Path(write_config(folder, type, **arguments))
    text = path.read_text().replace("num_frames = 1", "").replace("image_size = (16, 24)", "")
    path.write_text(f"{text}bucket_config = {BUCKETS}\n")
    return str(path)


def test_buckets_of_a_config_are_read_by_its_cached_dataset(folder, clips_csv, monkeypatch, capsys):
    table = folder / "some.csv"
    table.write_text("".join(clips_csv.read_text().splitlines(keepends=True)[:4]))
    config = write_buckets(folder, data_path=table, root=clips_csv.parent)
    options = [config, f"--cache-dir={folder / 'cache'}", "--moments-dtype=fp32", "--epochs=2"]
    assert cache_features(options) == {"files": (3, 0), "buckets": (3 * 3 * 2, 0)}
    cached = ["--dataset.type=CachedVariableVideoTextDataset", f"--dataset.cache_dir={folder / 'cache'}"]
    assert cache_features([*options, *cached])["buckets"] == (0, 18)  # the same from its own config
    cfg = parse_config(TrainConfig, COMPONENTS, [config, *cached])
    vae = VideoAutoencoderKL(str(folder / "vae")).eval()
    stored = DATASETS.build(cfg.dataset, vae_fingerprint=vae.fingerprint())
    assert stored.buckets[0][3:5] == (32, 48)  # which the VAE takes
    videos = DATASETS.build(parse_config(TrainConfig, COMPONENTS, [config]).dataset)
    for epoch in range(2):
        for row, index in enumerate(stored.assign(epoch).bucket.tolist()):
            key = BucketKey(epoch, row, *stored.buckets[index][2:5])
            expected = vae.sliced_moments(videos[key]["video"][None])[0]
            torch.testing.assert_close(stored[key]["moments"], expected, rtol=0, atol=0)
    monkeypatch.setattr("sys.argv", ["cache_features", "--check", str(folder / "cache")])
    main()
    assert "no record is damaged" in capsys.readouterr().out


@pytest.mark.parametrize("ratios", ["random", "quarter_head"])
def test_conditions_that_are_drawn_anew_are_refused_before_anything_is_encoded(folder, ratios):
    config = write_buckets(folder, data_path=folder / "clips.csv")
    wan = ["--model", "dict(type='Wan', condition_channels=8)", f"--mask-ratios={{'{ratios}': 0.5}}"]
    with pytest.raises(UserError, match=f"with {ratios} the conditioning frames are drawn anew"):
        cache_features([config, *wan, f"--cache-dir={folder / 'cache'}", "--vae.from_pretrained=nowhere"])
    assert not (folder / "cache").exists()


@pytest.mark.parametrize("type", ["InMemoryVideoDataset", "ImageFolderDataset"])
def test_other_datasets_are_refused(folder, type):
    config = write_config(folder, type, data_path=folder / "clips.csv")
    with pytest.raises(UserError, match=f"{type} cannot train from a cache of moments"):
        cache_features([config, f"--cache-dir={folder / 'cache'}"])


def test_captions_may_be_stored_for_any_dataset(folder):
    config = write_buckets(folder, data_path=folder / "clips.csv")
    assert cache_features([config, "--what", "text", f"--cache-dir={folder / 'cache'}"]) == {"text": (2, 0)}
