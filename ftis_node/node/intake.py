"""The intake loop: every envelope, own or foreign, takes the same door into the buffer.

consumes: envelopes, from the publish and pull loops     produces: READY groups, refusals
waits for: an envelope                                   unblocked by: a put on its queue
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ftis_node.validation import Accepted, DoorContext, Refusal, Refused, judge

if TYPE_CHECKING:
    from ftis_node.node.parts import Parts
    from ftis_node.validation import Verdict

QUEUE_CAPACITY = 64


@dataclass(frozen=True, slots=True)
class Arrival:
    """An envelope at the door. `origin` is the peer that handed it over; it is the sender's word only when signed."""

    data: bytes
    origin: str
    own: bool
    verdict: asyncio.Future[Verdict]


class IntakeLoop:
    """One envelope after the other; a bounded queue in front."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._arrivals: asyncio.Queue[Arrival] = asyncio.Queue(QUEUE_CAPACITY)
        self.stored = asyncio.Event()  # set whenever a group became READY; the train loop clears it
        self._newest_own: asyncio.Queue[Accepted] = asyncio.Queue(1)
        self._context = DoorContext(
            manifest=parts.manifest,
            tokenizer=parts.tokenizer,
            resolve=parts.task.resolve,
            scorer=parts.scorer,
            is_known=parts.reader.is_known,
            has_number=parts.reader.has_number,
        )

    async def submit(self, data: bytes, *, origin: str, own: bool) -> Verdict:
        """Brings an envelope to the door and waits for its verdict; when it is Accepted, the group is on disk."""
        arrival = Arrival(data, origin, own, asyncio.get_running_loop().create_future())
        await self._arrivals.put(arrival)
        return await arrival.verdict

    async def next_own(self) -> Accepted:
        """The newest own group that was stored; waits for one. Each is given once, and at most one is kept."""
        return await self._newest_own.get()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            arrival = await self._arrivals.get()
            verdict = await judge(arrival.data, self._context)
            if isinstance(verdict, Accepted) and not await self._admit(verdict, own=arrival.own):
                verdict = Refused(
                    Refusal("duplicate", "admitted a moment ago"), verdict.group.sender, verdict.envelope.id
                )
            self._count(arrival, verdict)
            if not arrival.verdict.cancelled():
                arrival.verdict.set_result(verdict)

    async def _admit(self, accepted: Accepted, *, own: bool) -> bool:
        admitted = await self._parts.disk(self._parts.buffer.admit, accepted, own=own)
        if admitted:
            self.stored.set()
        if admitted and own:
            if self._newest_own.full():
                self._newest_own.get_nowait()
            self._newest_own.put_nowait(accepted)
        return admitted

    def _count(self, arrival: Arrival, verdict: Verdict) -> None:
        figures, events = self._parts.figures, self._parts.events
        if isinstance(verdict, Refused):
            figures.refused[verdict.refusal.reason] += 1
            if not arrival.own:
                figures.peer(arrival.origin).refused[verdict.refusal.reason] += 1
            events.write(
                "refused",
                group=verdict.group_id,
                origin=arrival.origin,
                reason=verdict.refusal.reason,
                detail=verdict.refusal.detail,
            )
            return
        group = verdict.group
        if not arrival.own:
            figures.groups_received += 1
            figures.tokens_received += group.num_tokens
            figures.envelope_bytes_received += len(arrival.data)
            figures.peer(group.sender).accepted += 1
        events.write(
            "admitted",
            group=verdict.envelope.id,
            retells=verdict.retells,
            own=arrival.own,
            sender=group.sender,
            number=group.number,
            prompt=str(group.prompt_ref),
            num_tokens=group.num_tokens,
            reward_mean=round(group.reward_mean, 4),
            policy_version=group.policy_version,
        )
