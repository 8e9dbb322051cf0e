"""The client with a fake worker, which fails on request: transfer, proofs, deaths, the token rate."""

import asyncio
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from generation_fake_worker import UNANSWERED, kill_worker
from generation_support import EOS_ID, completions_of, generate_group, proof, publish

from ftis_node.errors import EngineError, ModelError, WorkerDiedError
from ftis_node.generation.client import Throughput
from ftis_node.generation.engines.base import GenerationResult
from ftis_node.generation.messages import Probe, Probed, StartPhase
from ftis_node.records.group import Completion, FinishReason
from ftis_node.records.token_batch import TokenBatch
from ftis_node.workers import wire
from ftis_node.workers.supervisor import WorkerState
from tests.waiting import eventually


async def test_a_client_returns_the_completions_of_a_group(make_client):
    client = make_client()
    assert not client.is_alive
    await client.start()
    assert client.engine == "fake" and client.worker_state is WorkerState.READY
    result = await generate_group(client)
    assert [completion.token_ids.tolist() for completion in completions_of(result)] == [[4, 5, EOS_ID]] * 3
    assert completions_of(result)[0].token_ids.dtype == np.int32
    assert completions_of(result)[0].logprobs.tolist() == [-0.5] * 3
    assert completions_of(result)[0].finish_reason is FinishReason.STOP
    assert client.restarts == 0

    async def has_token_rate():
        await generate_group(client)
        return client.tokens_per_s > 0

    await eventually(has_token_rate)  # the worker reports its tokens


async def test_phases_are_reported_after_a_later_start(client):
    phases: list[str] = []
    await client.start(phases.append)
    await client.start()
    client._take_event(StartPhase("compiling"))
    assert phases == ["compiling"]


def test_a_reply_of_inconsistent_sizes_is_refused():
    tokens = TokenBatch.from_parts([[1, 2], [3]], [[-0.5, -0.5], [-1.0]])
    valid = GenerationResult(tokens, (FinishReason.STOP,) * 2, (0, 0), (0, 0))
    for changes in ({"policy_versions": (0,)}, {"tokens": replace(tokens, logprobs=tokens.logprobs[1:])}):
        with pytest.raises(ValueError, match="inconsistent sizes"):
            msgspec.structs.replace(valid, **changes)
    (_, body) = wire.pack(wire.Reply(call_id=1), valid)
    with pytest.raises(msgspec.ValidationError, match="multiple of element size"):
        wire.unpack_body(body.replace(b"\xc4\x0c", b"\xc4\x0b", 1)[:-1], GenerationResult)


def test_a_reply_keeps_the_versions_of_each_completion():
    token, logprob = np.array([1], dtype=np.int32), np.zeros(1, dtype=np.float32)
    mixed = GenerationResult.from_completions(
        tuple(
            Completion(token, logprob, FinishReason.STOP, policy_version=first, policy_version_newest=last)
            for first, last in ((4, 4), (3, 6), (5, 5))
        )
    )
    (_, body) = wire.pack(wire.Reply(call_id=1), mixed)
    again = wire.unpack_body(body, GenerationResult)
    assert again == mixed and again.tokens.logprobs.dtype == np.float32
    versions = [(completion.policy_version, completion.policy_version_newest) for completion in completions_of(again)]
    assert versions == [(4, 4), (3, 6), (5, 5)]
    assert (again.policy_version, again.policy_version_newest) == (3, 6)


async def test_a_tensor_with_slightly_other_values_fails_the_proof(client, problems, tmp_path):
    await client.update_weights(publish(tmp_path, 1, "-3.5", tensor="number"), proof(1, -3.5))
    assert problems == []
    (tmp_path / "stale-weights").write_text("1")  # -3.5 stays
    await client.update_weights(publish(tmp_path, 2, "-3.500001", tensor="number"), proof(2, -3.500001))
    difference = "holds other values than were published in 1 of 1 tensors, such as number"
    assert problems == [f"{difference} after it was given version 2"]
    assert (client.restarts, client.policy_version) == (0, 2)


@pytest.mark.parametrize(("content", "before"), [("-9.0", None), ("nan", 1), ("damaged", 1)])
async def test_foreign_weights_that_fail_leave_the_previous_ones(client, tmp_path, content, before):
    if before is not None:
        await client.try_weights(publish(tmp_path, before, "-1.5"), proof(before, -1.5))
    with pytest.raises(ModelError):
        await client.try_weights(publish(tmp_path, 2, content), proof(2, -3.5))
    assert client.policy_version == (before or 0)
    assert (await generate_group(client)).policy_version == (before or 0)
    assert client.restarts == (0 if content == "damaged" else 1), "a restart removes weights that were loaded"
    kill_worker(client)
    await eventually(lambda: client.restarts == (1 if content == "damaged" else 2))
    await client.supervisor.wait_ready()
    assert client.policy_version == (before or 0), "also after a restart"
    await client.try_weights(publish(tmp_path, 3, "-4.5"), proof(3, -4.5))
    assert client.policy_version == 3


@pytest.mark.parametrize(("method", "then"), [("update_weights", 2), ("try_weights", 1)])
async def test_a_worker_that_dies_during_a_transfer_restarts(client, tmp_path, method, then):
    """It gets the learner's new weights, but foreign ones are not tried again."""
    await client.update_weights(publish(tmp_path, 1, "-1.5"), proof(1, -1.5))
    replacing = asyncio.create_task(getattr(client, method)(publish(tmp_path, 2, "-2.5"), proof(2, -2.5)))
    await asyncio.sleep(0)
    kill_worker(client)
    with pytest.raises(WorkerDiedError):
        await replacing
    await client.supervisor.wait_ready()
    assert (await generate_group(client)).policy_version == client.policy_version == then


@pytest.mark.parametrize("file", ["stale-weights", "stale-version"])
async def test_two_failed_proofs_restart_the_worker_with_the_newest_weights(client, problems, tmp_path, file):
    pid = client.pid
    (tmp_path / file).write_text("2")
    await client.update_weights(publish(tmp_path, 1, "-3.5"), proof(1, -3.5))
    assert len(problems) == 2 and client.pid != pid
    assert (client.restarts, client.policy_version) == (1, 1)
    assert (await generate_group(client)).policy_version == 1
    assert "given version 1" in str(client.supervisor._last_error)


async def test_a_worker_that_fails_every_proof_is_given_up(client, tmp_path):
    (tmp_path / "stale-weights").write_text("1000")
    with pytest.raises(EngineError, match=r"3 times in a row.*differs from the learner by 3.5 nats.*: use another one"):
        await client.update_weights(publish(tmp_path, 1, "-3.5"), proof(1, -3.5))
    assert client.worker_state is WorkerState.FAILED and not client.is_alive


async def test_a_worker_that_computes_the_starting_model_otherwise_is_refused(client):
    probed = (await client.supervisor.call(Probe(token_ids=(1, 2, 3)), Probed)).logprobs
    await client.check_start(proof(0, probed[0]))
    with pytest.raises(EngineError, match=r"^the engine .* differs from the learner by 2 nats .*: use another one"):
        await client.check_start(proof(0, probed[0] - 2))


async def test_a_proof_passes_within_its_tolerance(make_client, tmp_path):
    problems: list[str] = []
    client = make_client(on_problem=problems.append, proof_tolerance=0.1)
    await client.start()
    await client.update_weights(publish(tmp_path, 1, "-3.5"), proof(1, -3.59))
    assert problems == []
    (tmp_path / "stale-weights").write_text("1")  # -3.5 stays
    await client.update_weights(publish(tmp_path, 2, "-3.61"), proof(2, -3.61))
    assert len(problems) == 1


async def test_a_worker_restarts_although_its_weight_file_was_withdrawn(client, problems, tmp_path):
    """A learner that died before its checkpoint withdraws its published weights. Then the generator dies, too."""
    weights = publish(tmp_path, 1, "-1")
    await client.update_weights(weights, proof(1, -1.0))
    Path(weights.path).unlink()  # noqa: ASYNC240 - at once
    kill_worker(client)
    await eventually(lambda: client.restarts == 1)
    assert (await generate_group(client)).policy_version == client.policy_version == 0
    assert len(problems) == 1
    assert problems[0].startswith("serves the model as it came, until there are new weights: ")

    await client.update_weights(publish(tmp_path, 1, "-1.5"), proof(1, -1.5))  # step 1, trained again
    kill_worker(client)
    await eventually(lambda: client.restarts == 2)
    assert (await generate_group(client)).policy_version == client.policy_version == 1
    assert len(problems) == 1


async def test_a_broken_engine_is_restarted_and_reported(client, problems, tmp_path):
    await client.update_weights(publish(tmp_path, 1, "-1"), proof(1, -1.0))
    call = asyncio.create_task(generate_group(client, prompt_ids=(UNANSWERED,)))
    await eventually((tmp_path / "unanswered").exists)
    (tmp_path / "new-broken").write_text("lost its core")
    (tmp_path / "new-broken").rename(tmp_path / "broken")
    with pytest.raises(WorkerDiedError, match="is started again, because its engine lost its core"):
        await call
    (tmp_path / "broken").unlink()
    assert (await generate_group(client)).policy_version == client.policy_version == 1
    assert problems == ["is started again, because its engine lost its core"]
    assert client.restarts == 1


async def test_stop_closes_the_engine(client, tmp_path):
    await client.stop()
    assert (tmp_path / "closed").exists()


@pytest.mark.parametrize(
    ("totals", "rates"),
    [
        ({second: 100 * second for second in range(21)}, {20: 100.0, 25: 50.0, 40: 0.0}),
        ({0: 0, 100: 400}, {100: 40.0}),  # a burst after idle time
        ({0: 1000, 1: 2000, 2: 50, 4: 150}, {4: 50.0}),  # a worker that began again
        ({}, {0: 0.0}),
    ],
)
def test_the_token_rate_is_that_of_the_last_seconds(totals, rates):
    throughput = Throughput(window_s=10.0)
    for at_s, total in totals.items():
        throughput.reach(total, at_s=float(at_s))
    assert {now_s: throughput.per_second(now_s=float(now_s)) for now_s in rates} == rates
