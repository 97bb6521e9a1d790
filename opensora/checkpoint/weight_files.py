"""Files of weights, told apart by their first bytes: safetensors, `torch.save`, and the index of a set of shards.

Also the one way in which weights leave as a single file. Which file a folder or a hub id stands for is decided in
`opensora.checkpoint.weight_sources`.
"""

import json
import logging
import os
import pickle
import re
import shlex
import zipfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from opensora.utils.dtype import to_torch_dtype
from opensora.utils.errors import UserError

log = logging.getLogger(__name__)

Kind = Literal["safetensors", "pickle", "index"]
WRAPPERS = ("ema", "state_dict_ema", "state_dict", "model", "module")  # an average is taken before what it averages
MAX_HEADER = 100_000_000  # bytes; safetensors' own limit
# What torch.load raises for a damaged file, beside UnpicklingError.
DAMAGED = (SafetensorError, RuntimeError, EOFError, ValueError, LookupError, AttributeError, TypeError, OSError)
TAKE_OUT = (
    "import sys, torch; s = torch.load(sys.argv[1], map_location='cpu', weights_only=False); "
    "s = s.state_dict() if hasattr(s, 'state_dict') else s; "
    f"torch.save({{k: s[k] for k in {WRAPPERS} if k in s}} or s, sys.argv[2])"
)


def kind_of(path: Path) -> Kind | None:
    """What `path` is, by its content; None = nothing that holds weights."""
    with path.open("rb") as file:
        head = file.read(9)
    if head[8:] == b"{" and int.from_bytes(head[:8], "little") <= MAX_HEADER:
        return "safetensors"
    if head.startswith(b"PK\x03\x04"):
        return "pickle" if _is_torch_archive(path) else None
    if head[:1] == b"\x80" and head[1] in range(2, 6):  # a pickle, the form of torch.save before PyTorch 1.6
        return "pickle"
    if head.lstrip()[:1] == b"{" and ".index" in path.name and _weight_map(path):
        return "index"
    return None


def read_file(path: Path) -> dict[str, Tensor]:
    """The tensors of a file, or of all shards of an index; mapped from disk where the format allows it.

    Raises:
        UserError: it is no file of weights, is damaged, or is a pickle with more in it than plain data.
    """
    kind = kind_of(path)
    if kind is None:
        raise UserError(f"{path} cannot be read as weights: {_what_instead(path)}.")
    if kind == "index":
        return _read_shards(path)
    try:
        return load_file(path) if kind == "safetensors" else _unwrap(_load_pickle(path), path)
    except UserError:
        raise
    except DAMAGED as error:
        raise UserError(f"{path} cannot be read as weights, it seems damaged: {error}") from error


def shards_of(index: Path) -> list[str]:
    """The names of an index's files, relative to its folder.

    Raises:
        UserError: one of them lies outside the folder.
    """
    names = sorted(set(_weight_map(index).values()))
    for name in names:
        place = PurePosixPath(name)
        if not name or place.is_absolute() or ".." in place.parts or "\\" in name or ":" in name:
            raise UserError(f"{index} is refused: its shard {name!r} is not inside the folder of the index.")
    return names


def write_file(tensors: Mapping[str, Tensor], out: Path, *, dtype: str, header: Mapping[str, Any]) -> int:
    """Write weights as one .safetensors file, under a temporary name until complete; returns its size in bytes.

    Args:
        tensors: name -> tensor; floating-point ones are written as `dtype`.
        out: the file to make.
        dtype: "fp32", "bf16" or "fp16".
        header: what the file is and where it comes from; None is left out, what is no text becomes JSON.

    Raises:
        UserError: `out` is there already.
    """
    refuse_existing(out)
    wanted = to_torch_dtype(dtype)
    copies = {
        # a clone where nothing changes: tensors that share memory are refused
        name: tensor.detach().to(wanted if tensor.is_floating_point() else tensor.dtype, copy=True).cpu().contiguous()
        for name, tensor in tensors.items()
    }
    metadata = {
        key: value if isinstance(value, str) else json.dumps(value, default=str)
        for key, value in header.items()
        if value is not None
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f".{out.name}.partial-{os.getpid()}")
    try:
        save_file(copies, partial, metadata={"format": "pt", **metadata})
        partial.rename(out)
    finally:
        partial.unlink(missing_ok=True)
    return out.stat().st_size


def refuse_existing(out: Path) -> None:
    """Nothing is overwritten.

    Raises:
        UserError: `out` is there.
    """
    if out.exists():
        raise UserError(f"{out} is there already; remove it or choose another name.")


def _load_pickle(path: Path) -> Any:
    try:
        # only the zip archives of PyTorch 1.6 and later can be mapped; and torch.load believes in some suffixes
        if zipfile.is_zipfile(path) and path.suffix != ".safetensors":
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        with path.open("rb") as file:
            return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL ([\w.]+)", str(error))
        target = path.with_name(f"{path.stem}.weights.pt")
        raise UserError(
            f"{path} is refused: it holds {found[1] if found else 'more than plain data'}, not only tensors, and loading it "
            f"could run code. Where you trust who made it, take the weights out:\n"
            f'  python -c "{TAKE_OUT}" {shlex.quote(str(path))} {shlex.quote(str(target))}'
        ) from error


def _unwrap(content: Any, path: Path) -> dict[str, Tensor]:
    """The dictionary of tensors in a file of `torch.save`, which may lie under the names of WRAPPERS, nested."""
    while isinstance(content, Mapping):
        wrapper = next((key for key in WRAPPERS if isinstance(content.get(key), Mapping) and content[key]), None)
        if wrapper is None:
            break
        if beside := sorted(str(key) for key in content if key != wrapper):
            log.info("%s: taking %r; not used: %s", path, wrapper, ", ".join(beside[:8]))
        content = content[wrapper]
    if not isinstance(content, Mapping) or not content:
        raise UserError(f"{path} holds no dictionary of tensors, but: {_describe(content)}.")
    others = {key: value for key, value in content.items() if not isinstance(value, Tensor)}
    if others:
        raise UserError(
            f"{path} holds no dictionary of tensors alone; it also holds {_describe(others)}. "
            f"Weights are looked for at the top and under {', '.join(WRAPPERS)}."
        )
    return {str(name): tensor.detach() for name, tensor in content.items()}


def _read_shards(index: Path) -> dict[str, Tensor]:
    names = shards_of(index)
    if absent := [name for name in names if not (index.parent / name).is_file()]:
        raise UserError(
            f"{index} needs {len(names)} files; missing: {', '.join(absent)}. Complete the download or the copy."
        )
    state: dict[str, Tensor] = {}
    for name in names:
        part = read_file(index.parent / name)
        if twice := sorted(state.keys() & part.keys()):
            raise UserError(f"{index}: {twice[0]} is in {name} and in another shard.")
        state.update(part)
    if absent := sorted(_weight_map(index).keys() - state.keys()):
        raise UserError(
            f"{index} and its shards disagree: {len(absent)} tensors are in none of them, such as {absent[0]}."
        )
    return state


def _weight_map(index: Path) -> dict[str, str]:
    """Tensor -> shard; empty when `index` is something else."""
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
    except ValueError:
        return {}
    found = content.get("weight_map") if isinstance(content, dict) else None
    return {str(key): str(value) for key, value in found.items()} if isinstance(found, dict) else {}


def _is_torch_archive(path: Path) -> bool:
    try:
        with zipfile.ZipFile(path) as archive:
            return any(name.endswith("data.pkl") for name in archive.namelist())
    except zipfile.BadZipFile:  # cut off: the list of contents is at the end
        return True


def _what_instead(path: Path) -> str:
    with path.open("rb") as file:
        head = file.read(200)
    if head.startswith(b"version https://git-lfs"):
        return "it is a Git LFS pointer, a note of where the file is. Fetch the file itself: git lfs pull"
    if head.lstrip().lower().startswith((b"<!doctype", b"<html")):
        return "it is a web page. Download the file itself"
    if not head:
        return "it is empty"
    return f"neither safetensors nor a file of torch.save begins like it, {head[:12]!r}"


def _describe(content: Any) -> str:
    if not isinstance(content, Mapping):
        return type(content).__name__
    shown = [f"{key} ({type(value).__name__})" for key, value in list(content.items())[:6]]
    return ", ".join(shown) + (f" and {len(content) - 6} more" if len(content) > 6 else "") if shown else "nothing"
