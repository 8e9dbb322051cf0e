"""Progress is periodic lines in a log file, and on a terminal a bar below the log lines that disappears at the end."""

import codecs
import logging
import os
import pty
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from ftis_node.cli.progress import ProgressState, show_fraction
from ftis_node.models.hub import progress_bar_class
from ftis_node.telemetry.log import CurrentStderr
from tests.waiting import wait_until

PERIOD_S = 0.02
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@contextmanager
def open_terminal(*, term: str = "xterm-256color") -> Iterator[Callable[[], str]]:
    """Make standard error a terminal of 80 columns; give a function that reads what was written since the last call.

    It is no fixture, because pytest replaces standard error between a test's set-up and its call.
    """
    leader, follower = pty.openpty()
    os.set_blocking(leader, False)
    with os.fdopen(follower, "w", encoding="utf-8", buffering=1) as stderr, pytest.MonkeyPatch.context() as patch:
        for name, value in (("TERM", term), ("COLUMNS", "80"), ("LINES", "24")):
            patch.setenv(name, value)
        patch.setattr("sys.stderr", stderr)
        decoder = codecs.getincrementaldecoder("utf-8")()  # a read may end within a character
        yield lambda: decoder.decode(_read_all(leader))
    os.close(leader)


def _read_all(descriptor: int) -> bytes:
    data = b""
    try:
        while part := os.read(descriptor, 65536):
            data += part
    except BlockingIOError:
        pass
    return data


def _until(pattern: str, read: Callable[[], str], *, plain: bool = False) -> str:
    """Read until the output contains the pattern, and return it; `plain`: search without escape sequences."""
    output = ""

    def is_found() -> bool:
        nonlocal output
        output += read()
        return bool(re.search(pattern, ESCAPES.sub("", output) if plain else output))

    wait_until(is_found)
    return output


def test_a_log_file_gets_lines_with_the_time_left(capsys):
    printed = ""

    def read():
        nonlocal printed
        captured = capsys.readouterr()
        printed += captured.out
        return captured.err

    with show_fraction("eval", log_period_s=PERIOD_S) as show:
        show(None, "loading m into the engine")
        output = _until(r"(?m)^eval: loading m into the engine, \d+ s so far$", read)
        show(0.5, "32 of 64")
        output += _until(r"(?m)^eval: 50% 32 of 64, about \d+ s left$", read)
        show(0.502, "32 of 64")
        time.sleep(3 * PERIOD_S)
        assert read() == "", "the line would only repeat the last one"
        show(0.6, "38 of 64")
        output += _until(r"(?m)^eval: 60% 38 of 64", read)
        show(None, "")
        time.sleep(3 * PERIOD_S)
        output += read()
        time.sleep(3 * PERIOD_S)
    assert read() == "", "no work is in progress"
    assert printed == "" and "\x1b" not in output
    assert "\r" not in output


def test_a_dumb_terminal_gets_no_bar():
    with open_terminal(term="dumb") as terminal:
        with show_fraction("eval", log_period_s=PERIOD_S) as show:
            show(0.5, "32 of 64")
            output = _until(r"\n", terminal)
        output += terminal()
    assert re.fullmatch(r"eval: 50% 32 of 64, about \d+ s left", output.splitlines()[0])
    assert "\x1b" not in output


def test_a_terminal_gets_a_bar_that_disappears():
    with open_terminal() as terminal, show_fraction("eval") as show:
        show(0.5, "32 of 64 [bold]not markup[/bold]")
        drawn = _until(r"32 of 64 \[bold\]not.*about \d+ s left", terminal, plain=True)
        assert max(len(line) for line in re.split(r"[\r\n]+", ESCAPES.sub("", drawn))) <= 80
        show(None, "")
        sys.stderr.write("done")
        sys.stderr.flush()
        assert ESCAPES.sub("", _until("done", terminal)).split("\n")[-1].strip() == "done", "the bar is removed"


def test_log_lines_are_above_the_bar_and_continue_after_it():
    log = logging.Logger("above")
    log.addHandler(CurrentStderr())
    with open_terminal() as terminal, show_fraction("start") as show:
        show(None, "connecting")
        _until("connecting", terminal)
        log.warning("a log line")
        output = _until("a log line", terminal)
        assert "\x1b[2Ka log line" in re.sub(r"\x1b\[(?!2K)[0-9;?]*[A-Za-z]", "", output), (
            "the line of the bar is cleared first"
        )
        show(None, "")
        log.warning("all is done")
        assert _until("all is done\r\n", terminal).endswith("all is done\r\n")
        log.warning("the node runs")
        assert _until("\n", terminal) == "the node runs\r\n"


def test_the_time_left_counts_from_the_first_fraction():
    work = ProgressState("tiny")
    work.began_at -= 1000
    work.update(0.1, "step 1 of 10")
    assert work.time() == "about 0 s left", "work without a fraction does not count"
    work.began_at -= 30
    work.update(0.25, "step 3 of 12")
    assert work.time() == "about 1 min 30 s left"
    work.began_at -= 30_000
    assert work.time() == "about 1 d 1 h left"


def test_a_download_reports_its_bytes_and_draws_no_bar(capfd):
    reported: list[tuple[float | None, str]] = []
    make_bar = progress_bar_class("org/model", lambda fraction, what: reported.append((fraction, what)))
    with make_bar(desc="Fetching 3 files", total=3) as files, make_bar(desc="Bytes", total=0, unit="B") as data:
        data.total += 2e9
        data.update(5e8)
        data.refresh()
        files.update(1)
    assert reported[-1] == (0.25, "downloading org/model, 500 MB of 2.0 GB")
    assert all("files" not in what for _, what in reported)
    assert capfd.readouterr() == ("", "")
