"""Delete inductor's cache of compiled programs and measured kernels.

    python -m opensora.acceleration.compiler.clear_cache [--dry-run]

The folder is $TORCHINDUCTOR_CACHE_DIR, or else PyTorch's own in the folder for temporary files. What inductor, Triton and
dynamo make there is deleted; anything else is left alone and named. Running processes compile anew.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from opensora.utils.errors import UserError, exit_on_user_error

HASH = r"[a-z2-7]{40,}"  # inductor's names: a letter, and SHA-256 in base 32
# Files that PyTorch 2.6 to 2.14 makes, by their paths in the folder. The names of folders alone do not tell, for people have folders
# called "cache" and "triton" as well; what is in them does.
MADE = re.compile(
    rf"[a-z2-7]{{2}}/\.?({HASH}|\d+\.\d+\.tmp).*"  # programs, kernels, libraries, measured settings
    r"|(fxgraph|aotautograd|aoti_eager|autoheuristic|unhashed_kernel_inputs|precompiled_headers|torch_cutlass(_library)?)/.+"
    rf"|locks/({HASH}|[0-9a-f]{{40,}})\.lock"
    r"|triton/\d+/([A-Z2-7]{40,}|[0-9a-f]{40,}|tmp\.[^/]+)/.+"
    r"|cache/[0-9a-f]{40,}.*"  # times of kernels, in a file for each kind of GPU
    r"|dynamo/code_state_.+"
    r"|(py3\d+_(cpu|cu\d+)|halide-runtime-[^/]+)/.+"
    r"|memoizer_cache\.(json|lock)"
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


def clear_cache(*, dry_run: bool = False) -> Cleared:
    """Delete what PyTorch made in the folder, unless `dry_run`, and the folder itself if nothing else is in it.

    Raises:
        UserError: the folder is one that holds more than a cache: the home or the working folder, or one above.
    """
    from torch._inductor.runtime.runtime_utils import cache_dir

    folder = Path(cache_dir()).resolve()
    for holds_more in (Path.home().resolve(), Path.cwd().resolve()):
        if folder == holds_more or folder in holds_more.parents:
            raise UserError(
                f"TORCHINDUCTOR_CACHE_DIR={folder} is no folder of its own; nothing is deleted. Name one for the cache alone."
            )
    paths = sorted(folder.rglob("*"), reverse=True)  # what is in a folder comes before it
    files = [path for path in paths if path.is_symlink() or not path.is_dir()]
    made = {path for path in files if MADE.fullmatch(path.relative_to(folder).as_posix())}
    size = sum(path.lstat().st_size for path in made)
    above_made = {above for path in made for above in path.parents}
    left = set()
    for path in set(files) - made:  # a folder of which nothing is the cache's has one name
        while path.parent != folder and path.parent not in above_made:
            path = path.parent
        left.add(path)
    for path in made if not dry_run else ():
        path.unlink(missing_ok=True)  # another process may have deleted it meanwhile
    for path in (*paths, folder) if not dry_run else ():
        if path in above_made and path.is_dir() and not any(path.iterdir()):
            path.rmdir()
    return Cleared(folder, size, sorted(left))


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
