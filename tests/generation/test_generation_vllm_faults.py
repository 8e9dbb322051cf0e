"""Client, worker process and vLLM's own processes together, when one of them starts, dies, hangs or cannot start.

The last tests read logs of vLLM, without vLLM.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from generation_support import EMBEDDING_ROWS, completions_of, file_tensors, fresh_logprobs, save_model, tiny_model
from generation_vllm_support import STALL_S, VLLM_MODEL, VLLM_SETTINGS, make_client

from ftis_node.errors import EngineError, OutOfMemoryError, UnknownArchitectureError, WorkerDiedError, WorkerError
from ftis_node.generation.client import GenerationClient
from ftis_node.generation.engines.base import GenerateRequest
from ftis_node.generation.engines.vllm_engine import explained
from ftis_node.generation.engines.vllm_log import LOST_CORE, WorkerLog
from ftis_node.models import ModelSource
from ftis_node.records.group import SamplingSettings
from ftis_node.workers.supervisor import WorkerState
from ftis_node.workers.weight_store import WeightStore, prove
from tests.waiting import eventually

PROMPT = (3, 1, 4, 1, 5)
START_PHASES = ["importing vLLM", "reading the configuration", "loading weights", "answering first requests"]


async def make_group(client: GenerationClient, *, max_tokens: int = 12) -> Any:
    """Request four completions of the prompt, which end at their token limit."""
    request = GenerateRequest(
        prompt_ids=PROMPT,
        num_completions=4,
        sampling=SamplingSettings(),
        max_tokens=max_tokens,
        eos_ids=frozenset(),
    )
    return await client.generate(request)


async def assert_serves(client: GenerationClient, learner: Any, *, version: int) -> None:
    """Assert that a new group is of that version, by its own report, the client's report, and its log-probs."""
    group = await make_group(client)
    assert (group.policy_version, group.policy_version_newest, client.policy_version) == (version,) * 3
    for completion in completions_of(group):
        expected = fresh_logprobs(learner, PROMPT, completion)
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-5, rtol=0)


def processes_of(client: GenerationClient) -> list[psutil.Process]:
    """Return the worker and all its descendants."""
    worker = psutil.Process(client.pid)
    return [worker, *worker.children(recursive=True)]


def find_core(client: GenerationClient) -> psutil.Process:
    """Return vLLM's engine core, the only child of the worker that has a child, vLLM's worker."""
    (core,) = (child for child in psutil.Process(client.pid).children() if child.children())
    return core


async def assert_ended(processes: list[psutil.Process], *, within_s: float = 3.0) -> None:
    """Assert that none of the processes runs. Kill those that do, so that a failed test leaves none."""
    try:
        await eventually(lambda: not any(map(is_running, processes)), within_s=within_s)
    finally:
        for process in filter(is_running, processes):
            process.kill()


def is_running(process: psutil.Process) -> bool:
    """Return whether the process is more than a zombie."""
    try:
        return process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


async def start_groups(client: GenerationClient) -> list[asyncio.Task[Any]]:
    """Start three loops that request group after group. Returns after the first group."""
    made: list[Any] = []
    tasks = [asyncio.create_task(make_groups_until_error(client, made)) for _ in range(3)]
    await eventually(lambda: bool(made))
    return tasks


async def make_groups_until_error(client: GenerationClient, made: list[Any]) -> None:
    """Request groups until one raises."""
    while True:
        made.append(await make_group(client, max_tokens=VLLM_SETTINGS.max_model_len - len(PROMPT)))


async def assert_all_died(tasks: list[asyncio.Task[Any]], *, within_s: float, match: str) -> None:
    """Assert that all tasks fail within `within_s`, by an error of the worker or by its death."""
    outcomes = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), within_s)
    assert all(isinstance(outcome, WorkerError) for outcome in outcomes), outcomes
    assert all(match in str(each) for each in outcomes if isinstance(each, WorkerDiedError)), outcomes


@pytest.mark.timeout(240)
async def test_a_separate_core_serves_new_weights_and_its_death_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The core is killed while it samples. Sleep mode is tried at the first start on a card, and not at the restart."""
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    phases: list[str] = []
    save_model(tmp_path / "model", **VLLM_MODEL)
    learner = tiny_model(seed=1, **VLLM_MODEL)
    problems: list[str] = []
    client = make_client(tmp_path, engine_core="separate", problems=problems)
    try:
        await client.start(phases.append)
        assert phases == [*START_PHASES, "trying sleep mode (once on this card)", ""]
        phases.clear()
        (inspected,) = (tmp_path / "cache" / "modelinfos").iterdir()
        written_ns = inspected.stat().st_mtime_ns
        weights = WeightStore(tmp_path / "weights").publish(1, file_tensors(learner))
        proof = prove(learner, version=1, vocab_size=EMBEDDING_ROWS)
        begun = asyncio.create_task(make_group(client, max_tokens=400))
        await eventually(lambda: client.tokens_per_s > 0)
        await client.update_weights(weights, proof)
        newest = (await begun).policy_versions_newest  # it may end before the new weights are loaded
        assert set(newest) <= {0, 1}
        await assert_serves(client, learner, version=1)

        processes, tasks = processes_of(client), await start_groups(client)
        assert len(processes) >= 3
        find_core(client).kill()
        await assert_all_died(tasks, within_s=STALL_S, match="its engine ")
        await eventually(lambda: len(problems) == 1)
        assert problems[0].startswith("is started again, because its engine ")
        await assert_ended(processes)
        await client.wait_ready()
        assert phases == [*START_PHASES, ""]
        assert inspected.stat().st_mtime_ns == written_ns, "the architecture was inspected again"
    finally:
        await client.stop()


@pytest.mark.timeout(240)
async def test_a_core_that_cannot_start_reports_its_own_error(tmp_path: Path) -> None:
    """A cache of 1,000 bytes holds no block. The error is in the core's process; the worker sees only its end."""
    save_model(tmp_path / "model", **VLLM_MODEL)
    client = make_client(tmp_path, engine_core="separate", cache_bytes=1000)
    try:
        with pytest.raises(OutOfMemoryError, match=r"for generation \(ValueError: No available memory for the cache b"):
            await client.start()
        assert (client.state, client.restarts) == (WorkerState.FAILED, 0)
    finally:
        await client.stop()


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
LOGGED_PHASES = [
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
    assert read == LOGGED_PHASES, "those of an earlier start are not read"


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
