"""The user's own parts: the Python files and modules that a config names in `imports`, which register what they define.

A file is named by its path, relative to the working directory as every path of a config is; its folder joins the end of
`sys.path`, so that it may import its neighbours. A module (`my_package.parts`) must be importable: installed, or on
PYTHONPATH. Importing runs code, so it happens for what a user names in a config file, on the command line or in a call, and
never on behalf of a checkpoint or a sidecar: those may come from somebody else.
"""

import importlib
import importlib.util
import sys
import traceback
import zlib
from collections.abc import Sequence
from pathlib import Path

from opensora.registry import REGISTRIES
from opensora.utils.errors import UserError


def import_parts(names: Sequence[str] | str) -> None:
    """Import each file or module once; a string is one of them.

    Raises:
        UserError: there is none, or it fails; the message names the line.
    """
    for registry in REGISTRIES.values() if names else ():
        registry.choices()  # ours first, so that a name that is taken is the later file's fault
    for name in [names] if isinstance(names, str) else names:
        if (module := _module_name(name)) in sys.modules:
            continue
        try:
            if name.endswith(".py"):
                _import_file(Path(name), module)
            else:
                importlib.import_module(module)
        except UserError:
            raise
        except Exception as error:
            raise UserError(_explained(name, error)) from error


def not_imported(names: Sequence[str] | str) -> list[str]:
    """Those of `names` that this process has not imported."""
    return [name for name in ([names] if isinstance(names, str) else names) if _module_name(name) not in sys.modules]


def _module_name(name: str) -> str:
    """A file's own name in `sys.modules`: no other module's, and the same in every process."""
    if not name.endswith(".py"):
        return name
    path = Path(name).resolve()
    return f"{path.stem}_{zlib.crc32(str(path).encode()):08x}"


def _import_file(path: Path, module_name: str) -> None:
    if not path.is_file():
        raise UserError(f"imports: there is no file {path} (from {Path.cwd()}).")
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None, "the path ends in .py"
    assert spec.loader is not None, "it is a file"
    module = importlib.util.module_from_spec(spec)
    if (folder := str(path.resolve().parent)) not in sys.path:
        sys.path.append(folder)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]
        raise


def _explained(name: str, error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name is not None and f"{name}.".startswith(f"{error.name}."):
        return (
            f"imports: there is no module {error.name!r}. Name a file by its path, ending in .py; a module must be installed or on "
            "PYTHONPATH."
        )
    what = error.args[0] if isinstance(error, KeyError) and error.args else error  # str() of a KeyError is quoted
    if isinstance(error, SyntaxError):
        return f"imports: {error.filename}:{error.lineno}: {error.msg}: {(error.text or '').strip()}"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not _is_machinery(f.filename)]
    where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else name
    return f"imports: {where}: {type(error).__name__}: {what}"


def _is_machinery(filename: str) -> bool:
    return filename == __file__ or "importlib" in filename or "mmengine" in filename
