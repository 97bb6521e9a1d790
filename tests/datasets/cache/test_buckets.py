"""Cached buckets: the samples that training from the videos has, whatever happens between writing and reading."""

import csv
import logging

import numpy as np
import pytest
import torch

from opensora.acceleration.distributed import World
from opensora.datasets.buckets.bucket import NONE
from opensora.datasets.cache import CachedVariableVideoTextDataset, write_buckets
from opensora.datasets.cache.buckets import BUCKETS, CONDITIONS, IMAGES, Encoder
from opensora.datasets.cache.moments import Job
from opensora.datasets.cache.records import RecordReader
from opensora.datasets.dataloader import read_or_substitute
from opensora.datasets.sampler import BucketKey
from opensora.datasets.variable_dataset import VariableVideoTextDataset
from opensora.datasets.video.files import BadFile
from opensora.utils.errors import UserError

ALONE = World(0, 1, torch.device("cpu"))
CONFIG = {
    "32x48": {9: ((0.6, 0.5), 2), 5: (0.7, 2)},
    "16x24,24x16": {9: ((1.0, 0.5), 1), 5: (1.0, 3), 1: (1.0, 2)},
}


def moments_of(video):
    """Of a VAE that compresses time: a causal mean over pairs of frames, so that 1 + 2k frames become 1 + k."""
    latents = torch.cat([video[:, :, :1], (video[:, :, 1::2] + video[:, :, 2::2]) / 2], dim=2)
    return {"moments": torch.cat([latents, latents - 5], dim=1)[0]}


def encoder(vae="temporal"):
    return Encoder(moments_of, {"vae": vae, "size_multiples": [2, 2]})


@pytest.fixture
def table(write_video, write_image, write_table):
    """Clips of noise and an image; of one clip there are two rows, and one is too short for all but the shortest."""
    rng = np.random.default_rng(0)
    sizes = {"a.mp4": (14, 48, 64), "b.mp4": (9, 64, 48), "c.mp4": (7, 32, 48), "d.mp4": (11, 20, 30)}
    for name, (count, height, width) in sizes.items():
        write_video(name, list(rng.integers(0, 256, (count, height, width, 3), np.uint8)))
    write_image("e.png", rng.integers(0, 256, (40, 30, 3), np.uint8))
    names = [*sizes, "e.png", "a.mp4"]
    return write_table([{"path": name, "text": f"t{i}", "more": f"m{i}"} for i, name in enumerate(names)])


def videos(table, config=CONFIG, **options):
    return VariableVideoTextDataset(str(table), config, text_columns=("text", "more"), **options)


def write(dataset, folder, windows=1, world=ALONE, threads=0, **encoders):
    job = Job(folder, world, dtype="fp32", shard_bytes=1000, threads=threads)
    return write_buckets(dataset, encoders or {BUCKETS: encoder()}, job, windows)


def cached(table, folder, config=CONFIG, **options):
    options = {"text_columns": ("text", "more"), "vae_fingerprint": "temporal", **options}
    return CachedVariableVideoTextDataset(str(table), config, str(folder), **options)


def keys_of(dataset, epoch):
    bucket = dataset.assign(epoch).bucket
    return [
        BucketKey(epoch, row, *dataset.buckets[bucket[row]][2:5]) for row in np.flatnonzero(bucket != NONE).tolist()
    ]


def assert_same(pixels, stored, epochs, windows):
    for epoch in range(epochs):
        keys = keys_of(pixels, epoch)
        assert keys == keys_of(stored, epoch)
        for key in keys:
            item, expected = stored[key], pixels[key]
            window = pixels[key._replace(epoch=epoch % windows)]
            assert torch.equal(item.pop("moments"), moments_of(window["video"][None])["moments"])
            assert torch.equal(stored.pixels(key), window["video"])
            assert item.keys() == expected.keys() - {"video"}
            assert all(torch.equal(torch.as_tensor(v), torch.as_tensor(expected[k])) if k not in ("text", "path")
                       else v == expected[k] for k, v in item.items())  # fmt: skip


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"frame_interval": 2},
        {"transform_name": "random_crop"},
        {"target_fps": 12.0},
        {"target_fps": 25.0},
        {"bucket_choice": "largest"},
        {"use_image_transform": True, "decode": {"colors": "fast"}},
    ],
    ids=str,
)
def test_samples_are_those_of_the_videos_in_every_epoch(table, tmp_path, options):
    pixels = videos(table, **options)
    write(pixels, tmp_path / "cache", windows=2, threads=2)
    stored = cached(table, tmp_path / "cache", **options)
    assert stored.windows == 2
    assert_same(pixels, stored, epochs=4, windows=2)


def test_every_bucket_that_a_clip_may_be_in_is_cached_and_counted(table, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    done = write(videos(table), tmp_path / "cache", windows=3)
    # a.mp4 twice in four buckets, b.mp4 in four, c.mp4 in two of 5 frames, d.mp4 in two of the smaller size, the image in one; of
    # b.mp4 with 9 frames and of the image there is one window
    assert done == {"files": (5, 0), "buckets": (2 * 4 * 3 + (2 * 3 + 2) + 2 * 3 + 2 * 3 + 1, 0)}
    assert "32x48 9x32x48                       3        7" in caplog.text
    assert "0 rows dropped" in caplog.text
    assert write(videos(table), tmp_path / "cache", windows=3) == {"files": (0, 5), "buckets": (0, done["buckets"][0])}
    at_rate = write(
        videos(table, target_fps=25.0), tmp_path / "cache", windows=3
    )  # that of the files: the same windows
    assert at_rate["buckets"] == done["buckets"]


def test_the_largest_bucket_alone_must_be_asked_for_in_training(table, tmp_path):
    assert write(videos(table, bucket_choice="largest"), tmp_path / "cache")["buckets"] == (6, 0)
    with pytest.raises(
        UserError, match=r"(?s)5 of 6 rows have samples that are not in the cache .*set dataset.bucket_choice='largest'"
    ):
        cached(table, tmp_path / "cache")
    assert len(keys_of(cached(table, tmp_path / "cache", bucket_choice="largest"), 0)) == 6
    assert write(videos(table), tmp_path / "cache")["buckets"] == (11, 6)  # what is there stays


def test_another_bucket_config_encodes_what_is_new(table, tmp_path):
    write(videos(table), tmp_path / "cache")
    more = {**CONFIG, "16x24,24x16": {**CONFIG["16x24,24x16"], 7: ((1.0, 0.5), 1)}}
    with pytest.raises(
        UserError,
        match=r"(?s)rows have samples that are not in the cache .*such as the first as 7x16x24.*cache_features",
    ):
        cached(table, tmp_path / "cache", more)
    before = {"16x24,24x16": CONFIG["16x24,24x16"]}
    cached(table, tmp_path / "cache", before)  # of fewer buckets nothing is missing
    written, present = write(videos(table, more), tmp_path / "cache")["buckets"]
    assert (written, present) == (5, 17)
    cached(table, tmp_path / "cache", more)


def test_a_changed_setting_invalidates_what_depends_on_it_alone(table, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    images = Encoder(lambda video: {"features": video[:, :, 0].flatten(2)[0]}, {"image_encoder": "clip", "frames": [0]})
    pixels = videos(table)
    first = write(pixels, tmp_path / "c", **{BUCKETS: encoder(), IMAGES: images})
    caplog.clear()
    count = first["buckets"][0]
    again = write(pixels, tmp_path / "c", **{BUCKETS: encoder("other"), IMAGES: images})
    assert (again["buckets"], again["images"]) == ((count, 0), (0, count))
    assert "buckets: vae was temporal, is other: encoded anew in buckets-" in caplog.text
    assert "images" not in caplog.text
    with pytest.raises(UserError, match=r"vae is .*, not third"):
        cached(table, tmp_path / "c", vae_fingerprint="third")
    with pytest.raises(UserError, match="frame_interval is 1, not 2"):
        cached(table, tmp_path / "c", frame_interval=2)
    write(videos(table, frame_interval=2), tmp_path / "c", **{BUCKETS: encoder()})
    for interval in (1, 2):  # both are there now
        assert cached(table, tmp_path / "c", frame_interval=interval).frame_interval == interval
    conditions = {"kinds": ["identity"], "image_encoder": "clip", "frames": [0]}
    with pytest.raises(UserError, match="there is no cache of conditions in"):
        cached(table, tmp_path / "c", conditions=conditions)
    with pytest.raises(UserError, match="dtype is fp32, not fp16"):
        write_buckets(pixels, {BUCKETS: encoder()}, Job(tmp_path / "c", ALONE, dtype="fp16"))


def test_conditions_come_with_the_samples(table, tmp_path):
    given = torch.tensor([[True, False, False], [False, False, False]])
    latents = Encoder(
        lambda video: {"latents": video[:, :, :3].repeat(2, 1, 1, 1, 1), "given": given[:, : video.shape[2]]},
        {"vae": "temporal", "size_multiples": [2, 2], "kinds": ["identity", "image_head"]},
    )
    images = Encoder(lambda video: {"features": video[0, :, 0].flatten(1)}, {"image_encoder": "clip", "frames": [0]})
    pixels = videos(table)
    write(pixels, tmp_path / "c", **{BUCKETS: encoder(), CONDITIONS: latents, IMAGES: images})
    conditions = {"kinds": ["identity", "image_head"], "image_encoder": "clip", "frames": [0]}
    stored = cached(table, tmp_path / "c", conditions=conditions)
    for key in keys_of(stored, 0):
        item, video = stored[key], pixels[key]["video"]
        assert torch.equal(item["condition_latents"], video[None, :, :3].expand(2, -1, -1, -1, -1))
        assert torch.equal(item["condition_given"], given[:, : len(video[0])])
        assert torch.equal(item["image_features"], video[:, 0].flatten(1))
    assert "condition_latents" not in cached(table, tmp_path / "c")[keys_of(stored, 0)[0]]


def test_the_videos_may_be_gone_but_not_changed(table, tmp_path, write_video):
    """Of a table that does not say sizes: they are in the cache."""
    pixels = videos(table)
    write(pixels, tmp_path / "cache")
    keys = keys_of(pixels, 0)
    for path in table.parent.glob("*.mp4"):
        path.rename(path.with_suffix(".bak"))
    stored = cached(table, tmp_path / "cache")
    assert keys_of(stored, 0) == keys
    assert stored[keys[0]]["moments"].isfinite().all()
    with pytest.raises(UserError, match=r"a\.mp4"):
        stored.pixels(keys[0])
    write_video("a.mp4", [np.zeros((48, 64, 3), np.uint8)] * 14)
    with pytest.raises(UserError, match=r"2 of 6 rows were changed after the cache"):
        cached(table, tmp_path / "cache")


def test_what_cannot_be_read_is_dropped_with_its_reason_and_replaced_as_in_training(
    table, tmp_path, caplog, write_table
):
    whole = (table.parent / "a.mp4").read_bytes()
    (table.parent / "broken.mp4").write_bytes(whole[:-200])  # its header is there
    sizes = {"a.mp4": (14, 48, 64), "b.mp4": (9, 64, 48), "broken.mp4": (14, 48, 64)}
    rows = [
        {"path": n, "text": n, "more": "", "num_frames": s[0], "height": s[1], "width": s[2]} for n, s in sizes.items()
    ]
    rows += [{"path": "e.png", "text": "e", "more": "", "num_frames": 1, "height": 4, "width": 4}]  # too small
    rows += [{**rows[0], "path": "gone.mp4"}]
    path = write_table(rows, "bad.csv")
    one = {"32x48": {9: (1.0, 2)}}
    caplog.set_level(logging.INFO)
    pixels = videos(path, one, max_bad_share=0.5)
    write(pixels, tmp_path / "cache", threads=2)
    with (tmp_path / "cache" / "dropped.csv").open(newline="") as file:
        dropped = [(row["row"], row["path"], row["reason"]) for row in csv.DictReader(file)]
    assert [row[:2] for row in dropped] == [("3", "broken.mp4"), ("4", "e.png"), ("5", "")]
    assert "too small for every resolution" in dropped[1][2]
    assert "name a file that does not exist" in dropped[2][2]
    assert "3 rows dropped" in caplog.text
    stored = cached(path, tmp_path / "cache", one, max_bad_share=0.5)
    for epoch in range(3):
        for key in keys_of(pixels, epoch):
            read, other = (read_or_substitute(dataset, key) for dataset in (pixels, stored))
            assert (read["path"], read["bad_files"]) == (other["path"], other["bad_files"])
    assert "broken.mp4" in stored.path_of(2).name
    (table.parent / "broken.mp4").write_bytes(whole)  # mended: the same command encodes it
    assert write(videos(path, one, max_bad_share=0.5), tmp_path / "cache")["buckets"] == (1, 2)
    with pytest.raises(UserError, match=r"gone\.mp4"):
        cached(path, tmp_path / "cache")
    (table.parent / "broken.mp4").write_bytes(whole[:-200])
    many = videos(write_table([*rows[:2], *rows[2:3] * 6], "many.csv"), one)
    with pytest.raises(
        UserError, match=r"6 of 8 clips cannot be read, more than max_bad_share=0.05 of 100; .*broken\.mp4"
    ):
        write(many, tmp_path / "many")
    with pytest.raises(UserError, match=r"broken\.mp4"):
        write(videos(write_table(rows[:3], "strict.csv"), bad_files="error"), tmp_path / "strict")


def test_a_file_that_could_not_be_read_is_tried_again(table, tmp_path):
    """Also where it is the same file: what failed may have been the storage."""

    def fail(video):
        raise BadFile("a.mp4 is away")

    one = {"32x48": {9: (1.0, 2)}}
    write(videos(table, one), tmp_path / "cache", **{BUCKETS: encoder()._replace(encode=fail)})
    stored = cached(table, tmp_path / "cache", one)
    with pytest.raises(BadFile, match="is away"):
        stored[keys_of(stored, 0)[0]]
    assert write(videos(table, one), tmp_path / "cache")["buckets"] == (3, 0)
    assert_same(videos(table, one), cached(table, tmp_path / "cache", one), epochs=1, windows=1)


def test_what_was_made_of_a_file_that_is_gone_stays(table, tmp_path):
    one = {"32x48": {9: (1.0, 2)}}
    pixels = videos(table, one)
    write(pixels, tmp_path / "cache")
    (table.parent / "b.mp4").unlink()
    assert write(pixels, tmp_path / "cache") == {"files": (0, 5), "buckets": (0, 3)}
    stored = cached(table, tmp_path / "cache", one)
    assert all(stored[key]["moments"].isfinite().all() for key in keys_of(stored, 0))


def test_rows_that_are_new_are_refused(table, tmp_path, write_table):
    write(videos(table), tmp_path / "cache")
    new = write_table([{"path": name, "text": "", "more": ""} for name in ("a.mp4", "new.mp4")], "new.csv")
    with pytest.raises(UserError, match=r"1 of 2 rows are not in the cache .*\n  row 2: .*new.mp4"):
        cached(new, tmp_path / "cache")


@pytest.mark.parametrize("threads", [0, 3])
def test_an_interrupted_call_goes_on_where_it_stopped(table, tmp_path, threads):
    seen = []

    def stop_at_the_fifth(video):
        seen.append(video)
        if len(seen) == 5:
            raise KeyboardInterrupt
        return moments_of(video)

    stopping = encoder()._replace(encode=stop_at_the_fifth)
    with pytest.raises(KeyboardInterrupt):
        write(videos(table), tmp_path / "cache", threads=threads, **{BUCKETS: stopping})
    with pytest.raises(UserError, match="are not in the cache"):
        cached(table, tmp_path / "cache")
    assert write(videos(table), tmp_path / "cache")["buckets"] == (13, 4)
    assert_same(videos(table), cached(table, tmp_path / "cache"), epochs=1, windows=1)


def write_as_rank(rank, world_size, tmp_path):
    done = write(videos(tmp_path / "clips.csv"), tmp_path / "two", 2, World(rank, world_size, torch.device("cpu")))
    assert done["files"] == (5, 0)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.multiprocess
def test_two_processes_share_the_work(table, tmp_path, spawn):
    spawn(write_as_rank, 2, tmp_path)
    (folder,) = (tmp_path / "two").glob("buckets-*")
    assert write(videos(table), tmp_path / "two", 2)["buckets"] == (0, len(RecordReader(folder)))
    assert_same(videos(table), cached(table, tmp_path / "two"), epochs=3, windows=2)
