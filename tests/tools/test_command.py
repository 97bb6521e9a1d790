"""All tools have one kind of command line."""

import re
import sys
from importlib import import_module
from pathlib import Path

import pytest

from tools.command import Parser

ROOT = Path(__file__).parents[2]
FILES = sorted(file for file in (ROOT / "tools").rglob("*.py") if "\ndef main(" in file.read_text(encoding="utf-8"))
MODULES = [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in FILES]


def run(module: str, *argv: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """The exit code of a tool with that command line."""
    monkeypatch.setattr(sys, "argv", ["tool", *argv])
    with pytest.raises(SystemExit) as ended:
        import_module(module).main()
    return int(ended.value.code or 0)


@pytest.mark.parametrize("module", [name for name in MODULES if name != "tools.benchmark.__main__"])
def test_of_every_tool(module: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert run(module, "--help", monkeypatch=monkeypatch) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: python -m {module.removesuffix('.__main__')} ")
    for flag in re.findall(r"\n  (--\w+-[\w-]+) [A-Z]", text):  # `--help` follows, so that no required one is missed
        assert run(module, flag[:2] + flag[2:].replace("-", "_"), "1", "--help", monkeypatch=monkeypatch) == 0
    capsys.readouterr()
    assert run(module, "--hlep", monkeypatch=monkeypatch) == 2
    error = capsys.readouterr().err
    assert (
        "Did you mean '--help'?" in error or "required: FOLDER" in error or "config" in error
    )  # other flags are a config's
    assert hasattr(import_module(module).main, "__wrapped__"), "main without exit_on_user_error"


def test_a_flag_has_one_spelling_with_dashes_and_one_with_underscores() -> None:
    parser = Parser("What it does.")
    parser.add_argument("--data-path")
    parser.add_argument("--save_dir")
    commands = parser.add_subparsers(dest="command")
    commands.add_parser("merge").add_argument("--base-model", type=int)
    args = parser.parse_args(["--data_path=a_b", "--save-dir", "x_y", "merge", "--base_model", "3"])
    assert (args.data_path, args.save_dir, args.base_model) == ("a_b", "x_y", 3)
    known, rest = parser.parse_known_args(["--data_path", "t.csv", "--text_columns=a"])
    assert (known.data_path, rest) == ("t.csv", ["--text_columns=a"])  # a config's field is passed on as typed


def test_an_unknown_flag_comes_before_a_missing_one_and_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    parser = Parser()
    parser.add_argument("--data-path", required=True)
    parser.add_subparsers().add_parser("merge").add_argument("--scale")
    for argv, unknown, nearest in (
        (["--data_pth", "t"], "--data_pth", "Did you mean '--data-path'?"),
        (["merge", "--scal", "1"], "--scal", "Did you mean '--scale'?"),
        (["--data"], "--data", ""),  # no abbreviation
    ):
        with pytest.raises(SystemExit):
            parser.parse_args(argv)
        assert f"unrecognized argument {unknown}. {nearest}".rstrip() in capsys.readouterr().err


def test_help_wraps_text_keeps_examples_and_shows_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr(sys, "argv", ["/usr/bin/opensora doctor"])
    example = f"    python -m tools.x {'FILE ' * 12}"
    parser = Parser(f"A sentence of {'many ' * 20}words.\n\n{example}\n\nEnd.", sys.modules["tools.command"].__spec__)
    parser.add_argument("--share", type=float, default=0.5, help="in %%")
    parser.add_argument("--parts", nargs="+", default=["a", "b"])
    parser.add_argument("--fast", action="store_true", help="be fast")
    text = parser.format_help()
    assert text.startswith("usage: opensora doctor ")
    assert example in text
    assert all(len(line) < 60 for line in text.splitlines() if line != example)
    assert re.findall(r"\(default: .*\)", text) == ["(default: 0.5)", "(default: a b)"]
