"""The snapshot of the event log: a start reads equally many bytes of a long and of a short log, with equal results."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ftis_node.config.home import Home
from ftis_node.node.startup.recovery import rescue_files
from ftis_node.node.storage import event_log_snapshot
from ftis_node.node.storage.event_log_snapshot import COMPARED_BYTES, EventLogSnapshot
from ftis_node.telemetry.event_log_summary import MAX_EVALUATIONS, EventLogSummary, read_event_log_summary
from ftis_node.telemetry.events import EventLog, event_log_files

if TYPE_CHECKING:
    from collections.abc import Callable

FILE_BYTES = 1 << 20
KEPT_FILES = 3


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path)


def write_groups(home: Home, numbers: range, *, max_bytes: int = FILE_BYTES) -> None:
    """Write events like a node: each group is admitted, taken and used by a step."""
    events = EventLog(home.events, max_bytes=max_bytes, kept_files=KEPT_FILES)
    for number in numbers:
        group = number.to_bytes(32, "big")
        events.write("admitted", group=group, own=True, sender="me", number=number)
        events.write("taken", group=group, step=number, sender="me", number=number)
        events.write("step", step=number)
    events.close()


def fields_of(summary: EventLogSummary) -> tuple[object, ...]:
    return summary.step, summary.used, summary.admitted, summary.expected, summary.released, summary.last_numbers


class CountedReads:
    """Counts the bytes that are read from the log's files."""

    def __init__(self, home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_bytes = 0
        opened = Path.open

        def counted(path: Path, mode: str = "r", *more: object, **options: object) -> io.IOBase:
            file = opened(path, mode, *more, **options)  # type: ignore[call-overload]
            if not path.name.startswith(home.events.name) or mode != "rb":
                return file
            reads = self

            class Counting(io.BufferedReader):
                def read(self, size: int | None = -1) -> bytes:
                    return reads.count(super().read(size))

                def __next__(self) -> bytes:
                    return reads.count(super().__next__())

            return Counting(file.detach())

        monkeypatch.setattr(Path, "open", counted)

    def count(self, data: bytes) -> bytes:
        self.num_bytes += len(data)
        return data


def bytes_read(home: Home, work: Callable[[], object]) -> int:
    with pytest.MonkeyPatch.context() as patch:
        reads = CountedReads(home, patch)
        work()
    return reads.num_bytes


def test_a_start_reads_equally_many_bytes_of_a_long_and_a_short_log(home: Home) -> None:
    read = []
    for numbers in (range(1, 6000), range(6000, 16_000)):
        write_groups(home, numbers, max_bytes=64 << 20)
        EventLogSnapshot(home).renew()
        write_groups(home, range(numbers.stop, numbers.stop + 1), max_bytes=64 << 20)
        read.append(bytes_read(home, lambda: rescue_files(home)))
    assert home.events.stat().st_size > 5 * FILE_BYTES
    assert read[1] <= read[0] + 100 <= COMPARED_BYTES + 1000, read  # the number of the step has more digits
    home.event_log_snapshot.unlink()
    assert bytes_read(home, lambda: rescue_files(home)) > home.events.stat().st_size, (
        "without a snapshot not the whole log is read"
    )


@pytest.mark.parametrize("num_after", [0, 1, 3000, 9000])
def test_snapshot_and_tail_give_the_summary_of_the_whole_log(home: Home, num_after: int) -> None:
    write_groups(home, range(1, 2000))
    EventLogSnapshot(home).renew()
    write_groups(home, range(2000, 2000 + num_after))
    whole = read_event_log_summary(home.events)
    assert len(event_log_files(home.events)) == (4 if num_after == 9000 else 1 + (num_after > 1)), "files of the log"
    assert fields_of(EventLogSnapshot(home).read()) == fields_of(whole)


def damaged(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def older(path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(event_log_snapshot, "SNAPSHOT_VERSION", 0)
        EventLogSnapshot(Home(path.parent)).renew()


@pytest.mark.parametrize(
    "change",
    [Path.unlink, damaged, older, lambda path: path.write_bytes(b""), lambda path: path.write_bytes(b"x" * 99)],
)
def test_without_a_valid_snapshot_the_whole_log_is_read(home: Home, change: Callable[[Path], object]) -> None:
    write_groups(home, range(1, 3))
    EventLogSnapshot(home).renew()
    write_groups(home, range(3, 5))
    change(home.event_log_snapshot)
    assert fields_of(EventLogSnapshot(home).read()) == fields_of(read_event_log_summary(home.events))


def copied(log: Path) -> None:
    data = log.read_bytes()
    log.rename(log.with_suffix(".old"))
    log.write_bytes(data[: len(data) // 2])


def cut_short(log: Path) -> None:
    log.write_bytes(log.read_bytes()[:-150] + b"\n")


def edited(log: Path) -> None:
    log.write_bytes(log.read_bytes().replace(b'"number":2', b'"number":9'))


@pytest.mark.parametrize("change", [copied, cut_short, edited, Path.unlink])
def test_a_snapshot_of_another_log_is_not_used(home: Home, change: Callable[[Path], object]) -> None:
    write_groups(home, range(1, 5))
    EventLogSnapshot(home).renew()
    before = fields_of(EventLogSnapshot(home).read())
    change(home.events)
    assert fields_of(EventLogSnapshot(home).read()) == fields_of(read_event_log_summary(home.events)) != before


def test_the_snapshot_is_renewed_when_the_log_has_grown_or_rotated(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_log_snapshot, "RENEW_BYTES", 100_000)
    snapshot = EventLogSnapshot(home)
    snapshot.renew_if_due()
    assert not home.event_log_snapshot.exists(), "there is no log yet"
    write_groups(home, range(1, 2))
    snapshot.renew_if_due()
    first = home.event_log_snapshot.stat().st_ino
    write_groups(home, range(2, 5))
    snapshot.renew_if_due()
    assert home.event_log_snapshot.stat().st_ino == first
    write_groups(home, range(5, 500))
    snapshot.renew_if_due()
    assert (second := home.event_log_snapshot.stat().st_ino) != first
    write_groups(home, range(500, 501), max_bytes=1000)
    snapshot.renew_if_due()
    assert home.event_log_snapshot.stat().st_ino != second


def test_a_damaged_line_after_the_snapshot_is_reported_only_at_the_next_start(home: Home) -> None:
    write_groups(home, range(1, 3))
    EventLogSnapshot(home).renew()
    with home.events.open("ab") as log:
        log.write(b"\x80\x80\n")
    write_groups(home, range(3, 4))
    rescue_files(home)
    assert EventLogSnapshot(home).read().num_damaged == 0
    assert home.events.read_bytes().count(b'"recovered"') == 1
    rescue_files(home)
    assert home.events.read_bytes().count(b'"recovered"') == 1


def test_evaluations_are_bounded_and_the_first_one_is_kept() -> None:
    summary = EventLogSummary()
    for step in range(MAX_EVALUATIONS + 5):
        summary.add(b'{"time":1.0,"event":"eval","step":%d}\n' % step)
    steps = [event["step"] for event in summary.evaluations]
    assert (steps[0], steps[1], steps[-1], len(steps)) == (0, 6, MAX_EVALUATIONS + 4, MAX_EVALUATIONS)
