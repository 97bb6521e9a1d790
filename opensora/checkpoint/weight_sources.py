"""Which file holds the weights that a name stands for: a file, a folder in one of several layouts, or a hub id."""

import logging
import re
from collections.abc import Callable, Collection, Mapping
from glob import escape
from pathlib import Path

from opensora.checkpoint.pretrained import hub_error
from opensora.checkpoint.weight_files import Kind, kind_of, shards_of
from opensora.utils.errors import UserError

log = logging.getLogger(__name__)

PIPELINE = "model_index.json"  # in the folder of a diffusers pipeline; the denoiser is in `transformer`
COLOSSALAI_STATE = "running_states.json"  # beside `model` in a checkpoint of Open-Sora's own trainer
SUFFIXES: dict[str, Kind] = {".safetensors": "safetensors", ".bin": "pickle", ".pt": "pickle", ".pth": "pickle"}
SHARD = re.compile(r"-\d+-of-(\d+)\.")
HUB_ID = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:/(.+))?")


def find_weights(name: str | Path) -> Path:
    """The file of weights, or the index of shards, that `name` means.

    `name` is a file; a folder with one set of weights (safetensors before pickles, shards with their index, the plain
    files before variants such as `.fp16.`); the folder of a diffusers pipeline; a checkpoint of Open-Sora's own trainer
    (ColossalAI's shards in `model`); or a hub id, `owner/name` or `owner/name/file`, of which only the weights and JSON
    files are downloaded, into the hub's cache.

    Raises:
        UserError: there is nothing, or several sets of weights.
    """
    path = Path(name).expanduser()
    if path.is_file():
        return path
    if path.is_dir():
        return _in_folder(path)
    return _on_hub(*_hub_id(name))


def refuse_misnamed(name: str | Path | None) -> None:
    """See, without reading or fetching anything, that a config's `model.from_pretrained` can be weights at all; None are none.

    Raises:
        UserError: there is neither a file nor a folder, and it is no hub id.
    """
    if name is None or Path(name).expanduser().exists():
        return
    try:
        _hub_id(name)
    except UserError as error:
        raise UserError(f"model.from_pretrained (--ckpt-path): {error}") from None


def _hub_id(name: str | Path) -> tuple[str, str | None]:
    """Repository and file of a hub id."""
    path = Path(name).expanduser()
    hub_id = None if str(name).startswith((".", "/", "~")) else HUB_ID.fullmatch(str(name))
    # "runs/vea" beside a folder "runs", and "a/weights.pt", are misspelt paths
    if hub_id is None or Path(path.parts[0]).exists() or (hub_id[2] is None and path.suffix in SUFFIXES):
        raise UserError(
            f"no weights at {name}: expected a checkpoint folder, a folder of diffusers, a .safetensors, .pt or .pth file, "
            "or a hub id (owner/name or owner/name/file)."
        )
    return hub_id[1], hub_id[2]


def _in_folder(folder: Path) -> Path:
    inner = folder / "transformer"
    if (folder / PIPELINE).is_file():
        if not inner.is_dir():
            raise UserError(f"{folder} is a pipeline without a folder transformer: it has no denoiser that fits here.")
        log.info("%s is a pipeline: reading its transformer", folder)
        return _in_folder(inner)
    if _is_colossalai(folder):
        averages = sorted(path for path in folder.glob("ema*") if path.is_file())
        hint = f"; for the averaged weights name {averages[0]}" if averages else ""
        log.info("%s is a checkpoint of Open-Sora's own trainer: reading its model, as that code does%s", folder, hint)
        return _in_folder(folder / "model")
    kinds = _kinds(folder)
    return folder / _the_one(_entries(kinds, lambda index: shards_of(folder / index)), str(folder), sorted(kinds))


def _is_colossalai(folder: Path) -> bool:
    model = folder / "model"
    return model.is_dir() and ((folder / COLOSSALAI_STATE).is_file() or "index" in _kinds(model).values())


def _kinds(folder: Path) -> dict[str, Kind]:
    """What each file is that could hold weights, or should: a damaged one must not make room for another beside it.

    Shards may lie deeper; their index names them.
    """
    files = [path for path in sorted(folder.iterdir()) if path.is_file() and not path.name.startswith(".")]
    kinds = {path.name: kind_of(path) or ("safetensors" if path.suffix == ".safetensors" else None) for path in files}
    return {name: kind for name, kind in kinds.items() if kind is not None}


def _entries(kinds: Mapping[str, Kind], shards: Callable[[str], Collection[str]]) -> list[str]:
    """The sets of weights among some files, each as its one file or its index, of the safest kind that is there."""
    sets = {name: shards(name) for name, kind in kinds.items() if kind == "index"}
    of_a_set = {shard for names in sets.values() for shard in names}
    entries = [name for name in kinds if name not in of_a_set]
    entries = [name for name in entries if _plain(name) == name or _plain(name) not in entries]

    def is_safe(file: str) -> bool:
        # a shard that is missing or lies deeper is judged by its suffix, so that an incomplete set stays a candidate
        return (kinds.get(file) or SUFFIXES.get(Path(file).suffix)) == "safetensors"

    safe = [name for name in entries if all(map(is_safe, sets.get(name, [name])))]
    # shards that no index names are a part of something, so they are never preferred to what is whole
    return safe if any(not _is_part(name) for name in safe) else entries


def _is_part(name: str) -> bool:
    """Whether the name is that of one shard of several."""
    numbers = SHARD.search(name)
    return numbers is not None and int(numbers[1]) > 1


def _plain(name: str) -> str:
    """The file of which `name` is a variant: `model.fp16.safetensors` and `model.safetensors.index.fp16.json`."""
    return re.sub(r"\.(?:fp16|bf16|fp32|non_ema)(?=\.)", "", name)


def _the_one(entries: list[str], where: str, candidates: list[str]) -> str:
    if not entries:
        raise UserError(f"no weights in {where}: no file there is safetensors or made by torch.save.")
    if len(entries) == 1 and _is_part(entries[0]):
        raise UserError(
            f"{entries[0]} in {where} is one shard of several, whose index (*.index.json) is missing or damaged. "
            "Complete the download or the copy."
        )
    if len(entries) == 1:
        return entries[0]
    shards = all(SHARD.search(name) for name in entries)
    hint = " They look like shards, whose index (*.index.json) is missing." if shards else ""
    raise UserError(f"{len(entries)} sets of weights in {where}: {', '.join(entries)}. Name one of them.{hint}")


def _on_hub(repo: str, file: str | None) -> Path:
    import huggingface_hub

    if file is None:
        try:
            names = [entry.rfilename for entry in huggingface_hub.HfApi().model_info(repo).siblings or []]
        except Exception as error:  # noqa: BLE001  (the client's network errors share no base over its versions)
            return _in_cache(repo, error)
        file = _choose(repo, names)
    path = _download(repo, file)
    if kind_of(path) == "index":
        _download(repo, *(f"{Path(file).parent.as_posix()}/{name}".removeprefix("./") for name in shards_of(path)))
    return path


def _choose(repo: str, names: list[str]) -> str:
    """The file to read among all files of a repository, by their names: nothing is downloaded yet."""
    base = "transformer/" if PIPELINE in names else ""
    inside = [name.removeprefix(base) for name in names if name.startswith(base)]
    kinds: dict[str, Kind] = {}
    for name in sorted(name for name in inside if "/" not in name):
        if re.search(r"\.index(\.\w+)?\.json$", name):
            kinds[name] = "index"
        elif Path(name).suffix in SUFFIXES:
            kinds[name] = SUFFIXES[Path(name).suffix]
    entries = _entries(kinds, lambda index: shards_of(_download(repo, base + index)))
    return base + _the_one(entries, f"{repo}{'/' + base if base else ''} on the hub", names)


def _download(repo: str, *files: str) -> Path:
    """Fetch files, with the JSON that says what they are, where the cache lacks them; the path of the first."""
    import huggingface_hub

    beside = [PIPELINE, *(f"{Path(file).parent.as_posix()}/config.json".removeprefix("./") for file in files)]
    try:
        # not hf_hub_download, which tries for half a minute where there is no network
        folder = huggingface_hub.snapshot_download(repo, allow_patterns=[escape(name) for name in (*files, *beside)])
    except (OSError, ValueError) as error:
        raise hub_error(f"{repo}/{files[0]}", "weights", error) from error
    if absent := [file for file in files if not (Path(folder) / file).is_file()]:
        raise UserError(f"weights: {repo} on the hub, or what is cached of it, has no file {', '.join(absent)}.")
    return Path(folder) / files[0]


def _in_cache(repo: str, error: Exception) -> Path:
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
    return _in_folder(latest.snapshot_path)
