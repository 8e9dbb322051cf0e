"""Intake: envelopes that wait for the disk are stored in one commit, and no group is reported before it is stored."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from ftis_node.config.home import Home
from ftis_node.config.node import NodeSettings
from ftis_node.errors import ConfigError
from ftis_node.node.loops.intake import IntakeLoop
from ftis_node.node.startup.run_plan import RunPlan
from ftis_node.node.startup.running_components import running_components
from ftis_node.node.storage.node_store import DiskThread
from ftis_node.node.wiring import NodeComponents, Wiring
from ftis_node.records.codec import hash_messages
from ftis_node.records.envelope import seal_group
from ftis_node.records.identity import Identity
from ftis_node.records.token_batch import TokenBatch
from ftis_node.swarm import rate_limits
from ftis_node.swarm.reputation import Behaviour
from ftis_node.tasks.scorer import IsolatedScorer, ScoringLimits
from ftis_node.validation import Accepted, Refused
from tests.conftest import make_completion, make_group
from tests.node.nodes import ME, components
from tests.tasks.hostile_task import HostileTask
from tests.validation.test_pipeline import MANIFEST, _Scorer, _Tokenizer
from tests.waiting import eventually


class GatedDisk(DiskThread):
    """A disk that waits until the gate is open, and counts the groups of each commit."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.called = asyncio.Event()
        self.commits: list[int] = []

    async def __call__(self, function: Callable[..., Any], groups: list[Any]) -> Any:  # type: ignore[override]
        self.called.set()
        await self.gate.wait()
        self.commits.append(len(groups))
        return function(groups)


@contextmanager
def node_on(
    folder: Path, disk: DiskThread, *, role: str = "full", trust: tuple[str, ...] = (), **changes: Any
) -> Iterator[NodeComponents]:
    """Yield a node with real validator, buffer, event log and peer manager; `changes` are components."""
    settings = NodeSettings.model_validate({"model": "any", "role": role, "access": {"trust": trust}})
    given = {"tokenizer": _Tokenizer(), "scorer": _Scorer(), "new_peers_scorer": _Scorer()} | changes
    with components(folder, settings=settings, manifest=MANIFEST, disk=disk, **given) as node:
        yield node


def intake_of(node: NodeComponents) -> IntakeLoop:
    return Wiring(node).intake


def sealed(identity: Identity, number: int) -> bytes:
    return seal_group(make_group(identity, number=number, run_id=MANIFEST.run_id), identity).to_bytes()


@asynccontextmanager
async def running(node: NodeComponents) -> AsyncIterator[IntakeLoop]:
    intake = intake_of(node)
    task = asyncio.create_task(intake.run())
    yield intake
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def test_groups_validated_during_a_commit_are_stored_by_the_next(tmp_path, identity):
    disk = GatedDisk()
    with node_on(tmp_path, disk) as node:
        data = [sealed(identity, number) for number in (1, 2, 3)]
        async with running(node) as intake:
            first = asyncio.create_task(intake.submit(data[0], origin="ann"))
            await disk.called.wait()
            rest = [asyncio.create_task(intake.submit(body, origin="ann")) for body in (data[1], data[2], data[2])]
            junk = await intake.submit(b"junk", origin="ann")
            assert isinstance(junk, Refused), "a refusal waits for the disk"
            assert not first.done()
            disk.gate.set()
            verdicts = [await first, *[await task for task in rest]]
        assert disk.commits == [1, 2], "the group of the second commit does not count as a duplicate"
        assert [isinstance(verdict, Accepted) for verdict in verdicts] == [True, True, True, False]
        assert isinstance(verdicts[3], Refused) and verdicts[3].refusal.reason == "duplicate"
        assert node.store.reader.ready_counts() == (0, 3)
        assert intake.stored.is_set()


def open_disk() -> GatedDisk:
    disk = GatedDisk()
    disk.gate.set()
    return disk


NUM_CLAIMS = 46


async def send_claims(node: NodeComponents, identity: Identity, *, version: int) -> None:
    """Send groups that claim a version of the node's weights."""
    async with running(node) as intake:
        for number in range(1, NUM_CLAIMS + 1):
            versions = (version, version)
            claim = make_group(
                identity, number=number, run_id=MANIFEST.run_id, versions=versions, weights_of=ME.peer_id
            )
            await intake.submit(seal_group(claim, identity).to_bytes(), origin=identity.peer_id)


async def test_a_peer_that_claims_weights_of_a_node_that_offers_none_is_refused_and_banned(tmp_path, identity):
    with node_on(tmp_path, open_disk()) as node:
        await send_claims(node, identity, version=0)
        assert node.store.reader.ready_counts() == (0, 0)
        assert sorted(node.context.counters.refused) == ["banned", "weights_not_offered"]
        # The score recovers with time, so the ban may need one more refusal.
        assert node.context.counters.refused["weights_not_offered"] in (5, 6)
        assert node.peers.row(identity.peer_id)["trust_level"] == "banned"


async def test_a_follower_whose_learner_lost_steps_is_not_banned(tmp_path, identity):
    with node_on(tmp_path, open_disk(), role="learner") as node:
        node.context.state.policy_version = 1
        await send_claims(node, identity, version=500)
        assert node.context.counters.refused == {"version_not_offered": NUM_CLAIMS}
        assert node.peers.row(identity.peer_id)["trust_level"] != "banned"


@pytest.mark.parametrize("trusted", [False, True])
async def test_a_followers_group_counts_as_own_weights_only_if_the_operator_trusts_it(tmp_path, identity, trusted):
    trust = (identity.peer_id,) if trusted else ()
    with node_on(tmp_path, open_disk(), role="learner", trust=trust) as node:
        node.context.state.policy_version = 3
        async with running(node) as intake:
            claim = make_group(identity, run_id=MANIFEST.run_id, versions=(3, 3), weights_of=ME.peer_id)
            verdict = await intake.submit(seal_group(claim, identity).to_bytes(), origin=identity.peer_id)
            assert isinstance(verdict, Accepted)
            assert intake._newest_own.full() is trusted
        assert node.peers.is_of_own_weights(claim) is trusted


async def test_a_group_being_stored_when_the_node_ends_is_counted(tmp_path, identity):
    disk = GatedDisk()
    with node_on(tmp_path, disk) as node:
        intake = intake_of(node)
        running = asyncio.create_task(intake.run())
        submitted = asyncio.create_task(intake.submit(sealed(identity, 1), origin="ann"))
        await disk.called.wait()
        running.cancel()
        await asyncio.sleep(0)
        disk.gate.set()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert isinstance(await submitted, Accepted)
        assert node.store.reader.ready_counts() == (0, 1)
        assert node.context.counters.groups_received == 1
        assert '"admitted"' in (tmp_path / "events.jsonl").read_text()


async def test_a_codec_that_the_run_does_not_permit_is_a_config_error(tmp_path):
    settings = NodeSettings(model="any", swarm={"codec": "lossy"})
    with pytest.raises(ConfigError, match=r"swarm.codec is 'lossy' and run test takes exact, lossless"):
        async with running_components(settings, RunPlan(MANIFEST, "arithmetic", ()), Home(tmp_path)):
            pass


class _HostileTokenizer(_Tokenizer):
    """A tokenizer with which a completion that ends with 99 never finishes scoring, and one that begins with 10 is
    correct."""

    def answer_texts(self, tokens: TokenBatch, finish_reasons: object, *, opening: str = "") -> list[str]:
        return ["stuck" if ids[-1] == STUCK else str(float(ids[0] == 10)) for ids in tokens.ids_of_each()]


STUCK = 99
LIMITS = ScoringLimits(time_limit_s=2.0, start_limit_s=60, memory_limit_bytes=1 << 30)


def _hostile(sender: Identity, number: int, *, is_bomb: bool = False) -> bytes:
    problem = HostileTask()[0]
    group = make_group(
        sender,
        number=number,
        run_id=MANIFEST.run_id,
        prompt_ref=problem.ref,
        problem_hash=hash_messages(problem.prompt),
    )
    if is_bomb:
        group = group.with_completions((make_completion(12, STUCK), make_completion(13, STUCK)))
    return seal_group(group, sender).to_bytes()


async def test_a_new_peers_slow_groups_delay_no_known_peer_and_lower_their_senders_score(
    tmp_path, identity, monkeypatch
):
    new_peer = Identity.generate()
    async with (
        IsolatedScorer(HostileTask(), limits=LIMITS) as known,
        IsolatedScorer(HostileTask(), limits=LIMITS) as other,
    ):
        for scorer in (known, other):
            await scorer.score(HostileTask()[0], ["1"])  # starts its process
        workers = {"tokenizer": _HostileTokenizer(), "scorer": known, "new_peers_scorer": other}
        monkeypatch.setattr(rate_limits, "SCORING_S_PER_MINUTE", 1.5)
        with node_on(tmp_path, open_disk(), **workers) as node:
            for _ in range(12):
                node.peers.note(identity.peer_id, Behaviour.CONTRIBUTED)
            done: list[str] = []
            has_received_all, score = asyncio.Event(), other.score

            async def score_late(*given, **how):
                await has_received_all.wait()
                return await score(*given, **how)

            other.score = score_late  # type: ignore[method-assign]

            async def submit(sender, data):
                verdict = await intake.submit(data, origin=sender.peer_id)
                done.append(sender.peer_id)
                return verdict

            async with running(node) as intake, asyncio.TaskGroup() as tasks:
                bombs = [tasks.create_task(submit(new_peer, _hostile(new_peer, n, is_bomb=True))) for n in range(1, 5)]
                for number in range(1, 21):
                    assert isinstance(await submit(identity, _hostile(identity, number)), Accepted)
                assert new_peer.peer_id not in done, "twenty groups are scored while the first slow one is"
                has_received_all.set()
            reasons = [task.result().refusal.reason for task in bombs]
            assert reasons == ["scoring_timeout", *["scoring_quota"] * 3], (
                "the first group did not use up its sender's allowance"
            )
            assert node.store.reader.ready_counts() == (0, 20)
            assert node.peers.row(new_peer.peer_id)["score"] < -0.9
            assert node.peers.row(identity.peer_id)["trust_level"] == "good"


async def test_own_groups_wait_for_no_known_peer_and_known_peers_together_leave_time_for_them(tmp_path, identity):
    scored, waiting, peers = asyncio.Event(), [], (identity, Identity.generate())

    class Slow(_Scorer):
        async def score(self, item, texts, *, cost=None):
            waiting.append(item)
            await scored.wait()
            cost.seconds += rate_limits.KNOWN_PEERS_SCORING_S_PER_MINUTE
            return await super().score(item, texts, cost=cost)

    with node_on(tmp_path, open_disk(), scorer=Slow()) as node:
        for peer in peers:
            for _ in range(12):
                node.peers.note(peer.peer_id, Behaviour.CONTRIBUTED)
        async with running(node) as intake:
            of_peers = [asyncio.create_task(intake.submit(sealed(one, 1), origin=one.peer_id)) for one in peers]
            await eventually(lambda: waiting)
            group = make_group(ME, run_id=MANIFEST.run_id)
            own = asyncio.create_task(intake.submit(seal_group(group, ME).to_bytes(), origin=ME.peer_id, made=group))
            await eventually(own.done)
            assert isinstance(own.result(), Accepted) and not of_peers[0].done()
            scored.set()
            first, second = [await task for task in of_peers]
        assert isinstance(first, Accepted)
        assert isinstance(second, Refused) and second.refusal.reason == "scoring_quota"


async def test_the_same_group_in_both_lanes_is_admitted_once(tmp_path, identity):
    """The lanes validate at the same time."""
    scored, num_waiting = asyncio.Event(), 0

    class Slow(_Scorer):
        async def score(self, item, texts, *, cost=None):
            nonlocal num_waiting
            num_waiting += 1
            await scored.wait()
            return await super().score(item, texts, cost=cost)

    slow = Slow()
    with node_on(tmp_path, open_disk(), trust=("knownPeer",), scorer=slow, new_peers_scorer=slow) as node:
        data = sealed(identity, 1)
        async with running(node) as intake, asyncio.TaskGroup() as tasks:
            both = [tasks.create_task(intake.submit(data, origin=origin)) for origin in ("knownPeer", "newPeer")]
            await eventually(lambda: num_waiting == 2)
            scored.set()
        verdicts = [task.result() for task in both]
        assert sum(isinstance(verdict, Accepted) for verdict in verdicts) == 1
        assert [v.refusal.reason for v in verdicts if isinstance(v, Refused)] == ["duplicate"]
        assert node.store.reader.ready_counts() == (0, 1)
