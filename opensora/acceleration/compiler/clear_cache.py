"""Delete inductor's cache of compiled programs and measured kernels.

    python -m opensora.acceleration.compiler.clear_cache [--dry-run]

The folder is $TORCHINDUCTOR_CACHE_DIR, or else PyTorch's own in the folder for temporary files. What inductor, Triton and
dynamo make there is deleted; anything else is left alone and named. Running processes compile anew.
"""

import argparse
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from opensora.utils.errors import UserError, exit_on_user_error

HASH = r"[a-z2-7]{40,}"  # inductor's names: a letter, and SHA-256 in base 32
TEMPORARY = r"\.\d+\.\d+\.tmp"  # a file that is being written, or was when the process ended
HALF = rf"\.{HASH}\S*"  # and so of our own `libraries`
# What PyTorch 2.6 to 2.14 makes: path in the folder, each part a pattern -> all that is below it is the cache's. The names of
# folders alone do not tell, for people have folders called "cache" and "triton" as well; what is in them does.
MADE: tuple[tuple[str, ...], ...] = (
    (r"[a-z2-7]{2}", rf"{HASH}(\..+)?|{TEMPORARY}|{HALF}"),  # programs, kernels, libraries, measured settings
    (
        r"fxgraph|aotautograd|aoti_eager|autoheuristic|unhashed_kernel_inputs|precompiled_headers|torch_cutlass(_library)?",
    ),
    (r"locks", rf"({HASH}|[0-9a-f]{{40,}})\.lock"),
    (r"triton", r"\d+", r"[A-Z2-7]{40,}|[0-9a-f]{40,}|tmp\.\S+"),
    (r"cache", r"[0-9a-f]{40,}"),  # times of kernels, in a file for each kind of GPU
    (r"dynamo", r"code_state_.+"),
    (r"py3\d+_(cpu|cu\d+)",),
    (r"halide-runtime-\S+",),
    (r"memoizer_cache\.(json|lock)",),
)


class Cleared(NamedTuple):
    """What was deleted, or would be.

    Attributes:
        folder: of the cache.
        size: of the files deleted, in bytes.
        left: paths in the folder that are not the cache's.
    """

    folder: Path
    size: int
    left: list[Path]


def cache_folder() -> Path:
    """Where inductor keeps what it compiled."""
    from torch._inductor.runtime.runtime_utils import cache_dir

    return Path(cache_dir()).resolve()


def clear_cache(*, dry_run: bool = False) -> Cleared:
    """Delete what PyTorch made in the folder, unless `dry_run`, and the folder itself if nothing else is in it.

    Raises:
        UserError: the folder is one that holds more than a cache: the home or the working folder, or one above.
    """
    folder = cache_folder()
    for holds_more in (Path.home().resolve(), Path.cwd().resolve()):
        if folder == holds_more or folder in holds_more.parents:
            raise UserError(
                f"TORCHINDUCTOR_CACHE_DIR={folder} is no folder of its own; nothing is deleted. Name one for the cache alone."
            )
    made, left = _sorted_out(folder, MADE) if folder.is_dir() else ([], [])
    size = sum(file.lstat().st_size for path in made for file in _files(path))
    if not dry_run:
        for path in made:
            _delete(path)
        _delete_empty(folder, {path.parent for path in made})
    return Cleared(folder, size, left)


def _sorted_out(folder: Path, patterns: Sequence[tuple[str, ...]]) -> tuple[list[Path], list[Path]]:
    """Paths that are the cache's, and those that are not."""
    made: list[Path] = []
    left: list[Path] = []
    for path in sorted(folder.iterdir()):
        rests = [pattern[1:] for pattern in patterns if re.fullmatch(pattern[0], path.name)]
        if () in rests:
            made.append(path)
        elif rests and path.is_dir() and not path.is_symlink():
            inside_made, inside_left = _sorted_out(path, rests)
            made += inside_made
            # one name for a folder of which nothing is the cache's
            left += inside_left if inside_made or not inside_left else [path]
        else:
            left.append(path)
    return made, left


def _files(path: Path) -> Iterator[Path]:
    if path.is_symlink() or path.is_file():
        yield path
    else:
        yield from (file for file in path.rglob("*") if file.is_symlink() or file.is_file())


def _delete(path: Path) -> None:
    """Another process may have deleted it meanwhile."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)


def _delete_empty(folder: Path, inside: set[Path]) -> None:
    """The folders that what was deleted was in, up to the cache's own; empty ones only."""
    chain = {folder} | {above for path in inside for above in (path, *path.parents) if folder in above.parents}
    for path in sorted(chain, key=lambda path: len(path.parts), reverse=True):
        if path.is_dir() and not any(path.iterdir()):
            path.rmdir()


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="only say what would be deleted")
    args = parser.parse_args(argv)
    folder, size, left = clear_cache(dry_run=args.dry_run)
    sys.stdout.write(f"{folder}: {size / 2**20:.1f} MiB {'would be ' if args.dry_run else ''}deleted\n")
    for path in left:
        sys.stdout.write(f"left alone, for PyTorch does not make it: {path}\n")


if __name__ == "__main__":
    exit_on_user_error(main)()
