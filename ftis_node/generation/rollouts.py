"""The completions of a problem with their rewards: one turn each, or an episode of several.

In an episode all completions of a group take a turn, and the environment answers each of them. A turn's prompt is
everything before it: the first prompt, the sampled tokens as they were, and the observations. Completions with the same
tokens so far share a request. An engine that keeps the computed prefix of a prompt uses it again at the next turn.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from ftis_node.config.manifest import EpisodeSection
from ftis_node.errors import ModelError
from ftis_node.generation.engines.base import GenerateRequest, GenerationResult
from ftis_node.models import PromptTokenizer
from ftis_node.records.codec import hash_observations
from ftis_node.records.group import Completion, CompletionStatus, FinishReason, SamplingSettings
from ftis_node.tasks.base import TaskItem
from ftis_node.tasks.scorer import UNSCORED, IsolatedScorer, Score, score_answers
from ftis_node.tasks.scoring_worker import ScoringCost

log = logging.getLogger(__name__)
NO_REWARD: Score = (0.0, CompletionStatus.SCORED)
OBSERVATION_MARK = "\n> "  # before an observation, in a transcript


@dataclass(frozen=True, slots=True)
class Rollouts:
    """The sampled completions of a problem, in order. Each list and tuple has one entry per completion.

    `texts` are what is scored, None for a completion with a hidden special token (`PromptTokenizer.answer_texts`). In
    those of an episode the observations are between the turns. `last_texts` have its last turn alone; without episodes
    they are empty. `turn_lengths` and `observation_hash` are a `Group`'s.
    """

    result: GenerationResult
    scores: list[Score]
    texts: list[str | None]
    turn_lengths: tuple[tuple[int, ...], ...] = ()
    observation_hash: bytes = b""
    last_texts: tuple[str | None, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """How the completions of a problem are sampled and scored.

    `completion_limit` returns the longest turn after a number of tokens, below 1 if there is no space for one. One of
    `eos_ids` ends a turn, and so does a stop string of `episode`. An engine may sample beyond such a string, because it
    knows only the string's usual ids. The rest is removed here.
    """

    generate: Callable[[GenerateRequest], Awaitable[GenerationResult]]
    sampling: SamplingSettings
    completion_limit: Callable[[int], int]
    eos_ids: frozenset[int]
    tokenizer: PromptTokenizer
    scorer: IsolatedScorer
    episode: EpisodeSection = field(default_factory=EpisodeSection)

    async def sample(
        self, item: TaskItem, prompt_ids: Sequence[int], num_completions: int, *, cost: ScoringCost | None = None
    ) -> Rollouts | None:
        """Return the completions of a problem; None if the prompt leaves no space for them. Adds to `cost`.

        With `cost` an episode that cannot be scored ends all of them. Without it the others are played on.
        Raises the errors of `generate`.
        """
        if self.scorer.is_episode(item):
            return await self._play(item, prompt_ids, num_completions, cost)
        request = self._request(prompt_ids, num_completions)
        if request is None:
            return None
        result = await self.generate(request)
        opening = self.tokenizer.render_prompt(item.prompt).opening
        texts = self.tokenizer.answer_texts(result.tokens, result.finish_reasons, opening=opening)
        return Rollouts(result, await score_answers(self.scorer, item, texts, cost=cost), texts)

    def _request(self, prompt_ids: Sequence[int], num_completions: int) -> GenerateRequest | None:
        limit = self.completion_limit(len(prompt_ids))
        if limit < 1:
            return None
        return GenerateRequest(
            prompt_ids=tuple(prompt_ids),
            num_completions=num_completions,
            sampling=self.sampling,
            max_tokens=limit,
            eos_ids=self.eos_ids,
            stop_ids=self._stop_ids,
        )

    @cached_property
    def _stop_ids(self) -> tuple[tuple[int, ...], ...]:
        return self.tokenizer.encode_stops(self.episode.stop) if self.episode.stop else ()

    async def _play(
        self, item: TaskItem, prompt_ids: Sequence[int], num_completions: int, cost: ScoringCost | None
    ) -> Rollouts | None:
        opening = self.tokenizer.render_prompt(item.prompt).opening
        playing = [Playing(item, opening, prompt_ids) for _ in range(num_completions)]
        await self.play_all(playing, cost=cost)
        if not all(one.turns for one in playing):
            return None
        completions = [one.completion() for one in playing]
        return Rollouts(
            GenerationResult.from_completions(completions),
            [one.score for one in playing],
            [one.transcript for one in playing],
            tuple(one.turn_lengths for one in completions),
            hash_observations([one.observations[: len(one.turns) - 1] for one in playing]),
            tuple(one.last_text for one in playing),
        )

    async def play_all(self, playing: Sequence[Playing], *, cost: ScoringCost | None = None) -> None:
        """Play episodes, of one problem or several, to their ends. All take a turn together. Adds to `cost`.

        With `cost` an episode that cannot be scored ends all of them. Raises the errors of `generate`.
        """
        spent = cost or ScoringCost()
        for _ in range(self.episode.max_turns):
            if not await self._take_turns([one for one in playing if not one.has_ended]):
                break
            for one in playing:
                if not one.has_ended:
                    await self._observe(one, spent)
            if cost is not None and cost.num_unfinished:  # a group with an unscored completion is of no use
                break

    async def _take_turns(self, playing: Sequence[Playing]) -> bool:
        """Sample the next turn of each of these. End those without space for it. Return whether any had space."""
        by_prefix: dict[tuple[int, ...], list[Playing]] = {}
        for one in playing:
            by_prefix.setdefault(tuple(one.token_ids), []).append(one)
        requests = [(self._request(prefix, len(members)), members) for prefix, members in by_prefix.items()]
        for request, members in requests:
            for one in members if request is None else ():
                one.has_ended = True
        asked = [(request, members) for request, members in requests if request is not None]
        results = await asyncio.gather(*(self.generate(request) for request, _ in asked))
        for result, (_, members) in zip(results, asked, strict=True):
            for one, completion in zip(members, completions_of(result), strict=True):
                one.take(self._until_stop(completion))
        return bool(asked)

    def _until_stop(self, turn: Completion) -> Completion:
        """Return a turn up to its first stop string."""
        strings = self.episode.stop
        num_ids = self.tokenizer.num_until_stop(turn.token_ids.tolist(), strings) if strings else None
        if num_ids is None:
            return turn
        ids, logprobs = turn.token_ids[:num_ids], turn.logprobs[:num_ids]
        return replace(turn, token_ids=ids, logprobs=logprobs, finish_reason=FinishReason.STOP)

    async def _observe(self, one: Playing, cost: ScoringCost) -> None:
        """Replay the turns. Append the observation, or end the episode with its score."""
        turn = one.turns[-1]
        has_end = int(turn.token_ids[-1]) in self.eos_ids
        text = self.tokenizer.answer_text(turn.token_ids.tolist(), has_end=has_end, opening=one.opening)
        if text is None:
            one.has_ended, one.score = True, NO_REWARD
            return
        one.texts.append(text)
        play = await self.scorer.play(one.item, one.texts, cost=cost)
        if play is None:
            one.has_ended, one.score = True, UNSCORED
            return
        one.score = play.reward, CompletionStatus.SCORED
        if play.is_over or turn.finish_reason is not FinishReason.STOP:
            one.has_ended = True
            return
        try:
            observation_ids = self.tokenizer.encode_observation(
                play.observations[-1],
                opening=one.opening,
                max_tokens=self.episode.max_observation_tokens,
                has_end=has_end,
            )
        except ModelError as error:
            log.warning("%s: the model cannot read an observation, which ends the episode: %s", one.item.ref, error)
            one.has_ended = True
            if len(one.turns) < self.episode.max_turns:  # for peers it goes on
                one.turns[-1] = replace(turn, finish_reason=FinishReason.ABORT)
            return
        one.token_ids += observation_ids
        one.observation_ids.append(observation_ids)
        one.observations = list(play.observations)


@dataclass(slots=True, eq=False)
class Playing:
    """A completion under way: the tokens of its prompt, turns and observations; each turn as its engine returned it.

    An observation may follow the last turn, which no turn answers.
    """

    item: TaskItem
    opening: str
    prompt_ids: Sequence[int]
    token_ids: list[int] = field(init=False)
    turns: list[Completion] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    observations: list[str] = field(default_factory=list)
    observation_ids: list[list[int]] = field(default_factory=list)
    score: Score = NO_REWARD
    has_ended: bool = False

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_ids)

    def take(self, turn: Completion) -> None:
        self.turns.append(turn)
        self.token_ids += turn.token_ids.tolist()

    @property
    def last_text(self) -> str | None:
        """Return the text of the last turn; None if it has none."""
        return self.texts[-1] if len(self.texts) == len(self.turns) else None

    @property
    def transcript(self) -> str | None:
        """Return the turns with the observations between them, in lines; None if the last turn has no text."""
        if self.last_text is None:
            return None
        observed = [f"{OBSERVATION_MARK}{text}\n" for text in self.observations[: len(self.turns) - 1]]
        return "".join(part for pair in zip(self.texts, [*observed, ""], strict=True) for part in pair)

    def completion(self) -> Completion:
        """Return the sampled tokens of all turns as one completion, which ended as its last turn did."""
        return Completion(
            token_ids=np.concatenate([turn.token_ids for turn in self.turns]),
            logprobs=np.concatenate([turn.logprobs for turn in self.turns]),
            finish_reason=self.turns[-1].finish_reason,
            policy_version=min(turn.policy_version for turn in self.turns),  # a learner's restart may lower it
            policy_version_newest=max(turn.policy_version_newest for turn in self.turns),
            turn_lengths=tuple(len(turn.token_ids) for turn in self.turns),
        )


def completions_of(result: GenerationResult) -> list[Completion]:
    """Return one unscored completion per entry of the result."""
    return [
        Completion(ids, logprobs, reason, policy_version=first, policy_version_newest=last)
        for ids, logprobs, reason, first, last in zip(
            result.tokens.ids_of_each(),
            result.tokens.logprobs_of_each(),
            result.finish_reasons,
            result.policy_versions,
            result.policy_versions_newest,
            strict=True,
        )
    ]
