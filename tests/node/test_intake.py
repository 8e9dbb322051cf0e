"""Envelopes that wait for the disk are stored together, and nobody hears of a group before it is stored."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack, contextmanager, suppress
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from ftis_node.config.door import DoorSection
from ftis_node.config.home import Home
from ftis_node.config.manifest import WireSection
from ftis_node.config.node import NodeSettings
from ftis_node.errors import ConfigError
from ftis_node.node.background import to_the_end
from ftis_node.node.build import built_parts
from ftis_node.node.figures import Figures
from ftis_node.node.intake import IntakeLoop
from ftis_node.node.peer_book import PeerBook
from ftis_node.node.plan import RunPlan
from ftis_node.records.envelope import seal_group
from ftis_node.replay.buffer import ReplayBuffer
from ftis_node.replay.reader import ReplayReader
from ftis_node.telemetry.events import EventTrail
from ftis_node.validation import Accepted, Refused, judge
from tests.conftest import make_group
from tests.validation.test_door import MANIFEST, _context, _resolve, _Scorer, _Tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from ftis_node.records.identity import Identity


class GatedDisk:
    """A disk that does nothing until the gate is open; counts the groups of each commit."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.asked = asyncio.Event()
        self.commits: list[int] = []

    async def __call__(self, function: Callable[..., Any], groups: list[Any]) -> Any:
        self.asked.set()
        await self.gate.wait()
        self.commits.append(len(groups))
        return function(groups)


@contextmanager
def parts_on(folder: Path, disk: GatedDisk) -> Iterator[Any]:
    """What an intake loop asks for, with a real door, buffer, trail and peer book."""
    with ExitStack() as stack:
        buffer = ReplayBuffer(folder / "replay.sqlite")
        reader = ReplayReader(folder / "replay.sqlite")
        events = EventTrail(folder / "events.jsonl")
        peers = PeerBook(folder / "peers.sqlite", own_id="me", settings=DoorSection(), events=events)
        for part in (buffer, reader, events, peers):
            stack.callback(part.close)
        yield SimpleNamespace(
            manifest=MANIFEST,
            tokenizer=_Tokenizer(),
            task=SimpleNamespace(resolve=_resolve),
            scorer=_Scorer(),
            reader=reader,
            buffer=buffer,
            disk=disk,
            figures=Figures(),
            events=events,
            peers=peers,
            identity=SimpleNamespace(peer_id="me"),
        )


def sealed(identity: Identity, number: int) -> bytes:
    """An envelope that passes."""
    return seal_group(make_group(identity, number=number, run_id=MANIFEST.run_id), identity).to_bytes()


async def test_what_was_judged_during_a_commit_is_stored_by_the_next(tmp_path: Path, identity: Identity) -> None:
    disk = GatedDisk()
    with parts_on(tmp_path, disk) as parts:
        intake = IntakeLoop(parts)
        data = [sealed(identity, number) for number in (1, 2, 3)]
        running = asyncio.create_task(intake.run())
        first = asyncio.create_task(intake.submit(data[0], origin="ann", own=False))
        await disk.asked.wait()
        rest = [
            asyncio.create_task(intake.submit(body, origin="ann", own=False)) for body in (data[1], data[2], data[2])
        ]
        junk = await intake.submit(b"junk", origin="ann", own=False)
        assert isinstance(junk, Refused), "a refusal waits for no disk"
        assert not first.done()
        disk.gate.set()
        verdicts = [await first, *[await task for task in rest]]
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
        assert disk.commits == [1, 2], "what is on its way to the disk is a duplicate already"
        assert [isinstance(verdict, Accepted) for verdict in verdicts] == [True, True, True, False]
        assert verdicts[3].refusal.reason == "duplicate"
        assert parts.reader.ready_counts() == (0, 3)
        assert intake.stored.is_set()


async def test_what_is_being_stored_when_the_node_ends_is_counted(tmp_path: Path, identity: Identity) -> None:
    disk = GatedDisk()
    with parts_on(tmp_path, disk) as parts:
        intake = IntakeLoop(parts)
        running = asyncio.create_task(intake.run())
        submitted = asyncio.create_task(intake.submit(sealed(identity, 1), origin="ann", own=False))
        await disk.asked.wait()
        running.cancel()
        await asyncio.sleep(0)
        disk.gate.set()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert isinstance(await submitted, Accepted)
        assert parts.reader.ready_counts() == (0, 1)
        assert parts.figures.groups_received == 1
        assert '"admitted"' in (tmp_path / "events.jsonl").read_text()


async def test_what_fails_while_it_is_ended_is_told() -> None:
    gate = asyncio.Event()

    async def fail() -> None:
        await gate.wait()
        raise OSError("the disk is gone")

    ending = asyncio.create_task(to_the_end(fail()))
    await asyncio.sleep(0)
    ending.cancel()
    gate.set()
    with pytest.raises(OSError, match="the disk is gone"):
        await ending


async def test_a_node_trains_on_just_what_it_sent(tmp_path: Path, identity: Identity) -> None:
    manifest = MANIFEST.model_copy(update={"wire": WireSection(codecs=("lossy",))})
    group = make_group(identity, run_id=manifest.run_id)
    sealed = seal_group(group, identity, codec="lossy")
    verdict = await judge(sealed.to_bytes(), _context(manifest=manifest))
    assert isinstance(verdict, Accepted)
    buffer = ReplayBuffer(tmp_path / "replay.sqlite")
    assert buffer.admit(verdict, own=True)
    (taken,) = buffer.take(1, own=1, foreign=0).groups
    buffer.close()
    for sent, mine in zip(group.completions, taken.group.completions, strict=True):
        assert mine.logprobs.tolist() == (np.rint(sent.logprobs * 256) / 256).tolist() != sent.logprobs.tolist()


async def test_a_codec_that_the_run_does_not_take_is_a_wrong_setting(tmp_path: Path) -> None:
    settings = NodeSettings(model="any", swarm={"codec": "lossy"})
    with pytest.raises(ConfigError, match=r"swarm.codec is 'lossy' and run test takes exact, lossless"):
        async with built_parts(settings, RunPlan(MANIFEST, "arithmetic", ()), Home(tmp_path)):
            pass
