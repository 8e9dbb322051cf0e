"""The client and weights without a file: shared, refused, changed meanwhile, deadly; and weights discarded asleep.

Over a worker that does as it is told (`generation_fake_worker`) and a learner that writes files on request.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from typing import TYPE_CHECKING

import msgspec
import pytest
from generation_fake_worker import checksum_of
from generation_support import SETTINGS, MakeClient, one_group, proof, publish

from ftis_node.errors import ModelError, SharingError, WorkerDiedError
from ftis_node.generation.weight_loader import WeightLoader, known
from ftis_node.workers.shared_weights import SharedWeights
from ftis_node.workers.weight_store import PublishedWeights
from tests.waiting import eventually

if TYPE_CHECKING:
    from pathlib import Path

    from ftis_node.generation.client import GenerationClient

SLEEPS = msgspec.structs.replace(SETTINGS, can_sleep=True)
REFUSAL = "CUDA IPC cannot open a handle"


class Learner:
    """Writes the present weights to a file on request; `requests` has the reasons, "" for a single file."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.requests: list[str] = []
        self.told: list[str] = []
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
        return msgspec.structs.replace(written, way="pinned", fell_back=self.requests[0])


@pytest.fixture
def learner(tmp_path: Path) -> Learner:
    return Learner(tmp_path)


@pytest.fixture
async def client(learner: Learner, make_client: MakeClient) -> GenerationClient:
    """A started client that may ask the learner for a file."""
    made = make_client(settings=SLEEPS, write_weights=learner.write_weights, on_fall_back=learner.told.append)
    await made.start()
    return made


def share(version: int, number: str) -> PublishedWeights:
    """Weights in the memory of a learner of which nobody wrote a file."""
    shared = SharedWeights(export_id=number, device_uuid="", storages=(), tensors=())
    checksums = {"number": checksum_of(float(number))}
    return PublishedWeights(version=version, path="", num_bytes=0, checksums=checksums, way="ipc", shared=shared)


def say(folder: Path, what: str) -> None:
    (folder / "sharing").write_text(what)


def lines(folder: Path, name: str) -> list[str]:
    return (folder / name).read_text().splitlines() if (folder / name).exists() else []


async def served(client: GenerationClient) -> tuple[int, int, int]:
    """The version of a group, of the client, and how often the worker was started again."""
    return (await one_group(client)).policy_version, client.policy_version, client.restarts


async def test_shared_weights_are_served_and_no_file_is_asked_for(learner: Learner, client: GenerationClient) -> None:
    assert client.hand_over == ""
    for version in (1, 2):
        await client.update_weights(share(version, f"-{version}"), proof(version, -float(version)))
        assert await served(client) == (version, version, 0)
    assert (client.hand_over, learner.requests, learner.told) == ("CUDA IPC", [], [])


@pytest.mark.parametrize("asleep", [True, False])
async def test_a_refusal_is_final_and_costs_no_version(
    learner: Learner, client: GenerationClient, tmp_path: Path, caplog: pytest.LogCaptureFixture, asleep: bool
) -> None:
    say(tmp_path, "refused")
    if asleep:
        await client.sleep(discard=True)
    with caplog.at_level(logging.WARNING):
        await client.update_weights(share(1, "-1"), proof(1, -1.0))
        assert await served(client) == (1, 1, 0)
        await client.update_weights(await learner.write_weights(""), proof(1, -1.0))
    assert learner.requests == [REFUSAL, ""]
    assert learner.told == [REFUSAL]
    assert client.hand_over == f"page-locked file ({REFUSAL})"
    warnings = [record.getMessage() for record in caplog.records if "as planned" in record.getMessage()]
    assert warnings == [f"weights do not cross as planned: {REFUSAL}"]


async def test_a_learner_that_fell_back_by_itself_is_reported_once(
    learner: Learner, client: GenerationClient, tmp_path: Path
) -> None:
    for version in (1, 2, 3):
        weights = msgspec.structs.replace(publish(tmp_path, version, "-1"), fell_back="cannot open a handle")
        await client.update_weights(weights, proof(version, -1.0))
    assert (learner.told, client.hand_over) == (["cannot open a handle"], "file (cannot open a handle)")


@pytest.mark.parametrize("what", ["fatal", "failing"])
async def test_a_worker_that_fails_over_them_begins_again_with_a_file(
    learner: Learner, client: GenerationClient, tmp_path: Path, what: str
) -> None:
    """The first time may be chance; the second is final, or the node would end."""
    say(tmp_path, what)
    for times in (1, 2):
        if what == "fatal":
            with pytest.raises(WorkerDiedError):
                await client.update_weights(share(1, "-1"), proof(1, -1.0))
            await client.start()
        else:
            await client.update_weights(share(1, "-1"), proof(1, -1.0))
        assert await served(client) == (1, 1, times)
        assert lines(tmp_path, "shared") == [f"1 {what}"] * times
    final = "the generation worker died twice over weights in the learner's memory"
    assert (learner.requests, learner.told) == (["", final], [final])


async def test_a_new_life_takes_what_the_learner_still_shares(
    learner: Learner, client: GenerationClient, tmp_path: Path
) -> None:
    await client.update_weights(share(1, "-1"), proof(1, -1.0))
    await kill(client)
    assert await served(client) == (1, 1, 1)
    assert (lines(tmp_path, "shared"), learner.requests) == (["1 -1", "1 -1"], [])


async def test_a_new_life_is_not_served_weights_that_the_learner_has_changed(
    learner: Learner, client: GenerationClient, tmp_path: Path
) -> None:
    """The checksums tell; what the learner has by then comes in a file, and later versions are shared as before."""
    await client.update_weights(share(1, "-1"), proof(1, -1.0))
    say(tmp_path, "-1.5")
    learner.version, learner.number = 2, "-2"
    await kill(client)
    assert await served(client) == (2, 2, 1)
    assert (learner.requests, learner.told) == ([""], [])
    (tmp_path / "sharing").unlink()
    await client.update_weights(share(2, "-2"), proof(2, -2.0))
    assert (client.hand_over, client.restarts) == ("CUDA IPC", 1)


@pytest.mark.parametrize("how", ["error", "nothing"])
async def test_where_nobody_writes_a_file_the_old_weights_go_on(
    learner: Learner, client: GenerationClient, tmp_path: Path, how: str
) -> None:
    """An error that a node survives: the learner died, and publishes again when it is back."""
    await client.update_weights(share(1, "-1"), proof(1, -1.0))
    say(tmp_path, "refused")
    learner.error = WorkerDiedError("the learner worker was killed") if how == "error" else None
    learner.has_weights = False
    await client.sleep()
    with pytest.raises(SharingError, match="cannot write weights" if how == "error" else "withdrew weights 2"):
        await client.update_weights(share(2, "-2"), proof(2, -2.0))
    assert await served(client) == (1, 1, 0)
    await kill(client)
    assert await served(client) == (0, 0, 1), "the model as it came, until there are new weights"
    (tmp_path / "sharing").unlink()
    await client.update_weights(share(3, "-3"), proof(3, -3.0))
    assert await served(client) == (3, 3, 1)


async def kill(client: GenerationClient) -> None:
    assert client.pid is not None
    os.kill(client.pid, signal.SIGKILL)
    await eventually(lambda: client.restarts == 1)
    await client.wait_ready()


# Weights that are discarded while the worker sleeps.


async def test_weights_are_discarded_only_where_others_or_the_same_can_be_loaded(
    client: GenerationClient, tmp_path: Path
) -> None:
    await client.sleep(discard=True)
    await client.wake()  # the model's own weights lie in no file of the learner's
    await client.update_weights(share(1, "-1"), proof(1, -1.0))
    for discard in (True, False):
        await client.sleep(discard=discard)
        await client.update_weights(share(1, "-1"), proof(1, -1.0))
    assert lines(tmp_path, "slept") == ["keep", "discard", "keep"]
    assert client.restarts == 0


@pytest.mark.parametrize("adapters", [True, False])
async def test_a_worker_that_cannot_sleep_or_serves_adapters_keeps_its_weights(
    make_client: MakeClient,
    tmp_path: Path,
    adapters: bool,
) -> None:
    settings = msgspec.structs.replace(SETTINGS, can_sleep=adapters, lora_rank=8 if adapters else None)
    client = make_client(settings=settings)
    await client.start()
    await client.update_weights(publish(tmp_path, 1, "-1"), proof(1, -1.0))
    await client.sleep(discard=True)
    await client.wake()
    assert lines(tmp_path, "slept") == ["keep"]


@pytest.mark.parametrize("way", ["shared", "file"])
async def test_a_step_without_new_weights_gives_the_last_ones_back(
    client: GenerationClient, tmp_path: Path, way: str
) -> None:
    weights = share(1, "-1") if way == "shared" else publish(tmp_path, 1, "-1")
    await client.update_weights(weights, proof(1, -1.0))
    await client.sleep(discard=True)
    waiting = asyncio.create_task(one_group(client))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await client.wake()
    assert (await waiting).policy_version == 1
    assert await served(client) == (1, 1, 0)
    assert lines(tmp_path, "slept") == ["discard"]


@pytest.mark.parametrize("way", ["shared", "file"])
async def test_a_failed_hand_over_after_that_restores_the_last_version(
    client: GenerationClient, tmp_path: Path, way: str
) -> None:
    weights = share(1, "-1") if way == "shared" else publish(tmp_path, 1, "-1")
    await client.update_weights(weights, proof(1, -1.0))
    await client.sleep(discard=True)
    with pytest.raises(ModelError, match="damaged"):
        await client.update_weights(publish(tmp_path, 2, "damaged"), proof(2, -2.0))
    assert await served(client) == (1, 1, 0)


async def test_where_the_last_version_is_gone_too_a_new_life_begins_and_none_are_discarded_any_more(
    client: GenerationClient, tmp_path: Path
) -> None:
    await client.update_weights(publish(tmp_path, 1, "-1"), proof(1, -1.0))
    await client.sleep(discard=True)
    (tmp_path / "weights-1").unlink()
    await client.wake()
    assert await served(client) == (0, 0, 1), "never weights that were discarded"
    await client.update_weights(publish(tmp_path, 2, "-2"), proof(2, -2.0))
    await client.sleep(discard=True)
    await client.wake()
    assert await served(client) == (2, 2, 1)
    assert lines(tmp_path, "slept") == ["discard", "keep"]


async def test_a_failed_proof_after_that_begins_again_and_none_are_discarded_any_more(
    client: GenerationClient, tmp_path: Path
) -> None:
    """Something in the engine may not have survived it."""
    await client.update_weights(publish(tmp_path, 1, "-1"), proof(1, -1.0))
    await client.sleep(discard=True)
    (tmp_path / "lies").write_text("2")
    await client.update_weights(publish(tmp_path, 2, "-2"), proof(2, -2.0))
    assert await served(client) == (2, 2, 1)
    await client.sleep(discard=True)
    await client.wake()
    assert lines(tmp_path, "slept") == ["discard", "keep"]


async def test_one_that_dies_with_its_weights_discarded_comes_back_with_the_newest(
    client: GenerationClient, tmp_path: Path
) -> None:
    await client.update_weights(publish(tmp_path, 1, "-1"), proof(1, -1.0))
    await client.sleep(discard=True)
    assert client.pid is not None
    os.kill(client.pid, signal.SIGKILL)
    await eventually(lambda: client.state == "backing-off")
    await client.wake()
    assert await served(client) == (1, 1, 1)
    await client.sleep(discard=True)
    assert lines(tmp_path, "slept") == ["discard", "discard"]


async def test_weights_that_do_not_fit_count_as_no_death() -> None:
    async def refuse(*_: object) -> None:
        raise ModelError("they do not fit")

    loader = WeightLoader(proof_tolerance=0.1)
    loader.newest = share(1, "1"), known(None)
    for _ in range(3):
        with pytest.raises(ModelError, match="they do not fit"):
            await loader.serve_newest(refuse)
