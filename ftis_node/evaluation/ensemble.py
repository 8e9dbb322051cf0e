"""Evaluation of several models on one task: each alone, as a mixture, by vote, and by the most confident answer.

    each model, one after another -> its answers to all problems -> the experts alone, vote, confidence
    all models at once            -> answers of the mixture      -> posterior, mean, answer

Vote and confidence reuse the answers of the single models, so they need no second generation. A model alone, or a
mixture of one model, is evaluated exactly as `ftis-node eval` does it.

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

import asyncio
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from math import inf, isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from ftis_node.errors import ConfigError, MachineError, ModelError
from ftis_node.evaluation.members import Member, as_members, swarm_members
from ftis_node.evaluation.model_answers import Asking, Expert, studying
from ftis_node.generation.evaluate import Answered, EvalResult, summarize
from ftis_node.memory.generator import cache_bytes_per_token
from ftis_node.memory.machine import Card
from ftis_node.models import ModelSource, list_accelerators, parameter_count, pick_device, read_shape
from ftis_node.tasks.answers import answer_in
from ftis_node.tasks.base import Task
from ftis_node.telemetry.host_memory import free_host_bytes
from ftis_node.telemetry.log import OnProgress, unwatched
from ftis_node.telemetry.terminal_text import GIB

if TYPE_CHECKING:
    from ftis_node.generation.engines.mixture_engine import MixtureMode

MIXTURES: Final[tuple[MixtureMode, ...]] = ("posterior", "mean", "answer")
MODES: Final = (*MIXTURES, "vote", "confidence")
ROWS: Final = 128  # completions that the engine decodes in parallel, divided by the number of models
BYTES: Final = {"cpu": 4, "cuda": 2}  # float32 and bfloat16
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


def run_ensemble(
    models: Sequence[str], swarm: Sequence[Path], task: str, *, on_progress: OnProgress = unwatched, **options: Any
) -> EnsembleResult:
    """Return `evaluate_ensemble` of the named models and those of the swarm's folders, in this order."""
    with tempfile.TemporaryDirectory(prefix="ftis-ensemble-") as scratch:
        members: list[str | Member] = [*models, *swarm_members(swarm, Path(scratch), on_progress=on_progress)]
        return asyncio.run(evaluate_ensemble(members, task, on_progress=on_progress, **options))


async def evaluate_ensemble(
    models: Sequence[str | Member], task: str, *, modes: Sequence[str] = MODES, **options: Any
) -> EnsembleResult:
    """Evaluate each model alone and each of `modes`. The options are those of `Asking`, without `k`.

    Its engine serves the experts alone, and so the modes that choose among their answers. The torch engine serves a
    mixture. Raises ConfigError, ModelError, MachineError, EngineError and NetworkError.
    """
    unknown = [mode for mode in modes if mode not in MODES]
    if unknown or not modes:
        raise ConfigError(f"no mode {unknown[0] if unknown else ''!r}: use all, or some of {', '.join(MODES)}")
    mixtures = [mode for mode in MIXTURES if mode in modes]
    async with studying(as_members(models), task, Asking(**options)) as study:
        experts = study.experts
        if mixtures:
            check_mixture(experts, max_tokens=study.asking.max_tokens)
        study.num_parts += len(mixtures)
        answers = [await study.answers_of(expert) for expert in experts]
        mixed = await study.mix(mixtures) if mixtures else {}
    rows = {mode: evaluation_row(mode, answered, num_models=len(experts)) for mode, answered in mixed.items()}
    if "vote" in modes:
        rows["vote"] = selection_row("vote", elected(answers, study.problems), answers)
    if "confidence" in modes:
        rows["confidence"] = confidence_row(answers, names=[expert.member.name for expert in experts])
    alone = [
        replace(evaluation_row(each.name, answered), model=each.model, domain=each.domain)
        for each, answered in zip((expert.member for expert in experts), answers, strict=True)
    ]
    return EnsembleResult(task, len(answers[0]), tuple(alone), tuple(rows[mode] for mode in dict.fromkeys(modes)))


def check_mixture(experts: Sequence[Expert], *, max_tokens: int) -> None:
    """Raise ConfigError if the experts have different tokenizers, and MachineError if they do not fit together."""
    first = experts[0]
    for other in experts[1:]:
        if other.tokenizer.fingerprint != first.tokenizer.fingerprint:
            raise ConfigError(
                f"{first.member.name} and {other.member.name} have different tokenizers, so their tokens cannot be "
                "mixed: use the mode vote or confidence"
            )
    check_models_fit([expert.source for expert in experts], max_tokens=max_tokens)


def bytes_together(sources: Sequence[ModelSource], *, max_tokens: int, bytes_per_number: int) -> int:
    """Return the bytes of all models' weights and of their caches, for `ROWS` completions of `max_tokens` in all.

    A model of unknown shape counts without its cache.
    """
    num_tokens = max(1, ROWS // len(sources)) * max_tokens
    total = 0
    for source in sources:
        total += bytes_per_number * parameter_count(source)
        with suppress(ModelError):
            total += num_tokens * cache_bytes_per_token(read_shape(source), bytes_per_number)
    return total


def check_models_fit(sources: Sequence[ModelSource], *, max_tokens: int) -> None:
    """Raise MachineError, which says what to do, if they need more memory together than is free."""
    device = pick_device("auto")
    needed = bytes_together(sources, max_tokens=max_tokens, bytes_per_number=BYTES[device])
    free = Card.of(list_accelerators()[0]).usable_bytes if device == "cuda" else free_host_bytes()
    if needed > free:
        raise MachineError(
            f"{len(sources)} models together need about {needed / GIB:.1f} GiB, and {free / GIB:.1f} GiB are free: "
            "use fewer models, lower --max-tokens, or evaluate the mode vote or confidence"
        )


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
