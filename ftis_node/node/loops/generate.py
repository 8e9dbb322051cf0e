"""The generate loop: takes a free slot, chooses a prompt, and generates and scores a group of completions.

Nodes of a swarm use the problems of a task in different orders, by seed and peer. So they rarely generate for the same
prompt. A task with a data file is sampled without replacement in each epoch. If the number of problems is practically
unlimited, a hash of k gives the k-th index. The k-th prompt depends only on k, seed and peer, so a restarted node
continues at its position.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from ftis_node.backoff import ExponentialBackoff
from ftis_node.config.manifest import EpisodeSection
from ftis_node.errors import ModelError, TaskError, WorkerError
from ftis_node.generation.engines.vllm_options import DEFAULT_MAX_BATCH
from ftis_node.generation.rollouts import Sampler
from ftis_node.models import PromptTokenizer
from ftis_node.node.context import NodeContext
from ftis_node.node.peers.node_part import NodePart
from ftis_node.node.training.generation_limits import GenerateBudget, SlotPool
from ftis_node.node.worker_interfaces import Generation
from ftis_node.records.codec import hash_messages, hash_prompt
from ftis_node.records.group import FinishReason, Group, SamplingSettings
from ftis_node.tasks.base import Task, TaskItem
from ftis_node.tasks.problems import stable_hash
from ftis_node.tasks.scorer import OWN_SHARE, IsolatedScorer
from ftis_node.tasks.scoring_worker import ScoringCost

LARGEST_SHUFFLED = 1 << 20  # problems
MAX_TRIES = 1 << 14  # problems in a row without one to generate for
MAX_ATTEMPTS = 6  # of one prompt: over half a minute
RETRY_PAUSE = ExponentialBackoff(first_s=1.0, ceiling_s=30.0)
MAX_SAMPLE_CHARS = 200
SPARE_GROUPS = 1  # sampled beside a full batch, so that the engine never waits for the next prompt
GENERATION, SCORING = "generation", "scoring of own groups"


@dataclass(eq=False, repr=False)
class GenerateLoop(NodePart):
    """Loop that keeps the generation worker busy while slots are free."""

    scored: asyncio.Queue[Group]
    domain: Task
    tokenizer: PromptTokenizer
    scorer: IsolatedScorer
    generation: Generation
    slots: SlotPool
    budget: GenerateBudget

    def __post_init__(self) -> None:
        self.position = self.store.buffer.prompt_position()  # prompts in the order that this node has used
        self._order = PromptOrder(len(self.domain), self.context.settings.seed, self.context.peer_id)
        if self.context.manifest.step.prompt_sharing == "horizontal":  # the same order for all nodes
            self._order = PromptOrder(len(self.domain), seed=0, peer_id=self.context.manifest.run_id)
        self._num_skipped = 0
        self._shortest: int | None = None  # prompt that is too long, in tokens
        self._unreadable: ModelError | None = None
        num_in_flight = min(self.slots.capacity, groups_in_flight(self.context))  # a worker's death fails all of them
        self.context.failures.expect(GENERATION, num_failing=2 * num_in_flight)
        sampling = self.context.manifest.sampling
        self._sampling = SamplingSettings(sampling.temperature, sampling.top_p, sampling.top_k)
        self._sampler = Sampler(
            generate=self.generation.generate,
            sampling=self._sampling,
            completion_limit=sampling.completion_limit,
            eos_ids=frozenset(self.tokenizer.eos_ids),
            tokenizer=self.tokenizer,
            scorer=self.scorer,
            episode=self.context.manifest.episode or EpisodeSection(),
        )

    async def run(self) -> None:
        """Run until canceled.

        Raise WorkerError if the supervisor does not restart the worker any more, or if no call has ever succeeded.
        Raise TaskError if no problem of the task has a prompt that the model can read and that is short enough.
        """
        in_flight = asyncio.Semaphore(groups_in_flight(self.context))
        async with asyncio.TaskGroup() as tasks:
            while True:
                await self.budget.until_more()
                await self.slots.charge()
                await in_flight.acquire()
                # last: the disk may have filled up during the waits above
                await self.store.space.wait_available()
                await self.context.pause.wait_running()
                if not self.budget.may_begin:  # a group that ended meanwhile took more tokens than the average
                    self.slots.cancel()
                    in_flight.release()
                    continue
                self.budget.begin()
                prompt = await self._next_prompt()
                task = tasks.create_task(self._make_group(*prompt), name=f"group-{self.position}")
                task.add_done_callback(lambda _: in_flight.release())

    async def _next_prompt(self) -> tuple[TaskItem, list[int]]:
        """Return the next problem in the node's order whose prompt is short enough, and the prompt's token ids.

        A restart continues at the position given by the number of own groups, so some problems repeat. Raise TaskError
        after one round of the order without such a problem.
        """
        max_tokens = self.context.manifest.sampling.max_prompt_tokens
        num_tries = min(self._order.num_items, MAX_TRIES)
        for _ in range(num_tries):
            item = self.domain[self._order.index(self.position)]
            self.position += 1
            try:
                token_ids = self.tokenizer.encode_prompt(item.prompt)
                if len(token_ids) <= max_tokens:
                    return item, token_ids
                self._note_skipped(item, len(token_ids))
                self._shortest = min(len(token_ids), self._shortest or len(token_ids))
            except ModelError as error:
                self._note_skipped(item, 0)
                self._unreadable = error
            await asyncio.sleep(0)
        what = f"none of the {num_tries:,} problems of {self.domain.name}"
        if self._shortest is None:
            raise TaskError(f"{what} can be read by the model: {self._unreadable}")
        raise TaskError(
            f"{what} fits sampling.max_prompt_tokens = {max_tokens}; the shortest has {self._shortest}: raise it in "
            "the run, or give shorter problems"
        )

    def _note_skipped(self, item: TaskItem, num_tokens: int) -> None:
        """Count a skipped problem (0 tokens: unreadable). Write an event for the 1st, 2nd, 4th, ... one."""
        self._num_skipped += 1
        if self._num_skipped & (self._num_skipped - 1) == 0:
            self.context.events.write(
                "prompt_skipped", prompt=str(item.ref), num_tokens=num_tokens, num_skipped=self._num_skipped
            )

    async def _make_group(self, item: TaskItem, prompt_ids: list[int]) -> None:
        """Generate and score one group and put it on the publish queue. Retry with the same slot, then give it up."""
        attempt = 0
        while attempt < MAX_ATTEMPTS:
            try:
                group, num_unfinished = await self._generate(item, prompt_ids)
                break
            except WorkerError as error:
                if not self.generation.is_alive:
                    raise
                if self.context.pause.is_paused:  # it interrupted the group; the next call waits for its end
                    continue
                attempt += 1
                self._note_failed(item, error, is_last=attempt == MAX_ATTEMPTS)
            await asyncio.sleep(RETRY_PAUSE.delay_s(attempt))
        else:
            self.budget.abandon()
            self.slots.cancel()
            return
        self.context.failures.succeeded(GENERATION)
        self.budget.end(group.num_tokens)
        if num_unfinished:  # peers would refuse the group and charge this node
            if self.context.failures.failed(SCORING, WorkerError(f"{num_unfinished} texts were not scored")):
                self.context.events.write("not_shared", prompt=str(item.ref), num_stopped=num_unfinished)
            self.slots.cancel()
            return
        self.context.failures.succeeded(SCORING)
        num_cut = group.finish_reasons.count(FinishReason.ABORT)
        if group.turn_lengths and num_cut:  # peers refuse it: nobody can check where its episodes end
            self.context.events.write("not_shared", prompt=str(item.ref), num_stopped=num_cut)
            self.slots.cancel()
            return
        await self.scored.put(group)

    def _note_failed(self, item: TaskItem, error: WorkerError, *, is_last: bool) -> None:
        """Count a failed call. Raise the error if this was a prompt's last attempt, and no call has ever succeeded."""
        is_due = self.context.failures.failed(GENERATION, error)
        streak = self.context.failures.streak(GENERATION)
        if is_due:
            self.context.events.write(
                "generation_failed", prompt=str(item.ref), error=str(error), num_in_row=streak.num_in_row
            )
        if is_last and not streak.has_succeeded:
            raise type(error)(
                f"generation failed on every call since the start, {streak.num_in_row} times: {error}; "
                "logs/generation.log in the home has the details"
            ) from error

    async def _generate(self, item: TaskItem, prompt_ids: list[int]) -> tuple[Group, int]:
        cost = ScoringCost(share=OWN_SHARE)
        rollouts = await self._sampler.sample(item, prompt_ids, self.context.manifest.sampling.group_size, cost=cost)
        assert rollouts is not None, "a prompt within its limit leaves space for a completion"
        result, scores = rollouts.result, rollouts.scores
        self._note_rewards([reward for reward, _ in scores], rollouts.texts)
        group = Group(
            run_id=self.context.manifest.run_id,
            sender=self.context.peer_id,
            number=0,  # the publish loop sets it when it signs the group, so that numbers have no gaps
            prompt_ref=item.ref,
            problem_hash=hash_messages(item.prompt),
            prompt_hash=hash_prompt(prompt_ids, self.tokenizer.observation_form if rollouts.turn_lengths else ()),
            tokens=result.tokens,
            finish_reasons=result.finish_reasons,
            rewards=tuple(reward for reward, _ in scores),
            statuses=tuple(status for _, status in scores),
            policy_versions=result.policy_versions,
            policy_versions_newest=result.policy_versions_newest,
            sampling=self._sampling,
            model=self.context.policy_name,
            tokenizer=self.context.about.tokenizer,
            created_at=time.time(),
            weights_of=self.context.settings.roles.follow or None,
            end_ids=self.tokenizer.end_ids,
            opening=self.tokenizer.render_prompt(item.prompt).opening,
            turn_lengths=rollouts.turn_lengths,
            observation_hash=rollouts.observation_hash,
        )
        return group, cost.num_unfinished

    def _note_rewards(self, rewards: Sequence[float], texts: Sequence[str | None]) -> None:
        state = self.context.state
        if any(rewards):
            state.groups_without_reward, state.sample = 0, ""
        else:
            state.groups_without_reward += 1
            state.sample = (texts[0] or "")[:MAX_SAMPLE_CHARS]


def groups_in_flight(context: NodeContext) -> int:
    """Return enough groups for a full batch, and the spare ones."""
    batch = context.settings.generation.max_batch or DEFAULT_MAX_BATCH
    return -(-batch // context.manifest.sampling.group_size) + SPARE_GROUPS


@dataclass(frozen=True, slots=True)
class PromptOrder:
    """Order in which a node uses the `num_items` problems of a task."""

    num_items: int
    seed: int
    peer_id: str

    def index(self, k: int) -> int:
        """Return the index of the k-th problem, k = 0, 1, ..."""
        if self.num_items > LARGEST_SHUFFLED:
            return self._number("draw", k) % self.num_items
        epoch, position = divmod(k, self.num_items)
        return _shuffled(self.num_items, self._number("epoch", epoch))[position]

    def _number(self, kind: str, k: int) -> int:
        return stable_hash(f"{kind}/{self.seed}/{self.peer_id}/{k}")


@lru_cache(maxsize=2)
def _shuffled(num_items: int, seed: int) -> tuple[int, ...]:
    order = list(range(num_items))
    random.Random(seed).shuffle(order)
    return tuple(order)
