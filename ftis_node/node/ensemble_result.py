"""What an ensemble's evaluation comes to: each expert alone and each mode, from the answers to the same problems.

Cost is counted twice. `generated_tokens` are those of all completions that were sampled. `forward_tokens` are the
positions, of prompts and completions, that went through a model, summed over the models: a mixture of J models takes J
passes for every token. What pass@k takes is in both.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from math import exp
from typing import TYPE_CHECKING

from ftis_node.generation.evaluate import Answered, EvalResult, summarise
from ftis_node.generation.vote import Vote, elect
from ftis_node.tasks.answers import answer_in

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ftis_node.generation.evaluate import Answer
    from ftis_node.tasks.base import Task, TaskItem

MAX_EXPONENT = 700.0  # e^709 is the largest float


@dataclass(frozen=True, slots=True)
class Entry:
    """One expert alone, or one mode of the ensemble.

    `majority_at_k` is the share of problems that the majority over k samples of each model gets right, None for k = 1.
    `model` and `domain` are an expert's, `chosen` is how many problems `route` gave to whom.
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
    """How likely a text is: `nats` of all its `tokens` together, which is comparable between tokenizers."""

    name: str
    tokens: int
    nats: float

    @property
    def nats_per_token(self) -> float:
        """The mean; comparable between models of one tokenizer."""
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        """e to the nats of a token."""
        return exp(min(self.nats_per_token, MAX_EXPONENT))


@dataclass(frozen=True, slots=True)
class EnsembleResult:
    """`prior` are the weights that `cached` began with, in the order of `experts`; None without that mode."""

    task: str
    n: int
    k: int
    experts: tuple[Entry, ...]
    modes: tuple[Entry, ...]
    prior: tuple[float, ...] | None = None
    text: tuple[TextFigures, ...] = ()


def entry_of(name: str, answered: Sequence[Answered], task: Task, *, k: int, num_models: int = 1) -> Entry:
    """The figures of answers that one model gave, or a mixture of `num_models`."""
    right = [_is_majority_right(task, problem.item, problem.samples[:k]) for problem in answered]
    return Entry(
        name=name,
        result=summarise(answered, k=k),
        majority_at_k=sum(right) / len(right) if k > 1 else None,
        generated_tokens=sum(map(_generated, answered)),
        forward_tokens=num_models * sum(map(_forward, answered)),
    )


def vote_entry(name: str, by_model: Sequence[Sequence[Answered]], task: Task, *, k: int) -> Entry:
    """The majority over the models' own answers; `by_model` has each one's answers to the same problems."""
    ballots = list(zip(*by_model, strict=True))
    elected, right = [], []
    for ballot in ballots:
        greedy = [problem.greedy for problem in ballot if problem.greedy is not None]
        winner = elect(_votes(task, ballot[0].item, greedy))
        elected.append(replace(ballot[0], greedy=None if winner is None else greedy[winner], samples=()))
        samples = [answer for problem in ballot for answer in problem.samples[:k]]
        right.append(_is_majority_right(task, ballot[0].item, samples))
    return Entry(
        name=name,
        result=replace(summarise(elected, k=1), k=k),
        majority_at_k=sum(right) / len(right) if k > 1 else None,
        generated_tokens=sum(_generated(problem) for ballot in ballots for problem in ballot),
        forward_tokens=sum(_forward(problem) for ballot in ballots for problem in ballot),
    )


def route_entry(
    name: str,
    by_model: Sequence[Sequence[Answered]],
    likelihoods: Sequence[Sequence[float]],
    task: Task,
    *,
    names: Sequence[str],
    k: int,
) -> Entry:
    """Each problem by the model under which its prompt is likeliest, the first of equals.

    `likelihoods` are log p_j(prompt), in the order of `by_model`. All models read every prompt to choose.
    """
    ballots = list(zip(*by_model, strict=True))
    prompts = zip(*likelihoods, strict=True)
    choices = [max(range(len(prompt)), key=prompt.__getitem__) for prompt in prompts]
    answered = [ballot[choice] for ballot, choice in zip(ballots, choices, strict=True)]
    read_to_choose = sum(problem.num_prompt_tokens for ballot in ballots for problem in ballot)
    entry = entry_of(name, answered, task, k=k)
    counts = Counter(names[choice] for choice in choices)
    return replace(
        entry,
        forward_tokens=entry.forward_tokens + read_to_choose,
        chosen={each: counts[each] for each in names},
    )


def _is_majority_right(task: Task, item: TaskItem, answers: Sequence[Answer]) -> bool:
    winner = elect(_votes(task, item, answers))
    return winner is not None and answers[winner].is_right


def _votes(task: Task, item: TaskItem, answers: Sequence[Answer]) -> list[Vote]:
    return [Vote(answer_in(task, item, answer.text), answer.mean_logprob) for answer in answers]


def _generated(problem: Answered) -> int:
    greedy = () if problem.greedy is None else (problem.greedy,)
    return sum(answer.num_tokens for answer in (*greedy, *problem.samples))


def _forward(problem: Answered) -> int:
    """The prompt is read once for the greedy answer and once for the samples."""
    num_reads = bool(problem.greedy) + bool(problem.samples)
    return num_reads * problem.num_prompt_tokens + _generated(problem)
