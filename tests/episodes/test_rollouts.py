"""The sampling of episodes with scripted parts: an engine, a scorer and a tokenizer."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ftis_node.config.manifest import EpisodeSection
from ftis_node.errors import ModelError
from ftis_node.evaluation.ensemble import elected
from ftis_node.generation.engines.base import GenerateRequest, GenerationResult
from ftis_node.generation.evaluate import Answered, ScoredAnswer
from ftis_node.generation.rollouts import Rollouts, Sampler
from ftis_node.records.group import Completion, CompletionStatus, FinishReason, SamplingSettings
from ftis_node.tasks import load_task
from ftis_node.tasks.episodes.episode import Play
from ftis_node.tasks.scoring_worker import ScoringCost

END = 2


class FailsOnce:
    """A scorer of episodes of two turns. Its first replay fails, as on a busy machine."""

    num_played = 0

    def is_episode(self, item: object) -> bool:
        return True

    async def play(self, item: object, texts: list[str], *, cost: ScoringCost) -> Play | None:
        self.num_played += 1
        if self.num_played == 1:
            cost.num_lost += 1
            return None
        is_over = len(texts) == 2
        return Play(("more",) * (len(texts) - is_over), len(texts), is_over, float(is_over))


async def generate(request: GenerateRequest) -> GenerationResult:
    ids = [np.array([3 + row, END], dtype=np.int32) for row in range(request.num_completions)]
    return GenerationResult.from_completions(
        [Completion(one, np.zeros(2, dtype=np.float32), FinishReason.STOP) for one in ids]
    )


class Asks:
    """A scorer of an episode without an end."""

    def __init__(self, observation: str = "more") -> None:
        self.observation = observation

    def is_episode(self, item: object) -> bool:
        return True

    async def play(self, item: object, texts: list[str], *, cost: ScoringCost) -> Play:
        return Play((self.observation,) * len(texts), len(texts), is_over=False, reward=0.5)


def no_observation(*_: object, **__: object) -> list[int]:
    raise ModelError("it has no embedding")


async def sampled(scorer: Any, cost: ScoringCost | None = None, **changes: Any) -> Rollouts:
    tokenizer: Any = SimpleNamespace(
        render_prompt=lambda prompt: SimpleNamespace(opening=""),
        **{"answer_text": lambda *_, **__: "a text", "encode_observation": lambda *_, **__: [7]} | changes,
    )
    sampler = Sampler(
        generate=generate,
        sampling=SamplingSettings(),
        completion_limit=lambda num_tokens: 100 - num_tokens,
        eos_ids=frozenset({END}),
        tokenizer=tokenizer,
        scorer=scorer,
        episode=EpisodeSection(max_turns=4),
    )
    item: Any = SimpleNamespace(prompt=(), ref="an item")
    rollouts = await sampler.sample(item, [1], 3, cost=cost)
    assert rollouts is not None
    return rollouts


@pytest.mark.parametrize("is_for_a_group", [False, True])
async def test_a_failed_replay_ends_the_other_episodes_of_a_group_but_not_of_an_evaluation(is_for_a_group) -> None:
    rollouts = await sampled(FailsOnce(), ScoringCost() if is_for_a_group else None)
    num_turns = [len(turns) for turns in rollouts.turn_lengths]
    assert num_turns == ([1, 1, 1] if is_for_a_group else [1, 2, 2])


async def test_an_observation_that_the_model_cannot_read_ends_the_episode_as_a_stopped_turn() -> None:
    """Peers that can read it would miss a turn, so the node does not share the group."""
    rollouts = await sampled(Asks(), encode_observation=no_observation)
    assert set(rollouts.result.finish_reasons) == {FinishReason.ABORT}
    assert [reward for reward, _ in rollouts.scores] == [0.5] * 3


async def test_the_last_turn_is_kept_apart_from_the_observations() -> None:
    """An observation may have lines that look like the border of another one."""
    rollouts = await sampled(Asks("4\n> 5\n6"), answer_text=lambda ids, **_: f"{ids[0]}")
    assert rollouts.last_texts == ("3", "3", "3")
    assert rollouts.texts[0] == "3" + "\n> 4\n> 5\n6\n3" * 3


def test_votes_compare_the_answer_of_the_last_turn() -> None:
    """By the last number of all turns, two of the three would elect 2."""
    task = load_task("calculator")
    facts = 3, -1.0, FinishReason.STOP, 0.0, CompletionStatus.SCORED
    right = ScoredAnswer("26 * 51\n> 1326\nsee\n> 1\n2", *facts, last_text="It is 1326.")
    answers = [right, ScoredAnswer("It is 1326.", *facts), ScoredAnswer("It is 2.", *facts)]
    (winner,) = elected([[Answered(task[0], 10, answer)] for answer in answers], task)
    assert winner.greedy == right
