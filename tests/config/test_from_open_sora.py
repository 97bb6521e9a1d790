"""Every row of docs/how-to/from-open-sora.md: the old key, flag or program is accepted and means what the row says."""

import ast
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from opensora.config.command_line import dashed
from opensora.config.load import TrainConfig, parse_config, to_dict
from opensora.config.schema import schema_fields
from opensora.utils.errors import UserError
from tests.config.open_sora import COMPONENTS, Facts, all_files, schema_of, write

ROOT = Path(__file__).parents[2]
BASES = {
    "train": "1.2/opensora-v1-2/train/stage2",
    "inference": "1.2/opensora-v1-2/inference/sample",
    "train_vae": "1.2/vae/train/stage1",
    "inference_vae": "1.2/vae/inference/video",
}


def rows(title: str) -> list[tuple[str, ...]]:
    """The cells of a section's table, without the remarks."""
    section = (ROOT / "docs/how-to/from-open-sora.md").read_text().partition(f"## {title}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")][2:]
    return [tuple(cell.strip().strip("`") for cell in line.split("|")[1:-2]) for line in lines]


def assignments(text: str) -> Iterator[tuple[str, object]]:
    for part in text.split("; "):
        path, _, value = part.partition(" = ")
        yield path, ast.literal_eval(value)


def base_of(script: str) -> Facts:
    """Of a file of Open-Sora, without what a row sets."""
    facts = all_files()[BASES[script]]
    own = (
        "mixed_strategy",
        "mixed_image_ratio",
        "use_z_rec_loss",
        "use_image_identity_loss",
        "plugin",
        "grad_checkpoint",
    )
    return {key: value for key, value in facts.items() if script != "train_vae" or key not in own}


def put(facts: Facts, text: str) -> Facts:
    """The facts with the assignments of a row."""
    facts = dict(facts)
    for path, value in assignments(text):
        name, _, key = path.partition(".")
        name = name if name in facts or name != "vae" else "model"  # of a VAE's file
        facts[name] = {**facts[name], key: value} if key else value
    return facts


@pytest.fixture
def parse(tmp_path):
    def parse(script: str, facts: Facts, *argv: str) -> Facts:
        data = [] if script == "inference" or "--data-path" in argv else ["--data-path", "clips.csv"]
        path = write(facts, tmp_path / "config.py")
        return to_dict(parse_config(schema_of(BASES[script]), COMPONENTS, [path, *data, *argv]))

    return parse


@pytest.mark.parametrize(("script", "old", "new"), rows("Keys of config files"))
def test_a_key(parse, caplog, script, old, new):
    base = base_of(script)
    if "scheduler" in new:  # the file's has these keys already
        base["scheduler"] = {"type": "rflow"}
    if "discriminator_start" in old:
        base["discriminator"] = {"type": "PatchDiscriminator"}
    if new == "no":
        with pytest.raises(UserError, match=old.partition(" = ")[0]):
            parse(script, put(base, old))
        return
    found = parse(script, put(base, old))
    notes = caplog.text
    if new == "the same":
        ((key, value),) = assignments(old)
        assert found[key] == value
    elif new == "no effect":
        assert found == parse(script, base)
        assert old.partition(" = ")[0] in notes
    else:
        assert found == parse(script, {key: v for key, v in put(base, new).items() if "loss_weight" not in key})


@pytest.mark.parametrize(("script", "old", "new"), rows("Command line"))
def test_a_flag(parse, script, old, new):
    base = base_of(script)
    if new == "no":
        flag, value = shlex.split(old)
        with pytest.raises(
            UserError,
            match=f"{flag} is (not a field|no option)|{flag[2:].replace('-', '_')}='?{value}'?: .*(ffmpeg|prompt-path)",
        ):
            parse(script, base, flag, value)
    else:
        expected = put(base, new)
        data = ["--data-path", str(expected.pop("data_path"))] if "data_path" in expected else []
        assert parse(script, base, *shlex.split(old)) == parse(script, expected, *data)


def test_a_flag_that_asks_for_nothing(parse):
    off = ["--watermark", "False", "--prompt-generator", ""]
    assert parse("inference", base_of("inference"), *off) == parse("inference", base_of("inference"))


@pytest.mark.slow
@pytest.mark.parametrize("new", [new for _, new in rows("Programs")])
def test_a_program(monkeypatch, capsys, new):
    """It is there, and its flags are its own or those of the config."""
    words = shlex.split(new)
    flags = {word for word in words if word.startswith("--")}
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["program", "--help"])
    program, name = (runpy.run_module, words[1]) if words[0] == "-m" else (runpy.run_path, words[0])
    with pytest.raises(SystemExit, match="0"):
        program(name, run_name="__main__")
    printed = set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
    fields = {f"--{dashed(name)}" for name in [*schema_fields(TrainConfig), *TrainConfig.aliases]}
    assert flags <= printed | fields
