"""Checkpoints: folders that are either complete or not there.

    <run>/epoch3-global_step1500/
        manifest.json                what made it: config, commit, versions, step, data; and every file with its size
        state.json                   step, position in the data, whatever else a resume needs
        model/model.safetensors      fp32 weights
        ema/ema.safetensors          fp32 averaged weights
        optimizer/optimizer.safetensors

A folder is written under a temporary name and renamed when the manifest, its last file, is on disk. No generator state
is saved, because all randomness is a function of (seed, step, position): see `opensora.utils.seed`.
"""

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from opensora.utils.errors import UserError
from opensora.utils.weight_files import read_file
from opensora.utils.weight_sources import find_weights

MANIFEST = "manifest.json"
STATE = "state.json"
RUNTIME_PREFIXES = ("module.", "_orig_mod.", "_fsdp_wrapped_module.")


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint folder, opened for reading."""

    path: Path
    manifest: Mapping[str, Any]
    state: Mapping[str, Any]

    def tensors(self, part: str) -> dict[str, Tensor]:
        """The tensors of `part`: "model", "ema", "optimizer" and what else was saved, on the CPU; {} if it was not."""
        file = self.path / part / f"{part}.safetensors"
        return load_file(file) if str(file.relative_to(self.path)) in self.manifest["files"] else {}


def save_checkpoint(
    path: Path,
    parts: Mapping[str, Mapping[str, Tensor]],
    *,
    state: Mapping[str, Any],
    manifest: Mapping[str, Any],
) -> Path:
    """Write a checkpoint folder; a crash at any moment leaves either no `path` or a complete one.

    Args:
        path: the folder to make. One that is already there is replaced when the new one is complete.
        parts: name -> tensors, for example {"model": ..., "ema": ..., "optimizer": ...}.
        state: small values for a resume, JSON.
        manifest: what made this checkpoint, JSON.
    """
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    header = {"format": "pt", "step": str(manifest.get("step", "")), "model": str(manifest.get("model", ""))}
    for part, tensors in parts.items():
        (partial / part).mkdir()
        on_cpu = {name: tensor.detach().contiguous().cpu().clone() for name, tensor in tensors.items()}
        save_file(on_cpu, partial / part / f"{part}.safetensors", metadata=header)
    _write_json(partial / STATE, state)
    files = {str(f.relative_to(partial)): f.stat().st_size for f in sorted(partial.rglob("*")) if f.is_file()}
    _write_json(partial / MANIFEST, {**manifest, "files": files})
    for file in [*files, MANIFEST]:
        _flush_to_disk(partial / file)
    _put_in_place(partial, path)
    return path


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a checkpoint folder for a resume.

    Raises:
        UserError: the folder is missing, is no checkpoint, or is incomplete.
    """
    path = Path(path)
    if not path.is_dir():
        raise UserError(f"no checkpoint at {path}: there is no such folder.{_found_inside(path.parent)}")
    if not (path / MANIFEST).is_file():
        raise UserError(
            f"{path} is not a complete checkpoint: it has no {MANIFEST}, which is written last."
            f"{_found_inside(path)}{_found_inside(path.parent)}"
        )
    manifest = json.loads((path / MANIFEST).read_text())
    broken = [
        f"{name} ({'missing' if not (path / name).is_file() else f'{(path / name).stat().st_size} of {size} bytes'})"
        for name, size in manifest["files"].items()
        if not (path / name).is_file() or (path / name).stat().st_size != size
    ]
    if broken:
        raise UserError(
            f"{path} is not a complete checkpoint: {', '.join(broken)}. Load another one.{_found_inside(path.parent)}"
        )
    return Checkpoint(path, manifest, json.loads((path / STATE).read_text()))


def complete_checkpoints(run: Path) -> list[Path]:
    """The complete checkpoints below a run's folder, oldest step first."""
    found = []
    for manifest in run.glob(f"*/{MANIFEST}"):
        try:
            found.append((json.loads(manifest.read_text()).get("step", 0), manifest.parent))
        except json.JSONDecodeError:
            continue  # not one of ours
    return [path for _, path in sorted(found)]


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """Weights from one of our checkpoint folders (its EMA if there), or from whatever `find_weights` understands.

    Formats are told apart by content, never by file name. A pickle with more than plain data in it is refused. The
    tensors are mapped from disk where the format allows it: copy them, do not change them.

    Raises:
        UserError: there is nothing to read at `path`, or it is not weights.
    """
    folder = Path(path).expanduser()
    try:
        state = read_file(_own_weights(folder) or find_weights(path))
    except UserError as error:
        near = folder if folder.is_dir() else folder.parent
        raise UserError(f"{error}{_found_inside(near)}") from error
    result = {_strip_prefixes(name): tensor for name, tensor in state.items()}
    if len(result) < len(state):
        raise UserError(
            f"{path} holds tensors twice, with and without one of the prefixes {', '.join(RUNTIME_PREFIXES)}."
        )
    return result


def load_strictly(
    model: nn.Module, state: Mapping[str, Tensor], source: str | Path, *, may_miss: Iterable[str] = ()
) -> None:
    """Copy `state` into `model`; every parameter and saved buffer must be there with its shape, and nothing else.

    Those named in `may_miss` need not be there, and keep their values.

    Raises:
        UserError: names or shapes differ; the model is left as it was.
    """
    own = model.state_dict()
    missing = sorted(own.keys() - state.keys() - set(may_miss))
    unexpected = sorted(state.keys() - own.keys())
    reshaped = [
        f"{name}: file {tuple(state[name].shape)}, model {tuple(own[name].shape)}"
        for name in sorted(own.keys() & state.keys())
        if state[name].shape != own[name].shape
    ]
    other_kind = [
        f"{name}: file {_dtype(state[name])}, model {_dtype(own[name])}"
        for name in sorted(own.keys() & state.keys())
        if state[name].is_floating_point() != own[name].is_floating_point()
    ]
    if missing or unexpected or reshaped or other_kind:
        raise UserError(
            f"{source} does not fit this {type(model).__name__} ({len(own)} tensors; the file has {len(state)}).\n"
            + _listing("missing in the file", missing, list(state))
            + _listing("in the file only", unexpected, list(own))
            + _listing("of another shape", reshaped)
            + _listing("of another kind of number (quantised weights?)", other_kind)
            + "Check model.type and its sizes in the config: they must be those of the run that wrote the file."
        )
    with torch.no_grad():
        for name, tensor in state.items():
            own[name].copy_(tensor)


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _listing(title: str, names: list[str], others: Iterable[str] = ()) -> str:
    if not names:
        return ""
    lines = []
    for name in names[:5]:
        close = get_close_matches(name, others, n=1, cutoff=0.8)
        lines.append(f"    {name}" + (f"   (similar: {close[0]})" if close else ""))
    more = f"    ... and {len(names) - 5} more\n" if len(names) > 5 else ""
    return f"  {len(names)} {title}:\n" + "\n".join(lines) + "\n" + more


def _own_weights(folder: Path) -> Path | None:
    """The file to read in a checkpoint folder of ours; None = it is something else."""
    if (folder / MANIFEST).is_file():
        for part in ("ema", "model"):
            if (folder / part / f"{part}.safetensors").is_file():
                return open_checkpoint(folder).path / part / f"{part}.safetensors"
    return None


def _found_inside(folder: Path) -> str:
    found = complete_checkpoints(folder) if folder.is_dir() else []
    return f" Complete checkpoints in {folder}: {', '.join(path.name for path in found)}." if found else ""


def _strip_prefixes(name: str) -> str:
    for prefix in RUNTIME_PREFIXES:
        name = name.removeprefix(prefix).replace(f".{prefix}", ".")
    return name


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1, default=str) + "\n")


def _flush_to_disk(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _put_in_place(partial: Path, path: Path) -> None:
    if not path.exists():
        partial.rename(path)
        return
    old = path.with_name(f".{path.name}.old-{os.getpid()}")
    path.rename(old)
    partial.rename(path)
    shutil.rmtree(old)
