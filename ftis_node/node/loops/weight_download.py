"""Resumable download of a version from the learner, and the store of complete versions on a generator's disk.

    version-00000012-<hash>/   model.safetensors, the signed offer; the file `served` once its proof is verified
    partial/<sha256>.part      the verified chunks so far, from the first on
    partial/<sha256>.hashes    the list of chunk hashes; the signed offer contains the hash of this list

A folder's hash is that of its offer. A learner that lost steps offers a version again, and the engine still needs the
file that it serves.
After a restart of the node, the download reads the partial file once and continues after its last valid chunk. A wrong
chunk ends it. File names contain only version numbers and verified hashes, never a peer's text.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ftis_node.errors import FileError, RecordError
from ftis_node.files import read_file
from ftis_node.gossip import Fetched, FetchOutcome, Gossip
from ftis_node.models.adapter_folder import ADAPTER_CONFIG_FILE, ADAPTER_FILE
from ftis_node.node.supervision.waits import in_background
from ftis_node.records.bounds import DIGEST_BYTES, MAX_CHUNK_BYTES
from ftis_node.records.peer_messages import WeightsOffer, WeightsPart, WeightsRequest, open_offer
from ftis_node.workers.durable import complete_folder, remove_leftovers
from ftis_node.workers.weight_store import WEIGHTS_FILE, PublishedWeights, WeightProof

log = logging.getLogger(__name__)
CHUNKS_AT_ONCE = 16
HASHES_PER_ITEM = MAX_CHUNK_BYTES // DIGEST_BYTES
PREFIX = "version-"
OFFER_FILE = "offer"
SERVED_MARK = "served"


class VersionStore:
    """Folder of versions with one writer. All methods block on the disk; `put` blocks until the file is synced."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._offers: dict[Path, WeightsOffer] = {}  # by folder, in the order in which they were stored

    @property
    def partial(self) -> Path:
        return self._folder / "partial"

    def find(self) -> list[tuple[WeightsOffer, bool]]:
        """Return the versions of earlier starts in the order of their offers, and whether each was served.

        Remove incomplete and damaged ones.
        """
        remove_leftovers(self._folder, PREFIX)
        found = {}
        for folder in self._folder.glob(f"{PREFIX}*"):
            try:
                offer = open_offer(read_file(folder / OFFER_FILE))
            except (OSError, FileError, RecordError) as error:
                log.warning("%s is damaged, and is removed: %s", folder, error)
                shutil.rmtree(folder)
                continue
            found[folder] = offer
        self._offers = dict(sorted(found.items(), key=lambda held: (held[1].created_at, held[1].version)))
        return [(offer, (folder / SERVED_MARK).exists()) for folder, offer in self._offers.items()]

    def put(self, file: Path, offer: WeightsOffer, signed: bytes) -> None:
        """Move a fetched file and its signed offer into the store. After a crash the version is complete or absent.

        It replaces an earlier version of this number, unless that one was served.
        """
        digest = hashlib.sha256(signed).hexdigest()[:16]
        folder = self._folder / f"{PREFIX}{offer.version:08d}-{digest}"
        with complete_folder(folder) as temporary:
            os.replace(file, temporary / _file_name(offer))
            (temporary / OFFER_FILE).write_bytes(signed)
            if offer.adapter_config:
                (temporary / ADAPTER_CONFIG_FILE).write_bytes(offer.adapter_config)
        self._offers.pop(folder, None)
        for held in [held for held in self._offers if self._offers[held].version == offer.version]:
            if not (held / SERVED_MARK).exists():
                self._remove(held)
        self._offers[folder] = offer

    def offer(self, version: int) -> WeightsOffer:
        """Return the last stored offer of this version."""
        return next(offer for offer in reversed(self._offers.values()) if offer.version == version)

    def for_engine(self, offer: WeightsOffer) -> tuple[PublishedWeights, WeightProof]:
        path = self._path(offer) / _file_name(offer)
        weights = PublishedWeights(version=offer.version, path=str(path), num_bytes=offer.num_bytes)
        return weights, WeightProof(version=offer.version, probe_ids=offer.probe_ids, logprobs=offer.probe_logprobs)

    def mark_served(self, offer: WeightsOffer) -> None:
        """Mark a version as verified, and remove all that were stored before it."""
        (path := self._path(offer)).joinpath(SERVED_MARK).touch()
        held = list(self._offers)
        for older in held[: held.index(path)]:
            self._remove(older)

    def remove(self, offer: WeightsOffer) -> None:
        self._remove(self._path(offer))

    def _remove(self, folder: Path) -> None:
        del self._offers[folder]
        shutil.rmtree(folder)

    def clear_partial(self, *, but: bytes) -> None:
        """Remove partial files, except of the version with the hash `but`."""
        for path in self.partial.glob("*"):
            if path.stem != but.hex():
                path.unlink()

    def _path(self, offer: WeightsOffer) -> Path:
        return next(folder for folder, held in self._offers.items() if held == offer)


def _file_name(offer: WeightsOffer) -> str:
    return ADAPTER_FILE if offer.adapter_config else WEIGHTS_FILE


class OfferWithdrawnError(Exception):
    """The learner no longer offers this version."""


@dataclass(eq=False, repr=False)
class Download:
    """Fetches the file of one offer into `folder`; retries every `pause_s` seconds while the peer does not answer.

    `num_resumed` chunks were already on disk, `num_fetched` arrived with `num_bytes`. `on_outcome` is called with the
    outcome of each request.
    """

    gossip: Gossip
    offer: WeightsOffer
    folder: Path
    pause_s: float
    on_outcome: Callable[[FetchOutcome], None]

    def __post_init__(self) -> None:
        self._part = self.folder / f"{self.offer.sha256.hex()}.part"
        self._list = self.folder / f"{self.offer.sha256.hex()}.hashes"
        self._whole = hashlib.sha256()
        self._hashes = b""
        self._num_here = 0
        self.num_resumed = self.num_fetched = self.num_bytes = 0

    async def run(self) -> Path:
        """Return the path of the complete, verified file under its temporary name.

        Raise OfferWithdrawnError, RecordError (`hash`: the hashes contradict the offer; `chunk`: a wrong chunk) and
        OSError. After an error, `discard` removes the files.
        """
        self._part.parent.mkdir(parents=True, exist_ok=True)
        self._hashes = await self._chunk_hashes()
        self._num_here = self.num_resumed = await in_background(self._read_part)
        with self._part.open("ab") as file:
            while self._num_here < self.offer.num_chunks:
                for chunk in await self._next_chunks():
                    await in_background(file.write, chunk)
                file.flush()
        if self._whole.digest() != self.offer.sha256:
            raise RecordError("hash", "the chunks match the offer, but their file does not")
        self._list.unlink()
        return self._part

    def discard(self) -> None:
        self._part.unlink(missing_ok=True)
        self._list.unlink(missing_ok=True)

    async def _chunk_hashes(self) -> bytes:
        if self._list.exists() and self.offer.lists(hashes := self._list.read_bytes()):
            return hashes
        question = WeightsRequest(WeightsPart.HASHES, file=self.offer.sha256)
        max_items = -(-self.offer.num_chunks // HASHES_PER_ITEM)
        while True:
            fetched = await self._ask(question, max_items=max_items)
            if fetched.outcome is FetchOutcome.COMPLETE:
                hashes = b"".join(fetched.items)
                if not self.offer.lists(hashes):
                    raise RecordError("hash", "the list of chunk hashes differs from the offer")
                self._list.write_bytes(hashes)
                return hashes
            await asyncio.sleep(0 if fetched.items else self.pause_s)

    def _read_part(self) -> int:
        """Return the number of valid chunks at the start of the partial file; truncate the file after them."""
        num_right = 0
        with self._part.open("a+b") as file:
            file.seek(0)
            while num_right < self.offer.num_chunks:
                chunk = file.read(self.offer.size_of(num_right))
                if not self._is_right(num_right, chunk):
                    break
                self._whole.update(chunk)
                num_right += 1
            file.truncate(num_right * self.offer.chunk_bytes if num_right < self.offer.num_chunks else None)
        return num_right

    async def _next_chunks(self) -> Sequence[bytes]:
        count = min(CHUNKS_AT_ONCE, self.offer.num_chunks - self._num_here)
        question = WeightsRequest(WeightsPart.CHUNKS, file=self.offer.sha256, first=self._num_here, count=count)
        fetched = await self._ask(question, max_items=count)
        for chunk in fetched.items:
            if not self._is_right(self._num_here, chunk):
                raise RecordError("chunk", f"chunk {self._num_here} differs from the offer")
            self._whole.update(chunk)
            self._num_here += 1
        self.num_fetched += len(fetched.items)
        self.num_bytes += sum(map(len, fetched.items))
        if fetched.outcome is not FetchOutcome.COMPLETE:
            await asyncio.sleep(0 if fetched.items else self.pause_s)
        return fetched.items

    async def _ask(self, question: WeightsRequest, *, max_items: int) -> Fetched:
        """Send a request to the learner. Raise OfferWithdrawnError for a complete but empty answer."""
        fetched = await self.gossip.request_weights(self.offer.peer_id, question.to_bytes(), max_items=max_items)
        self.on_outcome(fetched.outcome)
        if fetched.outcome is FetchOutcome.COMPLETE and not fetched.items:
            raise OfferWithdrawnError(f"version {self.offer.version} is no longer offered")
        return fetched

    def _is_right(self, index: int, chunk: bytes) -> bool:
        expected = self._hashes[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]
        return len(chunk) == self.offer.size_of(index) and hashlib.sha256(chunk).digest() == expected
