"""Resumable download of a version from the learner.

    partial/<sha256>.part      the verified chunks so far, from the first on
    partial/<sha256>.hashes    the list of chunk hashes; the signed offer contains the hash of this list

After a restart of the node, the download reads the partial file once and continues after its last valid chunk. A wrong
chunk ends it. File names contain only verified hashes, never a peer's text.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ftis_node.errors import RecordError
from ftis_node.gossip import Fetched, FetchOutcome, Gossip
from ftis_node.node.supervision.waits import in_background
from ftis_node.records.bounds import DIGEST_BYTES, MAX_CHUNK_BYTES
from ftis_node.records.peer_messages import WeightsOffer, WeightsPart, WeightsRequest

CHUNKS_AT_ONCE = 16
HASHES_PER_ITEM = MAX_CHUNK_BYTES // DIGEST_BYTES


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
