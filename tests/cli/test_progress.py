"""Progress: whole lines now and then in a log, a bar on a terminal that log lines stand above and that goes away."""

from __future__ import annotations

import logging
import os
import pty
import re
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from ftis_node.cli.progress import Work, show_fraction
from ftis_node.models.download_bar import telling_bar
from ftis_node.telemetry.log import CurrentStderr

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PERIOD_S = 0.02
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@contextmanager
def a_terminal(*, term: str = "xterm-256color") -> Iterator[Callable[[], str]]:
    """Standard error is a terminal of 80 columns; gives a function that reads what was written there since last time.

    No fixture, for between the set-up and the call of a test pytest puts its own standard error there.
    """
    leader, follower = pty.openpty()
    os.set_blocking(leader, False)
    with os.fdopen(follower, "w", encoding="utf-8", buffering=1) as stderr, pytest.MonkeyPatch.context() as patch:
        for name, value in (("TERM", term), ("COLUMNS", "80"), ("LINES", "24")):
            patch.setenv(name, value)
        patch.setattr("sys.stderr", stderr)
        yield lambda: _read_all(leader)
    os.close(leader)


def _read_all(descriptor: int) -> str:
    data = b""
    try:
        while part := os.read(descriptor, 65536):
            data += part
    except BlockingIOError:
        pass
    return data.decode()


def test_a_log_gets_whole_lines_with_the_time_left(capsys: pytest.CaptureFixture[str]) -> None:
    with show_fraction("eval", log_period_s=PERIOD_S) as show:
        show(None, "loading m into the engine")
        time.sleep(3 * PERIOD_S)
        show(0.5, "32 of 64")
        time.sleep(3 * PERIOD_S)
        show(None, "")
        time.sleep(3 * PERIOD_S)
        said_before = capsys.readouterr()
        time.sleep(3 * PERIOD_S)
    assert capsys.readouterr().err == "", "nothing is being done"
    assert said_before.out == ""
    lines = said_before.err.splitlines()
    assert "eval: loading m into the engine, 0 s so far" in lines
    assert "eval: 50% 32 of 64, about 0 s left" in lines
    assert "\x1b" not in said_before.err
    assert "\r" not in said_before.err


def test_short_work_says_nothing_in_a_log(capsys: pytest.CaptureFixture[str]) -> None:
    with show_fraction("eval") as show:
        show(0.5, "32 of 64")
    assert capsys.readouterr() == ("", "")


def test_a_dumb_terminal_gets_no_bar() -> None:
    with a_terminal(term="dumb") as terminal:
        with show_fraction("eval", log_period_s=PERIOD_S) as show:
            show(0.5, "32 of 64")
            time.sleep(3 * PERIOD_S)
        said = terminal()
    assert said.splitlines()[0] == "eval: 50% 32 of 64, about 0 s left"
    assert "\x1b" not in said


def test_a_terminal_gets_a_bar_that_goes_away() -> None:
    with a_terminal() as terminal, show_fraction("eval") as show:
        show(0.5, "32 of 64 [bold]not markup[/bold]")
        time.sleep(0.3)
        drawn = terminal()
        assert "32 of 64 [bold]not" in ESCAPES.sub("", drawn)
        assert re.search(r"about \d+ s left", ESCAPES.sub("", drawn))
        assert max(len(line) for line in re.split(r"[\r\n]+", ESCAPES.sub("", drawn))) <= 80
        show(None, "")
        assert ESCAPES.sub("", terminal()).split("\n")[-1].strip() == "", "the bar is gone"


def test_log_lines_stand_above_the_bar_and_go_on_after_it() -> None:
    log = logging.Logger("above")
    log.addHandler(CurrentStderr())
    with a_terminal() as terminal, show_fraction("start") as show:
        show(None, "connecting")
        time.sleep(0.15)
        terminal()
        log.warning("a line of its own")
        time.sleep(0.15)
        assert "\x1b[2Ka line of its own" in re.sub(r"\x1b\[(?!2K)[0-9;?]*[A-Za-z]", "", terminal()), (
            "on a cleared line"
        )
        show(None, "")
        time.sleep(0.15)
        terminal()
        log.warning("the node runs")
        time.sleep(0.15)
        assert terminal() == "the node runs\r\n"


def test_the_time_left_is_counted_from_the_begin_of_what_is_measured() -> None:
    work = Work("tiny")
    work.began_at -= 1000
    work.tell(0.1, "step 1 of 10")
    assert work.time() == "about 0 s left", "what came before had no measure"
    work.began_at -= 30
    work.tell(0.25, "step 3 of 12")
    assert work.time() == "about 90 s left"
    work.began_at -= 30_000
    assert work.time() == "about 25.0 h left"


def test_a_download_is_told_by_its_bytes_and_draws_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    told: list[tuple[float | None, str]] = []
    make_bar = telling_bar("org/model", lambda fraction, what: told.append((fraction, what)))
    with make_bar(desc="Fetching 3 files", total=3) as files, make_bar(desc="Bytes", total=0, unit="B") as data:
        data.total += 2e9
        data.update(5e8)
        data.refresh()
        files.update(1)
    assert told[-1] == (0.25, "downloading org/model, 0.5 of 2.0 GB")
    assert all("files" not in what for _, what in told)
    assert capfd.readouterr() == ("", "")
