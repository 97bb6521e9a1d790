"""Cached moments and text: what the encoders give for the same samples, resumable, refused where they do not belong."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from opensora.acceleration.distributed import World
from opensora.datasets.cache import CachedVideoTextDataset, moments, source_hash, write_clips, write_samples, write_text
from opensora.datasets.cache.features import captions_of
from opensora.datasets.cache.moments import Choices, Job, cache_settings
from opensora.datasets.cache.records import METADATA, RecordReader
from opensora.datasets.datasets import VideoTextDataset
from opensora.datasets.sampler import SampleKey
from opensora.datasets.table.table import read_table
from opensora.datasets.video.files import Decoding
from opensora.datasets.video.read_video import probe
from opensora.inference.text import CachedTextEncoder
from opensora.models.text_encoder import ClassEncoder, TextCondition
from opensora.models.vae.vae import VideoAutoencoderKL
from opensora.utils.errors import UserError

SIZE = (16, 24)
ALONE = World(0, 1, torch.device("cpu"))
TINY = {
    "block_out_channels": (4, 4), "layers_per_block": 1, "norm_num_groups": 2, "latent_channels": 2, "sample_size": 16,
}  # fmt: skip


def make_vae(seed: int = 0) -> VideoAutoencoderKL:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return VideoAutoencoderKL(architecture=TINY).requires_grad_(False).eval()


class Temporal(nn.Module):
    """The VAE contract with a causal mean over pairs of frames: 1 + 2k frames become 1 + k."""

    def moments(self, x):
        latents = torch.cat([x[:, :, :1], (x[:, :, 1::2] + x[:, :, 2::2]) / 2], dim=2)
        return torch.cat([latents, latents - 5], dim=1)

    def latent_size(self, size):
        return (size[0] + 1) // 2, *size[1:]

    def fingerprint(self):
        return "temporal"


class Letters(nn.Module):
    """The text contract on letters; what it encoded is kept."""

    output_dim, model_max_length, dtype = 4, 6, torch.float32

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(0x10000, 4)
        self.encoded = []

    @torch.no_grad()
    def encode(self, texts):
        self.encoded.append(list(texts))
        codes = torch.tensor([[ord(c) for c in text[:5].ljust(6, "\0")] for text in texts])
        return TextCondition(self.embedding(codes)[:, None], codes != 0)

    def fingerprint(self):
        return "letters"


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
    return write_table([{"path": name, "text": f"t{i}", "more": f"湖, m{i}"} for i, name in enumerate(names)])


@pytest.fixture
def cache(table, vae, tmp_path) -> Path:
    assert write(table, tmp_path / "cache", vae) == (2, 0)
    return tmp_path / "cache"


def write(table: Path, folder: Path, vae, size: tuple[int, int] = SIZE, dtype: str = "fp16", **more):
    job = Job(folder, ALONE, dtype=dtype, shard_bytes=1000)
    return write_clips(read_table(table, text_columns=()), vae, job, image_size=size, chunk=5, **more)


def cached(table: Path, cache: Path, vae=None, **more) -> CachedVideoTextDataset:
    settings = {"num_frames": 3, "frame_interval": 2, "image_size": SIZE, **more}
    fingerprint = vae.fingerprint() if vae else None
    return CachedVideoTextDataset(str(table), str(cache), vae_fingerprint=fingerprint, **settings)


def assert_same_samples(pixels, stored, vae, tolerance: float, epochs: int = 4) -> None:
    assert len(pixels) == len(stored) == 3
    for epoch in range(epochs):
        for index in range(3):
            one, other = pixels[SampleKey(epoch, index)], stored[SampleKey(epoch, index)]
            expected = vae.moments(one.pop("video")[None])[0]
            found = other.pop("moments")
            assert found.dtype == torch.float32
            torch.testing.assert_close(found, expected, atol=1e-7 + tolerance / 100, rtol=tolerance)
            assert one == other


@pytest.mark.parametrize(("dtype", "tolerance"), [("fp32", 1e-5), ("fp16", 2**-11 + 1e-5)])
def test_windows_of_clips_are_the_vaes_moments_for_the_same_choices(table, tmp_path, vae, dtype, tolerance):
    write(table, tmp_path / "cache", vae, dtype=dtype)
    columns = ("text", "more")
    pixels = VideoTextDataset(str(table), 3, 2, SIZE, text_columns=columns)
    assert_same_samples(pixels, cached(table, tmp_path / "cache", vae, text_columns=columns), vae, tolerance)


def write_epochs(table: Path, folder: Path, vae, epochs: int, transform: str = "random_crop", **job):
    pixels = VideoTextDataset(str(table), 3, 2, SIZE, transform_name=transform, text_columns=("text", "more"))
    settings = cache_settings(vae.fingerprint(), SIZE, transform, "fp32", num_frames=3, frame_interval=2, seed=42)
    return write_samples(pixels, vae, Job(folder, ALONE, dtype="fp32", shard_bytes=1000, **job), settings, epochs)


def test_samples_of_some_epochs_serve_any_vae_and_transform(table, tmp_path):
    vae, folder = Temporal(), tmp_path / "cache"
    assert write_epochs(table, folder, vae, 2) == (6, 0)
    assert write_epochs(table, folder, vae, 4) == (6, 6)
    choices = {"transform_name": "random_crop", "text_columns": ("text", "more"), "content": "samples"}
    stored = cached(table, folder, vae, **choices)
    assert stored.epochs == 4
    pixels = VideoTextDataset(str(table), 3, 2, SIZE, transform_name="random_crop", text_columns=("text", "more"))
    assert_same_samples(pixels, stored, vae, 0)
    again, first = (
        stored[SampleKey(4, 1)],
        stored[SampleKey(0, 1)],
    )  # epoch 4 repeats epoch 0's clips, with new captions
    assert torch.equal(again["moments"], first["moments"])
    with pytest.raises(UserError, match="seed is 42, not 43"):
        cached(table, folder, vae, **choices, seed=43)
    with pytest.raises(UserError, match="num_frames is 3, not 5"):
        cached(table, folder, vae, **choices, num_frames=5)
    with pytest.raises(UserError, match=r"no cache in .*clips"):
        cached(table, folder, vae, transform_name="random_crop")


def test_missing_samples_are_reported(table, tmp_path, write_table):
    write_epochs(table, tmp_path / "cache", Temporal(), 1)
    more = write_table([{"path": "a.mp4", "text": ""}, {"path": "sub/a.mp4", "text": ""}] * 2, "more.csv")
    with pytest.raises(UserError, match=r"1 of 4 rows are not in the cache .*\n  row 4: .*a.mp4\n.*--epochs N"):
        cached(more, tmp_path / "cache", content="samples", transform_name="random_crop")


# ------------------------------------------------------------------------------ everything that decides pixels


def chosen(**options) -> Choices:
    decoding = Decoding.of(options.get("decode"))
    return Choices(options.get("use_image_transform", False), decoding, options.get("target_fps"))


def write_chosen(table: Path, folder: Path, **options):
    """The samples of an epoch of a dataset with such options."""
    pixels = VideoTextDataset(str(table), 3, 1, SIZE, **options)
    window = {"num_frames": 3, "frame_interval": 1, "seed": 42}
    settings = cache_settings("temporal", SIZE, "center", "fp32", chosen(**options), **window)
    return write_samples(pixels, Temporal(), Job(folder, ALONE, dtype="fp32"), settings, 1)


SAMPLES_OF_3 = {"num_frames": 3, "frame_interval": 1, "content": "samples"}


@pytest.mark.parametrize(
    ("name", "value", "reported"),
    [
        ("target_fps", 10.0, "10.0"),
        ("use_image_transform", True, "True"),
        ("decode", {"colors": "fast"}, r"\{'colors': 'fast'\}"),
    ],
)
def test_a_choice_that_decides_pixels_is_refused_where_it_differs(table, tmp_path, name, value, reported):
    """A cache of another rate was taken for present, and opened."""
    for folder, written, other in (("with", {name: value}, {}), ("without", {}, {name: value})):
        cache = tmp_path / folder
        assert write_chosen(table, cache, **written) == (3, 0)
        assert write_chosen(table, cache, **written) == (0, 3)
        is_, not_ = (reported, "None") if written else ("None", reported)
        message = rf"made with other settings: {name} is {is_}, not {not_}\. .*--cache-dir ANOTHER_FOLDER"
        with pytest.raises(UserError, match=message):
            write_chosen(table, cache, **other)
        with pytest.raises(UserError, match=message):
            cached(table, cache, **SAMPLES_OF_3, **other)
        stored, pixels = (
            cached(table, cache, **SAMPLES_OF_3, **written),
            VideoTextDataset(str(table), 3, 1, SIZE, **written),
        )
        assert_same_samples(pixels, stored, Temporal(), 0, epochs=1)


@pytest.mark.parametrize("content", ["clips", "samples"])
def test_caches_without_these_choices_hold_the_defaults(table, tmp_path, vae, content):
    """What the first versions wrote: settings and fingerprints of the defaults are still theirs."""
    if content == "samples":
        write_chosen(table, tmp_path / "cache")
    else:
        write(table, tmp_path / "cache", vae)
    settings = json.loads((tmp_path / "cache" / content / METADATA).read_text())["settings"]
    window = {"num_frames", "frame_interval", "seed"} if content == "samples" else set()
    assert settings.keys() == {"vae", "image_size", "transform_name", "dtype"} | window
    defaults = {"target_fps": None, "use_image_transform": False, "decode": {"colors": "exact"}}
    same = {**SAMPLES_OF_3, "content": content}
    one, other = cached(table, tmp_path / "cache", **same), cached(table, tmp_path / "cache", **same, **defaults)
    assert one.fingerprint() == other.fingerprint()


def test_whole_clips_are_read_with_the_datasets_choices(table, tmp_path, vae, write_image, write_table):
    rng = np.random.default_rng(0)
    write_image("p.png", rng.integers(0, 256, (40, 70, 3), np.uint8))
    rows = write_table([{"path": name, "text": ""} for name in ("p.png", "a.mp4", "sub/a.mp4")], "three.csv")
    options = {"use_image_transform": True, "decode": {"colors": "fast"}, "transform_name": "resize_crop"}
    choices = chosen(**options)
    write(rows, tmp_path / "cache", vae, dtype="fp32", transform_name="resize_crop", choices=choices)
    pixels = VideoTextDataset(str(rows), 1, 1, SIZE, **options)
    assert_same_samples(
        pixels, cached(rows, tmp_path / "cache", vae, num_frames=1, frame_interval=1, **options), vae, 1e-4
    )
    plain = VideoTextDataset(str(rows), 1, 1, SIZE, transform_name="resize_crop")
    assert not torch.equal(plain[SampleKey(0, 0)]["video"], pixels[SampleKey(0, 0)]["video"])
    with pytest.raises(UserError, match=r"use_image_transform is True, not None; decode is .*, not None"):
        cached(rows, tmp_path / "cache", vae, transform_name="resize_crop")
    with pytest.raises(UserError, match="made with other settings: use_image_transform is True, not None"):
        write(rows, tmp_path / "cache", vae, dtype="fp32", transform_name="resize_crop")


def test_whole_clips_have_no_target_rate(table, cache, vae, tmp_path):
    message = r"target_fps=5 has no place in a cache of whole clips.*--epochs N"
    with pytest.raises(UserError, match=message):
        cached(table, cache, vae, frame_interval=1, target_fps=5)
    with pytest.raises(UserError, match=message):
        write(table, tmp_path / "other", vae, choices=Choices(target_fps=5))
    assert not (tmp_path / "other").exists()


def test_short_clips_of_samples_may_be_dropped(table, tmp_path):
    """Of a table without num_frames: what was too short for a sample is in no record."""
    pixels = VideoTextDataset(str(table), 11, 1, SIZE, short_clips="drop")
    settings = cache_settings("temporal", SIZE, "center", "fp32", num_frames=11, frame_interval=1, seed=42)
    assert write_samples(pixels, Temporal(), Job(tmp_path / "c", ALONE, dtype="fp32"), settings, 1) == (2, 0)
    stored = cached(table, tmp_path / "c", num_frames=11, frame_interval=1, content="samples", short_clips="drop")
    assert [stored.path_of(index).name for index in range(len(stored))] == ["a.mp4", "a.mp4"]
    assert stored[SampleKey(0, 1)]["text"] == "t2"


# ------------------------------------------------------------------------------------------------------- text


def test_features_come_with_the_samples_and_equal_the_encoders(table, cache, vae):
    encoder, columns = Letters(), ("text", "more")
    captions = captions_of(read_table(table, text_columns=columns))
    assert len(captions) == 6
    job = Job(cache, ALONE, dtype="auto")
    assert write_text(captions, encoder, job, batch_size=4) == (7, 0)  # and ""
    assert sorted(text for batch in encoder.encoded[1:] for text in batch) == sorted([*captions, ""])
    assert write_text(captions, encoder, job) == (0, 7)
    dataset = cached(table, cache, vae, text_columns=columns, text="features")
    seen = set()
    for epoch in range(12):
        for index in range(3):
            item = dataset[SampleKey(epoch, index)]
            y, mask = encoder.encode([item["text"]])
            assert torch.equal(item["mask"], mask[0])
            assert torch.equal(item["y"], y[0] * mask[0, :, None])  # padding is zero
            seen.add(item["text"])
    assert len(seen) == 6


def test_the_cached_encoder_stands_for_the_encoder(tmp_path):
    encoder, texts = Letters(), ["dog", "a lake", "湖", ""]
    write_text(texts, encoder, Job(tmp_path, ALONE, dtype="auto"))
    stored = CachedTextEncoder(str(tmp_path), fingerprint="letters")
    assert (stored.output_dim, stored.model_max_length, stored.fingerprint()) == (4, 6, "letters")
    y, mask = encoder.encode(texts)
    found = stored.encode(texts)
    assert torch.equal(found.mask, mask)
    assert torch.equal(found.y, y * mask[:, None, :, None])
    with pytest.raises(
        UserError, match=r"1 captions are not in the text cache .* \(4 are\), such as 'a dog'.*--what text"
    ):
        stored.encode(["dog", "a dog"])
    with pytest.raises(UserError, match="its fingerprint is letters, not other"):
        CachedTextEncoder(str(tmp_path), fingerprint="other")


@pytest.mark.parametrize(("dtype", "stored"), [("auto", "float32"), ("bf16", "bfloat16"), ("fp16", "float16")])
def test_number_formats_of_text(tmp_path, dtype, stored):
    encoder = Letters()
    write_text(["dog"], encoder, Job(tmp_path, ALONE, dtype=dtype))
    assert RecordReader(tmp_path / "text").read("dog")["y"].dtype == getattr(torch, stored)
    y = CachedTextEncoder(str(tmp_path)).encode(["dog"]).y
    assert y.dtype == torch.float32
    expected = encoder.encode(["dog"]).y[:, :, :3]
    torch.testing.assert_close(y[:, :, :3], expected.to(getattr(torch, stored)).float(), rtol=0, atol=0)


def test_classes_are_kept_as_integers(tmp_path):
    encoder = ClassEncoder(10)
    assert write_text(["7", "3"], encoder, Job(tmp_path, ALONE, dtype="auto")) == (2, 0)
    torch.testing.assert_close(
        CachedTextEncoder(str(tmp_path)).encode(["3", "7", "3"]), encoder.encode(["3", "7", "3"])
    )
    with pytest.raises(UserError, match=r"encoder is .*, not"):
        write_text(["7"], ClassEncoder(11), Job(tmp_path, ALONE, dtype="auto"))


def test_a_changed_caption_is_refused(table, cache, vae, write_table):
    write_text(["t0", "t1"], Letters(), Job(cache, ALONE, dtype="auto"))
    with pytest.raises(UserError, match=r"1 captions are not in the text cache .* such as 't2': were they changed"):
        cached(table, cache, vae, text="features")
    with pytest.raises(UserError, match="text='both'"):
        cached(table, cache, vae, text="both")


def test_features_that_are_not_finite(tmp_path):
    encoder = Letters()
    encoder.embedding.weight.data[ord("d")] = 1e6
    with pytest.raises(UserError, match=r"'dog' are not finite in torch.float16.*--text-dtype fp32"):
        write_text(["cat", "dog"], encoder, Job(tmp_path, ALONE, dtype="fp16"), batch_size=1)
    assert write_text(["cat"], encoder, Job(tmp_path, ALONE, dtype="fp16")) == (1, 1)  # cat was kept; "" is new


# ------------------------------------------------------------------------------------------------------- resuming


def test_an_interrupted_call_goes_on_where_it_stopped(table, vae, tmp_path, monkeypatch):
    probed = []

    def stop_at_the_second(path):
        probed.append(path.name)
        if len(probed) == 2:
            raise KeyboardInterrupt
        return probe(path)

    monkeypatch.setattr(moments, "probe", stop_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        write(table, tmp_path / "cache", vae)
    with pytest.raises(UserError, match="3 of 3 rows are not in the cache"):
        cached(table, tmp_path / "cache")
    assert write(table, tmp_path / "cache", vae) == (1, 1)
    assert write(table, tmp_path / "cache", vae) == (0, 2)
    assert len(cached(table, tmp_path / "cache", vae)) == 3


def write_as_rank(rank, world_size, tmp_path):
    world = World(rank, world_size, torch.device("cpu"))
    job = Job(tmp_path / "cache", world, shard_bytes=1000)
    counts = write_clips(read_table(tmp_path / "clips.csv", text_columns=()), make_vae(), job, image_size=SIZE)
    assert counts == (2, 0)
    assert write_text([f"text {i}" for i in range(7)], Letters(), job._replace(dtype="auto"), batch_size=2) == (8, 0)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.multiprocess
def test_two_processes_share_the_work(table, vae, tmp_path, spawn):
    spawn(write_as_rank, 2, tmp_path)
    names = list((tmp_path / "cache" / "text").glob("0*.safetensors"))
    assert len(names) == 2  # one of each process
    assert write(table, tmp_path / "cache", vae) == (0, 2)
    assert write(table, tmp_path / "alone", vae) == (2, 0)
    one, other = cached(table, tmp_path / "cache", vae), cached(table, tmp_path / "alone", vae)
    for index in range(3):
        assert torch.equal(one[SampleKey(0, index)]["moments"], other[SampleKey(0, index)]["moments"])
    assert len(RecordReader(tmp_path / "cache" / "text")) == 8


# ------------------------------------------------------------------------------------------------------- refusals


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
    with pytest.raises(UserError, match="dtype is fp16, not fp32"):
        write(table, cache, vae, dtype="fp32")


def test_a_changed_clip_is_refused_and_encoded_anew(table, cache, vae, write_video):
    write_video("a.mp4", [np.zeros((48, 64, 3), np.uint8)] * 12)
    with pytest.raises(UserError, match=r"2 of 3 rows were changed after the cache .*\n  row 1: .*a.mp4\n  row 3"):
        cached(table, cache, vae)
    assert write(table, cache, vae) == (1, 1)
    assert len(cached(table, cache, vae)) == 3
    black = vae.moments(torch.full((1, 3, 1, *SIZE), -1.0))[0, :, 0]
    found = cached(table, cache, vae)[SampleKey(0, 0)]["moments"][:, 0]
    torch.testing.assert_close(found, black, atol=2e-2, rtol=2e-2)


def test_a_clip_changed_at_the_same_size_is_refused(table, cache, vae):
    path = table.parent / "a.mp4"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    dataset = cached(table, cache, vae)
    with pytest.raises(UserError, match=r"row 1: .*a.mp4 was changed after the cache"):
        dataset[SampleKey(0, 0)]


def test_dates_do_not_matter_and_the_clips_may_be_gone(table, cache, vae):
    path = table.parent / "a.mp4"
    path.touch()
    assert cached(table, cache, vae)[SampleKey(0, 0)]["text"] == "t0"
    path.unlink()
    assert cached(table, cache, vae)[SampleKey(0, 0)]["text"] == "t0"


def test_missing_clips_and_files(table, cache, vae, write_table):
    more = write_table([{"path": "a.mp4", "text": ""}, {"path": "new.mp4", "text": ""}], "more.csv")
    with pytest.raises(UserError, match=r"1 of 2 rows are not in the cache .*\n  row 2: .*new.mp4\n.*cache_features"):
        cached(more, cache, vae)
    next((cache / "clips").glob("0*")).unlink()
    with pytest.raises(UserError, match=r"1 files of the cache .* are missing.*tools.cache_features"):
        cached(table, cache, vae)
    assert sum(write(table, cache, vae)) == 2
    assert len(cached(table, cache, vae)) == 3
    with pytest.raises(UserError, match=r"there is no cache in nowhere.*tools.cache_features.*--cache-dir nowhere"):
        cached(table, Path("nowhere"), vae)


def test_short_clips(table, cache, vae):
    with pytest.raises(UserError, match=r"row 2: .*a.mp4 has 9 frames, but num_frames=5 at frame_interval=3 needs 13"):
        cached(table, cache, vae, num_frames=5, frame_interval=3)[SampleKey(0, 1)]
    assert len(cached(table, cache, vae, num_frames=10, frame_interval=1, short_clips="drop")) == 2


def test_fingerprint(table, cache, vae):
    base = cached(table, cache, vae).fingerprint()
    assert cached(table, cache, vae).fingerprint() == base
    assert cached(table, cache, vae, num_frames=4).fingerprint() != base


def test_what_cannot_be_cached_as_whole_clips(table, tmp_path, vae):
    with pytest.raises(UserError, match=r"transform_name='random_crop' gives no fixed crop.*--epochs N"):
        write(table, tmp_path / "cache", vae, transform_name="random_crop")
    with pytest.raises(UserError, match="cannot encode 15x24"):
        write(table, tmp_path / "cache", vae, size=(15, 24))
    with pytest.raises(UserError, match=r"Temporal compresses time.*--epochs N"):
        write(table, tmp_path / "cache", Temporal())
    assert not (tmp_path / "cache").exists()


def test_moments_that_are_not_finite(table, tmp_path):
    broken = make_vae()
    next(broken.parameters()).fill_(float("nan"))
    with pytest.raises(UserError, match=r"clips.csv, row 1: the VAE's moments of .*a.mp4 are not finite"):
        write(table, tmp_path / "cache", broken)


def test_what_it_says_about_itself(cache, vae):
    content = json.loads((cache / "clips" / METADATA).read_text())
    assert content["entries"] == 2
    assert content["settings"] == {
        "vae": vae.fingerprint(), "image_size": [16, 24], "transform_name": "center", "dtype": "fp16",
    }  # fmt: skip


def test_source_hash(tmp_path):
    content = bytearray(300_000)
    (tmp_path / "a").write_bytes(content)
    base = source_hash(tmp_path / "a")
    for offset in (0, 150_000, 299_999):
        changed = bytearray(content)
        changed[offset] = 1
        (tmp_path / "b").write_bytes(changed)
        assert source_hash(tmp_path / "b") != base
    assert base.startswith("300000-")
