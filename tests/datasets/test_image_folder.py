"""Class-labelled images: numbers as torchvision gives them, checked at the start, with the samples that training expects."""

import os
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.datasets import ImageFolder

from opensora.datasets.datasets import VideoTextDataset
from opensora.datasets.image_folder import ImageFolderDataset
from opensora.datasets.sampler import SampleKey
from opensora.models.text_encoder.classes import check_classes, check_classes_of_data
from opensora.models.text_encoder.memo import MemoizedTextEncoder
from opensora.registry import DATASETS, MODELS
from opensora.utils.errors import UserError


@pytest.fixture
def folder(tmp_path):
    """Three classes with images of 24 x 32."""
    rng = np.random.default_rng(0)
    for name in ("cat/2.png", "cat/1.jpg", "Zebra/x/a.png", "dog 1/b.webp", "dog 1/a.JPEG"):
        path = tmp_path / "images" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (24, 32, 3), np.uint8)).save(path)
    return tmp_path / "images"


def all_of(dataset):
    return [dataset[SampleKey(0, i)] for i in range(len(dataset))]


def test_classes_are_those_of_torchvision(folder):
    theirs = ImageFolder(folder)
    ours = ImageFolderDataset(str(folder), image_size=(16, 16))
    assert ours.class_names == theirs.classes == ["Zebra", "cat", "dog 1"]
    assert ours.num_classes == 3
    assert [(item["path"], int(item["text"])) for item in all_of(ours)] == theirs.samples


def test_a_sample_has_what_other_datasets_give(folder, write_table):
    table = write_table([{"path": "images/cat/1.jpg", "text": "x"}])
    settings = {"image_size": (16, 24), "num_frames": 1}
    usual = VideoTextDataset(str(table), **settings)[SampleKey(3, 0)]
    ours = ImageFolderDataset(str(folder), **settings)[SampleKey(3, 1)]
    assert ours["path"].endswith("images/cat/1.jpg")
    assert ours.keys() == usual.keys()
    for name in usual.keys() - {"text", "path", "index"}:
        assert torch.equal(ours[name], usual[name]), name
    assert ours["video"].shape == (3, 1, 16, 24)


def test_the_text_is_a_class_number(folder):
    texts = [item["text"] for item in all_of(ImageFolderDataset(str(folder), image_size=(8, 8)))]
    y, _ = MODELS.build({"type": "classes", "num_classes": 3}).encode(texts)
    assert y.flatten().tolist() == [0, 1, 1, 2, 2]


def test_a_table_with_labels(folder, write_table):
    rows = [{"path": "images/cat/1.jpg", "label": 7}, {"path": "images/cat/2.png", "label": "0"}]
    table = str(write_table(rows))
    assert [item["text"] for item in all_of(ImageFolderDataset(table, image_size=(8, 8)))] == ["7", "0"]
    assert ImageFolderDataset(table).num_classes == 8
    assert ImageFolderDataset(table, num_classes=10).num_classes == 10
    with pytest.raises(UserError, match=r"(?s)1 of 2 rows have a label above 6.*images/cat/1\.jpg"):
        ImageFolderDataset(table, num_classes=7)
    assert DATASETS.build({"type": "ImageFolderDataset", "data_path": table}, num_classes=9).num_classes == 9
    with pytest.raises(UserError, match=r"has no column 'class'.* is set with dataset\.label_column"):
        ImageFolderDataset(str(write_table(rows)), label_column="class")
    for label in ("", "cat", "-1", "1.5"):
        with pytest.raises(UserError, match="1 of 2 rows have no whole number in 'label'"):
            ImageFolderDataset(str(write_table([rows[0], {**rows[1], "label": label}])))


def test_mistakes_are_reported_at_the_start(folder):
    with pytest.raises(UserError, match="set num_frames=1 and frame_interval=1, not 16 and 1"):
        ImageFolderDataset(str(folder), num_frames=16)
    with pytest.raises(UserError, match="has 3 class folders, but num_classes=1000"):
        ImageFolderDataset(str(folder), num_classes=1000)
    with pytest.raises(UserError, match=r"root='\.' has no effect"):
        ImageFolderDataset(str(folder), root=".")
    with pytest.raises(UserError, match="has no folders"):
        ImageFolderDataset(str(folder / "cat"))
    (folder / "train").mkdir()
    with pytest.raises(UserError, match=r"1 of 4 class folders hold no image \(train\)"):
        ImageFolderDataset(str(folder))
    Image.new("RGB", (4, 4)).save(folder / "train" / "a.png")
    with pytest.raises(UserError, match="Is the data rather in train"):
        ImageFolderDataset(str(folder), num_classes=3)


def test_other_files_are_counted(folder, caplog):
    (folder / "cat" / "notes.txt").touch()
    (folder / "cat" / ".hidden.png").touch()
    (folder / "LICENSE").touch()
    assert len(ImageFolderDataset(str(folder))) == 5
    assert "1 files in class folders are no images" in caplog.text


def test_a_broken_image_is_named_and_another_can_take_its_place(folder):
    (folder / "cat" / "1.jpg").write_bytes(b"no image")
    dataset = ImageFolderDataset(str(folder), image_size=(8, 8))
    with pytest.raises(UserError, match=r"row 2: .*cat/1\.jpg"):
        dataset[SampleKey(0, 1)]
    others = {dataset.another(SampleKey(2, 1), torch.Generator().manual_seed(i)) for i in range(40)}
    assert others == {SampleKey(2, i) for i in (0, 2, 3, 4)}


def test_random_crops_follow_seed_epoch_and_row(folder):
    def video(seed, epoch):
        dataset = ImageFolderDataset(str(folder), image_size=(8, 8), transform_name="random_crop", seed=seed)
        return dataset[SampleKey(epoch, 2)]["video"]

    assert torch.equal(video(1, 0), video(1, 0))
    assert not torch.equal(video(1, 0), video(1, 1))
    assert not torch.equal(video(1, 0), video(2, 0))


def test_the_fingerprint_follows_what_decides_the_samples(folder):
    def fingerprint(**settings):
        return ImageFolderDataset(str(folder), **settings).fingerprint()

    before = fingerprint()
    assert fingerprint() == before
    assert (
        len({before, fingerprint(image_size=(8, 8)), fingerprint(use_image_transform=True), fingerprint(seed=1)}) == 4
    )
    (folder / "cat" / "1.jpg").rename(folder / "dog 1" / "c.jpg")
    assert fingerprint() != before


TINY = {"depth": 1, "hidden_size": 16, "num_heads": 2}


@pytest.mark.parametrize(
    ("num_classes", "condition", "message"),
    [
        (10, "label_10", None),
        (10, "unconditional", None),
        (10, "label_12", "gives 10 classes, but DiT takes 12 classes"),
        (10, "text", "gives 10 classes, but DiT takes text"),
    ],
)
def test_encoder_and_denoiser_mean_the_same_classes(num_classes, condition, message):
    encoder = MODELS.build({"type": "classes", "num_classes": num_classes})
    denoiser = MODELS.build({"type": "DiT-S/8", "condition": condition, **TINY})
    for given in (encoder, MemoizedTextEncoder(encoder)):
        if message is None:
            check_classes(given, denoiser)
            continue
        with pytest.raises(UserError, match=message):
            check_classes(given, denoiser)


def test_a_text_encoder_gives_no_classes():
    class Words:
        output_dim, model_max_length = 8, 3

    denoiser = MODELS.build({"type": "DiT-S/8", "condition": "label_10", **TINY})
    with pytest.raises(UserError, match="gives text, but DiT takes 10 classes"):
        check_classes(Words(), denoiser)
    check_classes(Words(), MODELS.build({"type": "DiT-S/8", "condition": "text", "caption_channels": 8, **TINY}))


def test_data_of_more_classes_than_the_text_encoder_knows(folder):
    dataset = ImageFolderDataset(str(folder))
    known = {count: MODELS.build({"type": "classes", "num_classes": count}) for count in (2, 3, 10)}
    for given in (known[2], MemoizedTextEncoder(known[2])):
        with pytest.raises(UserError, match=r"the data have 3 classes, but text_encoder.num_classes=2"):
            check_classes_of_data(dataset, given)
    check_classes_of_data(dataset, known[3])
    check_classes_of_data(dataset, known[10])


@pytest.mark.skipif(sys.platform != "linux", reason="file names are any bytes on Linux only")
def test_file_names_that_are_no_utf8(folder):
    """They are bytes; a fingerprint ended in a UnicodeEncodeError that named no file."""
    source = folder / "cat" / "2.png"
    source.rename(source.with_name(os.fsdecode(b"caf\xe9.png")))
    dataset = ImageFolderDataset(str(folder), image_size=(16, 16))
    assert [item["video"].shape for item in all_of(dataset)] == [(3, 1, 16, 16)] * 5
    assert dataset.fingerprint() == ImageFolderDataset(str(folder), image_size=(16, 16)).fingerprint()
