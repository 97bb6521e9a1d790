"""Checkpoints: folders that are either complete or not there.

    <run>/epoch3-global_step1500/
        manifest.json                what made it: config, commit, versions, step, data; every file with size and CRC-32
        state.json                   step, position in the data, whatever else a resume needs
        model/model.safetensors      fp32 weights; of sharded engines model-00000-of-00008.safetensors and so on
        ema/ema.safetensors          fp32 EMA weights
        optimizer/optimizer.safetensors

`save.py` writes a folder, `tensors.py` the files. No generator state is saved, because all randomness is a function of
(seed, step, position): see `opensora.utils.seed`.
"""

import logging
import secrets
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from opensora.checkpoint.save import MANIFEST, STATE, Writing
from opensora.checkpoint.tensors import SavedTensors, checksum, load_into, shard_of
from opensora.checkpoint.weight_files import find_weights, foreign_checkpoint, read_file
from opensora.utils.errors import UserError, first_few
from opensora.utils.folders import read_json

logger = logging.getLogger(__name__)

RUNTIME_PREFIXES = ("module.", "_orig_mod.", "_fsdp_wrapped_module.")


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint folder, opened for reading."""

    path: Path
    manifest: Mapping[str, Any]
    state: Mapping[str, Any]

    def tensors(self, part: str) -> SavedTensors:
        """The tensors of `part`: "model", "ema", "optimizer" and what else was saved, on the CPU; empty if it was not.

        They are read when they are asked for.
        """
        files = [name for name in self.manifest["files"] if Path(name).parent == Path(part)]
        return SavedTensors(self.path / name for name in files)


def save_checkpoint(
    path: Path,
    parts: Mapping[str, Mapping[str, Tensor]],
    *,
    state: Mapping[str, Any],
    manifest: Mapping[str, Any],
) -> Path:
    """Write a checkpoint folder from one process; a crash at any moment leaves either no `path` or a complete one.

    Args:
        path: the folder to make. One that is already there is replaced when the new one is complete.
        parts: name -> tensors, for example {"model": ..., "ema": ..., "optimizer": ...}.
        state: small values for a resume, JSON.
        manifest: what made this checkpoint, JSON.
    """
    writing = Writing(path, secrets.token_hex(4))
    whole = {part: {name: shard_of(tensor) for name, tensor in tensors.items()} for part, tensors in parts.items()}
    writing.write_own(whole, file_header(manifest))
    return writing.commit(state, manifest)


def file_header(manifest: Mapping[str, Any]) -> dict[str, str]:
    """The metadata of each file, which name its origin even outside its folder."""
    origin = {key: str(manifest[key]) for key in ("step", "model", "config_hash", "git_commit") if manifest.get(key)}
    return {"format": "pt", **origin}


def open_checkpoint(path: str | Path, *, check: Literal["size", "checksum"] = "size") -> Checkpoint:
    """Open a checkpoint folder for a resume.

    Args:
        check: "size" compares the size of every file with the manifest; "checksum" also reads them all.

    Raises:
        UserError: the folder is missing, is no checkpoint, is incomplete, or its files changed.
    """
    path = Path(path)
    if path.is_file():
        raise UserError(
            f"{path} is a file, not the folder of a checkpoint. To start from weights, name it with --ckpt-path."
        )
    if not path.is_dir():
        raise UserError(f"no checkpoint at {path}: there is no such folder.{_found_inside(path.parent)}")
    if not (path / MANIFEST).is_file():
        raise UserError(
            foreign_checkpoint(path)
            or f"{path} is not a complete checkpoint: it has no {MANIFEST}, which is written last."
            f"{_found_inside(path)}{_found_inside(path.parent)}"
        )
    manifest = _read_manifest(path)
    broken = []
    for name, size in manifest["files"].items():
        found = (path / name).stat().st_size if (path / name).is_file() else None
        if found != size:
            broken.append(f"{name} ({'missing' if found is None else f'{found} of {size} bytes'})")
    if not broken and check == "checksum":
        if "crc32" not in manifest:
            raise UserError(f"{path} was written by a version without checksums; load it with --load-check size.")
        changed = [name for name, crc in manifest["crc32"].items() if f"{checksum(path / name):08x}" != crc]
        broken = [f"{name} (its content changed)" for name in changed]
    if broken:
        raise UserError(
            f"{path} is not a complete checkpoint: {', '.join(broken)}. Load another one.{_found_inside(path.parent, path)}"
        )
    return Checkpoint(path, manifest, read_json(path / STATE, "Load another checkpoint."))


def _read_manifest(folder: Path) -> dict[str, Any]:
    manifest = read_json(folder / MANIFEST, "Load another checkpoint.")
    kinds = {"files": dict, "crc32": dict, "config": dict, "step": int}
    wrong = [name for name, kind in kinds.items() if not isinstance(manifest.get(name) or kind(), kind)]
    if wrong or not manifest.get("files"):
        raise UserError(
            f"{folder / MANIFEST} is damaged, or no checkpoint's ({', '.join(wrong) or 'files'}). Load another checkpoint."
        )
    return manifest


def latest_checkpoint(run: Path, *, check: Literal["size", "checksum"] = "size") -> Path | None:
    """The newest complete checkpoint of a run; None = it has none. The log names what is passed over."""
    for path in sorted(run.glob(".*.partial-*")):
        name = path.name[1:].rpartition(".partial-")[0]
        logger.warning("%s: the writing of %s was interrupted; it is passed over.", run, name)
    complete = complete_checkpoints(run)
    for damaged in sorted({file.parent for file in run.glob(f"[!.]*/{MANIFEST}")} - set(complete)):
        logger.warning("passed over: %s, whose %s is damaged or no checkpoint's.", damaged, MANIFEST)
    for path in reversed(complete):
        try:
            return open_checkpoint(path, check=check).path
        except (UserError, OSError) as error:
            logger.warning("passed over: %s", error)
    return None


def complete_checkpoints(run: Path) -> list[Path]:
    """The checkpoints below a run's folder that have a manifest, oldest step first."""
    found = []
    for manifest in run.glob(f"[!.]*/{MANIFEST}"):
        with suppress(UserError):  # not one of ours, damaged, or just removed
            found.append((_read_manifest(manifest.parent).get("step") or 0, manifest.parent))
    return [path for _, path in sorted(found)]


def read_weights(path: str | Path) -> Mapping[str, Tensor]:
    """Weights from one of our checkpoint folders (its EMA if there), or from whatever `find_weights` understands.

    Formats are recognised by content, never by file name. A pickle with more than plain data in it is refused. The
    tensors are mapped from disk where the format allows it: copy them, do not change them.

    Raises:
        UserError: there is nothing to read at `path`, or it is not weights.
    """
    folder = Path(path).expanduser()
    if (folder / MANIFEST).is_file():
        checkpoint = open_checkpoint(folder)
        if own := checkpoint.tensors("ema") or checkpoint.tensors("model"):
            return own
    try:
        state = read_file(find_weights(path))
    except UserError as error:
        raise UserError(f"{error}{_found_inside(folder if folder.is_dir() else folder.parent)}") from error
    result = {}
    for name, tensor in state.items():
        for prefix in RUNTIME_PREFIXES:
            name = name.removeprefix(prefix).replace(f".{prefix}", ".")
        result[name] = tensor
    if len(result) < len(state):
        raise UserError(
            f"{path} holds tensors twice, with and without one of the prefixes {', '.join(RUNTIME_PREFIXES)}."
        )
    return result


def load_strictly(
    model: nn.Module, state: Mapping[str, Tensor], source: str | Path, *, may_miss: Iterable[str] = ()
) -> None:
    """Copy `state` into `model`; every parameter and saved buffer must be there with its shape, and nothing else.

    Where the model is sharded each process takes its part. Those named in `may_miss` need not be there, and keep their
    values. A parameter on the meta device gets memory on the CPU, in its dtype, one at a time. A weight of `QuantisedLinear` whose
    scales are not in `state` is quantised.

    Raises:
        UserError: names or shapes differ; the model is left as it was.
    """
    own = model.state_dict()
    both = sorted(own.keys() & state.keys())
    found = {name: state.meta(name) if isinstance(state, SavedTensors) else state[name] for name in both}
    quantised = {name for name in both if f"{name}_scale" in own.keys() - state.keys()}
    missing = sorted(own.keys() - state.keys() - {*may_miss, *(f"{name}_scale" for name in quantised)})
    unexpected = sorted(state.keys() - own.keys())
    reshaped = [
        f"{name}: file {tuple(found[name].shape)}, model {tuple(own[name].shape)}"
        for name in both
        if found[name].shape != own[name].shape
    ]
    other_dtype = [
        f"{name}: file {found[name].dtype}, model {own[name].dtype}".replace("torch.", "")
        for name in both
        if found[name].is_floating_point() != (own[name].is_floating_point() or name in quantised)
    ]
    if missing or unexpected or reshaped or other_dtype:
        advice = "Check model.type and its sizes in the config: they must be those of the run that wrote the file."
        if missing + unexpected == ["lora_forwards"]:  # `opensora.training.lora.COUNTER`, which imports this module
            advice = "lora.dropout was 0 in the run that wrote the file, or is here, and not in both: it cannot be switched on or off."
        elif with_lora := [names is unexpected for names in (missing, unexpected) if any(".lora_" in n for n in names)]:
            advice = (
                f"The file is of a run {'with' if with_lora[0] else 'without'} lora. --load goes on with a run of the same kind; "
                "the base of a new lora is named by --ckpt-path, and `python -m tools.lora merge` makes plain weights of one."
            )
        raise UserError(
            f"{source} does not fit this {type(model).__name__} ({len(own)} tensors; the file has {len(state)}).\n"
            + _listing("missing in the file", missing, list(state))
            + _listing("in the file only", unexpected, list(own))
            + _listing("of another shape", reshaped)
            + _listing("of another dtype (quantised weights?)", other_dtype)
            + advice
        )
    for name in both:
        target = own[name]
        module, _, leaf = name.rpartition(".")
        if name in quantised:
            layer: Any = model.get_submodule(module)
            layer.store(state[name])
            continue
        if target.is_meta:
            target = nn.Parameter(torch.empty_like(target, device="cpu"), requires_grad=target.is_floating_point())
            setattr(model.get_submodule(module), leaf, target)
        load_into(target, state, name)


def _listing(title: str, names: list[str], others: Iterable[str] = ()) -> str:
    if not names:
        return ""
    lines = []
    for name in names[:5]:
        close = get_close_matches(name, others, n=1, cutoff=0.8)
        lines.append(f"    {name}" + (f"   (similar: {close[0]})" if close else ""))
    more = f"    ... and {len(names) - 5} more\n" if len(names) > 5 else ""
    return f"  {len(names)} {title}:\n" + "\n".join(lines) + "\n" + more


def _found_inside(folder: Path, but: Path | None = None) -> str:
    found = [path.name for path in complete_checkpoints(folder) if path != but] if folder.is_dir() else []
    return f" Complete checkpoints in {folder}: {', '.join(first_few(found[::-1]))}." if found else ""
