"""Answers peers' requests.

They are for envelopes of stored groups, own groups as text, and lists of stored groups; confirmations come as
requests, too. Only the sender of a group can sign its text form, which peers with another tokenizer request.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace

from ftis_node.errors import RecordError
from ftis_node.gossip import MAX_ANSWERS
from ftis_node.models import PromptTokenizer
from ftis_node.node.context import NodeDescription
from ftis_node.node.peers.node_part import NodePart
from ftis_node.records.codec import unpack_group
from ftis_node.records.envelope import Announcement, open_envelope, seal_group
from ftis_node.records.group import reencode_as_text
from ftis_node.records.peer_messages import BackfillRequest, open_backfill_request
from ftis_node.replay.reader import HeldGroup, ReplayReader
from ftis_node.swarm.lru import IdsByPeer, LruBytes

MAX_SENT_GROUPS = 1 << 14  # envelopes sent to a peer completely
MAX_TEXT_BYTES = 32 << 20  # own groups as text, in memory


def announcement_of(held: HeldGroup, about: NodeDescription) -> Announcement:
    """Return the announcement of a stored group, as token ids: the buffer stores only ids of our tokenizer."""
    return Announcement(
        id=held.id,
        number=held.number,
        envelope_bytes=held.num_bytes,
        num_tokens=held.num_tokens,
        tokenizer=about.tokenizer_prefix,
        policy_version=held.policy_version,
        created_at=held.created_at,
        sender=None if held.own else held.sender,
    )


@dataclass(eq=False, repr=False)
class PeerRequestHandler(NodePart):
    """Handler of peers' requests, which reads the buffer on disk.

    Each request opens the buffer in the thread of `disk`.
    """

    tokenizer: PromptTokenizer
    _deliveries: IdsByPeer = field(default_factory=lambda: IdsByPeer(capacity=MAX_SENT_GROUPS), init=False)
    _texts: LruBytes[bytes] = field(default_factory=lambda: LruBytes(MAX_TEXT_BYTES), init=False)
    _encoding: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    async def lookup(self, ids: Sequence[bytes]) -> list[bytes]:
        """Return the envelopes of those groups that are in the buffer."""
        return self.store.reader.envelopes(ids)

    async def encode_as_text(self, ids: Sequence[bytes]) -> list[bytes]:
        """Return own groups among `ids`, encoded as text; none if the run does not use text."""
        if self.context.manifest.step.other_tokenizers != "text":
            return []
        encoded = [await self._text_of(group_id) for group_id in ids if self.store.reader.is_own(group_id)]
        return [data for data in encoded if data]

    async def _text_of(self, group_id: bytes) -> bytes:
        """Return an own group as text, b"" if there is none; encode one at a time, because requests cost nothing."""
        if (known := self._texts.get(group_id)) is not None:
            return known
        async with self._encoding:
            if (known := self._texts.get(group_id)) is None:
                found = self.store.reader.envelopes([group_id])
                known = await asyncio.to_thread(self._encode_as_text, found[0]) if found else b""
                self._texts[group_id] = known
        return known

    def _encode_as_text(self, data: bytes) -> bytes:
        """Return the group as text; b"" if that is too large, or a completion has a token that no text expresses."""
        envelope = open_envelope(data)
        group = unpack_group(envelope.body)
        texts = self.tokenizer.answer_texts(group.tokens, group.finish_reasons)
        text_group = reencode_as_text(group, envelope.id, texts=texts)
        encoded = b"" if text_group is None else seal_group(text_group, self.context.identity).to_bytes()
        return encoded if len(encoded) <= self.context.manifest.wire.max_envelope_bytes else b""

    async def answer(self, peer_id: str, question: bytes) -> list[bytes]:
        """Return announcements of stored groups, oldest first; an empty list for a malformed request."""
        try:
            request = open_backfill_request(question)
        except RecordError as error:
            self.peers.refuse_message(peer_id, "question", error, is_charged=False)
            return []
        fresh = time.time() - self.context.manifest.step.max_age_s
        held = await self.store.disk(self._find, replace(request, since=max(request.since, fresh)))
        if held:  # a peer that waits for groups asks every few seconds
            self.context.events.write("backfill_requested", peer=peer_id, sender=request.sender, num_groups=len(held))
        return held

    def _find(self, request: BackfillRequest) -> list[bytes]:
        """Return the announcements of the requested groups. Runs in the disk thread, on a separate connection."""
        with closing(ReplayReader(self.store.home.replay)) as reader:
            found = reader.find_held(request, limit=MAX_ANSWERS)
            return [announcement_of(held, self.context.about).to_bytes() for held in found]

    def sent(self, peer_id: str, group_id: bytes) -> None:
        if self.store.reader.is_own(group_id):
            self._deliveries.add(peer_id, group_id)

    async def confirmed(self, peer_id: str, ids: Sequence[bytes]) -> None:
        """Note that a peer fetched and checked these groups; each own group counts once.

        All peers know the ids of announced groups. So a confirmation counts at once only in two cases. Either this
        node sent the group to the peer, or the peer is the followed learner or has sent good groups. For other peers,
        `ReannounceLoop` first fetches the group back, because this node may have sent it before a restart.
        """
        is_believed = peer_id == self.context.settings.roles.follow or not self.peers.is_new_peer(peer_id)
        for group_id in ids:
            if not self.store.reader.is_own(group_id):
                continue
            if not is_believed and not self._deliveries.has(peer_id, group_id):
                self.peers.confirmations.unverified.add(peer_id, group_id)
            elif self.peers.confirmations.confirm(peer_id, group_id):
                self.context.events.write("confirmed", group=group_id, peer=peer_id)
