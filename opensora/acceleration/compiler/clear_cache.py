"""Delete inductor's cache of compiled programs and measured kernels.

    python -m opensora.acceleration.compiler.clear_cache [--dry-run]

The folder is $TORCHINDUCTOR_CACHE_DIR, or else PyTorch's own in the folder for temporary files. Running processes compile anew.
"""

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from opensora.utils.errors import UserError, exit_on_user_error


def cache_folder() -> Path:
    """Where inductor keeps what it compiled."""
    from torch._inductor.runtime.runtime_utils import cache_dir

    return Path(cache_dir()).resolve()


def clear_cache(*, dry_run: bool = False) -> tuple[Path, int]:
    """Delete the folder, unless `dry_run`; returns it, and how many bytes it held.

    Raises:
        UserError: the folder is one that holds more than a cache: the home or the working folder, or one above.
    """
    folder = cache_folder()
    for holds_more in (Path.home().resolve(), Path.cwd().resolve()):
        if folder == holds_more or folder in holds_more.parents:
            raise UserError(f"TORCHINDUCTOR_CACHE_DIR={folder} is no folder of its own; it is not deleted.")
    size = sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file() or path.is_symlink())
    if not dry_run:
        shutil.rmtree(folder, ignore_errors=True)
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
