"""A task whose texts name a fault, for tests of the scoring process."""

import ctypes
import mmap
import os
import time
from typing import ClassVar

from ftis_node.records.group import PromptRef
from ftis_node.tasks.base import TaskItem


class HostileTask:
    """Scores a number as itself; any other text names the fault that scoring has."""

    name: ClassVar[str] = "hostile"
    split: ClassVar[str] = "train"

    def __init__(self, *, isolate: bool = True) -> None:
        self.isolate_scoring = isolate

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> TaskItem:
        if index != 0:
            raise IndexError(index)
        return TaskItem(PromptRef(self.name, self.split, 0), ({"role": "user", "content": "obey"},), "1")

    def resolve(self, ref: PromptRef) -> TaskItem:
        return self[ref.index]

    def score(self, item: TaskItem, completion_text: str) -> float:
        match completion_text:
            case "sleep":
                time.sleep(600)
            case "stuck":  # C code that holds the interpreter's lock and runs no Python signal handler
                return float(sum(range(10**13)))
            case "memory":
                mmap.mmap(-1, 2 << 30).close()
                return 0.0
            case "segfault":
                ctypes.string_at(0)
            case "exit":
                os._exit(0)
            case "raise":
                raise RuntimeError("the requested error")
            case "pid":
                return 1 / os.getpid()
        return 1.0 if completion_text.startswith("<think>") else float(completion_text)


class DyingTask(HostileTask):
    """Ends every process that scores with it."""

    def score(self, item: TaskItem, completion_text: str) -> float:
        os._exit(3)


class HangingTask(HostileTask):
    """Never ends scoring, so that its process is never ready."""

    def score(self, item: TaskItem, completion_text: str) -> float:
        time.sleep(600)
        return 0.0


class UnpicklableTask(HostileTask):
    """Has an attribute that cannot be pickled."""

    def __init__(self) -> None:
        super().__init__()
        self.handle = lambda: None
