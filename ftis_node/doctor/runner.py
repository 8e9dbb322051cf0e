"""Run checks in parallel, each within its time limit, so that a hanging check delays no other result.

A check is a function that yields results. It runs in a daemon thread, because a name server, a disk or a driver may
ignore time-outs. A check that exceeds its limit stays in its thread and ends with the process.
"""

from __future__ import annotations

import queue
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ftis_node.doctor.check_result import CheckResult
from ftis_node.errors import FtisError, NetworkError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

QUIET_S = 2.0  # seconds until progress names the open checks
PROGRESS_EVERY_S = 5.0
REPEAT_PROGRESS_S = 30.0  # the same checks are named again after this time


@dataclass(frozen=True, slots=True)
class DoctorCheck:
    """One check. `look` may take `limit_s`. `title` is the text shown while it runs."""

    name: str
    title: str
    limit_s: float
    run: Callable[[], Iterable[CheckResult]]


def run_checks(
    checks: Sequence[DoctorCheck], *, on_progress: Callable[[str], None] = lambda text: None
) -> list[CheckResult]:
    """Return the results of all checks, in the order of the checks. `on_progress` gets the open checks' titles."""
    answers: queue.SimpleQueue[tuple[str, list[CheckResult]]] = queue.SimpleQueue()
    began_at = time.monotonic()
    open_checks = {check.name: check for check in checks}
    found: dict[str, list[CheckResult]] = {}
    for check in checks:
        threading.Thread(target=_run, args=(check, answers), name=f"check-{check.name}", daemon=True).start()
    next_word_at = began_at + QUIET_S
    last_text, repeat_at = "", began_at
    while open_checks:
        next_cut_at = began_at + min(check.limit_s for check in open_checks.values())
        try:
            name, findings = answers.get(timeout=max(0.0, min(next_cut_at, next_word_at) - time.monotonic()))
        except queue.Empty:
            pass
        else:
            if open_checks.pop(name, None):
                found[name] = findings
        now = time.monotonic()
        for check in [check for check in open_checks.values() if began_at + check.limit_s <= now]:
            del open_checks[check.name]
            found[check.name] = [_cut(check)]
        if open_checks and now >= next_word_at:
            next_word_at = now + PROGRESS_EVERY_S
            text = f"still checking: {', '.join(check.title for check in open_checks.values())}"
            if text != last_text or now >= repeat_at:
                last_text, repeat_at = text, now + REPEAT_PROGRESS_S
                on_progress(text)
    return [finding for check in checks for finding in found[check.name]]


def _run(check: DoctorCheck, answers: queue.SimpleQueue[tuple[str, list[CheckResult]]]) -> None:
    findings: list[CheckResult] = []
    try:
        for finding in check.run():
            findings.append(finding)  # noqa: PERF402 - what was found before a fault counts
    except FtisError as error:
        findings.append(
            CheckResult("peer.dial" if isinstance(error, NetworkError) else "check.broken", "fail", str(error))
        )
    except Exception as error:
        advice = "report it with what `ftis-node --debug doctor` says"
        findings.append(CheckResult("check.broken", "warn", f"{check.title}: {type(error).__name__}: {error}", advice))
    answers.put((check.name, findings))


def _cut(check: DoctorCheck) -> CheckResult:
    return CheckResult(
        "check.cut", "warn", f"{check.title}: no answer within {check.limit_s:g} s, stopped", "run doctor again"
    )
