"""Sleep and wake of the torch engine, of vLLM in a worker, and of the client.

On a CPU, vLLM's worker frees no memory. Its core pauses and resumes as on a GPU, and that is tested here.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from generation_fake_worker import kill_worker
from generation_support import (
    EMBEDDING_ROWS,
    NEVER,
    SETTINGS,
    MakeClient,
    completions_of,
    generate_group,
    make_request,
    proof,
    publish,
    save_model,
    tiny_model,
)

from ftis_node.errors import ModelError, WorkerTaskError
from ftis_node.generation.engines.base import GenerationResult
from ftis_node.generation.engines.torch_engine import TorchEngine
from ftis_node.generation.messages import (
    GenerationBoot,
    LoadWeights,
    Probe,
    Probed,
    Sleep,
    TokensMade,
    Wake,
    WeightsLoaded,
)
from ftis_node.generation.time_limits import TimeLimits
from ftis_node.workers.liveness import Timing
from ftis_node.workers.process import WorkerSpec
from ftis_node.workers.supervisor import Supervisor, WorkerState
from ftis_node.workers.weight_store import WeightStore, prove
from ftis_node.workers.wire import Done
from tests.loop_clock import LoopClock
from tests.waiting import eventually

VLLM_SHAPE = {"head_dim": 32, "num_layers": 4}  # vLLM's attention has no smaller heads


@pytest_asyncio.fixture
async def engine() -> AsyncIterator[TorchEngine]:
    opened = TorchEngine(tiny_model(), SETTINGS)
    yield opened
    await opened.close()


def ask(engine: TorchEngine, *prompt_ids: int, max_tokens: int = 8) -> asyncio.Task[Any]:
    """Request a group of four completions. Its request id is `r` and the first prompt id."""
    request = make_request(prompt_ids, max_tokens=max_tokens, eos_ids=NEVER, request_id=f"r{prompt_ids[0]}")
    return asyncio.create_task(engine.generate(request))


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


def file_of(folder: Path, version: int, *, seed: int, **options: Any) -> Path:
    """Publish weights as the learner does: a tied tensor once."""
    tensors = tiny_model(seed=seed, **options).state_dict()
    del tensors["lm_head.weight"]
    return Path(WeightStore(folder).publish(version, tensors).path)


async def test_before_sleep_running_groups_finish_and_new_ones_wait(engine: TorchEngine) -> None:
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
    assert not engine.is_asleep
    assert len(await engine.probe((0, 1))) == 1


async def test_requests_are_canceled_during_sleep(engine: TorchEngine) -> None:
    await engine.sleep()
    cut, given_up, waiting = ask(engine, 6), ask(engine, 9), ask(engine, 1)
    await asyncio.sleep(0)
    given_up.cancel()
    engine.cancel(["r6"])
    with pytest.raises(WorkerTaskError, match="before its first token"):
        await asyncio.wait_for(cut, 30)
    assert engine.is_asleep
    await engine.wake()
    await waiting
    assert (given_up.cancelled(), engine.tokens_made) == (True, 32)


async def test_new_weights_wake_the_engine(engine: TorchEngine, tmp_path: Path) -> None:
    await engine.sleep()
    waiting = ask(engine, 1, 5)
    await engine.load_weights(file_of(tmp_path, 1, seed=1), 1)
    assert not engine.is_asleep
    assert (await waiting).policy_version == 1


async def test_a_canceled_sleep_leaves_the_engine_awake(engine: TorchEngine) -> None:
    running = await begin(engine)
    asleep = await begin_sleep(engine)
    await engine.wake()
    with pytest.raises(WorkerTaskError, match="awakened before it slept"):
        await asleep
    asleep = await begin_sleep(engine)
    asleep.cancel()
    assert len(completions_of(await running)) == len(completions_of(await ask(engine, 2, 7))) == 4
    assert not engine.is_asleep


@pytest.mark.timeout(180)
async def test_a_vllm_worker_sleeps_and_wakes_by_request_and_by_new_weights(tmp_path: Path) -> None:
    """With `can_sleep`, vLLM's core pauses, although its CPU worker keeps the memory."""
    settings = msgspec.structs.replace(SETTINGS, max_model_len=256, can_sleep=True)
    boot = GenerationBoot(model=str(save_model(tmp_path / "model", **VLLM_SHAPE)), settings=settings, engine="vllm")
    worker = Supervisor(
        WorkerSpec(
            name="generation",
            module="ftis_node.generation.worker",
            boot=boot,
            sockets_dir=tmp_path / "s",
            log_path=tmp_path / "worker.log",
            event_types=(TokensMade,),
            environment={"OMP_NUM_THREADS": "1"},
        ),
        timing=Timing(heartbeat_every_s=0.1, stall_timeout_s=2.0),
    )

    def make(*prompt_ids: int, max_tokens: int = 8) -> asyncio.Task[GenerationResult]:
        request = make_request(prompt_ids, max_tokens=max_tokens, seed=None, eos_ids=NEVER)
        return asyncio.create_task(worker.call(request, GenerationResult))

    try:
        await worker.start()
        await worker.call(Wake(), Done)  # no-op: it is awake
        running = make(3, 1, 4, max_tokens=120)
        await worker.call(Probe(token_ids=(0, 1)), Probed)  # the reply shows that the group is admitted
        await worker.call(Sleep(), Done)
        assert (await running).tokens.lengths.tolist() == [120] * 4
        waiting, given_up = make(1, 5), make(9, 2)
        await worker.call(Sleep(), Done)  # no-op: it sleeps
        with pytest.raises(WorkerTaskError, match="asleep"):
            await worker.call(Probe(token_ids=(0, 1)), Probed)
        given_up.cancel()
        await asyncio.sleep(3.0)  # longer than `stall_timeout_s`, which does not count during sleep
        assert not waiting.done()
        await worker.call(Wake(), Done)
        assert (await waiting).policy_versions == (0,) * 4
        await worker.call(Sleep(), Done)
        waiting = make(1, 5)
        weights = file_of(tmp_path / "weights", 1, seed=1, **VLLM_SHAPE)
        await worker.call(LoadWeights(path=str(weights), version=1), WeightsLoaded)
        assert (await waiting).policy_versions == (1,) * 4
        expected = prove(tiny_model(seed=1, **VLLM_SHAPE), version=1, vocab_size=EMBEDDING_ROWS)
        probed = await worker.call(Probe(token_ids=expected.probe_ids), Probed)
        assert expected.rms_difference(probed.logprobs) < 1e-4
        await worker.call(Sleep(), Done)
        waiting = make(1, 5)
        weights.write_bytes(weights.read_bytes()[:-8])
        with pytest.raises(ModelError):
            await worker.call(LoadWeights(path=str(weights), version=2), WeightsLoaded)
        assert (await waiting).policy_versions == (1,) * 4  # awake although the load failed
        assert worker.restarts == 0
    finally:
        await worker.stop()


async def test_the_time_limit_of_a_request_excludes_sleep(make_client: MakeClient) -> None:
    client = make_client(request_timeout_s=0.5)
    await client.start()
    await client.sleep()
    await client.sleep()  # no-op
    assert client.is_asleep
    waiting = asyncio.create_task(generate_group(client))
    await asyncio.sleep(0.8)
    assert not waiting.done()
    await client.wake()
    assert len((await waiting).tokens) == 3
    assert not client.is_asleep


async def test_new_weights_wake_the_client_even_if_they_are_damaged(make_client: MakeClient, tmp_path: Path) -> None:
    client = make_client()
    await client.start()
    await client.sleep()
    await client.update_weights(publish(tmp_path, 1, "-1"), proof(1, -1.0))
    assert (await generate_group(client)).policy_version == 1
    await client.sleep()
    with pytest.raises(ModelError, match="damaged"):
        await client.update_weights(publish(tmp_path, 2, "damaged"), proof(2, -2.0))
    assert (await generate_group(client)).policy_version == 1
    assert not client.is_asleep


@pytest.mark.parametrize("by", ["wake", "update_weights"])
async def test_a_worker_that_dies_asleep_is_restarted_on_waking(
    make_client: MakeClient,
    tmp_path: Path,
    by: str,
) -> None:
    client = make_client()
    await client.start()
    await client.sleep()
    kill_worker(client)
    await eventually(lambda: client.state is WorkerState.BACKING_OFF)
    waiting = asyncio.create_task(generate_group(client))
    await asyncio.sleep(0.5)  # ten times the delay before a restart
    assert (client.state, client.restarts) == (WorkerState.BACKING_OFF, 0)
    await client.sleep()  # no-op
    if by == "wake":
        await client.wake()
    else:
        await client.update_weights(publish(tmp_path, 1, "-1"), proof(1, -1.0))
    assert len((await waiting).tokens) == 3
    assert (client.state, client.restarts, client.is_asleep) == (WorkerState.READY, 1, False)


async def test_a_time_limit_counts_only_time_awake(monkeypatch: pytest.MonkeyPatch) -> None:
    limits, clock = TimeLimits(2.0), LoopClock(monkeypatch)

    async def call() -> None:
        async with limits.of_a_call():
            await asyncio.sleep(60)

    early = asyncio.create_task(call())
    await clock.advance(1.5)
    limits.pause()
    late = asyncio.create_task(call())
    await clock.advance(2.0)
    limits.resume()
    await clock.advance(0.4)
    assert not early.done()
    await clock.advance(0.2)
    assert isinstance(early.exception(), TimeoutError)
    assert not late.done()
    await clock.advance(1.5)
    assert isinstance(late.exception(), TimeoutError)
