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
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ftis_node.errors import ConfigError, MachineError, ModelError
from ftis_node.evaluation.members import Member, as_members, swarm_members
from ftis_node.evaluation.model_answers import Asking, Expert, studying
from ftis_node.evaluation.result import EnsembleResult, confidence_row, elected, evaluation_row, selection_row
from ftis_node.memory.generator import cache_bytes_per_token
from ftis_node.memory.machine import Card
from ftis_node.models import ModelSource, list_accelerators, parameter_count, pick_device, read_shape
from ftis_node.telemetry.host_memory import free_host_bytes
from ftis_node.telemetry.log import OnProgress, unwatched
from ftis_node.telemetry.terminal_text import GIB

if TYPE_CHECKING:
    from ftis_node.generation.engines.mixture_engine import MixtureMode

MIXTURES: Final[tuple[MixtureMode, ...]] = ("posterior", "mean", "answer")
MODES: Final = (*MIXTURES, "vote", "confidence")
ROWS: Final = 128  # completions that the engine decodes in parallel, divided by the number of models
BYTES: Final = {"cpu": 4, "cuda": 2}  # float32 and bfloat16


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
    check_modes(modes)
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


def check_modes(modes: Sequence[str]) -> None:
    """Raise ConfigError for an unknown mode, and if there is none."""
    unknown = [mode for mode in modes if mode not in MODES]
    if unknown or not modes:
        raise ConfigError(f"no mode {unknown[0] if unknown else ''!r}: use all, or some of {', '.join(MODES)}")


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
    free = free_bytes(device)
    if needed > free:
        raise MachineError(
            f"{len(sources)} models together need about {needed / GIB:.1f} GiB, and {free / GIB:.1f} GiB are free: "
            "use fewer models, lower --max-tokens, or evaluate the mode vote or confidence"
        )


def free_bytes(device: str) -> int:
    """Return the memory that models may use: most of the first GPU, or the free memory of the host."""
    if device == "cuda":
        return Card.of(list_accelerators()[0]).usable_bytes
    return free_host_bytes()
