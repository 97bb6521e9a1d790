"""Bad files: replaced by samples of the same kind, the same in every run, counted, named, and never too many."""

import pytest
import torch

from opensora.datasets.dataloader import MAX_ATTEMPTS, BadFileCount, build_loader, build_sampler, read_or_substitute
from opensora.datasets.datasets import VideoTextDataset
from opensora.datasets.sampler import DataPosition, SampleKey
from opensora.datasets.video.files import BadFile, BadFiles
from opensora.utils.errors import UserError
from tests.datasets.video.videos import numbered_frames


class Half:
    """Samples of which those in `bad` cannot be read."""

    def __init__(self, bad, length=40, **settings) -> None:
        self.bad, self.length, self.bad_files = set(bad), length, BadFiles(**settings)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, key):
        if key.index in self.bad:
            raise BadFile(f"{key.index}.mp4 is damaged.")
        return {"index": torch.tensor(key.index)}

    def another(self, key, rng):
        return SampleKey(key.epoch, int(torch.randint(self.length, (1,), generator=rng)))


def batches(dataset, *, count=30, num_workers=0, rank=0, world_size=1, batch_size=4, first=0):
    sampler = build_sampler(dataset, batch_size, seed=1, rank=rank, world_size=world_size)
    sampler.seek(DataPosition(0, first), count)
    return build_loader(dataset, sampler, num_workers=num_workers)


def test_a_stand_in_is_a_function_of_seed_epoch_and_sample():
    dataset = Half(range(20), max_share=1)
    first = {i: int(read_or_substitute(dataset, SampleKey(3, i))["index"]) for i in range(40)}
    for i in reversed(range(40)):  # whatever was read before
        assert int(read_or_substitute(Half(range(20), max_share=1), SampleKey(3, i))["index"]) == first[i]
    assert all(first[i] == i for i in range(20, 40))
    assert all(first[i] >= 20 for i in range(20))
    assert len({first[i] for i in range(20)}) > 5
    assert first != {i: int(read_or_substitute(dataset, SampleKey(4, i))["index"]) for i in range(40)}
    other = Half(range(20), seed=9, max_share=1)
    assert first != {i: int(read_or_substitute(other, SampleKey(3, i))["index"]) for i in range(40)}


def test_every_file_that_was_tried_is_reported():
    problems = [read_or_substitute(Half(range(20)), SampleKey(0, i))["bad_files"] for i in range(40)]
    assert all(messages == [] for messages in problems[20:])
    assert all(messages[0] == f"{i}.mp4 is damaged." for i, messages in enumerate(problems[:20]))
    assert max(len(messages) for messages in problems) > 1  # a stand-in was bad, too


def test_it_ends():
    with pytest.raises(UserError, match=rf"{MAX_ATTEMPTS + 1} samples .* is the storage there\?.*\n7.mp4 is damaged"):
        read_or_substitute(Half(range(40)), SampleKey(0, 7))

    class Alone(Half):
        def another(self, key, rng):
            return None

    with pytest.raises(UserError, match=r"7.mp4 is damaged.\nNo other sample has its size"):
        read_or_substitute(Alone([7]), SampleKey(0, 7))


def test_the_policy_error_and_other_errors_end_a_run():
    with pytest.raises(BadFile, match=r"7.mp4 is damaged"):
        read_or_substitute(Half([7], policy="error"), SampleKey(0, 7))

    class Mistaken(Half):
        def __getitem__(self, key):
            raise UserError("no such setting")

    with pytest.raises(UserError, match="no such setting"):
        read_or_substitute(Mistaken([]), SampleKey(0, 7))


@pytest.mark.parametrize(("settings", "message"), [
    ({"policy": "skip"}, "bad_files='skip' is not one of substitute, error"),
    ({"max_share": 5}, "max_bad_share=5 is no share"),
])  # fmt: skip
def test_wrong_settings(settings, message):
    with pytest.raises(UserError, match=message):
        BadFiles(**settings)


def test_the_same_for_any_workers_processes_and_resume():
    dataset = Half([3, 8, 21], max_share=1)
    whole = [batch["index"].tolist() for batch in batches(dataset)]
    assert [batch["index"].tolist() for batch in batches(dataset, num_workers=2)] == whole
    assert [batch["index"].tolist() for batch in batches(dataset, count=18, first=12)] == whole[12:]
    ranks = [[b["index"].tolist() for b in batches(dataset, rank=r, world_size=2, batch_size=2)] for r in (0, 1)]
    assert [one + other for one, other in zip(*ranks, strict=True)] == whole
    assert not {3, 8, 21} & {index for batch in whole for index in batch}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_training_process_counts_what_its_workers_met(num_workers, caplog):
    loader = batches(Half([3, 8], max_share=0.1), num_workers=num_workers)  # 120 samples, three times all
    assert len(list(loader)) == 30
    count = loader.bad_files
    assert (count.samples, count.substituted) == (120, 6)
    assert set(count.problems) == {"3.mp4 is damaged.", "8.mp4 is damaged."}
    assert caplog.text.count("another sample is taken instead: 3.mp4 is damaged.") == 1
    assert "6 of 120 samples were replaced by others. What is wrong with 2 files:" in caplog.text


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_run_with_too_many_bad_files_ends(num_workers):
    """3 of 10 clips are corrupt: upstream draws other ones for ever, unsaid."""
    loader = batches(Half([1, 2, 3], length=10), num_workers=num_workers)
    with pytest.raises(
        UserError, match=r"[67] of \d+ samples were replaced (.*\n)*.*more than max_bad_share=0.05 of 100"
    ) as caught:
        list(loader)
    assert "2.mp4 is damaged" in str(caught.value)
    assert loader.bad_files.samples < 60


def test_a_share_of_few_samples_is_not_judged():
    count = BadFileCount(BadFiles(max_share=0.05))
    for _ in range(5):
        count.add({"bad_files": [["a.mp4 is damaged."]]})
    assert "5 x a.mp4" in count.summary()
    with pytest.raises(UserError, match="6 of 6"):
        count.add({"bad_files": [["a.mp4 is damaged."]]})
    many = BadFileCount(BadFiles(max_share=0.05))
    for i in range(1000):
        many.add({"bad_files": [["a.mp4 is damaged."] if i % 25 == 24 else []]})
    assert many.substituted == 40


def test_only_the_first_bad_files_are_named_one_by_one(caplog):
    count = BadFileCount(BadFiles(max_share=1))
    for i in range(50):
        count.add({"bad_files": [[f"{i}.mp4 is damaged."]]})
    assert caplog.text.count("another sample is taken instead") == 10
    assert "and 40 more" in count.summary()
    assert len(count.problems) == 50


# ------------------------------------------------------------------------------------- the fixed-size data set


@pytest.fixture
def table(write_video, write_table, tmp_path):
    """Ten clips; the third is noise, the sixth is cut off, the ninth has fewer frames than the table says."""
    rows = []
    for i in range(10):
        write_video(f"{i}.mp4", numbered_frames(4 if i == 8 else 12))
        rows.append({"path": f"{i}.mp4", "text": str(i), "num_frames": 12})
    (tmp_path / "2.mp4").write_bytes(b"this is no video" * 50)
    (tmp_path / "5.mp4").write_bytes((tmp_path / "5.mp4").read_bytes()[:-200])
    return write_table(rows)


def test_stand_ins_of_a_dataset_are_whole_samples(table):
    dataset = VideoTextDataset(str(table), num_frames=4, image_size=(16, 16), max_bad_share=1)
    for i in range(10):
        item = read_or_substitute(dataset, SampleKey(0, i))
        assert item["text"] == str(int(item["index"])) == item["path"].split("/")[-1][0]
        assert bool(item["bad_files"]) == (i in (2, 5, 8))
        assert int(item["index"]) not in (2, 5, 8)
        assert item["video"].std() > 0  # no black frames
    messages = [read_or_substitute(dataset, SampleKey(0, i))["bad_files"][0] for i in (2, 5, 8)]
    for i, (problem, what) in enumerate(
        zip(messages, ("cannot be opened as a video", "is truncated", "says num_frames=12"), strict=True)
    ):
        assert f"row {3 * i + 3}" in problem
        assert what in problem


def test_reading_a_dataset_directly_never_substitutes(table):
    dataset = VideoTextDataset(str(table), num_frames=4, image_size=(16, 16))
    with pytest.raises(BadFile, match=r"row 3: .*2.mp4 cannot be opened"):
        dataset[SampleKey(0, 2)]


def test_missing_files_up_to_the_share_are_left_out_at_the_start(write_video, write_table, caplog):
    write_video("a.mp4", numbered_frames(6))
    rows = [{"path": "a.mp4", "text": str(i)} for i in range(30)]
    rows[4] = {"path": "gone.mp4", "text": "4"}
    table = str(write_table(rows))
    dataset = VideoTextDataset(table, num_frames=4, image_size=(16, 16))
    assert len(dataset) == 29
    assert "1 of 30 rows are left out: they name a file that does not exist (gone.mp4)" in caplog.text
    assert dataset[SampleKey(0, 4)]["text"] == "5"
    for settings in ({"bad_files": "error"}, {"max_bad_share": 0.01}):
        with pytest.raises(UserError, match=r"1 of 30 rows name a file that does not exist"):
            VideoTextDataset(table, num_frames=4, image_size=(16, 16), **settings)


def test_counting_frames_at_the_start_survives_bad_files(write_video, write_table, tmp_path):
    for i in range(4):
        write_video(f"{i}.mp4", numbered_frames(3 if i == 1 else 9))
    (tmp_path / "2.mp4").write_bytes(b"this is no video" * 50)
    table = str(write_table([{"path": f"{i}.mp4", "text": str(i)} for i in range(4)]))
    dataset = VideoTextDataset(table, num_frames=8, image_size=(16, 16), short_clips="drop")
    assert dataset.clips.kept.tolist() == [0, 2, 3]
    item = read_or_substitute(dataset, SampleKey(0, 1))
    assert item["text"] in ("0", "3")
    assert "row 3: " in item["bad_files"][0]
    with pytest.raises(UserError, match=r"row 3: .*2.mp4 cannot be opened"):
        VideoTextDataset(table, num_frames=8, image_size=(16, 16), short_clips="drop", bad_files="error")
