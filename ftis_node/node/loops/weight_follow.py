"""The follow loop: a generator fetches and serves the weights of its learner, with the delay of its settings.

    offer --signature, rules--> fetch (weight_download.py) --> complete file --delay--> engine --proof--> served
                                                              the newest due version

A lower version is taken if it was offered later: the learner has lost steps, and repeats them from there.
The proof is the log-probs of fixed probe tokens, which the engine must reproduce. If a signature, a chunk or the proof
is wrong, the generator continues with its present weights and logs the reason.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from dataclasses import dataclass

from ftis_node.config.roles import MAX_PENDING_VERSIONS
from ftis_node.errors import ModelError, RecordError, WorkerDiedError
from ftis_node.gossip import FetchOutcome
from ftis_node.models import ModelSource, PromptTokenizer, model_fingerprint, parameter_count
from ftis_node.node.loops.weight_download import Download, OfferWithdrawnError
from ftis_node.node.peers.node_part import NodePart
from ftis_node.node.peers.outgoing_slots import ANSWERED
from ftis_node.node.storage.weight_versions import VersionStore
from ftis_node.node.supervision.waits import in_background, wait_at_most
from ftis_node.node.training.evaluator import Evaluator
from ftis_node.node.worker_interfaces import Generation
from ftis_node.node.worker_settings import serves_adapters
from ftis_node.records.peer_messages import WeightsOffer, WeightsPart, WeightsRequest, open_offer
from ftis_node.swarm.peer_guard import Place
from ftis_node.swarm.transit import VersionsInTransit, should_fetch
from ftis_node.validation.rules import Refusal
from ftis_node.validation.weights_rules import Follower, refuse_offer
from ftis_node.workers.weight_store import PublishedWeights, WeightProof, probe_token_ids

log = logging.getLogger(__name__)
POLL_INTERVAL_S = 1.0
POLL_TIMEOUT_S = 10.0  # then the learner counts as unreachable
DOWNLOAD = "the download of weights"


@dataclass(eq=False, repr=False)
class FollowLoop(NodePart):
    """Loop that follows one learner. Call `resume` before `run`."""

    source: ModelSource
    tokenizer: PromptTokenizer
    generation: Generation
    evaluator: Evaluator

    def __post_init__(self) -> None:
        self._settings = self.context.settings.roles
        self._held = VersionStore(self.store.home.weights / "followed")
        self._transit = VersionsInTransit(self._settings.delay, random.Random())
        self._newest: WeightsOffer | None = None  # the newest offer whose file is on disk
        self._refused: bytes | None = None  # the last refused offer: each poll returns it again, the log has it once
        self._wanted_at = -math.inf  # when the fetch of the last version began
        self._is_away = False
        self._arrived = asyncio.Event()
        self._trial = asyncio.Lock()  # held while a version is tried or replaced
        self._follower: Follower | None = None
        self._has_resumed = False

    async def resume(self) -> None:
        """Serve the version that was served before the node stopped; let newer stored versions wait for their delay."""
        self._has_resumed = True
        served: WeightsOffer | None = None
        for offer, was_served in await in_background(self._held.find):
            if refuse_offer(offer, await self._self_as_follower()):  # the settings may have changed since
                self._held.remove(offer)
                continue
            self._follow(offer)
            if was_served:
                served, self._transit.served = offer, offer.version
            else:
                self._transit.send(offer.version, at=time.monotonic() - max(0.0, time.time() - offer.created_at))
        if served is not None:
            self.context.evaluations.go_back(served.version)
            await self._serve_guarded(served.version, before=0, offer=served)

    async def run(self) -> None:
        if not self._has_resumed:
            await self.resume()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._keep_fetching(), name="follow-fetch")
            tasks.create_task(self._keep_serving(), name="follow-serve")

    async def _keep_fetching(self) -> None:
        while True:
            with self.gossip.guard.work_for(self._settings.follow, Place.WEIGHTS):
                offer, signed = await self._poll()
                if offer is not None and self._should_fetch(offer):
                    await self._fetch(offer, signed)
            await asyncio.sleep(POLL_INTERVAL_S)

    async def _poll(self) -> tuple[WeightsOffer | None, bytes]:
        """Return the learner's newest offer and its signed form; None without an answer, or if the offer is refused."""
        question = WeightsRequest(WeightsPart.OFFER).to_bytes()
        fetched = await self.gossip.request_weights(
            self._settings.follow, question, max_items=1, timeout_s=POLL_TIMEOUT_S
        )
        self._note_outcome(fetched.outcome)
        signed = fetched.items[0] if fetched.items else b""
        if signed in (b"", self._refused):
            return None, signed
        try:
            offer = open_offer(signed)
        except RecordError as error:
            refusal: Refusal | None = Refusal(error.reason, str(error))
        else:
            refusal = refuse_offer(offer, await self._self_as_follower())
            newest = self._newest
            if refusal is None and newest and offer.version < newest.version and offer.created_at < newest.created_at:
                refusal = Refusal("goes_back", f"version {offer.version} was offered before {newest.version}")
        if refusal is None:
            return offer, signed
        self._refused = signed
        self._refuse(refusal)
        return None, signed

    def _should_fetch(self, offer: WeightsOffer) -> bool:
        """Return whether the offer is new, there is disk space, and the delay policy allows another pending version."""
        newest = self._newest
        is_known = newest is not None and (offer.version, offer.sha256) == (newest.version, newest.sha256)
        if is_known or self.context.pause.is_paused or self.store.space.why_full:
            return False
        return should_fetch(
            self._settings.delay,
            num_held=len(self._transit.versions),
            max_held=MAX_PENDING_VERSIONS,
            since_last=time.monotonic() - self._wanted_at,
        )

    async def _fetch(self, offer: WeightsOffer, signed: bytes) -> None:
        began_at, age_s = time.monotonic(), max(0.0, time.time() - offer.created_at)
        self._held.clear_partial(but=offer.sha256)
        download = Download(self.gossip, offer, self._held.partial, POLL_INTERVAL_S, self._note_outcome)
        try:
            file = await download.run()
            async with self._trial:  # a repeated version replaces the lost one
                await in_background(self._held.put, file, offer, signed)
                self._follow(offer)
        except (OfferWithdrawnError, RecordError) as error:
            if isinstance(error, RecordError):
                self._refused = signed
                self._refuse(Refusal(error.reason, str(error)))
            download.discard()
            return
        except OSError as error:
            if self.context.failures.failed(DOWNLOAD, error):
                log.warning("version %d cannot be kept: %s", offer.version, error)
                self.context.events.write("weights_failed", version=offer.version, error=str(error))
            return
        self.context.failures.succeeded(DOWNLOAD)
        self.context.events.write(
            "weights_fetched",
            version=offer.version,
            num_bytes=download.num_bytes,
            num_chunks=download.num_fetched,
            num_resumed=download.num_resumed,
            duration_s=round(time.monotonic() - began_at, 4),
            age_s=round(time.time() - offer.created_at, 3),
        )
        self._wanted_at = began_at
        self._transit.send(offer.version, at=began_at - age_s)
        self._arrived.set()

    def _follow(self, offer: WeightsOffer) -> None:
        """Note the newest stored version. If it is no higher one, drop those that the learner repeats."""
        if self._newest is not None and offer.version <= self._newest.version:
            for lost in self._transit.go_back(offer.version):
                if lost != offer.version:
                    self._held.remove(self._held.offer(lost))
            self.context.evaluations.go_back(offer.version - 1)
        self._newest = offer

    async def _keep_serving(self) -> None:
        while True:
            self._arrived.clear()
            before = self._transit.served
            arrived = self._transit.receive(time.monotonic())
            if arrived is not None and await self._serve_guarded(arrived, before=before):
                await self._evaluate_if_due(arrived)
            await wait_at_most(POLL_INTERVAL_S, self._arrived)

    async def _evaluate_if_due(self, version: int) -> None:
        """Evaluate at the run's interval if this generator evaluates; the next version waits meanwhile."""
        every_steps = self.context.manifest.eval.every_steps
        last = max((entry.step for entry in self.context.evaluations.entries), default=0)
        if self._settings.evaluate and every_steps and version // every_steps > last // every_steps:
            async with self.context.pause.working():
                await self.evaluator.evaluate(step=version)

    async def _serve_guarded(self, version: int, *, before: int, offer: WeightsOffer | None = None) -> bool:
        """Serve the version, its last `offer` by default. If that fails, return False, remove its file, keep `before`.

        A worker that a pause ends would interrupt the trial, and the next one would begin with unproven weights.
        """
        is_served = False
        async with self.context.pause.working(), self._trial:
            offer = offer or self._held.offer(version)  # the fetch may have replaced it meanwhile
            with self.gossip.guard.work_for(self._settings.follow, Place.WEIGHTS):
                is_served = await self._serve(offer)
            if not is_served:
                self._transit.served = min(before, self._transit.served)  # the learner may have gone back meanwhile
                self._held.remove(offer)
        return is_served

    async def _serve(self, offer: WeightsOffer) -> bool:
        version, began_at = offer.version, time.monotonic()
        weights, proof = self._held.for_engine(offer)
        try:
            await self._try(weights, proof)
        except (ModelError, WorkerDiedError) as error:
            self._refuse(Refusal("proof", str(error)), version=version)
            return False
        await in_background(self._held.mark_served, offer)
        if version <= self.context.state.policy_version:  # an evaluation of the lost weights may have ended meanwhile
            self.context.evaluations.go_back(version - 1)
        self.context.state.policy_version, self.context.counters.weights_created_at = version, offer.created_at
        age_s = round(time.time() - offer.created_at, 3)
        duration_s = round(time.monotonic() - began_at, 4)
        self.context.events.write("served", version=version, age_s=age_s, duration_s=duration_s)
        log.info("version %d of %s is served, %.1f s after it was offered", version, offer.model, age_s)
        return True

    async def _try(self, weights: PublishedWeights, proof: WeightProof) -> None:
        """Load the weights; try once more if the worker dies, since its death may have another cause."""
        try:
            await self.generation.try_weights(weights, proof)
        except WorkerDiedError as error:
            log.warning("version %d: next try follows: %s", weights.version, error)
            await self.generation.try_weights(weights, proof)

    def _refuse(self, refusal: Refusal, *, version: int | None = None) -> None:
        peer_id = self._settings.follow
        self.peers.refuse_weights(peer_id, refusal, version=version)
        log.warning("weights of %s are refused: %s", peer_id, refusal.detail)

    def _note_outcome(self, outcome: FetchOutcome) -> None:
        """Log one line when the learner stops answering, and one when it answers again."""
        is_away = outcome not in ANSWERED
        if is_away == self._is_away:
            return
        self._is_away = is_away
        learner = self._settings.follow
        self.context.events.write("learner_away" if is_away else "learner_back", peer=learner, outcome=outcome)
        if is_away:
            log.warning("the learner %s does not answer (%s): the present weights stay in use", learner, outcome)
        else:
            log.info("the learner %s answers", learner)

    async def _self_as_follower(self) -> Follower:
        if self._follower is None:
            self._follower = Follower(
                follows=self._settings.follow,
                run_id=self.context.manifest.run_id,
                tokenizer=self.context.about.tokenizer,
                started_from=await in_background(model_fingerprint, self.source),
                parameters=parameter_count(self.source),
                probe_ids=probe_token_ids(self.tokenizer.vocab_size),
                takes_adapters=serves_adapters(self.context.settings),
            )
        return self._follower
