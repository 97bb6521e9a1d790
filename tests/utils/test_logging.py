"""What a program shows of the package's messages."""

import io
import logging
import sys

import pytest

from opensora.utils.logging import RunLog, show_messages


@pytest.fixture
def package_logger():
    logger = logging.getLogger("opensora")
    level, handlers = logger.level, list(logger.handlers)
    logger.handlers = []
    yield logger
    logger.setLevel(level)
    logger.handlers = handlers


def test_messages_are_shown_once_however_often_it_is_asked(package_logger, capsys):
    logging.getLogger("opensora.models.x").info("too early")
    show_messages()
    show_messages()
    logging.getLogger("opensora.models.x").info("two\nlines")
    logging.getLogger("opensora.models.x").debug("too much")
    err = capsys.readouterr().err
    assert err.count("two\nlines\n") == 1
    assert "too" not in err


def test_they_go_to_the_stderr_of_the_moment(package_logger, monkeypatch):
    show_messages()
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    logging.getLogger("opensora").warning("hello")
    assert "hello" in sys.stderr.getvalue()


def test_lines_of_a_run_are_not_doubled(package_logger, capsys, tmp_path):
    show_messages()
    log = RunLog(tmp_path)
    log.line("step 1")
    log.close()
    assert capsys.readouterr().err.count("step 1") == 1
    assert (tmp_path / "log.txt").read_text().count("step 1") == 1
