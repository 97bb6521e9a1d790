"""A name is a folder, a folder in a package, or a hub id; a misspelt path is never asked of the hub."""

import pytest

from opensora.checkpoint.pretrained import resolve_pretrained
from opensora.utils.errors import UserError


def test_folders_packages_and_hub_ids(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "vae").mkdir(parents=True)
    assert resolve_pretrained("models/vae", what="VAE") == "models/vae"
    assert resolve_pretrained("package:opensora/models", what="VAE").endswith("opensora/models")
    for name in ("owner/name", "name"):
        assert resolve_pretrained(name, what="VAE") == name


@pytest.mark.parametrize("name", ["models/vea", "./x", "/x/y", "~/x", "a/b/c", "x/", "package:opensora/modles"])
def test_misspelt_paths(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    with pytest.raises(UserError, match="VAE: there is no folder"):
        resolve_pretrained(name, what="VAE")


def test_missing_files_are_named(tmp_path):
    (tmp_path / "config.json").touch()
    with pytest.raises(UserError, match=r"has no \*.safetensors or \*.bin"):
        resolve_pretrained(tmp_path, what="VAE", any_of=[("config.json",), ("*.safetensors", "*.bin")])
    with pytest.raises(UserError, match="is a file; pass the folder"):
        resolve_pretrained(tmp_path / "config.json", what="VAE")
