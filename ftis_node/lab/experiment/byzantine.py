"""A malicious peer: it follows the protocol and signs its groups, but their contents are chosen to do harm.

| lie         | what it sends                                               | defense                                  |
|-------------|-------------------------------------------------------------|------------------------------------------|
| `rewards`   | honest completions, every claimed reward inverted           | validation scores again and refuses      |
| `logprobs`  | wrong answers replaced by random tokens, with the log-probs | the filter, as soon as the learner has   |
|             | that the untrained model gives them: they look close        | moved away from the untrained model      |
| `positives` | right answers behind junk that scoring does not see, with   | the cap: at most C times the weight of   |
|             | log-probs so low that the weight would be enormous          | an honest completion                     |
| `padded`    | right answers, then junk that scoring does not see, with    | truncation: the learner finds the junk   |
|             | log-probs that look honest (-0.05)                          | unlikely, so its weight is near 0        |
| `mimic`     | as `positives`, with the log-probs that a learner gives     | its weight, if peers are weighted by the |
|             | them at that moment, so likelihood cannot detect it         | agreement of their gradients             |

It generates with the initial model and does not train.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, get_args

import numpy as np

from ftis_node.lab.experiment.in_process import InProcessGeneration
from ftis_node.lab.experiment.rounds import RoundBarrier
from ftis_node.node.wiring import NodeComponents, Wiring
from ftis_node.records.envelope import announce_group, seal_group
from ftis_node.records.group import Completion, FinishReason, Group

Lie = Literal["rewards", "logprobs", "positives", "padded", "mimic"]
LIES: tuple[Lie, ...] = get_args(Lie)
UNLIKELY_LOGPROB = -12.0  # a ratio of e^12 before the cap
LIKELY_LOGPROB = -0.05  # the mean of a completion
NUM_JUNK_TOKENS = 3
MIN_RIGHT_REWARD = 0.5


class ByzantineNode:
    """One malicious peer in a loopback swarm, synchronous with the others. It uses no learner of its `parts`."""

    def __init__(
        self,
        parts: NodeComponents,
        untrained: InProcessGeneration,
        learner: InProcessGeneration,
        *,
        lie: Lie,
        seed: int,
    ) -> None:
        """`learner` has the newest weights of the node whose log-probs `mimic` reports."""
        self._parts = parts
        self._untrained = untrained
        self._learner = learner
        self._lie = lie
        self._random = random.Random(seed)
        self._bodies: dict[bytes, bytes] = {}
        taken = {*parts.tokenizer.eos_ids, *parts.tokenizer.hidden_ids}
        self._words = [i for i in range(parts.tokenizer.vocab_size) if i not in taken]
        self._unseen = [i for i in self._words if not parts.tokenizer.decode([i]).strip()]  # not visible in the text
        parts.gossip.serve(self._lookup)

    async def run(self, lockstep: RoundBarrier, *, steps: int) -> None:
        slots = self._parts.slots
        wiring = Wiring(self._parts)
        async with asyncio.TaskGroup() as tasks:
            generating = tasks.create_task(wiring.generate_loop.run())
            for step in range(1, steps + 1):
                await lockstep.begin(step)
                self._bodies.clear()
                for _ in range(self._parts.context.manifest.step.own_groups):
                    await self._send(await wiring.scored.get())
                    slots.fill()
                slots.set_held(0)
            generating.cancel()

    async def _send(self, group: Group) -> None:
        prompt_ids = self._parts.tokenizer.encode_prompt(self._parts.task.resolve(group.prompt_ref).prompt)
        completions = [await self._distorted(completion, prompt_ids) for completion in group.completions]
        false = replace(group.with_completions(completions), number=self._parts.context.counters.groups_sent + 1)
        envelope = seal_group(false, self._parts.context.identity, codec=self._parts.context.settings.swarm.codec)
        data = envelope.to_bytes()
        self._bodies[envelope.id] = data
        await self._parts.gossip.announce(announce_group(envelope, false, envelope_bytes=len(data)).to_bytes())
        self._parts.context.counters.groups_sent += 1

    async def _lookup(self, ids: Sequence[bytes]) -> list[bytes]:
        return [self._bodies[group_id] for group_id in ids if group_id in self._bodies]

    async def _distorted(self, completion: Completion, prompt_ids: Sequence[int]) -> Completion:
        is_right = completion.reward >= MIN_RIGHT_REWARD
        if self._lie == "rewards":
            return replace(completion, reward=1.0 - completion.reward)
        if self._lie == "logprobs":
            return completion if is_right else await self._junk(completion, prompt_ids)
        if not is_right:
            return completion
        limit = self._parts.context.manifest.sampling.completion_limit(len(prompt_ids))
        padded = self._padded(completion, limit=limit)
        return await self._as_given_by(self._learner, padded, prompt_ids) if self._lie == "mimic" else padded

    async def _junk(self, completion: Completion, prompt_ids: Sequence[int]) -> Completion:
        eos_id = self._parts.tokenizer.eos_ids[0]
        ids = [self._random.choice(self._words) for _ in completion.token_ids[:-1]] + [eos_id]
        junk = replace(completion, token_ids=np.asarray(ids, dtype=np.int32), finish_reason=FinishReason.STOP)
        return await self._as_given_by(self._untrained, junk, prompt_ids)

    async def _as_given_by(
        self, policy: InProcessGeneration, completion: Completion, prompt_ids: Sequence[int]
    ) -> Completion:
        ids = completion.token_ids.tolist()
        logprobs = await policy.probe([*prompt_ids, *ids])
        return replace(completion, logprobs=np.minimum(np.asarray(logprobs[-len(ids) :], dtype=np.float32), 0.0))

    def _padded(self, completion: Completion, *, limit: int) -> Completion:
        room = min(NUM_JUNK_TOKENS, limit - len(completion.token_ids))
        junk = [self._random.choice(self._unseen) for _ in range(room)] if self._unseen else []
        ids, place = completion.token_ids.tolist(), 0
        if self._lie == "padded":
            place = len(ids) - (completion.finish_reason is FinishReason.STOP)
        ids[place:place] = junk
        logprobs = np.full(len(ids), UNLIKELY_LOGPROB, dtype=np.float32)
        if self._lie == "padded":  # not equal, because validation refuses that
            logprobs[:] = [self._random.uniform(2 * LIKELY_LOGPROB, 0.0) for _ in ids]
        return replace(completion, token_ids=np.asarray(ids, dtype=np.int32), logprobs=logprobs)
