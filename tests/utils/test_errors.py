"""How a program ends when the user can mend it, or has had enough."""

import pytest

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
