"""What was compiled, in a folder for the next process: PyTorch's mega-cache with a header that says for whom it is.

    save_compiled("compiled/dit", pipe)      after the first calls
    load_compiled("compiled/dit", pipe)      after `compile_pipe`, before the first call

The folder holds `header.json` and `artifacts.bin`. Programs fit one version of torch and triton, one kind of GPU, and one
architecture with its options; a header that differs is refused with the reason, since PyTorch would compile anew in silence.
The artefacts are code: load only what you saved.
"""

import hashlib
import json
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from opensora.acceleration.compile.nexfort import record_of
from opensora.acceleration.compile.pipes import parts_of
from opensora.utils.errors import UserError

HEADER, ARTIFACTS = "header.json", "artifacts.bin"
FORMAT = 2


def save_compiled(folder: str | Path, *compiled: Any) -> Path:
    """Save what this process has compiled so far in `folder`, which is made, and returned.

    Args:
        compiled: modules and pipelines that `compile` and `compile_pipe` took, and that ran; the header describes them.

    Raises:
        UserError: nothing was compiled yet that PyTorch keeps, or PyTorch is too old to.
    """
    entries = _describe(compiled)
    if not hasattr(torch.compiler, "save_cache_artifacts"):
        raise UserError(f"save_compiled: PyTorch {torch.__version__} cannot save what it compiled; a newer one can.")
    saved = torch.compiler.save_cache_artifacts()
    if saved is None:
        raise UserError(
            "save_compiled: nothing compiled yet that PyTorch keeps. Programs are made by the first call: run the model once; and compile "
            "without freezing, whose programs a CPU does not keep."
        )
    file = {"bytes": len(saved[0]), "sha256": hashlib.sha256(saved[0]).hexdigest()}
    header = {"format": FORMAT, **_machine(), "modules": entries, "files": {ARTIFACTS: file}}
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / HEADER).unlink(missing_ok=True)  # an interruption leaves no header next to artefacts of another time
    (folder / ARTIFACTS).write_bytes(saved[0])
    (folder / HEADER).write_text(json.dumps(header, indent=2) + "\n", encoding="utf-8")
    return folder


def load_compiled(folder: str | Path, *compiled: Any) -> dict[str, Any]:
    """Load what `save_compiled` saved, so that first calls need not compile; returns the header.

    Args:
        compiled: the modules and pipelines of this process, compiled but not yet called; the header must describe each.

    Raises:
        UserError: there is no such folder, a file is damaged, or it is for another machine, version, model or options.
    """
    folder = Path(folder)
    try:
        header = json.loads((folder / HEADER).read_text(encoding="utf-8"))
        data = (folder / ARTIFACTS).read_bytes()
    except FileNotFoundError as error:
        raise UserError(
            f"{folder} holds no compiled programs: {Path(error.filename).name} is missing. save_compiled makes it."
        ) from error
    except json.JSONDecodeError as error:
        raise UserError(f"{folder / HEADER} is damaged ({error}). Delete the folder and save again.") from error
    differing = _differences({"format": FORMAT, **_machine()}, header)
    for module in _describe(compiled):
        same_class = [entry for entry in header.get("modules", ()) if entry["class"] == module["class"]]
        ways = [_differences(module, entry, of=f" of {module['class']}") for entry in same_class]
        nearest = min(ways or [[f"it has no programs for {module['class']}"]], key=len)
        differing += nearest
    if differing:
        raise UserError(
            f"{folder}: its programs do not fit. {'; '.join(differing)}. Compile without them, and save again."
        )
    intact = hashlib.sha256(data).hexdigest() == header["files"][ARTIFACTS]["sha256"]
    if not intact or torch.compiler.load_cache_artifacts(data) is None:
        raise UserError(f"{folder / ARTIFACTS} is damaged. Delete the folder and save again.")
    return header


def save_pipe(pipe: Any, dir: str | Path = "cached_pipe", *, overwrite: bool = True) -> None:
    """OneDiff's name of `save_compiled`, after the first calls of a compiled pipeline.

    Raises:
        UserError: as `save_compiled`; or there are programs in the folder, and not `overwrite`.
    """
    if not overwrite and (Path(dir) / HEADER).exists():
        raise UserError(
            f"save_pipe: {dir} holds compiled programs already; name another folder, or pass overwrite=True."
        )
    save_compiled(dir, pipe)


def load_pipe(pipe: Any, dir: str | Path = "cached_pipe") -> None:
    """OneDiff's name of `load_compiled`, after `compile_pipe` and before the first call."""
    load_compiled(dir, pipe)


def _describe(compiled: Iterable[Any]) -> list[dict[str, Any]]:
    """Each module for the header: architecture, dtype, options."""
    entries: list[dict[str, Any]] = []
    for one in compiled:
        inside = [one] if isinstance(one, nn.Module) else [module for _, module in parts_of(one)]
        found = [(module, record) for module in inside if (record := record_of(module)) is not None]
        if not found:
            raise UserError(f"{type(one).__name__} is not compiled; call compile or compile_pipe first.")
        for module, record in found:
            state = [(name, list(value.shape), str(value.dtype)) for name, value in module.state_dict().items()]
            entry = {
                "class": type(module).__name__,
                "architecture": hashlib.sha256(json.dumps(state).encode()).hexdigest(),
                "dtype": sorted({str(parameter.dtype).removeprefix("torch.") for parameter in module.parameters()}),
                "backend": record.backend,
                "options": record.options.describe(),
            }
            entries.append(entry)
    return entries


def _machine() -> dict[str, Any]:
    """What programs depend on besides the model; as JSON gives it back."""
    cuda = torch.cuda.is_available()
    try:
        import triton
    except ImportError:
        triton = None
    cpu = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    return {
        "torch": torch.__version__,
        "triton": None if triton is None else triton.__version__,
        "cuda": torch.version.cuda,
        "python": ".".join(platform.python_version_tuple()[:2]),
        "device": torch.cuda.get_device_name() if cuda else cpu,
        "capability": list(torch.cuda.get_device_capability()) if cuda else None,
    }


def _differences(here: dict[str, Any], saved: dict[str, Any], of: str = "") -> list[str]:
    return [f"{key}{of}: saved with {saved.get(key)}, here {here[key]}" for key in here if saved.get(key) != here[key]]
