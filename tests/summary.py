"""Two tables at the end of a test run: the time per package, and the skipped tests by reason."""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest
from _pytest.terminal import TerminalReporter

OUTCOMES = ("passed", "failed", "error", "skipped")


def write_summary(reporter: TerminalReporter) -> None:
    """Write both tables."""
    reports = [report for outcome in (*OUTCOMES, "") for report in reporter.getreports(outcome)]
    _write_packages(reporter, reports)
    _write_skips(reporter, reporter.getreports("skipped"))


def make_sendable(report: pytest.TestReport) -> None:
    """Escape lone surrogates in the log and failure of a test: pytest-xdist cannot send them."""
    report.sections = [(title, _escaped(text)) for title, text in report.sections]
    if report.longrepr is not None and (text := str(report.longrepr)) != _escaped(text):
        report.longrepr = _escaped(text)


def _escaped(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()


def package_of(nodeid: str) -> str:
    """Return `replay` for `tests/replay/test_buffer.py::test_x`, and `.` for a file directly in `tests/`."""
    parts = nodeid.split("::", 1)[0].split("/")
    return parts[1] if len(parts) > 2 else "."


def _write_packages(reporter: TerminalReporter, reports: list[pytest.TestReport]) -> None:
    seconds, tests = defaultdict[str, float](float), defaultdict[str, set[str]](set)
    for report in reports:
        package = package_of(report.nodeid)
        seconds[package] += getattr(report, "duration", 0.0)
        tests[package].add(report.nodeid)
    if not seconds:
        return
    reporter.write_sep("=", "seconds per package")
    for package, taken_s in sorted(seconds.items(), key=lambda entry: -entry[1]):
        reporter.write_line(f"{taken_s:8.1f}  {package:<12} {len(tests[package])} tests")


def _write_skips(reporter: TerminalReporter, reports: list[pytest.TestReport]) -> None:
    reasons = Counter(_reason(report) for report in reports)
    if not reasons:
        return
    reporter.write_sep("=", f"skipped: {reasons.total()}")
    for reason, count in reasons.most_common():
        reporter.write_line(f"{count:8d}  {reason}")


def _reason(report: pytest.TestReport) -> str:
    """Return the text of a skip, without the place that raised it."""
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return reason.removeprefix("Skipped: ")
