"""Client, worker process and vLLM's own processes together, when one of them starts, dies, hangs or cannot start."""

import asyncio
from typing import Any

import numpy as np
import psutil
import pytest
from generation_support import (
    EMBEDDING_ROWS,
    completions_of,
    file_tensors,
    fresh_logprobs,
    make_group,
    save_model,
    tiny_model,
)
from generation_vllm_support import STALL_S, VLLM_MODEL, VLLM_SETTINGS, make_client

from ftis_node.errors import OutOfMemoryError, WorkerDiedError, WorkerError
from ftis_node.generation.client import GenerationClient
from ftis_node.workers.supervisor import WorkerState
from ftis_node.workers.weight_store import prove, publish_weights
from tests.waiting import eventually

PROMPT = (3, 1, 4, 1, 5)
START_PHASES = ["importing vLLM", "reading the configuration", "loading weights", "answering first requests"]


async def assert_serves(client: GenerationClient, learner: Any, *, version: int) -> None:
    """Assert that a new group is of that version, by its own report, the client's report, and its log-probs."""
    group = await make_group(client, PROMPT)
    assert (group.policy_version, group.policy_version_newest, client.policy_version) == (version,) * 3
    for completion in completions_of(group):
        expected = fresh_logprobs(learner, PROMPT, completion)
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-5, rtol=0)


def processes_of(client: GenerationClient) -> list[psutil.Process]:
    """Return the worker and all its descendants."""
    worker = psutil.Process(client.pid)
    return [worker, *worker.children(recursive=True)]


def find_core(client: GenerationClient) -> psutil.Process:
    """Return vLLM's engine core, the child of the fork server that has a child, vLLM's worker."""
    servers = psutil.Process(client.pid).children()
    (core,) = (child for server in servers for child in server.children() if child.children())
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
        made.append(await make_group(client, PROMPT, max_tokens=VLLM_SETTINGS.max_model_len - len(PROMPT)))


async def assert_all_died(tasks: list[asyncio.Task[Any]], *, within_s: float, match: str) -> None:
    """Assert that all tasks fail within `within_s`, by an error of the worker or by its death."""
    outcomes = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), within_s)
    assert all(isinstance(outcome, WorkerError) for outcome in outcomes), outcomes
    assert all(match in str(each) for each in outcomes if isinstance(each, WorkerDiedError)), outcomes


@pytest.mark.timeout(240)
async def test_a_separate_core_serves_new_weights_and_its_death_is_reported(tmp_path, monkeypatch):
    """The core is killed while it samples. Sleep mode is tried at the first start on a card, and not at the restart."""
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    monkeypatch.delenv("VLLM_LOGGING_LEVEL", raising=False)  # an engine in this process sets it, and children inherit
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
        weights = publish_weights(tmp_path / "weights", 1, file_tensors(learner))
        proof = prove(learner, version=1, vocab_size=EMBEDDING_ROWS)
        begun = asyncio.create_task(make_group(client, PROMPT, max_tokens=400))
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
        await client.supervisor.wait_ready()
        assert phases == [*START_PHASES, ""]
        assert inspected.stat().st_mtime_ns == written_ns, "the architecture was inspected again"
    finally:
        await client.stop()


@pytest.mark.timeout(240)
async def test_a_core_that_cannot_start_reports_its_own_error(tmp_path):
    """A cache of 1,000 bytes holds no block. The error is in the core's process; the worker sees only its end."""
    save_model(tmp_path / "model", **VLLM_MODEL)
    client = make_client(tmp_path, engine_core="separate", cache_bytes=1000)
    try:
        with pytest.raises(OutOfMemoryError, match=r"for generation \(ValueError: No available memory for the cache b"):
            await client.start()
        assert (client.worker_state, client.restarts) == (WorkerState.FAILED, 0)
    finally:
        await client.stop()
