"""Names under which a VAE is shipped: one folder, and no other is touched."""

import sys

import pytest

from assets.build import ship_vae


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/tmp/a"])
def test_a_name_that_is_no_folders_name_deletes_nothing(name, tmp_path, monkeypatch, capsys):
    """`.` was the folder of all models."""
    (tmp_path / "models" / "other").mkdir(parents=True)
    monkeypatch.setattr(ship_vae, "ASSETS", tmp_path / "models")
    words = ["--about", "x", "--command", "y", "--hardware", "z", "--csv", str(tmp_path / "v.csv")]
    monkeypatch.setattr(sys, "argv", ["ship_vae", str(tmp_path / "run"), "--name", name, *words])
    with pytest.raises(SystemExit) as stop:
        ship_vae.main()
    assert stop.value.code == 2
    assert "the name of one folder" in capsys.readouterr().err
    assert (tmp_path / "models" / "other").is_dir()
