"""How a program ends when the user can mend it, or has had enough."""

import io
import os
import sys
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from opensora.registry import Registry
from opensora.utils.errors import UserError, exit_on_user_error, first_few

PARTS = Registry("part")


@PARTS.register_module()
class Half:
    def __init__(self, whole=2, channels=4):
        if whole % 2:
            raise ValueError(f"whole={whole} is odd.")
        if channels == 0:
            raise UserError("no channels at all.")


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda: PARTS.build({"type": "Half", "whole": 3}), "error: part 'Half': whole=3 is odd."),
        (
            lambda: PARTS.build({"type": "Half", "channels": 3}, channels=4),
            "error: part 'Half': the config sets channels=3",
        ),
        (lambda: PARTS.build({"type": "Half", "channels": 0}), "error: no channels at all.\n"),
    ],
    ids=["refused by the constructor", "contradicts another part", "an error of the part's own"],
)
def test_a_part_that_cannot_be_built_is_one_message(build, said, capsys):
    with pytest.raises(SystemExit) as exit_:
        exit_on_user_error(build)()
    assert exit_.value.code == 2
    assert said in capsys.readouterr().err


def test_what_no_user_can_mend_keeps_its_traceback():
    def broken():
        raise ValueError("a mistake of ours")

    with pytest.raises(ValueError, match="a mistake of ours"):
        exit_on_user_error(broken)()


def test_ctrl_c_is_one_line(capsys):
    def long():
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as exit_:
        exit_on_user_error(long)()
    assert (exit_.value.code, capsys.readouterr().err) == (130, "\ninterrupted\n")


def test_the_first_few():
    assert first_few(["a", "b"], most=2) == ["a", "b"]
    assert first_few(["a", "b", "c"], most=1) == ["a", "and 2 more"]


def ended(main, code=2):
    with pytest.raises(SystemExit) as exit_:
        exit_on_user_error(main)()
    assert exit_.value.code == code


@pytest.mark.parametrize(
    ("main", "message"),
    [
        (lambda: Path("x" * 300).exists(), f"\nerror: {'x' * 300}: File name too long.\n"),
        (lambda: Path("/dev/full").write_text("a"), "\nerror: output cannot be written: No space"),
        (lambda: save_file({"w": torch.zeros(1)}, "/no/such/w"), "\nerror: weights cannot be written: Error while serializing: I/O error"),
    ],
    ids=["a name", "a full disk", "weights"],
)  # fmt: skip
def test_what_the_system_says_of_files_is_one_line(main, message, capsys):
    ended(main)
    assert capsys.readouterr().err.startswith(message)


def test_other_errors_of_the_system_and_damaged_weights_keep_their_traceback(tmp_path):
    (tmp_path / "w").write_bytes(b"damaged")
    for main, error in (
        (lambda: os.kill(2**22 + 1, 0), ProcessLookupError),
        (lambda: load_file(tmp_path / "w"), SafetensorError),
    ):
        with pytest.raises(error):
            exit_on_user_error(main)()


def test_a_pipe_that_nobody_reads_is_one_line(monkeypatch, capsys):
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        ended(lambda: print("a lake", flush=True))
        print("at exit", flush=True)  # goes nowhere, and raises nothing
    assert capsys.readouterr().err == "\nerror: output cannot be written: Broken pipe.\n"


def test_a_terminal_that_lacks_a_character_gets_an_escape(monkeypatch):
    stdout = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stdout)
    exit_on_user_error(lambda: print("caf\xe9"))()
    stdout.flush()
    assert stdout.buffer.getvalue() == b"caf\\xe9\n"


def test_a_script_without_an_output_runs(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    exit_on_user_error(lambda: sys.stdout.write("a lake"))()
