"""The offer loop: hashes, signs and stores a learner's new weights for the generators that follow it.

The train loop waits only for the hard link to the file. A version that arrives during hashing replaces a version that
still waits in the queue. The learner's weight store overwrites its old files. So the loop keeps a separate hard link to
each file until no generator needs it (`swarm/transit.py`).
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import shutil
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path

from ftis_node.config.limits import KEPT_CHECKPOINTS
from ftis_node.config.roles import MAX_PUBLISHED_VERSIONS
from ftis_node.generation.weight_loader import ProofToCome
from ftis_node.learner.messages import MAX_UNSAVED_STEPS
from ftis_node.models import ModelSource, model_fingerprint
from ftis_node.models.adapter_folder import ADAPTER_CONFIG_FILE, ADAPTER_FILE
from ftis_node.node.context import NodeContext
from ftis_node.node.loops.weight_download import HASHES_PER_ITEM
from ftis_node.node.peers.node_part import NodePart
from ftis_node.node.supervision.waits import in_background
from ftis_node.node.worker_interfaces import Learning
from ftis_node.records.bounds import DIGEST_BYTES, MAX_CHUNK_BYTES, MAX_INTEGER
from ftis_node.records.peer_messages import WeightsOffer, WeightsPart, open_weights_request, seal_offer
from ftis_node.swarm.transit import outdated_offers
from ftis_node.workers.weight_store import PublishedWeights, WeightProof

log = logging.getLogger(__name__)
OFFERED = "offered"  # folder beside the published versions: hard links need one file system


@dataclass(frozen=True, slots=True)
class PendingVersion:
    weights: PublishedWeights
    path: Path
    proof: ProofToCome | WeightProof | None
    adapter_config: bytes


@dataclass(frozen=True, slots=True)
class OfferedVersion:
    offer: WeightsOffer
    signed: bytes
    path: Path
    chunk_hashes: bytes


@dataclass(eq=False, repr=False)
class OfferLoop(NodePart):
    """Loop that offers weights. The train loop calls `take`; the network calls `give` for each request."""

    source: ModelSource

    def __post_init__(self) -> None:
        self._pending: PendingVersion | None = None
        self._changed = asyncio.Event()
        self._held: dict[int, OfferedVersion] = {}
        self._requested_at: dict[int, float] = {}
        self._newest: OfferedVersion | None = None
        self._num_taken = 0

    async def take(self, weights: PublishedWeights, proof: ProofToCome | WeightProof | None) -> None:
        """Queue new weights, whose proof may not be computed yet. Return when the hard link to their file exists."""
        if self._newest and weights.version == self._newest.offer.version:
            return
        self._num_taken += 1
        file = Path(weights.path)
        folder = file.parent.parent / OFFERED
        path = folder / f"{weights.version:08d}-{self._num_taken}.safetensors"
        await self.store.disk(keep_file, file, path, afresh=self._num_taken == 1)
        config = file.parent / ADAPTER_CONFIG_FILE
        adapter_config = config.read_bytes() if file.name == ADAPTER_FILE else b""
        if self._pending is not None:
            self._pending.path.unlink()
        self._pending = PendingVersion(weights, path, proof, adapter_config)
        self._changed.set()

    async def run(self) -> None:
        started_from = await in_background(model_fingerprint, self.source)
        while True:
            await self._changed.wait()
            self._changed.clear()
            pending, self._pending = self._pending, None
            if pending is not None:
                await self._offer(pending, started_from=started_from)

    async def _offer(self, pending: PendingVersion, *, started_from: str) -> None:
        began_at = time.monotonic()
        proof = pending.proof
        if isinstance(proof, asyncio.Future):  # the learner sets it; `abandon` sets None if the learner dies
            proof = await asyncio.shield(proof)
        if proof is None:  # the learner died before the proof: it repeats the step and publishes other weights
            pending.path.unlink()
            return
        num_bytes, sha256, chunk_hashes = await in_background(digests_of, pending.path)
        offer = WeightsOffer(
            run_id=self.context.manifest.run_id,
            peer_id=self.context.peer_id,
            version=pending.weights.version,
            created_at=time.time(),
            model=self.context.about.model,
            tokenizer=self.context.about.tokenizer,
            started_from=started_from,
            num_bytes=num_bytes,
            sha256=sha256,
            chunk_bytes=MAX_CHUNK_BYTES,
            chunks_sha256=hashlib.sha256(chunk_hashes).digest(),
            probe_ids=proof.probe_ids,
            probe_logprobs=proof.logprobs,
            adapter_config=pending.adapter_config,
        )
        for version in [version for version in self._held if version >= offer.version]:
            self._drop(version)  # from before a learner restart: these version numbers now name other weights
        self._newest = OfferedVersion(offer, seal_offer(offer, self.context.identity), pending.path, chunk_hashes)
        self._held[offer.version], self._requested_at[offer.version] = self._newest, time.monotonic()
        for version in outdated_offers(self._requested_at, now=time.monotonic(), max_offered=MAX_PUBLISHED_VERSIONS):
            self._drop(version)
        duration_s = round(time.monotonic() - began_at, 4)
        self.context.events.write("weights_offered", version=offer.version, num_bytes=num_bytes, duration_s=duration_s)

    def _drop(self, version: int) -> None:
        """Unlink the file. A transfer in progress continues, because the open file keeps its bytes."""
        self._held.pop(version).path.unlink()
        del self._requested_at[version]

    async def give(self, peer_id: str, data: bytes) -> AsyncGenerator[bytes, None]:
        """Yield the items of the answer to a request; none if this node does not offer the version to this peer.

        Raise RecordError for a malformed request.
        """
        question = open_weights_request(data)
        if self.context.settings.roles.weights_for == "trusted" and not self.peers.is_trusted(peer_id):
            return
        if question.part is WeightsPart.OFFER:
            if self._newest is not None:
                yield self._newest.signed
            return
        held = next((held for held in self._held.values() if held.offer.sha256 == question.file), None)
        if held is None:
            return
        self._requested_at[held.offer.version] = time.monotonic()
        if question.part is WeightsPart.HASHES:
            for at in range(0, len(held.chunk_hashes), HASHES_PER_ITEM * DIGEST_BYTES):
                yield held.chunk_hashes[at : at + HASHES_PER_ITEM * DIGEST_BYTES]
            return
        last = min(question.first + question.count, held.offer.num_chunks)
        with held.path.open("rb") as file:  # stays readable if the version is dropped meanwhile
            for chunk in range(question.first, last):
                yield await asyncio.to_thread(
                    os.pread, file.fileno(), held.offer.size_of(chunk), chunk * held.offer.chunk_bytes
                )
        if last == held.offer.num_chunks > question.first:
            offer, age_s = held.offer, round(time.time() - held.offer.created_at, 3)
            self.context.events.write(
                "weights_served", peer=peer_id, version=offer.version, num_bytes=offer.num_bytes, age_s=age_s
            )


def digests_of(path: Path) -> tuple[int, bytes, bytes]:
    """Return the size of a file in bytes, its SHA-256, and the concatenated ones of its chunks, in one pass over it."""
    whole, chunks, num_bytes = hashlib.sha256(), [], 0
    with path.open("rb") as file:
        while chunk := file.read(MAX_CHUNK_BYTES):
            whole.update(chunk)
            chunks.append(hashlib.sha256(chunk).digest())
            num_bytes += len(chunk)
    return num_bytes, whole.digest(), b"".join(chunks)


def keep_file(file: Path, path: Path, *, afresh: bool) -> None:
    """Hard-link `file` to `path`, or copy it. With `afresh`, first remove the files of an earlier start."""
    if afresh:
        shutil.rmtree(path.parent, ignore_errors=True)
    path.parent.mkdir(exist_ok=True)
    try:
        os.link(file, path)
    except OSError as error:  # for example a file system without hard links
        log.debug("%s is copied: %s", file, error)
        shutil.copyfile(file, path)


def newest_offered(context: NodeContext, learner: Learning) -> int | None:
    """Return the newest version of this node's weights that an honest follower may name; None if it offers none.

    Until the learner reports its version, and until its first step, a follower may name any version. It may have those
    of a learner that has begun again. The bound includes one version more, since the loop offers a version before its
    step is complete. It also includes the steps that the kept checkpoints span. A learner that dies may go back by that
    many steps, while groups of its followers are on their way. A version has the number of its step, so it counts the
    steps without an update.
    """
    if context.settings.role != "learner":
        return None
    state = learner.state
    if state is None or not (state.policy_version or context.state.policy_version):
        return MAX_INTEGER
    unsaved = context.settings.learner.checkpoint_every_steps or MAX_UNSAVED_STEPS
    return max(state.step, context.state.step) + 1 + unsaved * KEPT_CHECKPOINTS
