"""Files of weights: which one a file name, a folder or a hub id stands for, and how it is read and written.

Files are recognised by their first bytes: safetensors, `torch.save`, and the index of a set of shards.
"""

import json
import logging
import os
import pickle
import re
import shlex
import zipfile
from collections.abc import Callable, Collection, Mapping
from glob import escape
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from opensora.checkpoint.pretrained import hub_error
from opensora.utils.dtype import to_torch_dtype
from opensora.utils.errors import UserError

log = logging.getLogger(__name__)

Kind = Literal["safetensors", "pickle", "index"]
WRAPPERS = ("ema", "state_dict_ema", "state_dict", "model", "module")  # an EMA is taken before its weights
MAX_HEADER = 100_000_000  # bytes; safetensors' own limit
# what torch.load raises for a damaged file, besides UnpicklingError
DAMAGED = (SafetensorError, RuntimeError, EOFError, ValueError, LookupError, AttributeError, TypeError, OSError)
TAKE_OUT = (
    "import sys, torch; s = torch.load(sys.argv[1], map_location='cpu', weights_only=False); "
    "s = s.state_dict() if hasattr(s, 'state_dict') else s; "
    f"torch.save({{k: s[k] for k in {WRAPPERS} if k in s}} or s, sys.argv[2])"
)
PIPELINE = "model_index.json"  # in the folder of a diffusers pipeline; the denoiser is in `transformer`
COLOSSALAI_STATE = "running_states.json"  # next to `model` in a checkpoint of Open-Sora's own trainer
SUFFIXES: dict[str, Kind] = {".safetensors": "safetensors", ".bin": "pickle", ".pt": "pickle", ".pth": "pickle"}
SHARD = re.compile(r"-\d+-of-(\d+)\.")
# names by which Open-Sora's configs call published files -> where they are: a hub id, or a URL
RELEASED = (
    (r"(DiT-XL-2-\d+x\d+\.pt)", r"https://dl.fbaipublicfiles.com/DiT/models/\1"),
    (r"Latte-XL-2-256x256-(ucf101\.pt)", r"maxin-cn/Latte/\1"),
    (r"(PixArt-XL-2-[\w-]+\.pth)", r"PixArt-alpha/PixArt-alpha/\1"),
    (r"(PixArt-Sigma-XL-2-[\w-]+\.pth)", r"PixArt-alpha/PixArt-Sigma/\1"),
    (r"(OpenSora-v1-[\w-]+\.pth)", r"hpcai-tech/Open-Sora/\1"),
)
DOWNLOADS = Path("pretrained_models")  # where Open-Sora kept them
HUB_ID = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:/(.+))?")


# --- one file


def kind_of(path: Path) -> Kind | None:
    """What `path` is, by its content; None = nothing that holds weights."""
    with path.open("rb") as file:
        head = file.read(9)
    if head[8:] == b"{" and int.from_bytes(head[:8], "little") <= MAX_HEADER:
        return "safetensors"
    if head.startswith(b"PK\x03\x04"):
        try:
            with zipfile.ZipFile(path) as archive:
                return "pickle" if any(name.endswith("data.pkl") for name in archive.namelist()) else None
        except zipfile.BadZipFile:  # cut off: the list of contents is at the end
            return "pickle"
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
    try:
        if kind == "index":
            return _read_shards(path)
        if kind == "safetensors":
            return load_file(path)
        if kind == "pickle":
            return _unwrap(_load_pickle(path), path)
    except UserError:
        raise
    except DAMAGED as error:
        raise UserError(f"{path} cannot be read as weights, it seems damaged: {error}") from error
    with path.open("rb") as file:
        head = file.read(200)
    what = f"neither safetensors nor a file of torch.save begins like it, {head[:12]!r}"
    if head.startswith(b"version https://git-lfs"):
        what = "it is a Git LFS pointer, a note of where the file is. Fetch the file itself: git lfs pull"
    elif head.lstrip().lower().startswith((b"<!doctype", b"<html")):
        what = "it is a web page. Download the file itself"
    raise UserError(f"{path} cannot be read as weights: {what if head else 'it is empty'}.")


def _shards_of(index: Path) -> list[str]:
    """The names of an index's files, relative to its folder.

    Raises:
        UserError: one of them lies outside the folder.
    """
    names = sorted(set(_weight_map(index).values()))
    for name in names:
        path = PurePosixPath(name)
        if not name or path.is_absolute() or ".." in path.parts or "\\" in name or ":" in name:
            raise UserError(f"{index} is refused: its shard {name!r} is not inside the folder of the index.")
    return names


def write_file(tensors: Mapping[str, Tensor], out: Path, *, dtype: str, header: Mapping[str, Any]) -> int:
    """Write weights as one .safetensors file, under a temporary name until complete; returns its size in bytes.

    Args:
        tensors: name -> tensor; floating-point ones are written as `dtype`.
        out: the file to make.
        dtype: "fp32", "bf16" or "fp16".
        header: what the file is and where it comes from; None is left out, other values than texts become JSON.

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
    log.info("writing %s", out)
    texts = {key: v if isinstance(v, str) else json.dumps(v, default=str) for key, v in header.items() if v is not None}
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f".{out.name}.partial-{os.getpid()}")
    try:
        save_file(copies, partial, metadata={"format": "pt", **texts})
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
        if unused := sorted(str(key) for key in content if key != wrapper):
            log.info("%s: taking %r; not used: %s", path, wrapper, ", ".join(unused[:8]))
        content = content[wrapper]
    is_dict = isinstance(content, Mapping)
    others = {key: what for key, value in content.items() if (what := _unfit(value))} if is_dict else {}
    if others or not content or not is_dict:
        names = [f"{key} ({what})" for key, what in others.items()]
        shown = ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
        raise UserError(
            f"{path} holds no dictionary of tensors alone, but: {shown or (type(content).__name__ if content else 'nothing')}. "
            f"Weights are looked for at the top and under {', '.join(WRAPPERS)}."
        )
    return {str(name): tensor.detach() for name, tensor in content.items()}


def _unfit(value: Any) -> str:
    """What a value is that has no plain array of numbers; "" = it has."""
    if not isinstance(value, Tensor) or value.is_quantized:
        return type(value).__name__ if not isinstance(value, Tensor) else str(value.dtype)
    return "" if (value.layout, value.device.type) == (torch.strided, "cpu") else f"{value.layout}, {value.device}"


def _read_shards(index: Path) -> dict[str, Tensor]:
    names = _shards_of(index)
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


# --- which file


def find_weights(name: str | Path, subfolder: str = "transformer") -> Path:
    """The file of weights, or the index of shards, that `name` means; of a diffusers pipeline, in its `subfolder`.

    `name` is a file; a folder with one set of weights (safetensors before pickles, shards with their index, the plain
    files before variants such as `.fp16.`); the folder of a diffusers pipeline; a checkpoint of Open-Sora's own trainer
    (ColossalAI's shards in `model`); a hub id, `owner/name` or a file or folder in it, `owner/name/file`, of which only
    the weights and JSON files are downloaded, into the hub's cache; or the name of one of `RELEASED`, in `DOWNLOADS` or on
    the hub.

    Raises:
        UserError: there is nothing, several sets of weights, or a checkpoint of other code that must be converted first.
    """
    path = _downloaded(name)
    if path.suffix == ".distcp" and path.is_file():
        raise UserError(foreign_checkpoint(path.parent))
    if path.is_file():
        return path
    return _in_folder(path, subfolder) if path.is_dir() else _on_hub(*_hub_id(name), subfolder)


def foreign_checkpoint(folder: Path) -> str:
    """Of a checkpoint folder of other code that cannot be resumed: what it is, and how to start from its weights; "" = of none."""
    if _of_colossalai(folder):
        ema = "".join(f", or --ckpt-path {file} (EMA)" for file in _ema_files(folder)[:1])
        return (
            f"{folder} is a checkpoint of Open-Sora's own trainer (ColossalAI), whose optimizer cannot be resumed here. Start from its "
            f"weights: --ckpt-path {folder}{ema}."
        )
    if folder.is_dir() and any(folder.glob("*.distcp")):
        out = f"{folder}.pt"
        return (
            f"{folder} is a checkpoint of torch.distributed.checkpoint, which holds pickles. Where you trust who made it, convert it and "
            f"start from its weights, --ckpt-path {out}:\n"
            f"  python -m torch.distributed.checkpoint.format_utils dcp_to_torch {shlex.quote(str(folder))} {shlex.quote(out)}"
        )
    return ""


def refuse_misnamed(name: str | Path | None, field: str = "model.from_pretrained") -> None:
    """Check, without reading or fetching anything, that a config's `field` can be weights; None is fine.

    Raises:
        UserError: there is neither a file nor a folder, and it is no hub id.
    """
    try:
        if name is not None and not _downloaded(name).exists():
            _hub_id(name)
    except UserError as error:
        raise UserError(f"{field}{' (--ckpt-path)' * (field == 'model.from_pretrained')}: {error}") from None


def _downloaded(name: str | Path) -> Path:
    """What a name means here: a bare one may also be that of a file in `DOWNLOADS`."""
    path = Path(name).expanduser()
    kept = DOWNLOADS / path
    return kept if path.parent == Path() and kept.is_file() and not path.exists() else path


def _hub_id(name: str | Path) -> tuple[str, str | None]:
    """Repository and file of a hub id."""
    path = Path(name).expanduser()
    for pattern, where in RELEASED:
        if path.parent in (Path(), DOWNLOADS) and re.fullmatch(pattern, path.name):
            where = re.sub(pattern, where, path.name)
            if "://" in where:
                raise UserError(f"no weights at {name}. Download them from {where} into the folder {DOWNLOADS}.")
            log.info("%s is not here; it is %s on the hub", name, where)
            return _hub_id(where)
    hub_id = None if str(name).startswith((".", "/", "~")) else HUB_ID.fullmatch(str(name))
    # "runs/vea" next to a folder "runs", and "a/weights.pt", are misspelt paths
    if hub_id is None or Path(path.parts[0]).exists() or (hub_id[2] is None and path.suffix in SUFFIXES):
        raise UserError(
            f"no weights at {name}: expected a checkpoint folder, a folder of diffusers, a .safetensors, .pt or .pth file, "
            "or a hub id (owner/name or owner/name/file)."
        )
    return hub_id[1], hub_id[2]


def _in_folder(folder: Path, subfolder: str = "transformer") -> Path:
    pipeline = (folder / PIPELINE).is_file() or (folder / "transformer_2").is_dir()  # or its two networks alone
    if pipeline and not (folder / subfolder).is_dir():
        raise UserError(f"{folder} is a pipeline without a folder {subfolder}: it has no denoiser that fits here.")
    if pipeline:
        log.info("%s is a pipeline: reading its %s", folder, subfolder)
        return _in_folder(folder / subfolder)
    if _of_colossalai(folder):
        hint = "".join(f"; for the EMA weights name {file}" for file in _ema_files(folder)[:1])
        log.info("%s is a checkpoint of Open-Sora's own trainer: reading its model, as that code does%s", folder, hint)
        return _in_folder(folder / "model")
    if foreign := foreign_checkpoint(folder):
        raise UserError(foreign)
    return folder / _choose(_kinds(folder), lambda index: _shards_of(folder / index), str(folder))


def _of_colossalai(folder: Path) -> bool:
    model = folder / "model"
    return model.is_dir() and ((folder / COLOSSALAI_STATE).is_file() or "index" in _kinds(model).values())


def _ema_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("ema*") if path.is_file())


def _kinds(folder: Path) -> dict[str, Kind]:
    """What each file of a folder is that could hold weights.

    A damaged safetensors file counts, so that no other file is taken in its stead. Shards may lie deeper; their index names
    them.
    """
    files = [path for path in sorted(folder.iterdir()) if path.is_file() and not path.name.startswith(".")]
    kinds = {path.name: kind_of(path) or ("safetensors" if path.suffix == ".safetensors" else None) for path in files}
    return {name: kind for name, kind in kinds.items() if kind is not None}


def _choose(kinds: Mapping[str, Kind], shards: Callable[[str], Collection[str]], where: str) -> str:
    """The one set of weights among some files, as its one file or its index, of the safest kind that is there."""
    sets = {name: shards(name) for name, kind in kinds.items() if kind == "index"}
    of_a_set = {shard for names in sets.values() for shard in names}
    entries = [name for name in kinds if name not in of_a_set]
    # `model.fp16.safetensors` and `model.safetensors.index.fp16.json` are variants of other files
    plain = {name: re.sub(r"\.(?:fp16|bf16|fp32|non_ema)(?=\.)", "", name) for name in entries}
    entries = [name for name in entries if plain[name] == name or plain[name] not in entries]

    def is_safe(file: str) -> bool:
        # a shard that is missing or lies deeper is judged by its suffix, so that an incomplete set stays a candidate
        return (kinds.get(file) or SUFFIXES.get(Path(file).suffix)) == "safetensors"

    def is_part(name: str) -> bool:
        return (numbers := SHARD.search(name)) is not None and int(numbers[1]) > 1

    safe = [name for name in entries if all(map(is_safe, sets.get(name, [name])))]
    # shards that no index names are a part of something, so they are never preferred to what is whole
    entries = safe if not all(map(is_part, safe)) else entries
    if not entries:
        raise UserError(f"no weights in {where}: no file there is safetensors or made by torch.save.")
    if len(entries) > 1:
        lost = all(SHARD.search(name) for name in entries)
        hint = " They look like shards, whose index (*.index.json) is missing." if lost else ""
        raise UserError(f"{len(entries)} sets of weights in {where}: {', '.join(entries)}. Name one of them.{hint}")
    if is_part(entries[0]):
        raise UserError(
            f"{entries[0]} in {where} is one shard of several, whose index (*.index.json) is missing or damaged. "
            "Complete the download or the copy."
        )
    return entries[0]


def _on_hub(repo: str, file: str | None, subfolder: str) -> Path:
    import huggingface_hub

    if file is None or PurePosixPath(file).suffix not in SUFFIXES:  # the whole repository, or perhaps a folder in it
        try:
            names = [entry.rfilename for entry in huggingface_hub.HfApi().model_info(repo).siblings or []]
        except Exception as error:  # noqa: BLE001  (the client's network errors share no base over its versions)
            return _in_cache(repo, file, subfolder, error)
        if file not in names:
            base = file or (subfolder if PIPELINE in names else "")
            base = base and f"{base.rstrip('/')}/"
            kinds: dict[str, Kind] = {}  # by their names: nothing is downloaded yet
            for name in sorted(name.removeprefix(base) for name in names if name.startswith(base)):
                if "/" not in name and re.search(r"\.index(\.\w+)?\.json$", name):
                    kinds[name] = "index"
                elif "/" not in name and Path(name).suffix in SUFFIXES:
                    kinds[name] = SUFFIXES[Path(name).suffix]
            where = f"{repo}{'/' + base if base else ''} on the hub"
            file = base + _choose(kinds, lambda index: _shards_of(_download(repo, base + index)), where)
    path = _download(repo, file)
    if kind_of(path) == "index":
        _download(repo, *(f"{Path(file).parent.as_posix()}/{name}".removeprefix("./") for name in _shards_of(path)))
    return path


def _download(repo: str, *files: str) -> Path:
    """Fetch files, with the JSON that describes them, where the cache lacks them; the path of the first."""
    import huggingface_hub

    configs = [PIPELINE, *(f"{Path(file).parent.as_posix()}/config.json".removeprefix("./") for file in files)]
    try:
        # not hf_hub_download, which tries for half a minute where there is no network
        folder = huggingface_hub.snapshot_download(repo, allow_patterns=[escape(name) for name in (*files, *configs)])
    except (OSError, ValueError) as error:
        raise hub_error(f"{repo}/{files[0]}", "weights", error) from error
    if absent := [file for file in files if not (Path(folder) / file).is_file()]:
        raise UserError(f"weights: {repo} on the hub, or what is cached of it, has no file {', '.join(absent)}.")
    return Path(folder) / files[0]


def _in_cache(repo: str, file: str | None, subfolder: str, error: Exception) -> Path:
    """What an earlier run downloaded, where the hub cannot be asked."""
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = scan_cache_dir(constants.HF_HUB_CACHE).repos
        cached = [entry for entry in repos if entry.repo_id == repo and entry.repo_type == "model"]
    except CacheNotFound:
        cached = []
    if not cached:
        raise hub_error(repo, "weights", error) from error
    latest = max(cached[0].revisions, key=lambda revision: ("main" in revision.refs, revision.last_modified))
    log.info("the hub was not reached (%s): reading %s from its cache", type(error).__name__, repo)
    found = latest.snapshot_path / (file or "")
    if not found.exists():
        raise hub_error(f"{repo}/{file}", "weights", error) from error
    return found if found.is_file() else _in_folder(found, subfolder)
