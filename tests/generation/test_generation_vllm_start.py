"""The start of a vLLM engine: its phases and errors in the log of its processes, and the trial of sleep mode."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ftis_node.errors import EngineError, OutOfMemoryError, UnknownArchitectureError
from ftis_node.generation.engines.sleep_trial import try_sleep
from ftis_node.generation.engines.vllm_engine import explained
from ftis_node.generation.engines.vllm_log import LOST_CORE, WorkerLog
from ftis_node.models import ModelSource

NO_MODEL = ModelSource("m", Path("models/missing"))
START_LOG = """\
2026-11-28T12:00:00+0000 INFO    ftis_node.generation.engines.vllm_log: start: importing vLLM
(EngineCore pid=7) INFO 11-28 12:00:11 [gpu_model_runner.py:5039] Starting to load model /models/m...
(EngineCore pid=7) INFO 11-28 12:00:14 [monitor.py:40] Starting torch.compile
(EngineCore pid=7) WARNING 11-28 12:00:15 [x.py:1] Starting to load model again
(EngineCore pid=7) INFO 11-28 12:00:54 [monitor.py:62] [backbone] torch.compile took 40.10 s in total
(EngineCore pid=7) INFO 11-28 12:00:58 [kernel_warmup.py:176] JIT kernel warmup starting.
(EngineCore pid=7) INFO 11-28 12:00:59 [gpu_model_runner.py:6520] Rank 0: Torch profiler disabled for CUDA graph capture
"""
PHASES = [
    "importing vLLM",
    "loading weights",
    "compiling (first start only)",
    "measuring memory",
    "warming up kernels",
    "capturing graphs",
]


@contextmanager
def stderr_in(path: Path) -> Iterator[None]:
    """Redirect the descriptor of stderr to a file."""
    kept = os.dup(2)
    with path.open("ab") as log:
        os.dup2(log.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)


def test_the_log_has_the_phases_of_a_start_each_of_which_is_read_once(tmp_path: Path) -> None:
    with stderr_in(tmp_path / "log"):
        os.write(2, START_LOG.encode())
        log, read = WorkerLog(), []
        for begin in range(0, len(START_LOG), 50):  # lines come in parts
            os.write(2, START_LOG[begin : begin + 50].encode())
            read += log.new_phases()
    assert read == PHASES, "those of an earlier start are not read"


class SleepyEngine:
    """An engine whose log-probs after a sleep are given, or raise an error."""

    def __init__(self, after: Callable[[], list[float]]) -> None:
        self._after = after
        self._num_sleeps = 0

    async def probe(self, token_ids: Any) -> list[float]:
        return self._after() if self._num_sleeps else [-1.0, -2.0]

    async def sleep(self) -> None:
        self._num_sleeps += 1

    async def wake(self) -> None:
        assert self._num_sleeps == 1


def fail(message: str) -> list[float]:
    raise RuntimeError(message)


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        (lambda: [-1.0, -2.001], None),
        (
            lambda: [-1.0, float("nan")],
            (EngineError, r"on this card \(log-probs differ by nan .*placement = \"shared\""),
        ),
        (lambda: [-1.0, -2.5], (EngineError, r"on this card \(log-probs differ by 0\.5 ")),
        (lambda: fail("double free"), (EngineError, r"on this card \(.*double free")),
        (lambda: fail("CUDA out of memory"), (RuntimeError, "^CUDA out of memory$")),  # not the card's fault
    ],
)
async def test_a_card_is_refused_if_the_engine_differs_after_its_first_sleep(
    tmp_path: Path, after: Callable[[], list[float]], expected: tuple[type[Exception], str] | None
) -> None:
    engine: Any = SleepyEngine(after)
    marker = tmp_path / "cache" / "card"
    if expected is None:
        await try_sleep(engine, (1, 2, 3), marker)
    else:
        with pytest.raises(expected[0], match=expected[1]):
            await try_sleep(engine, (1, 2, 3), marker)
    assert marker.exists() == (expected is None)


CORE_LOG = """\
(EngineCore pid=6109) WARNING 11-23 19:01:08 [core.py:99] ValueError: of no consequence
(Worker_TP1 pid=6289) ERROR 11-23 19:01:08 [multiproc_executor.py:950] WorkerProc failed to start.
(Worker_TP1 pid=6289) ERROR 11-23 19:01:08 [multiproc_executor.py:950] Traceback (most recent call last):
(Worker_TP1 pid=6289) ERROR 11-23 19:01:08 [multiproc_executor.py:950]     raise ValueError(
(Worker_TP1 pid=6289) ERROR 11-23 19:01:08 [multiproc_executor.py:950] CAUSE Tried this.
(EngineCore pid=6109) ERROR 11-23 19:01:09 [core.py:1510] EngineCore failed to start.
(EngineCore pid=6109) ERROR 11-23 19:01:09 [core.py:1510] Exception: WorkerProc initialization failed due to an \
exception in a background process. See stack trace for root cause.
Process EngineCore:
Traceback (most recent call last):
    raise e from None
Exception: WorkerProc initialization failed due to an exception in a background process. See stack trace for root cause.
"""
PARENT_ERROR = "Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore': 1}"


@pytest.mark.parametrize(
    ("cause", "kind", "message"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory.", OutOfMemoryError, "OutOfMemoryError: CUDA out of memory."),
        (
            "ValueError: Free memory on device cuda:0 (3.1/22.0 GiB) on startup is less than desired",
            OutOfMemoryError,
            "ValueError: Free memory on device cuda:0 (3.1/22.0 GiB) on startup is less than desired",
        ),
        ("RuntimeError: no kernel image is available", EngineError, "RuntimeError: no kernel image is available"),
    ],
)
def test_an_error_names_its_cause_in_another_process(
    tmp_path: Path, cause: str, kind: type[EngineError], message: str
) -> None:
    """stderr is a file meanwhile. Lines from before the engine was opened belong to another start."""
    with stderr_in(tmp_path / "log"):
        os.write(2, b"ValueError: of another start\n")
        worker_log = WorkerLog()
        assert worker_log.with_cause(LOST_CORE) == LOST_CORE, "an older line is taken for the cause"
        os.write(2, CORE_LOG.replace("CAUSE", cause).encode())
        error = explained(RuntimeError(PARENT_ERROR), NO_MODEL, "cuda", worker_log)
        lost = worker_log.with_cause(LOST_CORE)
        own = explained(ValueError("an error of this process"), NO_MODEL, "cuda", worker_log)
    assert type(error) is kind
    assert f" ({message} Tried this.; the worker" in str(error) or f" ({message} Tried this.): see" in str(error)
    assert "root cause" not in str(error)
    assert lost == f"{LOST_CORE} ({message} Tried this.)"
    assert str(own) == "vLLM fails on m: use --engine torch (an error of this process; the worker's log has more)"


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        (
            "Model architectures ['Foo'] are not supported for now. Supported architectures: ...",
            UnknownArchitectureError,
        ),
        ("The Transformers implementation of 'Foo' is not compatible with vLLM.", UnknownArchitectureError),
        ("Model architectures ['Foo'] failed to be inspected.", EngineError),
        ("No available memory for the cache blocks.", OutOfMemoryError),
    ],
)
def test_the_message_of_vllm_decides_the_type_of_the_error(message: str, kind: type[EngineError]) -> None:
    assert type(explained(ValueError(message), NO_MODEL, "cpu", WorkerLog())) is kind
