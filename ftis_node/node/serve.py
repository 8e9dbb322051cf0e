"""What this node gives to peers who ask: bodies it holds, its own as text, what it made lately. What they confirm."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftis_node.node.pull import RECENT_QUESTION
from ftis_node.node.retell import retell_group
from ftis_node.records.codec import unpack_group
from ftis_node.records.envelope import announce_group, open_envelope, seal_group

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ftis_node.node.parts import Parts

MAX_RECENT = 64


class Served:
    """Answers to peers, from the buffer on disk."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    async def lookup(self, ids: Sequence[bytes]) -> list[bytes]:
        """The envelopes of those groups that are held here."""
        return self._parts.reader.envelopes(ids)

    async def retell(self, ids: Sequence[bytes]) -> list[bytes]:
        """Those groups that this node made, told as text; none where the run does not use text."""
        if self._parts.manifest.step.other_tokenizers != "text":
            return []
        own = self._parts.reader.envelopes([group_id for group_id in ids if self._parts.reader.is_own(group_id)])
        told = [self._told_as_text(data) for data in own]
        max_bytes = self._parts.manifest.wire.max_envelope_bytes
        return [data for data in told if data is not None and len(data) <= max_bytes]

    def _told_as_text(self, data: bytes) -> bytes | None:
        """None where the prompt is gone from the task: the data file is another than when the group was made."""
        envelope = open_envelope(data)
        group = unpack_group(envelope.body)
        try:
            messages = self._parts.task.resolve(group.prompt_ref).prompt
        except KeyError:
            return None
        text_group = retell_group(group, envelope.id, messages=messages, tokenizer=self._parts.tokenizer)
        return seal_group(text_group, self._parts.identity).to_bytes()

    async def answer(self, peer_id: str, question: bytes) -> list[bytes]:
        """Announcements of the newest own groups; nothing for a question that is not known here."""
        if question != RECENT_QUESTION:
            return []
        announcements = []
        for data in self._parts.reader.newest_own(MAX_RECENT):
            envelope = open_envelope(data)
            group = unpack_group(envelope.body)
            announcements.append(announce_group(envelope, group, envelope_bytes=len(data)).to_bytes())
        self._parts.events.write("asked_for_recent", peer=peer_id, num_groups=len(announcements))
        return announcements

    async def confirmed(self, peer_id: str, ids: Sequence[bytes]) -> None:
        """A peer fetched and checked these; each own group counts once."""
        for group_id in ids:
            if self._parts.reader.is_own(group_id) and self._parts.figures.confirm(peer_id, group_id):
                self._parts.events.write("confirmed", group=group_id, peer=peer_id)
