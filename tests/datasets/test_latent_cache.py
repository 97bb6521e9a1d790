"""Cached moments: what the VAE gives for the same windows, resumable, and refused where they do not belong."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from opensora.datasets import latent_cache
from opensora.datasets.datasets import VideoTextDataset
from opensora.datasets.latent_cache import CachedVideoTextDataset, cache_file, source_hash, write_cache
from opensora.datasets.sampler import SampleKey
from opensora.datasets.table import read_table
from opensora.models.vae.vae import VideoAutoencoderKL
from opensora.utils.errors import UserError

SIZE = (16, 24)
TINY = {
    "block_out_channels": (4, 4), "layers_per_block": 1, "norm_num_groups": 2, "latent_channels": 2, "sample_size": 16,
}  # fmt: skip


def make_vae(seed: int = 0) -> VideoAutoencoderKL:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return VideoAutoencoderKL(architecture=TINY).requires_grad_(False).eval()


@pytest.fixture(scope="module")
def vae() -> VideoAutoencoderKL:
    return make_vae()


@pytest.fixture
def table(write_video, write_table) -> Path:
    """Two clips of noise, one of them with two rows."""
    rng = np.random.default_rng(0)
    for name, count in (("a.mp4", 12), ("sub/a.mp4", 9)):
        write_video(name, [np.kron(rng.integers(0, 256, (6, 8, 3), np.uint8), np.ones((8, 8, 1), np.uint8))] * count)
    names = ["a.mp4", "sub/a.mp4", "a.mp4"]
    return write_table([{"path": name, "text": f"t{i}", "more": f"m{i}"} for i, name in enumerate(names)])


@pytest.fixture
def cache(table, vae, tmp_path) -> Path:
    assert write(table, tmp_path / "cache", vae) == (2, 0)
    return tmp_path / "cache"


def write(table: Path, folder: Path, vae: VideoAutoencoderKL, size: tuple[int, int] = SIZE, **more):
    return write_cache(read_table(table, text_columns=()), folder, vae, image_size=size, chunk=5, **more)


def cached(table: Path, cache: Path, vae: VideoAutoencoderKL | None = None, **more) -> CachedVideoTextDataset:
    settings = {"num_frames": 3, "frame_interval": 2, "image_size": SIZE, **more}
    fingerprint = vae.fingerprint() if vae else None
    return CachedVideoTextDataset(str(table), str(cache), vae_fingerprint=fingerprint, **settings)


def test_moments_are_the_vaes_for_the_same_choices(table, cache, vae):
    columns = ("text", "more")
    pixels = VideoTextDataset(str(table), 3, 2, SIZE, text_columns=columns)
    moments = cached(table, cache, vae, text_columns=columns)
    assert len(pixels) == len(moments) == 3
    for epoch in range(4):
        for index in range(3):
            one, other = pixels[SampleKey(epoch, index)], moments[SampleKey(epoch, index)]
            expected = vae.moments(one.pop("video")[None])[0]
            torch.testing.assert_close(other.pop("moments"), expected, atol=2e-3, rtol=2e-3)  # fp16
            assert one == other


def test_a_file(cache):
    path = cache / cache_file("a.mp4")
    with safe_open(path, framework="pt") as file:
        moments = file.get_tensor("moments")
    assert moments.dtype == torch.float16
    assert moments.shape == (4, 12, 8, 12)
    assert {p.suffix for p in cache.iterdir()} == {".json", ".safetensors"}  # nothing temporary is left
    assert len(list(cache.iterdir())) == 3


def test_an_interrupted_call_goes_on_where_it_stopped(table, vae, tmp_path, monkeypatch):
    encode, calls = latent_cache._encode, []

    def stop_at_the_second(path, *rest):
        calls.append(path.name)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return encode(path, *rest)

    monkeypatch.setattr(latent_cache, "_encode", stop_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        write(table, tmp_path / "cache", vae)
    with pytest.raises(UserError, match="3 of 3 rows are not in the latent cache"):
        cached(table, tmp_path / "cache")
    assert write(table, tmp_path / "cache", vae) == (1, 1)
    assert write(table, tmp_path / "cache", vae) == (0, 2)
    assert len(cached(table, tmp_path / "cache", vae)) == 3


def test_a_half_written_file_is_written_again(table, cache, vae):
    path = cache / cache_file("a.mp4")
    path.write_bytes(path.read_bytes()[:50])
    dataset = cached(table, cache, vae)
    with pytest.raises(UserError, match=r"a-.*safetensors cannot be read .*delete it.*tools.cache_features"):
        dataset[SampleKey(0, 0)]
    assert write(table, cache, vae) == (1, 1)


def test_a_subset_of_the_table_keeps_the_other_clips(table, cache, vae, write_table):
    one = write_table([{"path": "sub/a.mp4", "text": "t"}], "one.csv")
    assert write(one, cache, vae) == (0, 1)
    assert len(cached(one, cache, vae)) == 1
    assert len(cached(table, cache, vae)) == 3


def test_another_vae_is_refused(table, cache, vae):
    other = make_vae(seed=1)
    with pytest.raises(UserError, match=r"made with other settings: vae is \w+, not \w+.*tools.cache_features"):
        cached(table, cache, other)
    with pytest.raises(UserError, match=r"made with other settings: vae is"):
        write(table, cache, other)
    assert len(cached(table, cache, vae)) == 3


def test_other_settings_are_refused(table, cache, vae):
    with pytest.raises(UserError, match=r"image_size is \[16, 24\], not \[24, 16\]"):
        cached(table, cache, vae, image_size=(24, 16))
    with pytest.raises(UserError, match=r"transform_name is center, not none"):
        cached(table, cache, vae, transform_name="none")
    with pytest.raises(UserError, match=r"image_size is \[16, 24\], not \[16, 16\]"):
        write(table, cache, vae, size=(16, 16))


def test_a_changed_clip_is_refused_and_encoded_anew(table, cache, vae, write_video):
    write_video("a.mp4", [np.zeros((48, 64, 3), np.uint8)] * 12)
    with pytest.raises(
        UserError, match=r"2 of 3 rows were changed after the latent cache .*\n  row 1: .*a.mp4\n  row 3"
    ):
        cached(table, cache, vae)
    assert write(table, cache, vae) == (1, 1)
    assert len(cached(table, cache, vae)) == 3


def test_a_clip_changed_at_the_same_size_is_refused(table, cache, vae):
    path = table.parent / "a.mp4"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    dataset = cached(table, cache, vae)
    with pytest.raises(UserError, match=r"row 1: .*a.mp4 was changed after the latent cache"):
        dataset[SampleKey(0, 0)]


def test_dates_do_not_matter_and_the_clips_may_be_gone(table, cache, vae):
    path = table.parent / "a.mp4"
    path.touch()
    assert cached(table, cache, vae)[SampleKey(0, 0)]["text"] == "t0"
    path.unlink()
    assert cached(table, cache, vae)[SampleKey(0, 0)]["text"] == "t0"


def test_missing_clips_and_files(table, cache, vae, write_table):
    more = write_table([{"path": "a.mp4", "text": ""}, {"path": "new.mp4", "text": ""}], "more.csv")
    with pytest.raises(
        UserError, match=r"1 of 2 rows are not in the latent cache .*\n  row 2: .*new.mp4\n.*cache_features"
    ):
        cached(more, cache, vae)
    (cache / cache_file("sub/a.mp4")).unlink()
    with pytest.raises(UserError, match=r"1 of 3 rows are not in the latent cache"):
        cached(table, cache, vae)
    with pytest.raises(
        UserError, match=r"there is no latent cache in nowhere .*tools.cache_features.*--cache-dir nowhere"
    ):
        cached(table, Path("nowhere"), vae)


def test_manifests_of_other_versions_are_refused(table, cache, vae):
    path = cache / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 99}))
    with pytest.raises(UserError, match="has format 99, not 1"):
        cached(table, cache, vae)
    path.write_text("{")
    with pytest.raises(UserError, match="is no manifest of a latent cache"):
        cached(table, cache, vae)


def test_short_clips(table, cache, vae):
    with pytest.raises(UserError, match=r"row 2: .*a.mp4 has 9 frames, but num_frames=5 at frame_interval=3 needs 13"):
        cached(table, cache, vae, num_frames=5, frame_interval=3)[SampleKey(0, 1)]
    assert len(cached(table, cache, vae, num_frames=10, frame_interval=1, short_clips="drop")) == 2


def test_fingerprint(table, cache, vae):
    base = cached(table, cache, vae).fingerprint()
    assert cached(table, cache, vae).fingerprint() == base
    assert cached(table, cache, vae, num_frames=4).fingerprint() != base


def test_what_cannot_be_cached(table, tmp_path, vae):
    with pytest.raises(UserError, match=r"transform_name='random_crop' gives no fixed crop"):
        write(table, tmp_path / "cache", vae, transform_name="random_crop")
    with pytest.raises(UserError, match="cannot encode 15x24"):
        write(table, tmp_path / "cache", vae, size=(15, 24))

    class Temporal(VideoAutoencoderKL):
        def latent_size(self, size):
            return (size[0] + 3) // 4, *super().latent_size(size)[1:]

    with pytest.raises(UserError, match="Temporal compresses time"):
        write(table, tmp_path / "cache", Temporal(architecture=TINY))
    assert not (tmp_path / "cache").exists()


def test_moments_that_are_not_finite(table, tmp_path):
    broken = make_vae()
    next(broken.parameters()).fill_(float("nan"))
    with pytest.raises(UserError, match=r"clips.csv, row 1: the VAE's moments of .*a.mp4 are not finite"):
        write(table, tmp_path / "cache", broken)


def test_names_of_files():
    assert cache_file("x/a b.mp4") != cache_file("x/a_b.mp4") != cache_file("y/a_b.mp4")
    assert cache_file("x/a b.mp4").startswith("a_b-")
    assert len(cache_file("n" * 300 + ".mp4")) < 120


def test_source_hash(tmp_path):
    content = bytearray(300_000)
    (tmp_path / "a").write_bytes(content)
    base = source_hash(tmp_path / "a")
    for place in (0, 150_000, 299_999):
        changed = bytearray(content)
        changed[place] = 1
        (tmp_path / "b").write_bytes(changed)
        assert source_hash(tmp_path / "b") != base
    assert base.startswith("300000-")
