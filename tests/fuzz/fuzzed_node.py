"""A light node with real parts and loops, and hostile members of its run, for one case of a chain.

Its folder is in memory, it has no disk thread, and Unix time is frozen, so a case is reproducible.
"""

import asyncio
import json
import logging
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

from bench.stubs.stub_node import StubNode, StubTask
from ftis_node.cli.commands.peers import HEADER, _cells, peer_document, peer_screen
from ftis_node.config.home import Home
from ftis_node.config.manifest import RunManifest
from ftis_node.config.node import NodeSettings
from ftis_node.gossip.loopback import LoopbackGossip, LoopbackSwarm
from ftis_node.node.peers.announcements import AnnouncementHandler
from ftis_node.node.storage.node_store import DiskThread
from ftis_node.node.wiring import NodeComponents, Wiring
from ftis_node.records import rollout_pb2 as pb
from ftis_node.records.codec import CODECS
from ftis_node.records.group import PromptRef
from ftis_node.records.identity import ENVELOPE_DOMAIN, Identity
from ftis_node.records.peer_messages import open_backfill_request
from ftis_node.tasks.arithmetic import ArithmeticTask
from ftis_node.tasks.base import TaskItem
from ftis_node.telemetry.events import read_events
from ftis_node.telemetry.terminal_text import columns
from ftis_node.view.events import event_line
from ftis_node.view.peers import ban_words, peer_lines, peer_row, sorted_peers
from ftis_node.view.spans import text_of
from tests.validation.test_pipeline import _Scorer, _Tokenizer

OWN = Identity.from_seed(bytes([1]) * 32)
HOSTILE = tuple(Identity.from_seed(bytes([number]) * 32) for number in (7, 8, 9))
TASK = "arithmetic"
RUN = RunManifest(
    name="fuzz",
    task=TASK,
    sampling={"group_size": 2, "max_prompt_tokens": 10, "max_completion_tokens": 6, "max_total_tokens": 12},
    step={"other_tokenizers": "text", "own_groups": 1, "foreign_groups": 4},
    wire={"codecs": tuple(CODECS)},
)
NEAR, FAR = "arithmetic:add", "arithmetic:sub"
MIXED_RUN = RunManifest(name="fuzz", task=f"{NEAR}+{FAR}", step={"foreign_groups": 4})
SETTINGS = NodeSettings(model="none")
MADE_AT = 1e9  # Unix time of the seeds, and of the node
MEMORY = Path("/dev/shm") if Path("/dev/shm").is_dir() else None


@contextmanager
def quiet() -> Iterator[None]:
    """Disable the log of the package, which would have thousands of refusals per second."""
    logger = logging.getLogger("ftis_node")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


def sign_body(body: bytes, identity: Identity) -> bytes:
    return pb.Envelope(body=body, signature=identity.sign(ENVELOPE_DOMAIN, body)).SerializeToString()


class TextTokenizer(_Tokenizer):
    """A tokenizer that encodes each number in a text as the id of that value."""

    eos_id = 2

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))

    def encode_text(self, text: str) -> list[int]:
        return [int(word) for word in text.split() if word.isdecimal() and len(word) < 6]


class InlineDisk(DiskThread):
    """A disk thread that runs each function at once, in the calling thread."""

    async def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)


class ProblemTask(StubTask):
    """The problems of the tests of validation."""

    def resolve(self, ref: PromptRef) -> TaskItem:
        if ref.index >= 1000 or ref.task != TASK:
            raise KeyError(ref)
        return TaskItem(ref=ref, prompt=ArithmeticTask()[ref.index].prompt, answer="5")


class FuzzedNode:
    """The node under attack. `answers` and `bodies` are what each hostile member returns to requests."""

    def __init__(self, folder: Path, manifest: RunManifest, domain: str) -> None:
        self.home = Home(folder)
        self.home.create()
        self.swarm = LoopbackSwarm()
        self.faults: list[Exception] = []
        self.renders_all_views = True  # else only those of the status loop
        gossip = self.swarm.join(OWN.peer_id, run_id=manifest.run_id, num_shards=manifest.wire.announcement_shards)
        self.node = StubNode(
            self.home, OWN, gossip, manifest=manifest, settings=SETTINGS, on_event=lambda *_: None, domain=domain
        )
        task: Any = ProblemTask()
        self.parts = replace(
            self.node.parts,
            store=replace(self.node.parts.store, disk=InlineDisk()),
            tokenizer=cast("Any", TextTokenizer()),
            task=task,
            domain=self.node.parts.domain if domain else task,
            scorer=cast("Any", _Scorer()),
            new_peers_scorer=cast("Any", _Scorer()),
        )
        self.gossip: LoopbackGossip = gossip
        self.gossip.guard.on_fault = lambda peer, place, error: self.faults.append(error)
        self.members = [
            self.swarm.join(one.peer_id, run_id=manifest.run_id, num_shards=manifest.wire.announcement_shards)
            for one in HOSTILE
        ]
        self.answers: dict[str, list[bytes]] = {one.peer_id: [] for one in HOSTILE}
        self.bodies: dict[str, list[bytes]] = {one.peer_id: [] for one in HOSTILE}
        self.wiring = Wiring(self.parts)
        self.intake, self.pull = self.wiring.intake, self.wiring.pull
        for lane in (self.intake._known, self.intake._new_peers):  # for each group, so that the patched clock applies
            lane.context = replace(lane.context, now=lambda: time.time())

    async def start(self) -> None:
        self.wiring.serve_peers()
        await self.gossip.start()
        for member in self.members:
            self._serve(member)
            await member.start()

    def _serve(self, member: LoopbackGossip) -> None:
        async def answer(peer_id: str, question: bytes) -> Sequence[bytes]:
            open_backfill_request(question)  # raises if an honest peer would refuse the question
            return self.answers[member.peer_id]

        async def lookup(ids: Sequence[bytes]) -> Sequence[bytes]:
            bodies = self.bodies[member.peer_id]
            bodies[:] = bodies[len(ids) :] + bodies[: len(ids)]  # the next request gets the next ones
            return bodies[-len(ids) :]

        member.serve(lookup, answer=answer, lookup_text=lookup)

    async def check(self) -> None:
        """Render the views of the node, and check the invariants after each case."""
        await render_views(self.parts, all_views=self.renders_all_views)
        for gossip in (self.gossip, *self.members):
            assert not gossip.counters.serve_errors.get("fault"), "a served request failed by a fault"
            refused = {reason for reason in gossip.counters.serve_errors if gossip is not self.gossip}
            assert refused <= {"busy", "streams", "requests"}, f"an honest peer would refuse the request: {refused}"
        if self.faults:
            raise self.faults[0]
        assert not self.gossip.guard.num_faults
        check_bounds(self.wiring.announcements)


async def render_views(parts: NodeComponents, *, all_views: bool = True) -> None:
    """Render status, event log and peer table, with `all_views` also the screens of peers."""
    wiring = Wiring(parts)
    status, peer_table = wiring.status_loop(), wiring.swarm
    document = json.loads((await status.refresh()).to_json())
    json.dumps([document, peer_table.rows()], allow_nan=False)
    for event in read_events(parts.home.events):
        assert text_of(event_line(event)).isprintable(), event
    if not all_views:
        return
    rows = peer_table.rows()
    now = time.time()
    for row in sorted_peers(rows):
        shown = [span.text for span in peer_row(row, now=now)] + [text_of(one) for one in peer_lines(row, now=now)]
        shown += [ban_words(row), *columns(HEADER, [_cells(row, now=now)])]
        shown += [*peer_screen(peer_document(parts.home, row["peer_id"], rows), now=now)]
        assert all(text.isprintable() for text in shown), shown


def check_bounds(handler: AnnouncementHandler) -> None:
    """Check that state about peers is bounded, and that its values are in range."""
    assert len(handler.queue) <= 8192 + 1024 and len(handler.senders()) <= 4096
    for peer_id in handler.senders():
        tracker = handler.tracker_of(peer_id)
        assert 0 <= tracker.highest < 2**63 and len(tracker.gaps) <= 64
        assert all(1 <= gap.first <= gap.last < 2**63 for gap in tracker.gaps)


@asynccontextmanager
async def fuzzed_node(manifest: RunManifest = RUN, *, domain: str = "") -> AsyncIterator[FuzzedNode]:
    folder = Path(tempfile.mkdtemp(prefix="ftis-fuzz-", dir=MEMORY))
    try:
        with patch("time.time", lambda: MADE_AT):
            fuzzed = FuzzedNode(folder, manifest, domain)
            try:
                await fuzzed.start()
                yield fuzzed
                await fuzzed.check()
            finally:
                for gossip in (*fuzzed.members, fuzzed.gossip):
                    await gossip.close()
                await fuzzed.node._stack.aclose()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@asynccontextmanager
async def running(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run a loop during the block. An exception of the loop ends the block and is raised in a group."""
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(work)
        yield
        running.cancel()
