"""Scoring process: it loads tasks at its start and then scores one text after another.

Texts are untrusted, so the parent must be able to kill the process at any time. Arithmetic on huge integers runs in C
code and holds the interpreter lock, so no Python signal handler and no thread can run meanwhile. Only the kernel can
act then: by SIGTERM with its default action, by a memory limit, or by a CPU-time limit. That limit is set before each
text, and also ends a busy process whose parent was killed. A thread that watches the parent ends an idle one.
"""

from __future__ import annotations

import logging
import os
import resource
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

from ftis_node.errors import MachineError, TaskError
from ftis_node.tasks.base import Task, TaskItem

log = logging.getLogger(__name__)
PARENT_CHECK_S = 0.5
CPU_GRACE_S = 1.0
_tasks: dict[tuple[str, str], Task] = {}  # state of the scoring process, set once by start_worker


@dataclass(slots=True)
class ScoringCost:
    """Cost of scoring one group. `seconds` is CPU time of the scoring process, or the full limit if it was killed.

    `num_stopped` counts texts that used up their CPU time or ended the process. `num_lost` counts texts that this
    machine did not finish, because it is busy or because something else ended the process. None of these texts has a
    score. `share` is the part of the limits on processor time that the group may use.
    """

    share: float = 1.0
    seconds: float = 0.0
    num_stopped: int = 0
    num_lost: int = 0

    @property
    def num_unfinished(self) -> int:
        return self.num_stopped + self.num_lost


def start_worker(tasks: Sequence[Task], parent_pid: int, memory_limit_bytes: int) -> None:
    """Prepare the process: set limits, then load and warm up the tasks, so that no text pays for imports."""
    for name in (signal.SIGTERM, signal.SIGPROF):
        signal.signal(name, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_AS, (memory_limit_bytes, memory_limit_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    warnings.simplefilter("ignore")  # suppresses the compiler's warnings about untrusted text
    threading.Thread(target=_end_with_parent, args=(parent_pid,), name="watch-parent", daemon=True).start()
    for task in tasks:
        _tasks[task.name, task.split] = task
        item = task[0]
        try:
            task.score(item, f"<think>{item.answer}</think><answer>{item.answer}</answer>")
        except TaskError as error:  # only texts of this task remain unscored
            log.warning("%s", error)


class ScoringReply(NamedTuple):
    """Result of a call in the scoring process: value or exception, and CPU time."""

    value: object
    error: Exception | None
    seconds: float


def work_in_worker(work: Callable[[Task], object], name: str, split: str, time_limit_s: float) -> ScoringReply:
    """Return what `work` gives for this task; the error is a KeyError, or any other exception as a ValueError."""
    began = time.process_time()
    try:
        with _cpu_limit(time_limit_s):
            return ScoringReply(work(_tasks[name, split]), None, time.process_time() - began)
    except KeyError as error:
        return ScoringReply(None, KeyError(str(error)), time.process_time() - began)
    except Exception as error:  # its type may not be picklable
        return ScoringReply(None, ValueError(f"{type(error).__name__}: {error}"), time.process_time() - began)


def grader_fault(task: Task) -> str:
    """Return why a task cannot grade here; "" if it can, or has no check."""
    try:
        getattr(task, "check_grader", lambda: None)()
    except MachineError as error:
        return str(error)
    return ""


def checked_score(task: Task, item: TaskItem, text: str) -> float:
    """Return `task.score`, validated because a plug-in is third-party code. Raises ValueError for an invalid reward."""
    reward = float(task.score(item, text))
    if not 0.0 <= reward <= 1.0:
        raise ValueError(f"{task.name} gave the reward {reward}, which is not in [0, 1]")
    return reward


@contextmanager
def _cpu_limit(limit_s: float) -> Iterator[None]:
    """Limit the block's CPU time to `limit_s`: beyond it SIGPROF ends this process."""
    signal.setitimer(signal.ITIMER_PROF, limit_s)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    soft = ceil(time.process_time() + limit_s + CPU_GRACE_S)
    resource.setrlimit(resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_CPU, (hard, hard))


def _end_with_parent(parent_pid: int) -> None:
    """End this process when its parent has ended. A parent killed by SIGKILL cannot stop its children."""
    while os.getppid() == parent_pid:
        time.sleep(PARENT_CHECK_S)
    os._exit(1)
