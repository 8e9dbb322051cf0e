"""The order of calls by which vLLM's core sleeps, wakes and loads weights, and the log of its start, without vLLM.

`FakeClient` replaces vLLM's core: it has one step in flight when a command comes. It stamps versions on outputs as
`EngineCore._attach_weight_version` does. It refuses what `Executor.wake_up` and `GPUWorker.sleep` of vLLM 0.32 refuse.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ftis_node.errors import (
    EngineError,
    ModelError,
    OutOfMemoryError,
    SharingError,
    UnknownArchitectureError,
    WorkerTaskError,
)
from ftis_node.generation.engines.vllm_core import VllmCore, try_sleep
from ftis_node.generation.engines.vllm_engine import explained, with_known_options
from ftis_node.generation.engines.vllm_log import LOST_CORE, WorkerLog
from ftis_node.models import ModelSource
from ftis_node.workers.weight_store import SharedWeights

LOST = -1
SHARED = SharedWeights(export_id="e", device_uuid="u", storages=(), tensors=())


class FakeClient:
    """A client of a core. `weights` is the version that steps use; `outputs` has pairs of version and stamp."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.outputs: list[tuple[int, str]] = []
        self.weights = 0
        self.refuses = ""
        self.fails: Exception | None = None
        self._stamp = "0"
        self._is_paused = False
        self._asleep: set[str] = set()
        self._level = 0
        self._under_way: int | None = 0

    def _step(self) -> None:
        """Finish the step in flight and begin the next one, as the core does between two commands."""
        if self._is_paused:
            return
        if self._under_way is not None:
            self.outputs.append((self._under_way, self._stamp))
        self._under_way = self.weights

    def sleep(self, level: int, mode: str = "abort") -> None:
        self.calls.append(f"sleep {level}")
        if level == 0:
            assert mode == "keep", "another mode ends requests in flight"
            self._step()
            self._under_way, self._is_paused = None, True
            return
        assert not self._asleep
        self._under_way, self._is_paused, self._level = None, True, level
        self._asleep = {"weights", "kv_cache"}

    def wake_up(self, tags: list[str]) -> None:
        self.calls.append("wake " + " ".join(tags))
        if tags == ["scheduling"]:
            assert not self._asleep
        elif self._asleep.issuperset(tags):
            self._asleep -= set(tags)
            if "weights" in tags and self._level == 2:
                self.weights = LOST
        if not self._asleep:
            self._is_paused = False
            self._under_way = self.weights

    def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        self.calls.append(method)
        self._step()
        if method == "ftis_open":
            return [self.refuses]
        if self.fails is not None:
            raise self.fails
        assert "weights" not in self._asleep, "there is no memory for the weights"
        self.weights += 10 if self.weights != LOST else 101
        return [{"a": self.weights}]

    def set_weight_version(self, version: str) -> None:
        self._step()
        self._stamp = version

    def run_steps(self) -> None:
        for _ in range(3):
            self._step()


def load(core: VllmCore, transfer: str, version: int) -> dict[str, int]:
    return core.load("path", version) if transfer == "file" else core.load_shared(SHARED, version)


@pytest.mark.parametrize("transfer", ["file", "shared"])
def test_each_token_has_the_version_of_the_weights_that_computed_it(transfer):
    """A completion is in flight during two transfers. The stamp of each output is the version that computed it."""
    client = FakeClient()
    core = VllmCore(client, can_sleep=True)
    for version in (10, 20):
        client.run_steps()
        assert load(core, transfer, version) == {"a": version}
        client.run_steps()
    assert {computed for computed, _ in client.outputs} == {0, 10, 20}
    assert all(str(computed) == stamp for computed, stamp in client.outputs), client.outputs
    assert "wake scheduling" in client.calls


@pytest.mark.parametrize(("discard", "level"), [(False, 1), (True, 2)])
@pytest.mark.parametrize("transfer", ["file", "shared"])
def test_new_weights_wake_the_core_and_its_cache_last(transfer, discard, level):
    client = FakeClient()
    core = VllmCore(client, can_sleep=True)
    core.sleep(discard=discard)
    core.sleep(discard=discard)  # no-op
    assert core.is_asleep
    load(core, transfer, 100 if discard else 10)
    opened = ["ftis_open"] if transfer == "shared" else []
    name = "ftis_load_shared" if transfer == "shared" else "ftis_load"
    assert client.calls == [f"sleep {level}", *opened, "wake weights", name, "wake kv_cache"]
    assert (core.is_asleep, core.has_weights) == (False, True)
    client.run_steps()
    assert all(str(computed) == stamp for computed, stamp in client.outputs)
    core.sleep(discard=False)
    core.wake()
    assert client.calls[-1] == "wake weights kv_cache"


def test_no_step_runs_on_discarded_weights():
    client = FakeClient()
    core = VllmCore(client, can_sleep=True)
    core.sleep(discard=True)
    for _ in range(2):
        with pytest.raises(WorkerTaskError, match="discarded its weights"):
            core.wake()
    assert core.is_asleep
    client.fails = ModelError("the file is gone")
    with pytest.raises(ModelError):
        core.load("path", 100)
    with pytest.raises(WorkerTaskError, match="discarded its weights"):
        core.wake()
    client.fails = None
    core.load("path", 100)
    client.run_steps()
    assert LOST not in {computed for computed, _ in client.outputs}
    assert client.calls == ["sleep 2", "wake weights", "ftis_load", "ftis_load", "wake kv_cache"]


def test_a_failed_load_leaves_the_kept_weights():
    client = FakeClient()
    core = VllmCore(client, can_sleep=True)
    client.fails = ModelError("the file is gone")
    with pytest.raises(ModelError):
        core.load("path", 10)
    assert client.calls == ["sleep 0", "ftis_load", "wake scheduling"], "the core stays paused"
    core.sleep(discard=False)
    with pytest.raises(ModelError):
        core.load("path", 10)
    assert core.is_asleep
    core.wake()
    assert client.calls[3:] == ["sleep 1", "wake weights", "ftis_load", "wake kv_cache"]
    client.run_steps()
    assert set(client.outputs) == {(0, "0")}


@pytest.mark.parametrize("asleep", [True, False])
def test_shared_weights_that_cannot_be_mapped_change_nothing(asleep):
    client = FakeClient()
    core = VllmCore(client, can_sleep=True)
    if asleep:
        core.sleep(discard=True)
    client.refuses = "CUDA IPC cannot open a handle"
    with pytest.raises(SharingError, match="^CUDA IPC cannot open a handle$"):
        core.load_shared(SHARED, 10)
    assert client.calls == ["sleep 2", "ftis_open"] if asleep else ["ftis_open"]
    assert (core.is_asleep, client.weights) == (asleep, 0)
    load(core, "file", 100 if asleep else 10)
    client.run_steps()
    assert all(str(computed) == stamp for computed, stamp in client.outputs)


def test_a_core_that_cannot_sleep_keeps_its_weights():
    client = FakeClient()
    core = VllmCore(client, can_sleep=False)
    core.sleep(discard=True)
    assert (core.is_asleep, core.has_weights, client.calls) == (True, True, [])
    core.wake()
    core.sleep(discard=True)
    load(core, "file", 10)
    assert client.calls == ["ftis_load"]
    assert not core.is_asleep


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
async def test_a_card_is_refused_if_the_engine_differs_after_its_first_sleep(tmp_path, after, expected):
    engine: Any = SleepyEngine(after)
    marker = tmp_path / "cache" / "card"
    if expected is None:
        await try_sleep(engine, (1, 2, 3), marker)
    else:
        with pytest.raises(expected[0], match=expected[1]):
            await try_sleep(engine, (1, 2, 3), marker)
    assert marker.exists() == (expected is None)


NO_MODEL = ModelSource("m", Path("models/missing"))


def refuse_graphs(**options: Any) -> dict[str, Any]:
    """Return the options as a configuration, as another vLLM that does not know one of them."""
    if "cudagraph_capture_sizes" in options:
        raise TypeError("unexpected keyword argument 'cudagraph_capture_sizes'")
    return options


def test_another_vllm_starts_without_the_options_that_it_does_not_know(caplog):
    assert with_known_options(refuse_graphs, {"kernel_config": {}}) == {"kernel_config": {}}
    assert not caplog.records
    assert with_known_options(refuse_graphs, {"cudagraph_capture_sizes": [1], "kernel_config": {}}) == {}
    assert "refuses the options of a quick start (unexpected keyword argument" in caplog.text
    with pytest.raises(ValueError, match="another cause"):
        with_known_options(lambda **options: int("another cause"), {"kernel_config": {}})


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
    "importing vLLM", "loading weights", "compiling (first start only)", "measuring memory", "warming up kernels",
    "capturing graphs",
]  # fmt: skip


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


def test_the_log_has_the_phases_of_a_start_each_of_which_is_read_once(tmp_path):
    with stderr_in(tmp_path / "log"):
        os.write(2, START_LOG.encode())
        log, read = WorkerLog(), []
        for begin in range(0, len(START_LOG), 50):  # lines come in parts
            os.write(2, START_LOG[begin : begin + 50].encode())
            read += log.new_phases()
    assert read == PHASES, "those of an earlier start are not read"


def test_a_log_that_was_truncated_is_read_from_its_beginning(tmp_path):
    """The daemon copies and truncates a long log."""
    phase = START_LOG.splitlines(keepends=True)[0].encode()
    with stderr_in(tmp_path / "log"):
        os.write(2, b"x\n" * 1000)
        log = WorkerLog()
        os.ftruncate(2, 0)
        os.write(2, phase + b"ValueError: the cause\n")
        assert (len(log.new_phases()), log.new_phases()) == (1, [])
        assert log.cause_of(LOST_CORE) == "ValueError: the cause"


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
def test_an_error_names_its_cause_in_another_process(tmp_path, cause, kind, message):
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
def test_the_message_of_vllm_decides_the_type_of_the_error(message, kind):
    assert type(explained(ValueError(message), NO_MODEL, "cpu", WorkerLog())) is kind
