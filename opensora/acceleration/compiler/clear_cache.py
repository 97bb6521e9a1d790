"""Delete inductor's cache of compiled programs and measured kernels.

    python -m opensora.acceleration.compiler.clear_cache [--dry-run]

The folder is $TORCHINDUCTOR_CACHE_DIR, or else PyTorch's own in the folder for temporary files. Running processes compile anew.
"""

import argparse
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from opensora.utils.errors import UserError, exit_on_user_error

# what PyTorch 2.6 to 2.14 makes in the folder
MADE = re.compile(
    r"[a-z2-7]{2}|fxgraph|aotautograd|aoti_eager|autoheuristic|unhashed_kernel_inputs|precompiled_headers|torch_cutlass(_library)?"
    r"|locks|triton|cache|dynamo|py3\d+_(cpu|cu\d+)|halide-runtime-.+|memoizer_cache\.(json|lock)"
    r"|tmp[a-z0-9_]{8}"  # of a compilation that was killed
)


def clear_cache(*, dry_run: bool = False) -> tuple[Path, int]:
    """Delete PyTorch's cache on disk, unless `dry_run`; returns its folder, and how many bytes were or would be deleted.

    Raises:
        UserError: the folder holds something that PyTorch does not make there; nothing is deleted.
    """
    from torch._inductor.runtime.runtime_utils import cache_dir

    folder = Path(cache_dir()).resolve()
    inside = list(folder.iterdir()) if folder.is_dir() else []
    others = sorted(path.name for path in inside if path.is_symlink() or not MADE.fullmatch(path.name))
    if others or folder in (Path.home(), *Path.home().parents):
        raise UserError(
            f"TORCHINDUCTOR_CACHE_DIR={folder} is not a folder for the cache alone: it holds {', '.join(others[:5]) or 'the home folder'}. "
            "Nothing is deleted; move that away, or delete the cache by hand."
        )
    size = sum(path.lstat().st_size for path in folder.rglob("*") if path.is_symlink() or path.is_file())
    if not dry_run:
        shutil.rmtree(folder, ignore_errors=True)  # another process may be at work in it
    return folder, size


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="only say what would be deleted")
    args = parser.parse_args(argv)
    folder, size = clear_cache(dry_run=args.dry_run)
    sys.stdout.write(f"{folder}: {size / 2**20:.1f} MiB {'would be ' if args.dry_run else ''}deleted\n")


if __name__ == "__main__":
    exit_on_user_error(main)()
