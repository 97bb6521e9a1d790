"""docs/config.md says what the schemas and constructors say."""

import sys

import pytest

from opensora.config.schema import InferenceConfig, TrainConfig, VAETrainConfig, schema_fields
from opensora.registry import MODELS
from tools import gen_config_docs


@pytest.fixture
def docs(tmp_path, monkeypatch):
    path = tmp_path / "config.md"
    monkeypatch.setattr(gen_config_docs, "DOCS", path)

    def run(*argv):
        monkeypatch.setattr(sys, "argv", ["gen_config_docs", *argv])
        gen_config_docs.main()
        return path

    return run


def test_it_names_every_field_alias_and_component(docs):
    text = docs().read_text()
    for schema in (TrainConfig, InferenceConfig, VAETrainConfig):
        assert all(f"| `{name}` | " in text for name in schema_fields(schema))
        assert all(f"`--{name.replace('_', '-')}`" in text for name in schema.aliases)
    assert all(f"#### `{name}`" in text for name in MODELS.choices())


def test_it_is_the_same_each_time():
    assert gen_config_docs.generate() == gen_config_docs.generate()


def test_it_holds_no_address_of_an_object():
    assert " at 0x" not in gen_config_docs.generate()


def test_check_exits_1_when_the_file_is_absent_or_stale(docs, capsys):
    with pytest.raises(SystemExit) as absent:
        docs("--check")
    path = docs()
    docs("--check")
    path.write_text(path.read_text() + "edited")
    with pytest.raises(SystemExit) as stale:
        docs("--check")
    assert (absent.value.code, stale.value.code) == (1, 1)
    assert "python -m tools.gen_config_docs" in capsys.readouterr().err
