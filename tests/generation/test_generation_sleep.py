"""Sleep and wake of the torch engine and of the client."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from generation_fake_worker import kill_worker
from generation_support import (
    NEVER,
    SETTINGS,
    completions_of,
    file_tensors,
    generate_group,
    make_request,
    proof,
    publish,
    tiny_model,
)

from ftis_node.errors import ModelError, WorkerTaskError
from ftis_node.generation.engines.torch_engine import TorchEngine
from ftis_node.workers.supervisor import WorkerState
from ftis_node.workers.weight_store import publish_weights
from tests.waiting import eventually


@pytest_asyncio.fixture
async def engine():
    opened = TorchEngine(tiny_model(), SETTINGS)
    yield opened
    await opened.close()


def ask(engine: TorchEngine, *prompt_ids: int, max_tokens: int = 8) -> asyncio.Task[Any]:
    """Request a group of four completions."""
    return asyncio.create_task(engine.generate(make_request(prompt_ids, max_tokens=max_tokens, eos_ids=NEVER)))


async def begin(engine: TorchEngine) -> asyncio.Task[Any]:
    """Start a long group. Returns when the engine decodes it."""
    before, running = engine.tokens_made, ask(engine, 3, 1, 4, max_tokens=120)
    await eventually(lambda: engine.tokens_made > before)
    return running


async def begin_sleep(engine: TorchEngine) -> asyncio.Task[None]:
    """Start a sleep. Returns when the engine has received the request."""
    asleep = asyncio.create_task(engine.sleep())
    await asyncio.sleep(0)
    return asleep


def file_of(folder: Path, version: int, *, seed: int) -> Path:
    """Publish weights as the learner does: a tied tensor once."""
    return Path(publish_weights(folder, version, file_tensors(tiny_model(seed=seed))).path)


async def test_before_sleep_running_groups_finish_and_new_ones_wait(engine):
    running = await begin(engine)
    asleep = await begin_sleep(engine)
    waiting = ask(engine, 1, 5)
    assert not engine.is_asleep
    await asleep
    assert engine.is_asleep
    assert [len(completion.token_ids) for completion in completions_of(running.result())] == [120] * 4
    await engine.sleep()  # no-op
    with pytest.raises(WorkerTaskError, match="asleep"):
        await engine.probe((0, 1))
    await asyncio.sleep(0.05)
    assert (waiting.done(), engine.tokens_made) == (False, 480)
    await engine.wake()
    assert [len(completion.token_ids) for completion in completions_of(await waiting)] == [8] * 4
    await engine.wake()  # no-op
    assert not engine.is_asleep and len(await engine.probe((0, 1))) == 1


async def test_requests_are_canceled_during_sleep(engine):
    await engine.sleep()
    given_up, waiting = ask(engine, 9), ask(engine, 1)
    await asyncio.sleep(0)
    given_up.cancel()
    await engine.wake()
    await waiting
    assert (given_up.cancelled(), engine.tokens_made) == (True, 32)


async def test_new_weights_wake_the_engine(engine, tmp_path):
    await engine.sleep()
    waiting = ask(engine, 1, 5)
    await engine.load_weights(file_of(tmp_path, 1, seed=1), 1)
    assert not engine.is_asleep and (await waiting).policy_version == 1


async def test_a_canceled_sleep_leaves_the_engine_awake(engine):
    running = await begin(engine)
    asleep = await begin_sleep(engine)
    await engine.wake()
    with pytest.raises(WorkerTaskError, match="awakened before it slept"):
        await asleep
    asleep = await begin_sleep(engine)
    asleep.cancel()
    assert len(completions_of(await running)) == len(completions_of(await ask(engine, 2, 7))) == 4
    assert not engine.is_asleep


async def test_requests_wait_for_the_wake_and_do_not_count_as_a_hang(client):
    await client.sleep()
    await client.sleep()  # no-op
    assert client.is_asleep
    waiting = asyncio.create_task(generate_group(client))
    life = client.supervisor._life
    num_reports = life.num_reports
    await eventually(lambda: life.num_reports > num_reports)
    assert not waiting.done()
    await client.wake()
    assert len((await waiting).tokens) == 3 and not client.is_asleep


async def test_new_weights_wake_the_client_even_if_they_are_damaged(client, tmp_path):
    await client.sleep()
    await client.update_weights(publish(tmp_path, 1, "-1"), proof(1, -1.0))
    assert (await generate_group(client)).policy_version == 1
    await client.sleep()
    with pytest.raises(ModelError, match="damaged"):
        await client.update_weights(publish(tmp_path, 2, "damaged"), proof(2, -2.0))
    assert (await generate_group(client)).policy_version == 1 and not client.is_asleep


@pytest.mark.parametrize("by", ["wake", "update_weights"])
async def test_a_worker_that_dies_asleep_is_restarted_on_waking(client, tmp_path, by):
    await client.sleep()
    kill_worker(client)
    await eventually(lambda: client.worker_state is WorkerState.BACKING_OFF)
    waiting = asyncio.create_task(generate_group(client))
    await asyncio.sleep(0.2)  # four times the delay before a restart
    assert (client.worker_state, client.restarts) == (WorkerState.BACKING_OFF, 0)
    await client.sleep()  # no-op
    if by == "wake":
        await client.wake()
    else:
        await client.update_weights(publish(tmp_path, 1, "-1"), proof(1, -1.0))
    assert len((await waiting).tokens) == 3
    assert (client.worker_state, client.restarts, client.is_asleep) == (WorkerState.READY, 1, False)
