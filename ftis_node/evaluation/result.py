"""Result of an ensemble's evaluation: each expert alone and each mode, from the answers to the same problems.

Cost has two numbers. `generated_tokens` counts the tokens of all sampled completions. `forward_tokens` counts the
positions of prompts and completions that went through a model, summed over the models. A mixture of J models takes J
passes for every token. Both include the samples of pass@k.

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
from math import inf, isfinite
from typing import TypeAlias

from ftis_node.generation.evaluate import Answered, EvalResult, ScoredAnswer, summarize
from ftis_node.tasks.answers import answer_in
from ftis_node.tasks.base import Task, TaskItem

Vote: TypeAlias = "tuple[str | None, float]"
"""A completion's answer, None if it has none, and its mean log-prob in nats a token."""
UNSURE = -1e6  # nats: replaces a log-prob that is not finite


@dataclass(frozen=True, slots=True)
class EvaluationRow:
    """One expert alone, or one mode of the ensemble.

    `majority_at_k` is the fraction of problems that the majority over k samples of each model gets right, None for k =
    1. `model` and `domain` are an expert's. `chosen` counts each expert's answers, for the modes that choose one
    expert.
    """

    name: str
    result: EvalResult
    majority_at_k: float | None
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
    k: int
    experts: tuple[EvaluationRow, ...]
    modes: tuple[EvaluationRow, ...]

    @property
    def best_mode(self) -> EvaluationRow:
        """Return the row of the mode with the highest pass@1, the first of equals."""
        return max(self.modes, key=lambda row: row.result.pass_at_1)


def evaluation_row(
    name: str,
    answered: Sequence[Answered],
    task: Task,
    *,
    k: int,
    num_models: int = 1,
    others: Sequence[Answered] = (),
) -> EvaluationRow:
    """Return the row of answers from one model, or from a mixture of `num_models`. Its cost includes `others`."""
    right = [_is_majority_right(task, problem.item, problem.samples[:k]) for problem in answered]
    generated, forward = _cost([*answered, *others])
    return EvaluationRow(
        name=name,
        result=summarize(answered, k=k),
        majority_at_k=sum(right) / len(right) if k > 1 else None,
        generated_tokens=generated,
        forward_tokens=num_models * forward,
    )


def elected(by_model: Sequence[Sequence[Answered]], task: Task) -> list[Answered]:
    """Return the greedy answer that the models elect for each problem. `by_model` has answers to the same problems."""
    winners = []
    for ballot in zip(*by_model, strict=True):
        greedy = [problem.greedy for problem in ballot if problem.greedy is not None]
        winner = elect(_votes(task, ballot[0].item, greedy))
        winners.append(replace(ballot[0], greedy=None if winner is None else greedy[winner], samples=()))
    return winners


def vote_row(by_model: Sequence[Sequence[Answered]], task: Task, *, k: int) -> EvaluationRow:
    """Return the row of the majority over the models' own answers. `by_model` has the answers to the same problems."""
    right = []
    for ballot in zip(*by_model, strict=True):
        samples = [answer for problem in ballot for answer in problem.samples[:k]]
        right.append(_is_majority_right(task, ballot[0].item, samples))
    generated, forward = _cost([problem for answered in by_model for problem in answered])
    return EvaluationRow(
        name="vote",
        result=replace(summarize(elected(by_model, task), k=1), k=k),
        majority_at_k=sum(right) / len(right) if k > 1 else None,
        generated_tokens=generated,
        forward_tokens=forward,
    )


def chosen_row(
    name: str,
    by_model: Sequence[Sequence[Answered]],
    scores: Sequence[Sequence[float]],
    task: Task,
    *,
    names: Sequence[str],
    k: int,
) -> EvaluationRow:
    """Return the row of answers by the model with the highest of its `scores` `[J][N]`, the first of equals.

    The cost is that of the chosen answers, and of the greedy answers of all models, among which it chooses.
    """
    ballots = list(zip(*by_model, strict=True))
    choices = highest(scores)
    answered = [ballot[choice] for ballot, choice in zip(ballots, choices, strict=True)]
    others = [
        replace(problem, samples=())
        for ballot, choice in zip(ballots, choices, strict=True)
        for place, problem in enumerate(ballot)
        if place != choice
    ]
    row = evaluation_row(name, answered, task, k=k, others=others)
    counts = Counter(names[choice] for choice in choices)
    return replace(row, chosen={each: counts[each] for each in names})


def highest(scores: Sequence[Sequence[float]]) -> list[int]:
    """Return for each problem the model with the highest of its `scores` `[J][N]`, the first of equals."""
    return [max(range(len(row)), key=row.__getitem__) for row in zip(*scores, strict=True)]


def most_confident(by_model: Sequence[Sequence[Answered]]) -> list[Answered]:
    """Return for each problem the answers of the model that is most confident of its greedy one."""
    return [by_model[choice][place] for place, choice in enumerate(highest(confidences(by_model)))]


def confidences(by_model: Sequence[Sequence[Answered]]) -> list[list[float]]:
    """Return `[J][N]`, the mean log-prob of each greedy answer by its own model; -inf if it is NaN or missing."""
    greedy = [[problem.greedy for problem in answered] for answered in by_model]
    return [
        [answer.mean_logprob if answer and isfinite(answer.mean_logprob) else -inf for answer in answers]
        for answers in greedy
    ]


def _is_majority_right(task: Task, item: TaskItem, answers: Sequence[ScoredAnswer]) -> bool:
    winner = elect(_votes(task, item, answers))
    return winner is not None and answers[winner].is_right


def _votes(task: Task, item: TaskItem, answers: Sequence[ScoredAnswer]) -> list[Vote]:
    return [(answer_in(task, item, answer.answer_text), answer.mean_logprob) for answer in answers]


def _cost(problems: Iterable[Answered]) -> tuple[int, int]:
    """Return the generated tokens, and the positions of all forward passes.

    A prompt counts once for the greedy answer and once for the samples.
    """
    generated = forward = 0
    for problem in problems:
        greedy = () if problem.greedy is None else (problem.greedy,)
        num_tokens = sum(answer.num_tokens for answer in (*greedy, *problem.samples))
        num_reads = bool(greedy) + bool(problem.samples)
        generated += num_tokens
        forward += num_reads * problem.num_prompt_tokens + num_tokens
    return generated, forward


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
