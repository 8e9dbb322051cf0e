"""The client and shared weights that are served, refused, changed or fatal, and weights discarded during sleep.

The worker is scripted (`generation_fake_worker`), and the learner writes files on request.
"""

import asyncio
import logging
from pathlib import Path

import msgspec
import pytest
from generation_fake_worker import checksum_of, kill_worker
from generation_support import SETTINGS, generate_group, proof, publish

from ftis_node.errors import ModelError, SharingError, WorkerDiedError
from ftis_node.generation.client import GenerationClient
from ftis_node.generation.weight_loader import WeightLoader, known
from ftis_node.workers.weight_store import PublishedWeights, SharedWeights
from tests.waiting import eventually

SLEEPS = msgspec.structs.replace(SETTINGS, can_sleep=True)
REFUSAL = "CUDA IPC cannot open a handle"


class Learner:
    """A learner that writes its weights to a file on request.

    `requests` has the reason of each request, "" for a request of one file only. `fallbacks` has the reported reasons.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.requests: list[str] = []
        self.fallbacks: list[str] = []
        self.version, self.number = 1, "-1"
        self.error: Exception | None = None
        self.has_weights = True

    async def write_weights(self, refused: str) -> PublishedWeights | None:
        self.requests.append(refused)
        if self.error is not None:
            raise self.error
        if not self.has_weights:
            return None
        written = publish(self._folder, self.version, self.number)
        return msgspec.structs.replace(written, transfer="pinned", fell_back=self.requests[0])


@pytest.fixture
def learner(tmp_path):
    return Learner(tmp_path)


@pytest.fixture
async def client(learner, make_client):
    """A started client that may ask the learner for a file."""
    made = make_client(settings=SLEEPS, write_weights=learner.write_weights, on_fall_back=learner.fallbacks.append)
    await made.start()
    return made


def share(version: int, number: str) -> PublishedWeights:
    """Return weights in the learner's memory, without a file."""
    shared = SharedWeights(export_id=number, device_uuid="", storages=(), tensors=())
    checksums = {"number": checksum_of(float(number))}
    return PublishedWeights(version=version, path="", num_bytes=0, checksums=checksums, transfer="ipc", shared=shared)


def script_sharing(folder: Path, outcome: str) -> None:
    (folder / "sharing").write_text(outcome)


def lines(folder: Path, name: str) -> list[str]:
    return (folder / name).read_text().splitlines() if (folder / name).exists() else []


async def served(client: GenerationClient) -> tuple[int, int, int]:
    """Return the version of a new group, the version of the client, and the number of restarts."""
    return (await generate_group(client)).policy_version, client.policy_version, client.restarts


async def test_shared_weights_are_served_without_a_file(learner, client):
    assert client.weight_transfer == ""
    for version in (1, 2):
        await client.update_weights(share(version, f"-{version}"), proof(version, -float(version)))
        assert await served(client) == (version, version, 0)
    assert (client.weight_transfer, learner.requests, learner.fallbacks) == ("CUDA IPC", [], [])


@pytest.mark.parametrize("has_weights", [True, False])
async def test_after_a_pause_the_memory_of_the_former_learner_is_not_read(learner, client, tmp_path, has_weights):
    """The next learner may also be at an earlier version."""
    await client.update_weights(share(7, "-7"), proof(7, -7.0))
    await client.supervisor.pause()
    (tmp_path / "shared").unlink()
    client.begin_with(share(5, "-5") if has_weights else None, proof(5, -5.0))
    client.supervisor.resume()
    await client.supervisor.wait_ready()
    assert client.policy_version == 5 * has_weights
    assert lines(tmp_path, "shared") == ["5 -5"] * has_weights
    assert (learner.requests, learner.fallbacks, client.restarts) == ([], [], 0)


@pytest.mark.parametrize("asleep", [True, False])
async def test_a_refused_transfer_falls_back_to_files_for_good(learner, client, tmp_path, caplog, asleep):
    script_sharing(tmp_path, "refused")
    if asleep:
        await client.sleep(discard=True)
    with caplog.at_level(logging.WARNING):
        await client.update_weights(share(1, "-1"), proof(1, -1.0))
        assert await served(client) == (1, 1, 0)
        await client.update_weights(await learner.write_weights(""), proof(1, -1.0))
    assert (learner.requests, learner.fallbacks) == ([REFUSAL, ""], [REFUSAL])
    assert client.weight_transfer == f"page-locked file ({REFUSAL})"
    warnings = [record.getMessage() for record in caplog.records if "weight transfer failed" in record.getMessage()]
    assert warnings == [f"fast weight transfer failed, using files: {REFUSAL}"]


@pytest.mark.parametrize("outcome", ["fatal", "failing"])
async def test_a_worker_that_fails_on_shared_weights_restarts_with_files(learner, client, tmp_path, outcome):
    script_sharing(tmp_path, outcome)
    if outcome == "fatal":
        with pytest.raises(WorkerDiedError):
            await client.update_weights(share(1, "-1"), proof(1, -1.0))
        await client.start()
    else:
        await client.update_weights(share(1, "-1"), proof(1, -1.0))
    assert await served(client) == (1, 1, 1)
    assert lines(tmp_path, "shared") == [f"1 {outcome}"]
    reason = "the generation worker died when it read weights in the learner's memory"
    assert (learner.requests, learner.fallbacks) == ([reason], [reason])


@pytest.mark.parametrize("has_changed", [False, True])
async def test_a_restarted_worker_opens_the_shared_weights_again_unless_they_have_changed(
    learner, client, tmp_path, has_changed
):
    """If the checksums differ, the learner's present weights come in a file. Later versions are shared again."""
    await client.update_weights(share(1, "-1"), proof(1, -1.0))
    if has_changed:
        script_sharing(tmp_path, "-1.5")
        learner.version, learner.number = 2, "-2"
    await kill(client)
    assert await served(client) == ((2, 2, 1) if has_changed else (1, 1, 1))
    assert (learner.requests, learner.fallbacks) == ([""] if has_changed else [], [])
    (tmp_path / "sharing").unlink(missing_ok=True)
    await client.update_weights(share(2, "-2"), proof(2, -2.0))
    assert (client.weight_transfer, client.restarts) == ("CUDA IPC", 1)


@pytest.mark.parametrize("how", ["error", "nothing"])
async def test_the_old_weights_stay_if_the_learner_writes_no_file(learner, client, tmp_path, how):
    """A node survives this error: a learner that died publishes again after its restart."""
    await client.update_weights(share(1, "-1"), proof(1, -1.0))
    script_sharing(tmp_path, "refused")
    learner.error = WorkerDiedError("the learner worker was killed") if how == "error" else None
    learner.has_weights = False
    await client.sleep()
    with pytest.raises(SharingError, match="cannot write weights" if how == "error" else "withdrew weights 2"):
        await client.update_weights(share(2, "-2"), proof(2, -2.0))
    assert await served(client) == (1, 1, 0)
    await kill(client)
    assert await served(client) == (0, 0, 1), "a restart does not serve the starting model until new weights come"
    (tmp_path / "sharing").unlink()
    await client.update_weights(share(3, "-3"), proof(3, -3.0))
    assert await served(client) == (3, 3, 1)


async def kill(client: GenerationClient) -> None:
    kill_worker(client)
    await eventually(lambda: client.restarts == 1)
    await client.supervisor.wait_ready()


# The tests below discard the weights while the worker sleeps.


async def test_the_starting_weights_are_not_discarded(client, tmp_path):
    await client.sleep(discard=True)
    await client.wake()  # the learner has no file of the starting weights
    await client.update_weights(share(1, "-1"), proof(1, -1.0))
    for discard in (True, False):
        await client.sleep(discard=discard)
        await client.update_weights(share(1, "-1"), proof(1, -1.0))
    assert (lines(tmp_path, "slept"), client.restarts) == (["keep", "discard", "keep"], 0)


@pytest.mark.parametrize("adapters", [True, False])
async def test_a_worker_without_sleep_or_with_adapters_keeps_its_weights(make_client, tmp_path, adapters):
    settings = msgspec.structs.replace(SETTINGS, can_sleep=adapters, lora_rank=8 if adapters else None)
    client = make_client(settings=settings)
    await client.start()
    await client.update_weights(publish(tmp_path, 1, "-1"), proof(1, -1.0))
    await client.sleep(discard=True)
    await client.wake()
    assert lines(tmp_path, "slept") == ["keep"]


async def test_wake_restores_discarded_weights(client, tmp_path):
    await client.update_weights(share(1, "-1"), proof(1, -1.0))
    await client.sleep(discard=True)
    waiting = asyncio.create_task(generate_group(client))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await client.wake()
    assert (await waiting).policy_version == 1 and await served(client) == (1, 1, 0)
    assert lines(tmp_path, "slept") == ["discard"]


async def test_a_failed_weight_sync_after_a_discard_restores_the_last_version(client, tmp_path):
    await client.update_weights(share(1, "-1"), proof(1, -1.0))
    await client.sleep(discard=True)
    with pytest.raises(ModelError, match="damaged"):
        await client.update_weights(publish(tmp_path, 2, "damaged"), proof(2, -2.0))
    assert await served(client) == (1, 1, 0)


async def test_a_worker_that_cannot_restore_discarded_weights_restarts_and_discards_none_again(client, tmp_path):
    await client.update_weights(publish(tmp_path, 1, "-1"), proof(1, -1.0))
    await client.sleep(discard=True)
    (tmp_path / "weights-1").unlink()
    await client.wake()
    assert await served(client) == (0, 0, 1), "discarded weights are served"
    await client.update_weights(publish(tmp_path, 2, "-2"), proof(2, -2.0))
    await client.sleep(discard=True)
    await client.wake()
    assert await served(client) == (2, 2, 1)
    assert lines(tmp_path, "slept") == ["discard", "keep"]


async def test_a_worker_that_dies_with_discarded_weights_restarts_with_the_newest(client, tmp_path):
    await client.update_weights(publish(tmp_path, 1, "-1"), proof(1, -1.0))
    await client.sleep(discard=True)
    kill_worker(client)
    await eventually(lambda: client.worker_state == "backing-off")
    await client.wake()
    assert await served(client) == (1, 1, 1)
    await client.sleep(discard=True)
    assert lines(tmp_path, "slept") == ["discard", "discard"]


async def test_weights_that_do_not_fit_do_not_count_as_a_death():
    async def refuse(*_):
        raise ModelError("they do not fit")

    loader = WeightLoader(proof_tolerance=0.1)
    loader.newest = share(1, "1"), known(None)
    for _ in range(2):
        with pytest.raises(ModelError, match="they do not fit"):
            await loader.serve_newest(refuse)
