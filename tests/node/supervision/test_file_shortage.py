"""No free file descriptor: a periodic loop skips its work once and logs it once a minute."""

import errno
import logging
import os
import resource
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager

from ftis_node.files import replace_file
from ftis_node.node.supervision.process_limits import num_open_files, skip_without_files
from ftis_node.telemetry.events import EventLog, event_log_files, read_events
from ftis_node.telemetry.log import RateLimitedLog


@contextmanager
def no_free_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (num_open_files() + 8, hard))
    taken: list[int] = []
    try:
        while True:
            taken.append(os.open("/dev/null", os.O_RDONLY))
    except OSError as error:
        assert error.errno == errno.EMFILE
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in taken:
            os.close(descriptor)


async def test_periodic_work_is_skipped_and_logged_once(tmp_path, caplog):
    shortage = RateLimitedLog()

    async def save():
        replace_file(tmp_path / "status.json", b"{}")

    async def open_database():
        sqlite3.connect(tmp_path / "replay.sqlite").execute("PRAGMA user_version")

    async def count_files():
        num_open_files()

    with caplog.at_level(logging.WARNING), no_free_descriptors():
        for work in (save, open_database, count_files):
            await skip_without_files(work, shortage)
    assert shortage.count == 3
    assert len(caplog.records) == 1 and "no file can be opened" in caplog.text


def test_the_event_log_continues_in_its_full_file(tmp_path, caplog):
    path = tmp_path / "events.jsonl"
    events = EventLog(path, max_bytes=200)
    with no_free_descriptors():
        for number in range(4):
            events.write("more", number=number, text="a" * 150)
    assert event_log_files(path) == [path]
    assert len(caplog.records) == 1 and "events.jsonl is full" in caplog.text
    events.write("more", number=4)
    events.close()
    assert [event["number"] for event in read_events(path.with_name("events.jsonl.1"))] == [0, 1, 2, 3]
    assert [event["number"] for event in read_events(path)] == [0, 1, 2, 3, 4]


def test_a_log_line_is_due_once_a_minute_and_all_calls_are_counted():
    now = [0.0]
    log = RateLimitedLog(clock=lambda: now[0])
    due = [log.is_due() for now[0] in (0, 1, 59, 60, 61, 119.5, 120)]
    assert (due, log.count) == ([True, False, False, True, False, False, True], 7)
