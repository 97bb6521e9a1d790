"""Clips that tests of scorers share."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tools.scoring.videos import image, seen, write_video


@pytest.fixture(scope="session")
def moving(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`moving(name, right=2)` is a clip of a second whose image moves 2 of its 320 pixels to the right in each frame."""
    folder = tmp_path_factory.mktemp("moving")

    def make(name: str, right: float = 0, down: float = 0, zoom: float = 1, seed: int = 0, count: int = 24) -> Path:
        path = folder / f"{name}.mp4"
        if not path.exists():
            scene = image(seed)
            write_video(path, [seen(scene, right * i, down * i, zoom**i) for i in range(count)])
        return path

    return make
