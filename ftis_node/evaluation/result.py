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
from dataclasses import dataclass, replace
from math import exp, inf, isfinite
from typing import TYPE_CHECKING

from ftis_node.generation.evaluate import Answered, EvalResult, summarize
from ftis_node.tasks.answers import answer_in

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ftis_node.generation.evaluate import ScoredAnswer
    from ftis_node.tasks.base import Task, TaskItem

MAX_EXPONENT = 700.0  # e^709 is the largest float
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
class TextFigures:
    """Likelihood of a text: `nats` of all its `tokens` together, which is comparable between tokenizers."""

    name: str
    tokens: int
    nats: float

    @property
    def nats_per_token(self) -> float:
        """Mean over the tokens; comparable between models of one tokenizer."""
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        return exp(min(self.nats_per_token, MAX_EXPONENT))


@dataclass(frozen=True, slots=True)
class GateFigures:
    """Training data of `gate`: `right` is the fraction of its `prompts` that each expert answered correctly.

    The token counts are those of the experts' answers to these prompts; no `EvaluationRow` includes them.
    """

    prompts: int
    right: tuple[float, ...]
    generated_tokens: int
    forward_tokens: int


@dataclass(frozen=True, slots=True)
class EnsembleResult:
    """Results of the experts and modes. `prior`: the initial weights of `cached`, in the order of `experts`.

    `prior` is None without the mode `cached`, `gate` without the mode `gate`.
    """

    task: str
    n: int
    k: int
    experts: tuple[EvaluationRow, ...]
    modes: tuple[EvaluationRow, ...]
    prior: tuple[float, ...] | None = None
    gate: GateFigures | None = None
    text: tuple[TextFigures, ...] = ()


def evaluation_row(
    name: str, answered: Sequence[Answered], task: Task, *, k: int, num_models: int = 1
) -> EvaluationRow:
    """Return the row of answers from one model, or from a mixture of `num_models`."""
    right = [_is_majority_right(task, problem.item, problem.samples[:k]) for problem in answered]
    return EvaluationRow(
        name=name,
        result=summarize(answered, k=k),
        majority_at_k=sum(right) / len(right) if k > 1 else None,
        generated_tokens=sum(map(_generated, answered)),
        forward_tokens=num_models * sum(map(_forward, answered)),
    )


def vote_row(by_model: Sequence[Sequence[Answered]], task: Task, *, k: int) -> EvaluationRow:
    """Return the row of the majority over the models' own answers. `by_model` has the answers to the same problems."""
    ballots = list(zip(*by_model, strict=True))
    elected, right = [], []
    for ballot in ballots:
        greedy = [problem.greedy for problem in ballot if problem.greedy is not None]
        winner = elect(_votes(task, ballot[0].item, greedy))
        elected.append(replace(ballot[0], greedy=None if winner is None else greedy[winner], samples=()))
        samples = [answer for problem in ballot for answer in problem.samples[:k]]
        right.append(_is_majority_right(task, ballot[0].item, samples))
    return EvaluationRow(
        name="vote",
        result=replace(summarize(elected, k=1), k=k),
        majority_at_k=sum(right) / len(right) if k > 1 else None,
        generated_tokens=sum(_generated(problem) for ballot in ballots for problem in ballot),
        forward_tokens=sum(_forward(problem) for ballot in ballots for problem in ballot),
    )


def route_row(
    by_model: Sequence[Sequence[Answered]],
    likelihoods: Sequence[Sequence[float]],
    task: Task,
    *,
    names: Sequence[str],
    k: int,
) -> EvaluationRow:
    """Return the row of answers by the model under which the prompt is likeliest, the first of equals.

    `likelihoods` are log p_j(prompt), in the order of `by_model`. To choose, all models read every prompt.
    """
    entry = chosen_row("route", by_model, likelihoods, task, names=names, k=k)
    read_to_choose = sum(problem.num_prompt_tokens for answered in by_model for problem in answered)
    return replace(entry, forward_tokens=entry.forward_tokens + read_to_choose)


def confidence_row(
    by_model: Sequence[Sequence[Answered]], task: Task, *, names: Sequence[str], k: int
) -> EvaluationRow:
    """Return the row of answers by the model whose greedy answer has the highest mean log-prob by its own measure.

    A model without an answer, or with log-probs that are NaN, comes last. All models give a greedy answer.
    """
    confidences = [[_confidence(problem) for problem in answered] for answered in by_model]
    return chosen_row("confidence", by_model, confidences, task, names=names, k=k, all_answer=True)


def chosen_row(
    name: str,
    by_model: Sequence[Sequence[Answered]],
    scores: Sequence[Sequence[float]],
    task: Task,
    *,
    names: Sequence[str],
    k: int,
    all_answer: bool = False,
) -> EvaluationRow:
    """Return the row of answers by the model with the highest of its `scores` `[J][N]`, the first of equals."""
    ballots = list(zip(*by_model, strict=True))
    choices = [max(range(len(row)), key=row.__getitem__) for row in zip(*scores, strict=True)]
    answered = [ballot[choice] for ballot, choice in zip(ballots, choices, strict=True)]
    others = [
        replace(problem, samples=())
        for ballot, choice in zip(ballots, choices, strict=True)
        for place, problem in enumerate(ballot)
        if all_answer and place != choice
    ]
    entry = evaluation_row(name, answered, task, k=k)
    counts = Counter(names[choice] for choice in choices)
    return replace(
        entry,
        generated_tokens=entry.generated_tokens + sum(map(_generated, others)),
        forward_tokens=entry.forward_tokens + sum(map(_forward, others)),
        chosen={each: counts[each] for each in names},
    )


def gate_figures(by_model: Sequence[Sequence[Answered]]) -> GateFigures:
    """Return the figures of the models' answers to the gate's training prompts."""
    every = [problem for answered in by_model for problem in answered]
    return GateFigures(
        prompts=len(by_model[0]),
        right=tuple(sum(map(is_right, answered)) / len(answered) for answered in by_model),
        generated_tokens=sum(map(_generated, every)),
        forward_tokens=sum(map(_forward, every)),
    )


def is_right(problem: Answered) -> bool:
    """Return whether its greedy answer has the full reward."""
    return problem.greedy is not None and problem.greedy.is_right


def _confidence(problem: Answered) -> float:
    logprob = -inf if problem.greedy is None else problem.greedy.mean_logprob
    return logprob if isfinite(logprob) else -inf


def _is_majority_right(task: Task, item: TaskItem, answers: Sequence[ScoredAnswer]) -> bool:
    winner = elect(_votes(task, item, answers))
    return winner is not None and answers[winner].is_right


def _votes(task: Task, item: TaskItem, answers: Sequence[ScoredAnswer]) -> list[Vote]:
    return [Vote(answer_in(task, item, answer.text), answer.mean_logprob) for answer in answers]


def _generated(problem: Answered) -> int:
    greedy = () if problem.greedy is None else (problem.greedy,)
    return sum(answer.num_tokens for answer in (*greedy, *problem.samples))


def _forward(problem: Answered) -> int:
    """Return the positions of all forward passes: the prompt counts once for the greedy answer, once for samples."""
    num_reads = bool(problem.greedy) + bool(problem.samples)
    return num_reads * problem.num_prompt_tokens + _generated(problem)


@dataclass(frozen=True, slots=True)
class Vote:
    """The vote of one completion; `answer` None: it has none; `mean_logprob` is in nats a token."""

    answer: str | None
    mean_logprob: float


def elect(votes: Sequence[Vote]) -> int | None:
    """Return the position of the first vote for the winning answer; 0 if no vote has one, None without votes."""
    by_answer: dict[str, list[int]] = defaultdict(list)
    for position, vote in enumerate(votes):
        if vote.answer is not None:
            by_answer[vote.answer].append(position)
    if not by_answer:
        return 0 if votes else None

    def support(positions: list[int]) -> tuple[int, float]:
        means = [votes[position].mean_logprob for position in positions]
        return len(positions), sum(mean if isfinite(mean) else UNSURE for mean in means)

    return max(by_answer.values(), key=support)[0]  # the first of equals: answers are in order of their first vote
