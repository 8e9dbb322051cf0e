"""Calls in parallel processes: their progress is reported, and the first failure ends them with its reason."""

import os
import signal
import time
from pathlib import Path

import pytest

from ftis_node.errors import UsageError, WorkerDiedError
from ftis_node.lab.experiment.pool import call_in_processes, report


def write(name: str, folder: Path) -> None:
    report(name, 0.5)
    while not (folder / "go").exists():
        time.sleep(0.01)
    (folder / name).write_text(os.environ["OMP_NUM_THREADS"])


def refuse(name: str) -> None:
    raise UsageError(f"{name} is wrong")


def divide(name: str) -> None:
    raise ZeroDivisionError(name)


def die(name: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_every_call_uses_one_thread_and_reports_its_progress(tmp_path):
    seen: list[tuple[dict[str, float], int]] = []

    def watch(progress, num_left):
        seen.append((dict(progress), num_left))
        if 0.5 in progress.values():
            (tmp_path / "go").touch()  # so the third call starts after the first report

    call_in_processes(write, {name: (name, tmp_path) for name in "abc"}, jobs=2, watch=watch, failure="")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {**dict.fromkeys("abc", "1"), "go": ""}
    assert seen[-1][1] == 0
    assert {value for progress, _ in seen for value in progress.values()} == {0.0, 0.5}


@pytest.mark.parametrize(
    ("function", "error", "words"),
    [
        (refuse, UsageError, "^a is wrong$"),
        (divide, WorkerDiedError, r"^making failed: ZeroDivisionError\('a'\)$"),
        (die, WorkerDiedError, r"^making failed: its process was killed by SIGKILL \(out of memory, or manually\)$"),
    ],
)
def test_the_first_failure_is_raised_with_its_reason(function, error, words):
    with pytest.raises(error, match=words):
        call_in_processes(function, {"a": ("a",)}, jobs=1, watch=lambda *_: None, failure="making failed")  # type: ignore[arg-type]
