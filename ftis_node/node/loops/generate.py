"""The generate loop: a free slot becomes a prompt, the prompt a scored group of completions.

consumes: prompts of the node's own order     produces: scored groups, onto the publish queue
waits for: a free slot                        unblocked by: the hand-over of a step's weights (train loop)
           room in the home                               the room loop
           budget left                                    nobody: it is over (budget.py)
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ftis_node.errors import WorkerError
from ftis_node.generation.engines.vllm_options import DEFAULT_MAX_BATCH
from ftis_node.node.loops.prompt_order import PromptOrder
from ftis_node.node.supervision.task_monitor import waiting_for
from ftis_node.records.codec import hash_prompt
from ftis_node.records.group import Group, SamplingSettings
from ftis_node.tasks.scoring.cost import ScoringCost

if TYPE_CHECKING:
    from ftis_node.node.context import Parts
    from ftis_node.tasks.base import TaskItem

log = logging.getLogger(__name__)

RETRY_PAUSE_S = 1.0


@dataclass(frozen=True, slots=True)
class Prompt:
    """One problem, ready to generate for."""

    item: TaskItem
    token_ids: list[int]


class GenerateLoop:
    """Keeps the generation worker busy as far as free slots allow."""

    def __init__(self, parts: Parts, scored: asyncio.Queue[Group]) -> None:
        self._parts = parts
        self._scored = scored
        self._order = prompt_order(parts)
        self._position = parts.buffer.last_number()
        self._sampling = SamplingSettings(
            temperature=parts.manifest.sampling.temperature,
            top_p=parts.manifest.sampling.top_p,
            top_k=parts.manifest.sampling.top_k,
        )

    async def run(self) -> None:
        """Until cancelled. Raises what a worker that was given up raised."""
        in_flight = asyncio.Semaphore(groups_in_flight(self._parts))
        async with asyncio.TaskGroup() as tasks:
            while True:
                await self._parts.budget.until_more()
                with waiting_for("a free slot"):
                    await self._parts.slots.charge()
                with waiting_for("a group under way to end"):  # each has its own limits
                    await in_flight.acquire()
                with waiting_for("room on the disk"):  # last: it may have filled up while a slot was waited for
                    await self._parts.room.until_there()
                if not self._parts.budget.may_begin:  # one that ended meanwhile took more than is usual
                    self._parts.slots.cancel()
                    in_flight.release()
                    continue
                self._parts.budget.begin()
                task = tasks.create_task(self._make_group(self._next_prompt()), name=f"group-{self._position}")
                task.add_done_callback(lambda _: in_flight.release())

    def _next_prompt(self) -> Prompt:
        """The next problem of the node's order whose prompt is short enough; longer ones are counted, not used.

        Where the node's division is not even, it passes over problems so that the parts come in its shares. After a
        restart the position is that of the last group's number, so some problems come again.
        """
        sampling, division = self._parts.manifest.sampling, self._parts.division
        while True:
            item = self._parts.domain[self._order.index(self._position)]
            draw = self._order.draw(self._position)
            self._position += 1
            if division is not None and not division.keeps(item.ref.task, draw):
                continue
            token_ids = self._parts.tokenizer.encode_prompt(item.prompt)
            if len(token_ids) <= sampling.max_prompt_tokens:
                return Prompt(item, token_ids)
            self._parts.counters.skipped_prompts += 1
            self._parts.events.write("prompt_skipped", prompt=str(item.ref), num_tokens=len(token_ids))

    async def _make_group(self, prompt: Prompt) -> None:
        """One group from prompt to publish queue. A worker's death costs a pause and another try, never the slot."""
        while True:
            try:
                group, num_unfinished = await self._generate(prompt)
                break
            except WorkerError as error:
                if not self._parts.generation.is_alive:
                    raise
                self._parts.events.write("generation_failed", prompt=str(prompt.item.ref), error=str(error))
                await asyncio.sleep(RETRY_PAUSE_S)
        self._parts.budget.end(group.num_tokens)
        if num_unfinished:  # its peers would refuse it, and this node with it
            self._parts.events.write("not_shared", prompt=str(prompt.item.ref), num_stopped=num_unfinished)
            self._parts.slots.cancel()
            return
        await self._scored.put(group)

    async def _generate(self, prompt: Prompt) -> tuple[Group, int]:
        """A scored group, and how many of its completions scoring did not finish."""
        parts = self._parts
        result = await parts.generation.generate(
            prompt.token_ids,
            num_completions=parts.manifest.sampling.group_size,
            sampling=self._sampling,
            max_tokens=parts.manifest.sampling.completion_limit(len(prompt.token_ids)),
        )
        texts = [parts.tokenizer.decode(ids.tolist()) for ids in result.tokens.ids_of_each()]
        cost = ScoringCost()
        scores = await parts.scorer.score(prompt.item, texts, cost=cost)
        group = Group(
            run_id=parts.manifest.run_id,
            sender=parts.identity.peer_id,
            number=0,  # given when it is sealed, so that numbers have no gaps
            prompt_ref=prompt.item.ref,
            prompt_hash=hash_prompt(prompt.token_ids),
            tokens=result.tokens,
            finish_reasons=result.finish_reasons,
            rewards=tuple(reward for reward, _ in scores),
            statuses=tuple(status for _, status in scores),
            policy_versions=result.policy_versions,
            policy_versions_newest=result.policy_versions_newest,
            sampling=self._sampling,
            model=parts.source.name,
            tokenizer=parts.tokenizer.fingerprint,
            created_at=time.time(),
            weights_of=parts.settings.roles.follow or None,
        )
        return group, cost.num_unfinished


def groups_in_flight(parts: Parts) -> int:
    """As the node's settings say, or enough groups for a full batch and one more."""
    generation = parts.settings.generation
    batch = generation.max_batch or DEFAULT_MAX_BATCH
    return generation.groups_in_flight or -(-batch // parts.manifest.sampling.group_size) + 1


def prompt_order(parts: Parts) -> PromptOrder:
    """Vertical: this node's own order through its domain. Horizontal: the run's, for all answer the same problems."""
    if parts.manifest.step.prompt_sharing == "horizontal":
        return PromptOrder(len(parts.domain), seed=0, peer_id=parts.manifest.run_id)
    return PromptOrder(len(parts.domain), parts.settings.seed, parts.identity.peer_id)
