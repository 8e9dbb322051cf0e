"""The intake loop: every envelope, own or foreign, takes the same door into the buffer.

consumes: envelopes, from the publish and pull loops     produces: READY groups, refusals
waits for: an envelope                                   unblocked by: a put on its queue

    arrivals --judge, one after the other--> judged --one commit for all that wait--> verdicts

Waiting for the disk costs more than judging. So the next envelopes are judged while a commit is under way, and the next
commit takes all that passed meanwhile: at leisure that is one group, under load many. Nobody hears of a group before it
is on disk.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ftis_node.node.background import to_the_end
from ftis_node.node.health import Turn
from ftis_node.node.waits import waiting_for
from ftis_node.validation import Accepted, DoorContext, Refusal, Refused, judge

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Sequence

    from ftis_node.node.parts import Parts
    from ftis_node.validation import Verdict

QUEUE_CAPACITY = 64
COMMIT_CAPACITY = 64  # groups in one commit


@dataclass(frozen=True, slots=True)
class Arrival:
    """An envelope at the door. `origin` is the peer that handed it over; it is the sender's word only when signed.

    `asked`: the ids that it was asked for; None where it was not asked by id.
    """

    data: bytes
    origin: str
    own: bool
    asked: Container[bytes] | None
    verdict: asyncio.Future[Verdict]


class IntakeLoop:
    """One envelope after the other; a bounded queue in front of the door, and one behind it."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._arrivals: asyncio.Queue[Arrival] = asyncio.Queue(QUEUE_CAPACITY)
        self._passed: set[bytes] = set()  # ids on their way to the disk
        self._judged: asyncio.Queue[tuple[Arrival, Accepted]] = asyncio.Queue(COMMIT_CAPACITY)
        self.stored = asyncio.Event()  # set whenever a group became READY; the train loop clears it
        self.on_foreign: Callable[[Accepted], None] = lambda accepted: None  # told of each foreign group that is READY
        self._newest_own: asyncio.Queue[Accepted] = asyncio.Queue(1)
        self._num_submitted = self._num_answered = 0
        self._context = DoorContext(
            manifest=parts.manifest,
            tokenizer=parts.tokenizer,
            resolve=parts.task.resolve,
            scorer=parts.scorer,
            is_known=lambda group_id: group_id in self._passed or parts.reader.is_known(group_id),
            has_number=parts.reader.has_number,
            is_banned=parts.peers.is_banned,
            within_quota=parts.peers.within_quota,
            copy_of=parts.peers.copy_of,
            limits=parts.peers.limits,
        )

    async def submit(self, data: bytes, *, origin: str, own: bool, asked: Container[bytes] | None = None) -> Verdict:
        """Brings an envelope to the door and waits for its verdict; when it is Accepted, the group is on disk.

        `asked`: the ids that `origin` was asked for, where it was asked by id.
        """
        arrival = Arrival(data, origin, own, asked, asyncio.get_running_loop().create_future())
        await self._arrivals.put(arrival)
        self._num_submitted += 1
        return await arrival.verdict

    async def next_own(self) -> Accepted:
        """The newest group sampled by our own weights that was stored; waits for one. Each is given once."""
        return await self._newest_own.get()

    @property
    def turn(self) -> Turn:
        """How the loop fares; what is being judged or stored counts as waiting."""
        return Turn(done=self._num_answered, waiting=self._num_submitted - self._num_answered)

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._judge_all(), name="intake-judge")
            tasks.create_task(self._commit_all(), name="intake-commit")

    async def _judge_all(self) -> None:
        while True:
            with waiting_for("an envelope"):
                arrival = await self._arrivals.get()
            verdict = await judge(arrival.data, self._context, asked=arrival.asked)
            if isinstance(verdict, Accepted):
                self._passed.add(verdict.envelope.id)
                self._parts.peers.remember(verdict)  # before the next one is judged, which may be its copy
                await self._judged.put((arrival, verdict))
            else:
                self._answer(arrival, verdict)

    async def _commit_all(self) -> None:
        while True:
            with waiting_for("a group that passed"):
                passed = [await self._judged.get()]
            while not self._judged.empty() and len(passed) < COMMIT_CAPACITY:
                passed.append(self._judged.get_nowait())
            await to_the_end(self._commit(passed))  # what is stored when the node ends is counted, too

    async def _commit(self, passed: Sequence[tuple[Arrival, Accepted]]) -> None:
        groups = [(accepted, arrival.own) for arrival, accepted in passed]
        admitted = await self._parts.disk(self._parts.buffer.admit_many, groups)
        for (arrival, accepted), is_new in zip(passed, admitted, strict=True):
            self._passed.discard(accepted.envelope.id)
            self._acknowledge(arrival, accepted, is_new=is_new)

    def _acknowledge(self, arrival: Arrival, accepted: Accepted, *, is_new: bool) -> None:
        group = accepted.group
        if not is_new:
            late = Refusal("duplicate", "admitted a moment ago")
            self._answer(
                arrival, Refused(late, group.sender, accepted.envelope.id, signed=True, num_tokens=group.num_tokens)
            )
            return
        self.stored.set()
        if not arrival.own:
            self.on_foreign(accepted)
        if arrival.own or group.weights_of == self._parts.identity.peer_id:
            if self._newest_own.full():
                self._newest_own.get_nowait()
            self._newest_own.put_nowait(accepted)
        self._answer(arrival, accepted)

    def _answer(self, arrival: Arrival, verdict: Verdict) -> None:
        self._num_answered += 1
        self._count(arrival, verdict)
        if not arrival.verdict.cancelled():
            arrival.verdict.set_result(verdict)

    def _count(self, arrival: Arrival, verdict: Verdict) -> None:
        figures, events = self._parts.figures, self._parts.events
        self._parts.peers.settle(verdict, origin=arrival.origin)
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
