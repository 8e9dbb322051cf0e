"""A simulation of a real node's loops with hostile members and an honest node, and the invariants after each step.

    python -m tests.fuzz.simulation --steps 10000 --seed 1

A step runs one rule of `actions.py` for a hostile member. Rules and values come from a seeded random source, so the
same seed repeats a failure.
"""

import argparse
import asyncio
import random
import shutil
import sqlite3
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

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
from tests.fuzz.fuzzed_node import MEMORY, InlineDisk, NumberTexts, check_bounds, quiet, render_views, use_patched_clock
from tests.fuzz.hostile import Hostile
from tests.fuzz.virtual import Clock, VirtualLoop

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
VIEW_EVERY, AUDIT_EVERY, TRAIN_EVERY = 40, 15, 25
UNIX_S = 1.7e9
PAUSES_S = (0.0, 0.02, 0.1, 0.5, 1.0, 3.0)


class TextTokenizer(NumberTexts, StubTokenizer):
    eos_id = VOCABULARY


class Simulation:
    """A simulation in a separate event loop with simulated time: `start`, a `step` for each rule, `close`."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="ftis-simulation-", dir=MEMORY))
        self.clock = Clock(unix_s=UNIX_S)
        self.loop = VirtualLoop(self.clock)
        self.swarm = LoopbackSwarm()
        self.rng_groups = np.random.default_rng(0)
        self.num_steps = 0
        self.num_identities = self.num_honest = 0
        self.done: Counter[str] = Counter()
        self.admitted: Counter[str] = Counter()  # foreign groups at the victim, by sender
        self.hostile: list[Hostile] = []
        self._due: dict[int, tuple[float, int]] = {}  # time and step of honest numbers that the victim lacks
        self.longest_s = 0.0  # from publication to admission of an honest group
        self.faults: list[Exception] = []

    def start(self) -> None:
        """Start all nodes and warm up without attacks. The node's random source is seeded, so a run is reproducible."""
        self._random_state = random.getstate()
        random.seed(0)
        self.loop.run(self._start())

    def step(self, rule: Rule, rng: random.Random) -> None:
        """Run one rule, let time pass, and check the invariants."""
        self.num_steps += 1
        self.done[rule.__name__] += 1
        self.loop.run(self._step(rule, rng))

    def close(self) -> None:
        try:
            self.loop.run(self._close())
        finally:
            random.setstate(self._random_state)
            self.loop.close()
            shutil.rmtree(self._folder, ignore_errors=True)

    async def _start(self) -> None:
        self.victim = self._node(1, self._on_event)
        self.honest = self._node(2, lambda *_: None)
        for node in (self.victim, self.honest):
            await node.start()
        self.housekeeping = asyncio.ensure_future(self.victim.wiring.peers_loop.run())
        for _ in range(NUM_WARM_UP_GROUPS):
            await self.honest_publishes()
            await asyncio.sleep(0.2)
        await self._until_arrived()
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
            if fields["sender"] == self.honest.parts.context.peer_id and fields["number"] in self._due:
                since, _ = self._due.pop(fields["number"])
                self.longest_s = max(self.longest_s, self.clock.steady_s - since)

    @property
    def num_honest_admitted(self) -> int:
        return self.admitted[self.honest.parts.context.peer_id]

    async def add_hostile(self) -> Hostile:
        self.num_identities += 1
        identity = Identity.from_seed(self.num_identities.to_bytes(32, "little"))
        member = Hostile(
            self.swarm,
            identity,
            run_id=RUN.run_id,
            num_shards=RUN.wire.announcement_shards,
            rng=random.Random(self.num_identities),
        )
        await member.start()
        self.hostile.append(member)
        return member

    async def honest_publishes(self) -> None:
        """Publish a group of the honest member, which the victim must admit soon."""
        await self.honest.publish(stub_group(self.honest.parts.context.identity, RUN, self.rng_groups, num_tokens=4))
        self.num_honest += 1
        self._due[self.num_honest] = (self.clock.steady_s, self.num_steps)

    async def _until_arrived(self) -> None:
        deadline = self.clock.steady_s + ARRIVAL_LIMIT_S
        while self._due:
            assert self.clock.steady_s < deadline, f"{len(self._due)} groups did not arrive without attacks"
            await asyncio.sleep(0.1)

    async def _step(self, rule: Rule, rng: random.Random) -> None:
        await rule(self, rng.choice(self.hostile), rng)
        if self.num_steps % 5 == 0:
            await self.honest_publishes()
        await asyncio.sleep(rng.choice(PAUSES_S))
        if self.num_steps % TRAIN_EVERY == 0:
            self._train()
        self._check()
        if self.num_steps % VIEW_EVERY == 0:
            await render_views(self.victim.parts)
        if self.num_steps % AUDIT_EVERY == 0:
            self.audit()

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
        for number, (since, at_step) in self._due.items():
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

    def audit(self) -> None:
        """Check the victim's database: its integrity, unique numbers, and the signature of each group."""
        db = sqlite3.connect(self.victim.parts.home.replay)
        try:
            assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
            repeated = "SELECT sender, number FROM groups GROUP BY sender, number HAVING count(*) > 1"
            assert not db.execute(repeated).fetchall()
            rows = db.execute("SELECT id, sender, number, envelope FROM groups WHERE length(envelope) > 0").fetchall()
        finally:
            db.close()
        for group_id, sender, number, data in rows:
            envelope = open_envelope(data)
            assert envelope.id == group_id
            assert envelope.is_signed_by(sender), sender
            group = unpack_any(envelope.body)
            assert (group.sender, group.number, group.run_id) == (sender, number, RUN.run_id)

    async def _close(self) -> None:
        async with AsyncExitStack() as stack:
            for node in (self.victim, self.honest):
                stack.push_async_callback(node.close)
            for member in self.hostile:
                stack.push_async_callback(member.close)
            self.housekeeping.cancel()
            await asyncio.wait({self.housekeeping})


def play(steps: int, seed: int) -> Simulation:
    """Run a simulation and return it closed. After a failure it prints the last steps and raises the error."""
    from tests.fuzz.actions import CHOICES, RULES

    rng = random.Random(seed)
    names: list[str] = []
    simulation = Simulation()
    try:
        simulation.start()
        for _ in range(steps):
            names.append(rng.choice(CHOICES))
            simulation.step(RULES[names[-1]], rng)
        simulation.audit()
    except BaseException:
        sys.stdout.write(f"step {len(names)}; the last steps: {', '.join(names[-25:])}\n")
        raise
    finally:
        simulation.close()
    return simulation


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with quiet():
        simulation = play(options.steps, options.seed)
    sys.stdout.write(
        f"{simulation.clock.steady_s - 1000:.0f} s of the node's time, {simulation.num_identities} hostile identities\n"
        f"admitted: {sum(simulation.admitted.values())}, {simulation.num_honest_admitted} of the honest member\n"
        f"rules: {dict(simulation.done)}\nrefused: {dict(simulation.victim.parts.peers.counters.refused)}\n"
    )


if __name__ == "__main__":
    main()
