"""The scoring process: it holds the tasks that it was started with and scores one text after another.

Texts are hostile, so the process is made to be killed. A runaway sum of big integers sits in C code and holds the
interpreter's lock: no Python signal handler and no thread runs until it is done. What still works then is the kernel:
SIGTERM with its default action, a limit on memory, and a limit on CPU time that is set before each text. The last also
ends a busy process whose parent was killed; an idle one is ended by a thread that watches the parent.
"""

from __future__ import annotations

import logging
import os
import resource
import signal
import threading
import time
import warnings
from contextlib import contextmanager
from math import ceil
from typing import TYPE_CHECKING

from ftis_node.errors import TaskError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ftis_node.tasks.base import Task, TaskItem

log = logging.getLogger(__name__)

PARENT_CHECK_S = 0.5
CPU_GRACE_S = 1.0  # the parent's own limit, by the clock, should strike first

_tasks: dict[tuple[str, str], Task] = {}  # this process's own, set once by start_worker


def start_worker(tasks: Sequence[Task], parent_pid: int, memory_limit_bytes: int) -> None:
    """Prepares the process: limits first, then the tasks, warmed up so that no text pays for loading a library."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_AS, (memory_limit_bytes, memory_limit_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    warnings.simplefilter("ignore")  # a compiler's remarks on a stranger's text
    threading.Thread(target=_end_with_parent, args=(parent_pid,), name="watch-parent", daemon=True).start()
    for task in tasks:
        _tasks[task.name, task.split] = task
        item = task[0]
        try:
            task.score(item, f"<think>{item.answer}</think><answer>{item.answer}</answer>")
        except TaskError as error:  # a plug-in that cannot score: its texts come out unscored, the others' do not
            log.warning("%s", error)


def score_in_worker(item: TaskItem, text: str, time_limit_s: float) -> float:
    """The reward of one text. Raises ValueError where a task gives something that is no reward."""
    with _cpu_limit(time_limit_s + CPU_GRACE_S):
        return checked_score(_tasks[item.ref.task, item.ref.split], item, text)


def checked_score(task: Task, item: TaskItem, text: str) -> float:
    """`task.score`, which for a plug-in's task is somebody else's word. Raises ValueError where it is no reward."""
    reward = float(task.score(item, text))
    if not 0.0 <= reward <= 1.0:
        raise ValueError(f"{task.name} gave the reward {reward}, which is not in [0, 1]")
    return reward


@contextmanager
def _cpu_limit(limit_s: float) -> Iterator[None]:
    """The kernel ends this process if the block uses more CPU time than `limit_s`, rounded up to whole seconds."""
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    soft = ceil(time.process_time() + limit_s)
    resource.setrlimit(resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_CPU, (hard, hard))


def _end_with_parent(parent_pid: int) -> None:
    """A parent killed by SIGKILL cannot stop its children, but they get another parent."""
    while os.getppid() == parent_pid:
        time.sleep(PARENT_CHECK_S)
    os._exit(1)
