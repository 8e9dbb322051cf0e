"""A simulation of a real node's loops with hostile members and an honest node, and the invariants after each step.

A step runs one rule of `actions.py` for a hostile member. Rules and values come from a seeded random source, so the
same seed repeats a failure. Time is simulated and passes when each task waits: hours of a node's loops take seconds.
"""

import asyncio
import random
import selectors
import shutil
import sqlite3
import tempfile
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from bench.stubs.stub_node import StubNode, StubTokenizer, stub_group
from bench.stubs.wire_groups import VOCABULARY
from ftis_node.config.home import Home
from ftis_node.config.manifest import RunManifest
from ftis_node.config.node import NodeSettings
from ftis_node.gossip import GossipLimits
from ftis_node.gossip.loopback import LoopbackSwarm
from ftis_node.node.loops import pull
from ftis_node.node.wiring import Wiring
from ftis_node.records.codec import CODECS, unpack_any
from ftis_node.records.envelope import open_envelope
from ftis_node.records.identity import Identity
from ftis_node.replay.lifecycle import ReleaseReason
from tests.fuzz.fuzzed_node import MEMORY, InlineDisk, NumberTexts, check_bounds, render_views, use_patched_clock
from tests.fuzz.hostile import Hostile
from tests.waiting import eventually

Rule = Callable[..., Any]

RUN = RunManifest(
    name="light",
    task="gsm8k",
    step={"own_groups": 4, "foreign_groups": 4, "other_tokenizers": "text"},
    wire={"codecs": tuple(CODECS)},
)
NODE_SETTINGS = NodeSettings(model="none", swarm={"shutdown_serve_s": 0})
NUM_HOSTILE = 3
NUM_WARM_UP_GROUPS = 12  # of the honest member, so the victim knows it before the first attack
ARRIVAL_LIMIT_S = 90.0  # an honest group is late after both limits
ARRIVAL_LIMIT_STEPS = 60
PUBLISH_EVERY, VIEW_EVERY, AUDIT_EVERY, TRAIN_EVERY = 5, 40, 15, 25  # steps
UNIX_S = 1.7e9
PAUSES_S = (0.0, 0.02, 0.1, 0.5, 1.0, 3.0)


class Clock:
    """A monotonic clock, and a Unix clock that can be set."""

    def __init__(self) -> None:
        self.steady_s = 1000.0
        self.moved_s = UNIX_S - self.steady_s  # difference of both clocks

    def time(self) -> float:
        return self.steady_s + self.moved_s


class _Selector(selectors.SelectSelector):
    """A selector that sets the clock to the next timer if no file is ready."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> list[Any]:
        ready = super().select(0)
        if not ready and timeout is None:
            raise RuntimeError("each task waits, and none for a time")
        if not ready and timeout and timeout > 0:
            self._clock.steady_s += timeout + 1e-6  # past the timer, despite rounding
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop with a simulated clock. Tasks must not wait for threads, because time would pass meanwhile."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        super().__init__(_Selector(clock))

    def time(self) -> float:
        return self._clock.steady_s

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run `work` under the clock, also for `time.time` and `time.monotonic`, and return its result."""
        with patch("time.time", self._clock.time), patch("time.monotonic", self.time):
            return self.run_until_complete(work)


class TextTokenizer(NumberTexts, StubTokenizer):
    eos_id = VOCABULARY


class Simulation:
    """The nodes and members of a simulation, in a separate event loop."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="ftis-simulation-", dir=MEMORY))
        self.clock = Clock()
        self.loop = VirtualLoop(self.clock)
        self.swarm = LoopbackSwarm()
        self.rng_groups = np.random.default_rng(0)
        self.num_steps = self.num_identities = self.num_honest = 0
        self.admitted: Counter[str] = Counter()  # foreign groups at the victim, by sender
        self.hostile: list[Hostile] = []
        self.due: dict[int, tuple[float, int]] = {}  # time and step of honest numbers that the victim lacks
        self.faults: list[Exception] = []

    def play(self, rules: dict[str, Rule], names: list[str], rng: random.Random) -> None:
        """Warm up without attacks, run the named rules, and close. A failure has a note with the last rules."""
        random_state = random.getstate()
        random.seed(0)  # of the node, so that a run is reproducible
        try:
            self.loop.run(self._start())
            for name in names:
                self.num_steps += 1
                self.loop.run(self._step(rules[name], rng))
            self._audit()
        except BaseException as error:
            error.add_note(f"step {self.num_steps}; the last steps: {', '.join(names[: self.num_steps][-25:])}")
            raise
        finally:
            try:
                self.loop.run(self._close())
            finally:
                random.setstate(random_state)
                self.loop.close()
                shutil.rmtree(self._folder, ignore_errors=True)

    async def _start(self) -> None:
        self.victim = self._node(1, self._on_event)
        self.honest = self._node(2, lambda *_: None)
        for node in (self.victim, self.honest):
            await node.start()
        self.housekeeping = asyncio.ensure_future(self.victim.wiring.peers_loop.run())
        for _ in range(NUM_WARM_UP_GROUPS):
            await self._publish_honest()
            await asyncio.sleep(0.2)
        await eventually(lambda: not self.due, within_s=ARRIVAL_LIMIT_S)
        for _ in range(NUM_HOSTILE):
            await self.add_hostile()

    def _node(self, number: int, on_event: Callable[[str, dict[str, Any]], None]) -> StubNode:
        identity, home = Identity.from_seed(bytes([number]) * 32), Home(self._folder / str(number))
        home.create()
        gossip = self.swarm.join(
            identity.peer_id, run_id=RUN.run_id, num_shards=RUN.wire.announcement_shards, limits=GossipLimits()
        )
        node = StubNode(home, identity, gossip, manifest=RUN, settings=NODE_SETTINGS, on_event=on_event)
        node.wiring.directory_loop.record_period_s = 1.0
        tokenizer: Any = TextTokenizer()
        store = replace(node.parts.store, disk=InlineDisk())
        node.parts = replace(node.parts, store=store, tokenizer=tokenizer)
        node.wiring = Wiring(node.parts)
        charge = gossip.guard.on_fault
        use_patched_clock(node.wiring.intake, tokenizer=tokenizer)
        gossip.guard.on_fault = lambda peer, place, error: (self.faults.append(error), charge(peer, place, error))
        return node

    def _on_event(self, name: str, fields: dict[str, Any]) -> None:
        if name == "admitted" and not fields["own"]:
            self.admitted[fields["sender"]] += 1
            if fields["sender"] == self.honest.parts.context.peer_id:
                self.due.pop(fields["number"], None)

    @property
    def num_honest_admitted(self) -> int:
        return self.admitted[self.honest.parts.context.peer_id]

    async def add_hostile(self) -> Hostile:
        self.num_identities += 1
        member = Hostile(
            self.swarm,
            Identity.from_seed(self.num_identities.to_bytes(32, "little")),
            run_id=RUN.run_id,
            num_shards=RUN.wire.announcement_shards,
            rng=random.Random(self.num_identities),
        )
        await member.start()
        self.hostile.append(member)
        return member

    async def _publish_honest(self) -> None:
        """Publish a group of the honest member, which the victim must admit soon."""
        await self.honest.publish(stub_group(self.honest.parts.context.identity, RUN, self.rng_groups, num_tokens=4))
        self.num_honest += 1
        self.due[self.num_honest] = (self.clock.steady_s, self.num_steps)

    async def _step(self, rule: Rule, rng: random.Random) -> None:
        """Run one rule, let time pass, and check the invariants."""
        await rule(self, rng.choice(self.hostile), rng)
        if self.num_steps % PUBLISH_EVERY == 0:
            await self._publish_honest()
        await asyncio.sleep(rng.choice(PAUSES_S))
        if self.num_steps % TRAIN_EVERY == 0:
            self._train()
        self._check()
        if self.num_steps % VIEW_EVERY == 0:
            await render_views(self.victim.parts)
        if self.num_steps % AUDIT_EVERY == 0:
            self._audit()

    def _train(self) -> None:
        """Do what a step of the learner does with the buffer."""
        parts, number = self.victim.parts, self.num_steps
        groups, _ = parts.store.buffer.take(number, own=0, foreign=32)
        for group in groups:
            parts.peers.note_used(group)
        parts.store.buffer.release_step(number, ReleaseReason.TRAINED)
        parts.store.buffer.prune(max_disk_bytes=1 << 20, saved_step=number)

    def _check(self) -> None:
        if self.faults:
            raise self.faults[0]
        for node in (self.victim, self.honest):
            assert node.is_running, f"a loop has ended: {node._runner}"
            assert not node.gossip.guard.num_faults
            assert not node.gossip.counters.serve_errors.get("fault"), "a served request failed by a fault"
            check_bounds(node.wiring.announcements)
            self._check_sizes(node)
        assert not self.housekeeping.done(), self.housekeeping
        honest_id = self.honest.parts.context.peer_id
        assert not self.victim.parts.peers.is_banned(honest_id), "an honest member is banned"
        for number, (since, at_step) in self.due.items():
            waited = self.clock.steady_s - since
            is_late = waited > ARRIVAL_LIMIT_S and self.num_steps - at_step > ARRIVAL_LIMIT_STEPS
            assert not is_late, f"honest group {number} has not arrived within {waited:.0f} s"

    @staticmethod
    def _check_sizes(node: StubNode) -> None:
        handler, parts = node.wiring.announcements, node.parts
        sizes = {
            "refused": (len(handler._refused), 4096),
            "refused_of": (len(handler._refused_of), 4096),
            "malformed": (len(handler._malformed), 4096),
            "peers": (len(parts.peers.registry.peers), 4096),
            "later": (len(node.wiring.pull._later), 8192),
            "asking": (node.wiring.pull._slots.num_in_use, pull.PULLS_IN_FLIGHT),
            "inbox": (node.gossip._queue._queue.qsize(), 8192),  # type: ignore[attr-defined]
            "to confirm": (len(handler.to_confirm), 1 << 14),
            "arrivals": (node.wiring.intake._known.arrivals.qsize(), 64),
            "arrivals of new peers": (node.wiring.intake._new_peers.arrivals.qsize(), 64),
            "reasons": (len(parts.peers.counters.refused), 128),
        }
        assert all(size <= most for size, most in sizes.values()), sizes

    def _audit(self) -> None:
        """Check the victim's database: its integrity, unique numbers, and the signature of each group."""
        with closing(sqlite3.connect(self.victim.parts.home.replay)) as database:
            assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
            repeated = "SELECT sender, number FROM groups GROUP BY sender, number HAVING count(*) > 1"
            assert not database.execute(repeated).fetchall()
            stored = "SELECT id, sender, number, envelope FROM groups WHERE length(envelope) > 0"
            rows = database.execute(stored).fetchall()
        for group_id, sender, number, data in rows:
            envelope = open_envelope(data)
            assert envelope.id == group_id
            assert envelope.is_signed_by(sender), sender
            group = unpack_any(envelope.body)
            assert (group.sender, group.number, group.run_id) == (sender, number, RUN.run_id)

    async def _close(self) -> None:
        async with AsyncExitStack() as stack:
            for one in (self.victim, self.honest, *self.hostile):
                stack.push_async_callback(one.close)
            self.housekeeping.cancel()
            await asyncio.wait({self.housekeeping})
