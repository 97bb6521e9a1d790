"""Data runs no code, as SECURITY.md says."""

import ast
import json
import re
from pathlib import Path

import pytest

from opensora.models.text_encoder.hf import HFTextEncoder
from opensora.utils.errors import UserError

ROOT = Path(__file__).resolve().parent.parent
CODE = [
    path
    for folder in ("opensora", "tools", "scripts", "experiments", "assets")
    for path in (ROOT / folder).rglob("*.py")
]


def calls(name: str):
    """(where, call) for each call of `something.name` in the project's code."""
    for path in CODE:
        if f".{name}(" in (text := path.read_text(encoding="utf-8")):
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == name:
                    yield f"{path.name}:{node.lineno}", node


def test_pickles_are_read_as_plain_data():
    loads = [(where, call) for where, call in calls("load") if ast.unparse(call.func) == "torch.load"]
    assert len(loads) >= 4
    assert [where for where, call in loads if "weights_only=True" not in ast.unparse(call)] == []


def test_no_code_of_a_repository_is_run():
    # `self._hub` and the options made of it hold trust_remote_code=False
    kinds = re.compile(r"\bAuto(Config|Model|Processor|Tokenizer)")
    found = [(where, ast.unparse(call)) for where, call in calls("from_pretrained")]
    automatic = [(where, text) for where, text in found if kinds.search(text)]
    assert len(automatic) >= 5
    safe = ("trust_remote_code=False", "**self._hub", "**self._tokenizer_hub", "**options")
    assert [where for where, text in automatic if not any(word in text for word in safe)] == []
    assert [where for where, text in found if "trust_remote_code=True" in text] == []


@pytest.mark.parametrize("part", ["AutoConfig", "AutoTokenizer"])
def test_a_text_encoder_with_code_is_refused(tmp_path, monkeypatch, part):
    monkeypatch.setattr("builtins.input", lambda *_: "y")  # `yes | python scripts/train.py ...`
    ran = tmp_path / "ran"
    (tmp_path / "code.py").write_text(f"open({str(ran)!r}, 'w')\nclass Thing: pass\n")
    described = {"auto_map": {part: ["code.Thing", None] if part == "AutoTokenizer" else "code.Thing"}}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "unheard_of", **described}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(described))
    for name in ("vocab.txt", "model.safetensors"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(UserError, match="text encoder"):
        HFTextEncoder(str(tmp_path))
    assert not ran.exists()
