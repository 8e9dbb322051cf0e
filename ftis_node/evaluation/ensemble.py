"""Evaluation of several models on one task: each alone, as a mixture, by vote, and by the most confident answer.

    each model, one after another -> its answers to all problems -> the experts alone, vote, confidence
    all models at once            -> answers of the mixture      -> posterior, mean, answer

Vote and confidence reuse the answers of the single models, so they need no second generation. A model alone, or a
mixture of one model, is evaluated exactly as `ftis-node eval` does it.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import psutil

from ftis_node.errors import ConfigError, MachineError, ModelError
from ftis_node.evaluation.evaluate import Expert, Study, load_experts
from ftis_node.evaluation.members import Member, as_members, swarm_members
from ftis_node.evaluation.result import (
    EnsembleResult,
    EvaluationRow,
    chosen_row,
    confidences,
    vote_row,
)
from ftis_node.generation.engines import EngineName, choose_engine
from ftis_node.generation.evaluate import Answered
from ftis_node.memory.generator import cache_bytes_per_token
from ftis_node.memory.machine import Card
from ftis_node.models import (
    ModelSource,
    PromptSettings,
    list_accelerators,
    parameter_count,
    pick_device,
    read_shape,
)
from ftis_node.tasks import load_task
from ftis_node.tasks.base import Task
from ftis_node.tasks.scorer import IsolatedScorer
from ftis_node.telemetry.log import OnProgress, unwatched
from ftis_node.telemetry.terminal_text import GIB

if TYPE_CHECKING:
    from ftis_node.generation.engines.mixture_engine import MixtureWeights

MIXTURES: Final = ("posterior", "mean", "answer")
MODES: Final = (*MIXTURES, "vote", "confidence")
ROWS = 128  # completions that the engine decodes in parallel, divided by the number of models
BYTES = {"cpu": 4, "cuda": 2}  # float32 and bfloat16


def run_ensemble(
    models: Sequence[str], swarm: Sequence[Path], task: str, *, on_progress: OnProgress = unwatched, **options: Any
) -> EnsembleResult:
    """Return `evaluate_ensemble` of the named models and those of the swarm's folders, in this order."""
    with tempfile.TemporaryDirectory(prefix="ftis-ensemble-") as scratch:
        members: list[str | Member] = [*models, *swarm_members(swarm, Path(scratch), on_progress=on_progress)]
        return asyncio.run(evaluate_ensemble(members, task, on_progress=on_progress, **options))


async def evaluate_ensemble(
    models: Sequence[str | Member],
    task: str,
    *,
    modes: Sequence[str] = MODES,
    limit: int = 512,
    k: int = 1,
    max_tokens: int = 760,
    engine: EngineName = "auto",
    seed: int | None = None,
    prompts: PromptSettings | None = None,
    on_progress: OnProgress = unwatched,
) -> EnsembleResult:
    """Evaluate each model alone and each of `modes` on the first `limit` test problems of `task`.

    `max_tokens` bounds prompt and completion together. `engine` serves the experts alone, and so the modes that choose
    among their answers. The torch engine serves a mixture. With a `seed` samples are the same each time. `prompts` say
    how prompts are rendered for a model that is of no home; its own run sets the date.

    Raises ConfigError, ModelError, MachineError, EngineError and NetworkError.
    """
    _check_modes(modes)
    open_engine = choose_engine(engine)
    experts = load_experts(as_members(models), prompts or PromptSettings(), on_progress)
    mixtures = [mode for mode in modes if mode in MIXTURES]
    if mixtures:
        _check_one_tokenizer(experts)
        check_mixture_fits([expert.source for expert in experts], max_tokens=max_tokens)
    on_progress(None, f"loading the problems of {task}")
    problems = load_task(task, split="test")
    async with IsolatedScorer(problems) as scorer:
        study = Study(
            experts,
            problems,
            scorer,
            limit=limit,
            k=k,
            max_tokens=max_tokens,
            seed=seed,
            on_progress=on_progress,
            num_parts=len(experts) + len(mixtures),
        )
        answers = [await study.answers_of(expert, open_engine) for expert in experts]
        mixed = await study.mix(_mixture_weights(mixtures, len(experts))) if mixtures else {}
    names = [expert.member.name for expert in experts]
    rows = mixed | _selection_rows(modes, answers, problems, names=names, k=k)
    return EnsembleResult(
        task=task,
        n=len(answers[0]),
        k=k,
        experts=tuple(study.alone(expert, each) for expert, each in zip(experts, answers, strict=True)),
        modes=tuple(rows[mode] for mode in dict.fromkeys(modes)),
    )


def _check_modes(modes: Sequence[str]) -> None:
    unknown = [mode for mode in modes if mode not in MODES]
    if unknown or not modes:
        raise ConfigError(f"no mode {unknown[0] if unknown else ''!r}: use all, or some of {', '.join(MODES)}")


def _check_one_tokenizer(experts: Sequence[Expert]) -> None:
    first = experts[0]
    for other in experts[1:]:
        if other.tokenizer.fingerprint != first.tokenizer.fingerprint:
            raise ConfigError(
                f"{first.member.name} and {other.member.name} have different tokenizers, so their tokens cannot be "
                "mixed: use --mode vote or --mode confidence"
            )


def _selection_rows(
    modes: Sequence[str], answers: Sequence[Sequence[Answered]], problems: Task, *, names: Sequence[str], k: int
) -> dict[str, EvaluationRow]:
    rows = {}
    if "confidence" in modes:
        rows["confidence"] = chosen_row("confidence", answers, confidences(answers), problems, names=names, k=k)
    if "vote" in modes:
        rows["vote"] = vote_row(answers, problems, k=k)
    return rows


def _mixture_weights(mixtures: Sequence[str], num_models: int) -> dict[str, MixtureWeights]:
    if not mixtures:
        return {}
    from ftis_node.generation.engines.mixture_engine import uniform_mixture_weights

    return {
        mode: uniform_mixture_weights(num_models, learns=mode != "mean", reads_prompt=mode != "answer")
        for mode in mixtures
    }


def mixture_bytes(sources: Sequence[ModelSource], *, max_tokens: int, bytes_per_number: int) -> int:
    """Return the bytes of all models' weights and of their caches, for a full batch of completions of `max_tokens`.

    A model of unknown shape counts without its cache.
    """
    num_tokens = max(1, ROWS // len(sources)) * max_tokens
    total = 0
    for source in sources:
        total += bytes_per_number * parameter_count(source)
        with suppress(ModelError):
            total += num_tokens * cache_bytes_per_token(read_shape(source), bytes_per_number)
    return total


def check_mixture_fits(sources: Sequence[ModelSource], *, max_tokens: int) -> None:
    """Raise MachineError, which says what to do, if they need more memory than is free."""
    device = pick_device("auto")
    needed = mixture_bytes(sources, max_tokens=max_tokens, bytes_per_number=BYTES[device])
    free = free_bytes(device)
    if needed > free:
        raise MachineError(
            f"the mixture of {len(sources)} models needs about {needed / GIB:.1f} GiB, and {free / GIB:.1f} GiB are "
            "free: name fewer or smaller models, lower --max-tokens, or use --mode vote,confidence"
        )


def free_bytes(device: str) -> int:
    """Return the memory that models may use: most of the first GPU, or the free memory of the host."""
    if device == "cuda":
        return Card.of(list_accelerators()[0]).usable_bytes
    return int(psutil.virtual_memory().available)
