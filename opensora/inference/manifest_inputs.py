"""The files that a sample is made from beside its checkpoint, as its sidecar holds them: a name does not say what is in a file.

references    a hash of what is in each local picture or video; an address from the web is known by its name alone
weights       path, time of change and step of adapter, VAE and text encoder, as of a checkpoint: hashing gigabytes
              of them would take longer than many a sample. Those on the hub or in a package are known by their names.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from opensora.inference.manifest import describe_checkpoint

PARTS = ("model", "vae", "text_encoder")
FILES = ("from_pretrained", "tokenizer")  # arguments of parts that name files
CHECKPOINT = "model.from_pretrained"  # has a field of its own in the sidecar
BLOCK = 1 << 20


def inputs_of(config: Mapping[str, Any], sources: Sequence[str]) -> dict[str, Any]:
    """What a sidecar says of a sample's inputs.

    Args:
        config: the resolved config.
        sources: files and addresses that the sample starts from.
    """
    local = [source for source in dict.fromkeys(sources) if "://" not in source]
    named = {} if config.get("lora") is None else {"lora": config["lora"]}  # a sidecar may be older than the field
    for part in PARTS:
        named |= {name: value for name, value in _files_in(config[part], part) if name != CHECKPOINT}
    return {
        "references": {source: content_hash(source) for source in local},
        "weights": {name: describe_checkpoint(value) for name, value in named.items()},
    }


def content_hash(path: str | Path) -> str | None:
    """A hash of what is in a file; None where there is none. A file is read again only when size or time have changed."""
    try:
        found = Path(path).stat()
        return _hash_of(str(path), found.st_size, found.st_mtime_ns)
    except OSError:
        return None


@lru_cache(maxsize=4096)
def _hash_of(path: str, size: int, mtime_ns: int) -> str:
    digest = hashlib.blake2b(digest_size=8)
    with Path(path).open("rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _files_in(component: Mapping[str, Any], name: str) -> Iterator[tuple[str, str]]:
    """(`vae.vae_2d.from_pretrained`, path) for every argument of a component, and of those in it, that names files."""
    for key, value in component.items():
        if isinstance(value, Mapping):
            yield from _files_in(value, f"{name}.{key}")
        elif key in FILES and isinstance(value, str):
            yield f"{name}.{key}", value
