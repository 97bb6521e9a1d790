"""Images with the number of their class, for class-conditional training.

Classes are folders, numbered in the order of their names as torchvision's `ImageFolder` does (for the 1000 folders of
ImageNet those are its usual numbers), or a column of a table. The text encoder "classes" reads the number.

Videos with classes need no dataset of their own: `VideoTextDataset` with text_columns=("label",) reads a table of them.
"""

import logging
import os
from pathlib import Path
from typing import Any, Literal

import numpy as np

from opensora.datasets.datasets import TableDataset, describe, naming_the_row
from opensora.datasets.sampler import SampleKey
from opensora.datasets.table.table import UNKNOWN, Table, TextColumn, complain_about_rows, read_table
from opensora.datasets.transforms import get_transform
from opensora.datasets.video.files import IMAGE_EXTENSIONS, IMAGE_FPS, BadFiles, is_image, refuse_unlisted
from opensora.datasets.video.read_video import read_frames
from opensora.registry import DATASETS
from opensora.utils.errors import UserError
from opensora.utils.seed import generator

logger = logging.getLogger(__name__)

SHOWN_CLASSES = 3


@DATASETS.register_module()
class ImageFolderDataset(TableDataset):
    """Images and their class numbers: a folder with a folder for each class, or a table with a column of numbers.

    A sample has the keys of `VideoTextDataset`; `video` is [3, 1, H, W], `text` is the class as the text encoder "classes"
    reads it: "207". Use it with num_frames=1.

    Args:
        data_path: A folder CLASS/.../image.jpg, or a table (CSV, parquet) with the columns `path` and `label_column`.
        num_frames, frame_interval: 1; named only because training configs do.
        root: Folder that the paths of a table are relative to; the table's own when None. Not for folders.
        label_column: Column of a table that holds whole numbers from 0.
        num_classes: What labels must stay below, and the number of class folders; None = as many as there are.
        image_size, transform_name, use_image_transform, seed, bad_files, max_bad_share: as of `VideoTextDataset`; ADM's transform
            is given to all.

    Attributes:
        num_classes: as given, or counted.
        class_names: names of the class folders in the order of their numbers; empty for a table.
    """

    def __init__(  # noqa: PLR0913
        self,
        data_path: str,
        num_frames: int = 1,
        frame_interval: int = 1,
        image_size: tuple[int, int] = (256, 256),
        root: str | None = None,
        transform_name: str = "center",
        use_image_transform: bool = False,  # noqa: FBT001, FBT002  (a config's key)
        label_column: str = "label",
        num_classes: int | None = None,
        seed: int = 42,
        bad_files: Literal["substitute", "error"] = "substitute",
        max_bad_share: float = 0.05,
    ) -> None:
        if (num_frames, frame_interval) != (1, 1):
            raise UserError(
                f"ImageFolderDataset gives images: set num_frames=1 and frame_interval=1, not {num_frames} and "
                f"{frame_interval}."
            )
        self.bad_files = BadFiles(bad_files, max_bad_share, seed)
        self.seed = seed
        self.class_names: list[str] = []
        if not Path(data_path).is_dir():
            share = self.bad_files.at_start
            self.table = read_table(
                data_path, root, (label_column,), max_bad_share=share, columns_option="label_column"
            )
            self.num_classes = _count_classes(self.table, label_column, num_classes)
        elif root is not None:
            raise UserError(
                f"root={root!r} has no effect: data_path={data_path!r} is a folder, which holds the images."
            )
        else:
            self.table, self.class_names = _read_folder(Path(data_path))
            self.num_classes = len(self.class_names)
            if num_classes not in (None, self.num_classes):
                splits = [name for name in self.class_names if name.lower() in ("train", "val", "valid", "test")]
                hint = f" Is the data rather in {splits[0]}?" if splits else ""
                raise UserError(
                    f"{data_path} has {self.num_classes} class folders, but num_classes={num_classes} was asked for. The first "
                    f"are {', '.join(self.class_names[:SHOWN_CLASSES])}.{hint}"
                )
        self.rows = range(len(self.table))
        name = "adm_center" if use_image_transform else transform_name
        self.transform = get_transform(name, image_size)
        self._settings = (tuple(image_size), name, seed)

    def __getitem__(self, key: SampleKey) -> dict[str, Any]:
        row = key.index
        path = self.table.path(row)
        try:
            frames = read_frames(path, 0, 1)
        except UserError as error:
            raise naming_the_row(self.table, row, error) from error
        video = self.transform(frames, generator=generator(self.seed, "sample", key.epoch, row))  # [3, 1, H, W]
        label = self.table.captions(row)[0].strip()
        return {"video": video, **describe(row, path, label, video.shape[1:], IMAGE_FPS)}

    @property
    def sample_bytes(self) -> int:
        """Of one sample's image; 0 where files keep their size."""
        (height, width), name, _ = self._settings
        return 0 if name == "none" else height * width * 3 * 4

    def fingerprint(self) -> str:
        """A hash of everything that decides the samples, except the pixels in the files."""
        return self._hash(self._settings)


def class_folders(folder: Path) -> list[str]:
    """Names of the folders in a folder, sorted, without hidden ones; a `UserError` where there are none."""
    with os.scandir(folder) as entries:
        names = sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))
    if not names:
        raise UserError(f"{folder} has no folders; each class is a folder in it, such as {folder}/cat/1.jpg.")
    return names


def _read_folder(folder: Path) -> tuple[Table, list[str]]:
    """A table whose only text column is the class number, and the names of the classes. Hidden files are left out."""
    names = class_folders(folder)
    files: list[str] = []
    labels: list[str] = []
    empty, others = [], 0
    for label, name in enumerate(names):
        found = []
        for parent, folders, below in os.walk(folder / name, onerror=refuse_unlisted, followlinks=True):
            folders[:] = sorted(inner for inner in folders if not inner.startswith("."))
            relative = os.path.relpath(parent, folder)
            found += [f"{relative}/{file}" for file in below if not file.startswith(".")]
        images = sorted(path for path in found if is_image(path))
        others += len(found) - len(images)
        files += images
        labels += [str(label)] * len(images)
        if not images:
            empty.append(name)
    if empty:
        shown = ", ".join(empty[:SHOWN_CLASSES]) + (" ..." if len(empty) > SHOWN_CLASSES else "")
        raise UserError(
            f"{folder}: {len(empty)} of {len(names)} class folders hold no image ({shown}); classes would be numbered "
            f"wrongly. Remove them, or put images in. Images end with {' '.join(IMAGE_EXTENSIONS)}."
        )
    if others:
        logger.warning("%s: %d files in class folders are no images and are left out.", folder, others)
    rows = {"path": TextColumn.of(files), "label": TextColumn.of(labels)}
    unknown = np.full(len(files), UNKNOWN)
    rates = np.full(len(files), np.nan)
    return Table(folder, folder, rows, ("label",), unknown + 1, unknown, unknown, rates, np.arange(len(files))), names


def _count_classes(table: Table, column: str, wanted: int | None) -> int:
    """The number of classes of a table, whose labels are whole numbers below `wanted`."""
    labels = [label.strip() for label in table.rows[column]]
    if wrong := [row for row, label in enumerate(labels) if not (label.isdecimal() and label.isascii())]:
        remedy = (
            f"The first says {labels[wrong[0]]!r}; `python -m tools.datasets.convert classes` numbers class folders."
        )
        raise complain_about_rows(table, wrong, f"have no whole number in {column!r}", remedy)
    numbers = [int(label) for label in labels]
    if wanted is not None and (over := [row for row, number in enumerate(numbers) if number >= wanted]):
        what = f"have a {column} above {wanted - 1}, the last of num_classes={wanted}"
        raise complain_about_rows(table, over, what, "Classes count from 0.")
    return max(numbers) + 1 if wanted is None else wanted
