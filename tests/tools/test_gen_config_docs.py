"""docs/config.md lists what schemas and constructors take, configs/README.md what the docstrings of configs state."""

import shutil
import sys

import pytest

from opensora.config.schema import InferenceConfig, TrainConfig, VAETrainConfig, schema_fields
from opensora.registry import MODELS
from tools import gen_config_docs


@pytest.fixture
def docs(tmp_path, monkeypatch):
    shutil.copytree(gen_config_docs.ROOT / "configs", tmp_path / "configs")
    (tmp_path / "docs").mkdir()
    monkeypatch.setattr(gen_config_docs, "ROOT", tmp_path)

    def run(*argv):
        monkeypatch.setattr(sys, "argv", ["gen_config_docs", *argv])
        with pytest.raises(SystemExit) as ended:
            gen_config_docs.main()
        return ended.value.code

    return run


def test_it_names_every_field_alias_and_component():
    text = gen_config_docs.generate()
    for schema in (TrainConfig, InferenceConfig, VAETrainConfig):
        assert all(f"| `{name}` | " in text for name in schema_fields(schema))
        assert all(f"`--{name.replace('_', '-')}`" in text for name in schema.aliases)
    assert all(f"#### `{name}`\n" in text or f"\n| `{name}` | " in text for name in MODELS.choices())


def test_sizes_of_a_model_share_one_table_of_arguments():
    section = gen_config_docs.generate().split("#### `STDiT`\n")[1].split("#### ")[0]
    assert section.count("| `hidden_size` | `1152` |") == section.count("| `hidden_size` |") == 1
    assert "| `STDiT-S/2` | depth=12, hidden_size=384, num_heads=6 |" in section


def test_the_list_of_configs_has_task_weights_hardware_and_command_of_each():
    rows = [row.split(" | ") for row in gen_config_docs.list_configs().splitlines() if row.startswith("| [")]
    files = [path for path in (gen_config_docs.ROOT / "configs").rglob("*.py") if path.parent.name != "_base_"]
    assert len(rows) == len(files)
    assert all(len(row) == 5 and all(row) and f"{row[0].split('(')[1][:-1]}" in row[4] for row in rows)


def test_it_is_the_same_each_time():
    assert gen_config_docs.generate() == gen_config_docs.generate()


def test_it_holds_no_address_of_an_object():
    assert " at 0x" not in gen_config_docs.generate()


@pytest.mark.parametrize("name", ["docs/config.md", "configs/README.md"])
def test_check_exits_1_when_a_file_is_absent_or_stale(docs, name, tmp_path, capsys):
    (tmp_path / "configs/README.md").unlink()
    assert docs("--check") == 1
    assert docs() == 0
    assert docs("--check") == 0
    path = tmp_path / name
    path.write_text(path.read_text() + "edited")
    assert docs("--check") == 1
    assert "python -m tools.gen_config_docs" in capsys.readouterr().err
