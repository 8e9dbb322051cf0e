"""Weights from a learner to a generator: over real p2pd with broken streams, and from a malicious learner."""

import asyncio
import hashlib
import os
import signal
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.stubs.stub_node import StubTokenizer
from ftis_node.config.manifest import parse_manifest
from ftis_node.config.node import NodeSettings
from ftis_node.errors import ModelError
from ftis_node.gossip import Gossip, SwarmPhase
from ftis_node.gossip.libp2p import Libp2pGossip
from ftis_node.gossip.loopback import LoopbackSwarm
from ftis_node.learner.messages import MAX_UNSAVED_STEPS, LearnerState
from ftis_node.node.context import NodeState
from ftis_node.node.loops import weight_follow, weight_offer
from ftis_node.node.loops.weight_download import Download, OfferWithdrawnError
from ftis_node.node.loops.weight_offer import newest_offered
from ftis_node.node.pausing import Decision
from ftis_node.node.storage.disk_space import HomeLimit, HomeUse
from ftis_node.node.storage.weight_versions import OFFER_FILE
from ftis_node.node.wiring import NodeComponents, Wiring
from ftis_node.node.worker_interfaces import NullGeneration, NullLearner
from ftis_node.records.bounds import MAX_INTEGER
from ftis_node.records.identity import Identity
from ftis_node.records.peer_messages import (
    WeightsOffer,
    WeightsPart,
    WeightsRequest,
    open_offer,
    open_weights_request,
    seal_offer,
)
from ftis_node.telemetry.status import EvalStatus
from ftis_node.workers.durable import complete_folder
from ftis_node.workers.weight_store import WEIGHTS_FILE, PublishedWeights, WeightProof, probe_token_ids
from tests.conftest import TOKENIZER
from tests.gossip.helpers import settings
from tests.node.nodes import components, events_of
from tests.node.support import manifest_text
from tests.waiting import eventually

MANIFEST = parse_manifest(manifest_text(foreign_wait_s=1).replace("every_steps = 2", "every_steps = 5"), source="test")
RUN_ID = MANIFEST.run_id
MIB = 1 << 20
VOCABULARY = 100
PARAMETERS = 4 * MIB
LEARNER, GENERATOR, OTHER = (Identity.from_seed(bytes([number]) * 32) for number in (1, 2, 3))


@pytest.fixture(autouse=True)
def _same_model(monkeypatch):
    """Both nodes start from the same model, whose files no test reads. The generator polls often."""
    for module in (weight_follow, weight_offer):
        monkeypatch.setattr(module, "model_fingerprint", lambda source: "12" * 16)
    monkeypatch.setattr(weight_follow, "parameter_count", lambda source: PARAMETERS)
    monkeypatch.setattr(weight_follow, "POLL_INTERVAL_S", 0.05)


class _Engine(NullGeneration):
    """A generation worker that accepts all weights except files that begin with `refuses`."""

    def __init__(self, refuses: bytes = b"invalid") -> None:
        super().__init__(lambda: 0)
        self.versions: list[int] = []
        self.contents: list[bytes] = []
        self._refuses = refuses

    async def try_weights(self, weights: PublishedWeights, proof: WeightProof) -> None:
        with open(weights.path, "rb") as file:  # noqa: ASYNC230 - a few MiB
            content = file.read()
            if content.startswith(self._refuses):
                raise ModelError("differs from the learner by inf nats on the probe")
        assert proof.version == weights.version
        self.versions.append(weights.version)
        self.contents.append(content)


class _Tokenizer(StubTokenizer):
    fingerprint = TOKENIZER
    num_ids = vocab_size = VOCABULARY


@contextmanager
def _node(identity: Identity, folder: Path, gossip: Gossip | None, **roles: Any) -> Iterator[NodeComponents]:
    """Yield the components of a learner, or of a generator if it follows one."""
    role = "generator" if roles.get("follow") else "learner"
    settings = NodeSettings.model_validate({"model": "m", "role": role, "roles": roles})
    parts = {"tokenizer": _Tokenizer(), "generation": _Engine(), "learner": NullLearner(PARAMETERS)}
    given = {"identity": identity, "settings": settings, "manifest": MANIFEST, "gossip": gossip, "model": "tiny"}
    with components(folder, **given, **parts) as node:
        yield node


def _publish(node: NodeComponents, version: int, content: bytes) -> tuple[PublishedWeights, WeightProof]:
    """Publish weights like the learner's worker."""
    folder = node.home.weights / f"weights-{version:08d}"
    with complete_folder(folder, sync=False) as temporary:
        (temporary / WEIGHTS_FILE).write_bytes(content)
    ids = probe_token_ids(VOCABULARY)
    proof = WeightProof(version=version, probe_ids=ids, logprobs=(-1.0,) * (len(ids) - 1))
    return PublishedWeights(version=version, path=str(folder / WEIGHTS_FILE), num_bytes=len(content)), proof


class _Pair:
    """A learner that offers weights and a generator that follows it, over the in-process network."""

    def __init__(self, learner: NodeComponents, generator: NodeComponents) -> None:
        self.learner = learner
        self.generator = generator
        self.follow = Wiring(generator).follow_loop
        self.offers = Wiring(learner).offer_loop
        self.requests: list[WeightsRequest] = []
        engine: Any = generator.generation
        self.served, self.contents = engine.versions, engine.contents

    async def give(self, peer_id: str, data: bytes) -> AsyncGenerator[bytes, None]:
        self.requests.append(open_weights_request(data))
        async for item in self.offers.give(peer_id, data):
            yield item

    async def offer(self, version: int, content: bytes) -> WeightsOffer:
        await self.offers.take(*_publish(self.learner, version, content))
        await eventually(lambda: self.offers._newest and self.offers._newest.offer.version == version)
        return self.offers._newest.offer

    async def serve(self, version: int, content: bytes) -> WeightsOffer:
        """Offer weights, and wait until they are served after those of before."""
        expected, state = [*self.served, version], self.generator.context.state
        offer = await self.offer(version, content)
        await eventually(lambda: (self.served, state.policy_version) == (expected, version))
        return offer

    @property
    def refused(self) -> dict[str, int]:
        return dict(self.generator.context.counters.weights_refused)


@asynccontextmanager
async def _pair(folder: Path, *, follows: bool = True, **roles: Any) -> AsyncIterator[_Pair]:
    swarm = LoopbackSwarm()
    of_learner, of_generator = (swarm.join(one.peer_id, run_id=RUN_ID) for one in (LEARNER, GENERATOR))
    roles = {"follow": LEARNER.peer_id, **roles}
    with (
        _node(LEARNER, folder / "learner", of_learner) as learner,
        _node(GENERATOR, folder / "generator", of_generator, **roles) as generator,
    ):
        pair = _Pair(learner, generator)
        loops = (pair.offers, pair.follow) if follows else (pair.offers,)
        tasks = [asyncio.create_task(loop.run()) for loop in loops]
        for gossip in (of_learner, of_generator):
            await gossip.start()
        of_learner.serve_weights(pair.give)
        try:
            yield pair
        finally:
            for task in tasks:
                task.cancel()
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                assert isinstance(result, asyncio.CancelledError), result


def _held(folder: Path) -> list[int]:
    return sorted(int(path.name.split("-")[1]) for path in (folder / "generator/weights/followed").glob("version-*"))


def _folder(folder: Path, version: int) -> Path:
    (path,) = (folder / "generator/weights/followed").glob(f"version-{version:08d}-*")
    return path


async def test_versions_arrive_and_are_served_in_order(tmp_path):
    async with _pair(tmp_path) as pair:
        for version in (1, 2, 5):
            await pair.serve(version, os.urandom(2 * MIB + 5))
        fetched = events_of(pair.generator, "weights_fetched")
        assert [event["num_chunks"] for event in fetched] == [3, 3, 3]
        assert fetched[0]["num_bytes"] == 2 * MIB + 5
        assert events_of(pair.learner, "weights_served")[0]["num_bytes"] == 2 * MIB + 5
        sent, received = pair.learner.gossip.counters, pair.generator.gossip.counters
        await eventually(lambda: received.weights_bytes_in == sent.weights_bytes_out)  # it still requests offers
        assert received.weights_bytes_in > 3 * (2 * MIB + 5)
        assert received.envelope_bytes_in == 0
        await eventually(lambda: pair.generator.context.state.policy_version == 5)
        assert _held(tmp_path) == [5], "older versions are still there"


async def test_no_version_is_fetched_while_the_disk_is_full(tmp_path):
    async with _pair(tmp_path) as pair:
        space = pair.generator.store.space
        space.limit = HomeLimit(0, reserve_bytes=1)
        space.note(HomeUse(used_bytes=1, free_bytes=0))
        offer = await pair.offer(1, b"weights")
        await eventually(lambda: len(pair.requests) > 2)
        assert {request.part for request in pair.requests} == {WeightsPart.OFFER}
        assert not pair.follow._should_fetch(offer)
        space.limit = HomeLimit(1 << 40, reserve_bytes=0)
        space.note(HomeUse(used_bytes=1, free_bytes=1 << 40))
        await eventually(lambda: pair.served == [1])


async def test_a_restarted_generator_serves_its_last_version_and_resumes_a_partial_file(tmp_path):
    content = os.urandom(6 * MIB + 1)
    async with _pair(tmp_path) as pair:
        await pair.serve(1, b"first")
    async with _pair(tmp_path, follows=False) as pair:
        offer = await pair.offer(2, content)
        partial = tmp_path / "generator/weights/followed/partial"
        partial.mkdir(parents=True, exist_ok=True)
        damaged = content[: 3 * MIB] + b"x" + content[3 * MIB + 1 : 5 * MIB]  # the fourth chunk is wrong
        (partial / f"{offer.sha256.hex()}.part").write_bytes(damaged)
        (partial / f"{'00' * 32}.part").write_bytes(b"of a withdrawn version")
        follow = Wiring(pair.generator).follow_loop
        await follow.resume()
        assert pair.served == [1]
        running = asyncio.create_task(follow.run())
        await eventually(lambda: pair.served == [1, 2])
        running.cancel()
        fetched = events_of(pair.generator, "weights_fetched")[-1]
        assert (fetched["num_resumed"], fetched["num_chunks"]) == (3, 4)
        chunk_requests = [request for request in pair.requests if request.part is WeightsPart.CHUNKS]
        assert [(request.first, request.count) for request in chunk_requests] == [(3, 4)]
        assert _folder(tmp_path, 2).joinpath(WEIGHTS_FILE).read_bytes() == content
        assert list(partial.iterdir()) == []


async def test_weights_are_tried_before_or_after_a_pause(tmp_path, monkeypatch):
    async with _pair(tmp_path) as pair:
        await pair.serve(1, b"first")
        trying, may_end = asyncio.Event(), asyncio.Event()

        async def try_slowly(weights, proof, try_weights=pair.generator.generation.try_weights):
            trying.set()
            await may_end.wait()
            await try_weights(weights, proof)

        monkeypatch.setattr(pair.generator.generation, "try_weights", try_slowly)
        await pair.offer(2, b"second")
        await trying.wait()
        pausing = asyncio.create_task(pair.generator.context.pause.begin(Decision("by command")))
        await asyncio.sleep(0.1)
        assert not pausing.done(), "the pause does not wait for the trial"
        may_end.set()
        await asyncio.wait_for(pausing, 30)
        await eventually(lambda: pair.served == [1, 2])
    async with _pair(tmp_path, follows=False) as pair:  # a restart during the pause
        await pair.generator.context.pause.begin(Decision("by command"))
        running = asyncio.create_task(Wiring(pair.generator).follow_loop.run())
        await asyncio.sleep(0.3)
        assert pair.served == [], "weights were tried during the pause"
        pair.generator.context.pause.end()
        await eventually(lambda: pair.served == [2])
        running.cancel()


async def test_weights_whose_proof_fails_are_not_served_and_later_ones_are(tmp_path):
    async with _pair(tmp_path) as pair:
        await pair.serve(1, b"valid")
        await pair.offer(2, b"invalid weights: NaN")
        await eventually(lambda: pair.refused == {"proof": 1})
        assert (pair.generator.context.state.policy_version, _held(tmp_path)) == (1, [1])
        await pair.serve(3, b"valid again")


async def test_a_generator_goes_back_with_a_learner_that_lost_steps(tmp_path):
    async with _pair(tmp_path) as pair:
        await pair.serve(500, b"five hundred")
    async with _pair(tmp_path, weights_delay="fixed:1") as pair:  # both restart; the learner has lost its home
        await pair.offer(4, b"four")
        await eventually(lambda: pair.generator.context.state.policy_version == 4)
        assert pair.served == [500, 4]
        await pair.serve(5, b"five")
        assert (pair.served, pair.refused) == ([500, 4, 5], {})
    async with _pair(tmp_path) as pair:
        await eventually(lambda: pair.served == [5])


async def test_lost_versions_that_wait_for_their_delay_are_not_served(tmp_path):
    async with _pair(tmp_path, weights_delay="fixed:2") as pair:
        for version, content in ((7, b"lost"), (8, b"lost"), (7, b"seven, made again")):
            await pair.offer(version, content)
            await eventually(lambda version=version: pair.follow._newest and pair.follow._newest.version == version)
        assert _held(tmp_path) == [7]
        await eventually(lambda: pair.served == [7])
        assert _folder(tmp_path, 7).joinpath(WEIGHTS_FILE).read_bytes() == b"seven, made again"


async def test_the_served_version_stays_until_a_repeated_one_of_its_number_is_proven(tmp_path):
    """A worker that dies meanwhile loads its file again, and a restarted node serves it."""
    async with _pair(tmp_path) as pair:
        await pair.serve(9, b"nine")
        old = _folder(tmp_path, 9)
    async with _pair(tmp_path, weights_delay="fixed:3") as pair:
        await eventually(lambda: pair.served == [9])
        for version, content in ((12, b"lost"), (9, b"nine, made again")):
            await pair.offer(version, content)
            await eventually(lambda version=version: pair.follow._newest and pair.follow._newest.version == version)
        assert _held(tmp_path) == [9, 9]
        assert pair.served == [9] and (old / WEIGHTS_FILE).read_bytes() == b"nine"
    async with _pair(tmp_path, weights_delay="fixed:3") as pair:
        await eventually(lambda: pair.contents == [b"nine"])
        await eventually(lambda: pair.contents == [b"nine", b"nine, made again"])
        await eventually(lambda: _held(tmp_path) == [9])
        assert not old.exists()


async def test_versions_that_the_learner_lost_are_evaluated_again(tmp_path):
    async with _pair(tmp_path) as pair:
        await pair.serve(10, b"ten")
        evaluations = pair.generator.context.evaluations
        for step in (5, 10):
            evaluations.add(EvalStatus(step=step, task="sums", pass_at_1=0.5, n=8))
        await pair.serve(8, b"eight")
        assert [one.step for one in evaluations.entries] == [5], "version 10 would not be evaluated again"


async def test_a_restarted_generator_evaluates_again_what_is_newer_than_its_version(tmp_path):
    async with _pair(tmp_path) as pair:
        await pair.serve(8, b"eight")
    async with _pair(tmp_path, follows=False) as pair:
        for step in (5, 10):  # as the event log has them
            pair.generator.context.evaluations.add(EvalStatus(step=step, task="sums", pass_at_1=0.5, n=8))
        await pair.follow.resume()
        assert [one.step for one in pair.generator.context.evaluations.entries] == [5]


async def test_a_repeated_version_of_the_newest_number_is_fetched(tmp_path):
    async with _pair(tmp_path) as pair:
        offer = await pair.serve(9, b"nine")
        assert not pair.follow._should_fetch(offer)
        assert pair.follow._should_fetch(replace(offer, sha256=bytes(32)))


async def test_an_evaluation_is_due_if_the_last_one_was_of_lost_weights(tmp_path):
    async with _pair(tmp_path, evaluate=True) as pair:
        context = pair.generator.context
        evaluated: list[int] = []

        async def evaluate(*, step):
            evaluated.append(step)
            context.evaluations.add(EvalStatus(step=step, task="sums", pass_at_1=0.5, n=8))

        pair.follow.evaluator = SimpleNamespace(evaluate=evaluate)
        for number, (version, due) in enumerate(((9, [9]), (12, [9, 12]), (11, [9, 12, 11]), (14, [9, 12, 11]))):
            await pair.offer(version, b"%d" % number)
            await eventually(lambda version=version: context.state.policy_version == version)
            await eventually(lambda due=due: evaluated == due)


async def test_an_offer_that_is_sent_again_is_not_accepted(tmp_path):
    async with _pair(tmp_path) as pair:
        old = await pair.serve(4, b"four")
        await pair.serve(5, b"five")
        pair.learner.gossip.serve_weights(_Malicious(pair, old).give)
        await eventually(lambda: pair.refused == {"goes_back": 1})
        pair.learner.gossip.serve_weights(pair.give)
        await pair.serve(6, b"six")
        assert pair.refused == {"goes_back": 1}, "the same offer was reported twice"


async def test_a_damaged_version_of_an_earlier_start_is_removed(tmp_path):
    async with _pair(tmp_path) as pair:
        await pair.serve(1, b"one")
    folder = _folder(tmp_path, 1)
    (folder / OFFER_FILE).write_bytes(b"\x0a\x03abc\x12")
    async with _pair(tmp_path, follows=False) as pair:
        await pair.follow.resume()
        assert pair.served == [] and not folder.exists()


@dataclass
class _Malicious:
    """A malicious learner: it serves this offer, these hashes, and zeros for the chunk `spoil`."""

    pair: _Pair
    offer: WeightsOffer
    signer: Identity = LEARNER
    hashes: bytes | None = None
    spoil: int = -1

    async def give(self, peer_id: str, data: bytes) -> AsyncGenerator[bytes, None]:
        request = open_weights_request(data)
        self.pair.requests.append(request)
        if request.part is WeightsPart.OFFER:
            yield seal_offer(self.offer, self.signer)
            return
        if request.part is WeightsPart.HASHES and self.hashes is not None:
            yield self.hashes
            return
        index = request.first
        async for item in self.pair.offers.give(peer_id, data):
            is_spoiled = request.part is WeightsPart.CHUNKS and index == self.spoil
            yield bytes(len(item)) if is_spoiled else item
            index += 1


@asynccontextmanager
async def _attacked(
    folder: Path, content: bytes, changes: dict[str, Any] | None = None, **attack: Any
) -> AsyncIterator[tuple[_Pair, _Malicious]]:
    """Yield a pair whose generator follows a malicious learner; `changes` replace fields of its offer."""
    async with _pair(folder, follows=False) as pair:
        malicious = _Malicious(pair, replace(await pair.offer(1, content), **(changes or {})), **attack)
        pair.learner.gossip.serve_weights(malicious.give)
        running = asyncio.create_task(Wiring(pair.generator).follow_loop.run())
        yield pair, malicious
        running.cancel()


@pytest.mark.parametrize(
    ("changes", "signer", "reason"),
    [
        ({}, OTHER, "signature"),
        ({"num_bytes": 4 * PARAMETERS + MIB + 1}, LEARNER, "size"),
        ({"probe_logprobs": (float("nan"),) * 31}, LEARNER, "malformed"),
    ],
)
async def test_an_invalid_offer_is_refused_without_a_request_for_the_file(tmp_path, changes, signer, reason):
    async with _attacked(tmp_path, b"weights", changes, signer=signer) as (pair, _):
        await eventually(lambda: pair.refused)
        await asyncio.sleep(0.2)
        assert pair.refused == {reason: 1}
        assert {request.part for request in pair.requests} == {WeightsPart.OFFER}
        assert pair.generator.peers.registry.seen(LEARNER.peer_id).refused == {f"weights_{reason}": 1}
        assert pair.served == []


async def test_hashes_that_do_not_match_the_offer_are_refused(tmp_path):
    async with _attacked(tmp_path, b"weights", hashes=bytes(32)) as (pair, _):
        await eventually(lambda: pair.refused == {"hash": 1})
        assert WeightsPart.CHUNKS not in {request.part for request in pair.requests}


async def test_a_file_that_does_not_match_the_offer_is_removed(tmp_path):
    claimed = {"sha256": hashlib.sha256(b"others").digest()}
    async with _attacked(tmp_path, b"weights", claimed) as (pair, _):
        held = pair.offers._held[1]
        pair.offers._held[1] = replace(held, offer=replace(held.offer, **claimed))
        await eventually(lambda: pair.refused == {"hash": 1})
        assert list((tmp_path / "generator/weights/followed/partial").iterdir()) == []


async def test_a_wrong_chunk_ends_the_download_and_the_next_version_is_served(tmp_path):
    async with _attacked(tmp_path, os.urandom(5 * MIB), spoil=2) as (pair, _):
        await eventually(lambda: pair.refused)
        assert pair.refused == {"chunk": 1}
        assert list((tmp_path / "generator/weights/followed/partial").iterdir()) == []
        pair.learner.gossip.serve_weights(pair.offers.give)
        await pair.offer(2, os.urandom(MIB))
        await eventually(lambda: pair.served == [2])


async def test_the_number_of_offered_files_is_bounded_and_an_old_offer_is_withdrawn(tmp_path):
    async with _pair(tmp_path, follows=False) as pair:
        first = await pair.offer(1, b"one")
        folder = tmp_path / "learner/weights/offered"
        for version in range(2, 9):
            await pair.offer(version, b"%d" % version)
        assert len(list(folder.iterdir())) == 4, "more than `MAX_PUBLISHED_VERSIONS`"
        with pytest.raises(OfferWithdrawnError):
            await Download(pair.generator.gossip, first, tmp_path / "partial", 0.01, lambda _: None).run()


@pytest.mark.timeout(120)
async def test_a_download_over_p2pd_resumes_after_a_broken_stream(tmp_path):
    """The learner's p2pd is killed during the download. Received chunks are not requested again."""
    learner = Libp2pGossip(settings(tmp_path / "a"), identity=LEARNER, run_id=RUN_ID)
    await learner.start()
    generator = Libp2pGossip(
        settings(tmp_path / "b", peers=tuple(learner.addresses)), identity=GENERATOR, run_id=RUN_ID
    )
    await generator.start()
    with _node(LEARNER, tmp_path / "learner", learner) as node:
        offers = Wiring(node).offer_loop
        offering = asyncio.create_task(offers.run())
        content = os.urandom(8 * MIB + 77)
        num_given, first_chunks = 0, list[int]()

        async def give_slowly(peer_id, data):
            nonlocal num_given
            request = open_weights_request(data)
            if request.part is WeightsPart.CHUNKS:
                first_chunks.append(request.first)
            async for item in offers.give(peer_id, data):
                if request.part is WeightsPart.CHUNKS:
                    num_given += 1
                    if num_given == 4:
                        await asyncio.sleep(0.5)  # the first chunks arrive meanwhile
                        os.kill(learner.process_id, signal.SIGKILL)
                    await asyncio.sleep(0.05)
                yield item

        try:
            learner.serve_weights(give_slowly)
            await offers.take(*_publish(node, 1, content))
            await eventually(lambda: offers._newest)
            await eventually(lambda: generator.state.state is SwarmPhase.CONNECTED)
            offer = open_offer(offers._newest.signed)
            download = Download(generator, offer, tmp_path / "partial", 0.2, lambda _: None)
            assert (await download.run()).read_bytes() == content
            assert download.num_fetched == offer.num_chunks == 9
            assert first_chunks[0] == 0 < first_chunks[1], "received chunks were requested again"
            assert learner.counters.weights_bytes_out >= len(content)
        finally:
            offering.cancel()
            await asyncio.gather(learner.close(), generator.close())


def test_a_starting_learner_refuses_no_version_of_its_followers(tmp_path):
    learner = NullLearner(PARAMETERS)
    learner.state = None
    with components(tmp_path, settings=NodeSettings(model="m", role="learner")) as node:
        context = node.context
        assert newest_offered(context, learner) == MAX_INTEGER, "it does not know its version yet"
        proof = WeightProof(version=74, probe_ids=(), logprobs=())
        learner.state = LearnerState(0, 0, parameters=1, trainable_parameters=1, proof=proof)
        assert newest_offered(context, learner) == MAX_INTEGER, "its followers may have the weights of lost steps"
        learner.state = LearnerState(74, 74, parameters=1, trainable_parameters=1, proof=proof)
        assert newest_offered(context, learner) == 74 + 1 + 2 * MAX_UNSAVED_STEPS, "the train loop has not noted it yet"


def test_a_version_after_steps_without_an_update_is_not_refused(tmp_path):
    """The learner offers version 14, and has not noted step 14 yet."""
    learner, how = NullLearner(PARAMETERS), {"checkpoint_every_steps": 1}
    settings = NodeSettings.model_validate({"model": "m", "role": "learner", "learner": how})
    with components(tmp_path, settings=settings, state=NodeState(step=13, policy_version=10)) as node:
        proof = WeightProof(version=10, probe_ids=(), logprobs=())
        learner.state = LearnerState(10, 10, parameters=1, trainable_parameters=1, proof=proof)
        assert newest_offered(node.context, learner) == 13 + 1 + 2


async def test_weights_for_trusted_peers_are_served_to_no_other_peer(tmp_path):
    with _node(LEARNER, tmp_path, None, weights_for="trusted") as node:
        node.peers.trust(GENERATOR.peer_id)
        offers = Wiring(node).offer_loop
        offering = asyncio.create_task(offers.run())
        await offers.take(*_publish(node, 1, b"weights"))
        await eventually(lambda: offers._newest)
        offer = open_offer(offers._newest.signed)
        requests = [
            WeightsRequest(WeightsPart.OFFER),
            WeightsRequest(WeightsPart.HASHES, file=offer.sha256),
            WeightsRequest(WeightsPart.CHUNKS, file=offer.sha256, first=0, count=1),
        ]
        for request in requests:
            assert [item async for item in offers.give(GENERATOR.peer_id, request.to_bytes())]
            assert not [item async for item in offers.give(OTHER.peer_id, request.to_bytes())]
        offering.cancel()
