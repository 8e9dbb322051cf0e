"""Result of an ensemble's evaluation: each expert alone and each mode, from the answers to the same problems.

Cost has two numbers. `generated_tokens` counts the tokens of all completions. `forward_tokens` counts the positions of
prompts and completions that went through a model, summed over the models. A mixture of J models takes J passes for
every token.

The vote follows these rules, in this order, over votes in the order in which the models were named:

1. An answer's votes are the completions that gave it. A completion without an answer (a broken format, a prompt that is
   too long for its model) does not vote.
2. Among equals, the answer whose votes have the higher sum of mean log-probs wins (nats a token, each under its own
   model). So the more confident models decide.
3. If these are equal too, the answer that was given first wins, so the first model's before the second's.

If no completion has an answer, the first completion is the ensemble's. The vote does not use the correct answer.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import inf, isfinite
from typing import TypeAlias

from ftis_node.generation.evaluate import Answered, EvalResult, summarize
from ftis_node.tasks.answers import answer_in
from ftis_node.tasks.base import Task

Vote: TypeAlias = "tuple[str | None, float]"
"""A completion's answer, None if it has none, and its mean log-prob in nats a token."""
UNSURE = -1e6  # nats: replaces a log-prob that is not finite


@dataclass(frozen=True, slots=True)
class EvaluationRow:
    """One expert alone, or one mode of the ensemble.

    `model` and `domain` are an expert's. `chosen` counts each expert's answers, for the modes that choose one expert.
    """

    name: str
    result: EvalResult
    generated_tokens: int
    forward_tokens: int
    model: str | None = None
    domain: str | None = None
    chosen: dict[str, int] | None = None


@dataclass(frozen=True, slots=True)
class EnsembleResult:
    """Results of the experts and modes."""

    task: str
    n: int
    experts: tuple[EvaluationRow, ...]
    modes: tuple[EvaluationRow, ...]


def evaluation_row(name: str, answered: Sequence[Answered], *, num_models: int = 1) -> EvaluationRow:
    """Return the row of answers from one model, or from a mixture of `num_models`."""
    generated, forward = _cost(answered)
    return EvaluationRow(name, summarize(answered, k=1), generated, num_models * forward)


def selection_row(name: str, chosen: Sequence[Answered], by_model: Sequence[Sequence[Answered]]) -> EvaluationRow:
    """Return the row of answers that were chosen among those of all models. The cost is that of all."""
    return EvaluationRow(name, summarize(chosen, k=1), *_cost(chain.from_iterable(by_model)))


def confidence_row(by_model: Sequence[Sequence[Answered]], *, names: Sequence[str]) -> EvaluationRow:
    """Return the row of the answers of the most confident models, whose `names` are counted."""
    choices = _most_confident(by_model)
    chosen = [by_model[choice][place] for place, choice in enumerate(choices)]
    counts = Counter(names[choice] for choice in choices)
    return replace(selection_row("confidence", chosen, by_model), chosen={name: counts[name] for name in names})


def elected(by_model: Sequence[Sequence[Answered]], task: Task) -> list[Answered]:
    """Return the greedy answer that the models elect for each problem. `by_model` has answers to the same problems."""
    winners = []
    for ballot in zip(*by_model, strict=True):
        greedy = [problem.greedy for problem in ballot if problem.greedy is not None]
        votes = [(answer_in(task, ballot[0].item, answer.answer_text), answer.mean_logprob) for answer in greedy]
        winner = elect(votes)
        winners.append(replace(ballot[0], greedy=None if winner is None else greedy[winner], samples=()))
    return winners


def _most_confident(by_model: Sequence[Sequence[Answered]]) -> list[int]:
    """Return for each problem the model whose greedy answer has the highest mean log-prob, the first of equals.

    A log-prob that is NaN or missing is the lowest.
    """

    def confidence(problem: Answered) -> float:
        answer = problem.greedy
        return answer.mean_logprob if answer and isfinite(answer.mean_logprob) else -inf

    rows = [[confidence(problem) for problem in ballot] for ballot in zip(*by_model, strict=True)]
    return [row.index(max(row)) for row in rows]


def _cost(problems: Iterable[Answered]) -> tuple[int, int]:
    """Return the generated tokens, and the positions of all forward passes, of greedy answers."""
    answered = [(problem.num_prompt_tokens, problem.greedy.num_tokens) for problem in problems if problem.greedy]
    generated = sum(num_tokens for _, num_tokens in answered)
    return generated, generated + sum(num_prompt_tokens for num_prompt_tokens, _ in answered)


def elect(votes: Sequence[Vote]) -> int | None:
    """Return the position of the first vote for the winning answer; 0 if no vote has one, None without votes."""
    by_answer: dict[str, list[int]] = defaultdict(list)
    for position, (answer, _) in enumerate(votes):
        if answer is not None:
            by_answer[answer].append(position)
    if not by_answer:
        return 0 if votes else None

    def support(positions: list[int]) -> tuple[int, float]:
        means = [votes[position][1] for position in positions]
        return len(positions), sum(mean if isfinite(mean) else UNSURE for mean in means)

    return max(by_answer.values(), key=support)[0]  # the first of equals: answers are in order of their first vote
