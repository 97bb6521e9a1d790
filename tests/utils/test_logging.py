"""What a program shows of the package's messages."""

import io
import logging
import subprocess
import sys

import pytest

from opensora.training.run_log import RunLog
from opensora.utils import logging as ours
from opensora.utils.logging import progress_bar, show_messages


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


WORKER_IN_THE_MIDDLE_OF_A_LINE = """
import logging, multiprocessing, os, signal, sys, time
from opensora.utils.logging import show_messages

class Slow:
    def write(self, text):
        started.set()
        time.sleep(600)
    def flush(self): ...

def warn():
    sys.stderr = Slow()
    logging.getLogger("opensora").warning("a bad file")

context = multiprocessing.get_context("fork")
started = context.Event()
show_messages()
logging.getLogger("opensora").warning("before")
worker = context.Process(target=warn)
worker.start()
assert started.wait(60)
os.kill(worker.pid, signal.SIGKILL)
worker.join()
logging.getLogger("opensora").warning("still here")
"""


def test_a_worker_killed_in_the_middle_of_a_line_does_not_stop_the_program():
    result = subprocess.run(
        [sys.executable, "-c", WORKER_IN_THE_MIDDLE_OF_A_LINE], capture_output=True, text=True, timeout=60, check=True
    )
    assert "still here" in result.stderr


def test_a_bar_that_no_terminal_shows_is_a_line_now_and_then(package_logger, monkeypatch, capsys):
    show_messages()
    assert list(progress_bar(range(3), desc="measuring", unit="clip")) == [0, 1, 2]
    assert capsys.readouterr().err == ""  # it took less than a line is worth
    monkeypatch.setattr(ours, "LINE_S", 0.0)
    with progress_bar(total=3, desc="measuring", unit="clip") as bar:
        bar.update()
        bar.set_postfix(loss=0.5)
        monkeypatch.setattr(ours, "LINE_S", 30.0)
        for text in ("one", "two"):  # a message does not bring the line again
            logging.getLogger("opensora").info(text)
    err = capsys.readouterr().err
    assert "\r" not in err
    lines = [line for line in err.splitlines() if line.startswith("measuring: 1/3 clip, 00:00 so far, ")]
    assert len(lines) == 2
    assert lines[-1].endswith(" left, loss=0.5")
    assert [line[-3:] for line in err.splitlines()][-2:] == ["one", "two"]


def test_on_a_terminal_it_is_a_bar(monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    with progress_bar(total=2, desc="measuring", unit="clip", mininterval=0) as bar:
        bar.update()
    assert "\rmeasuring:  50%|" in terminal.getvalue()
