"""Evaluation of several models on one task: each alone, as a mixture, by vote, and by choosing one model per problem.

    each model, one after another -> its answers to all problems   -> the experts alone, vote, confidence, route, gate
                                  -> log-probs of prompts and text -> route, the cached prior, perplexity
                                  -> answers to training prompts   -> training data of gate
    all models at once            -> answers of the mixture        -> posterior, cached, mean, answer

Vote, confidence, route and gate reuse the answers of the single models, so they need no second generation. A model
alone, or a mixture of one model, is evaluated exactly as `ftis-node eval` does it.
"""

from __future__ import annotations

import asyncio
import tempfile
from contextlib import suppress
from dataclasses import replace
from math import exp
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import psutil

from ftis_node.errors import ConfigError, MachineError, ModelError, TaskError
from ftis_node.evaluation.evaluate import Expert, ExpertOutputs, Study
from ftis_node.evaluation.members import Member, as_members, swarm_members
from ftis_node.evaluation.result import (
    EnsembleResult,
    TextFigures,
    chosen_row,
    confidences,
    gate_figures,
    is_right,
    vote_row,
)
from ftis_node.files import read_text
from ftis_node.generation.engines import choose_engine
from ftis_node.memory.generator import cache_bytes_per_token
from ftis_node.memory.plan import USABLE_SHARE
from ftis_node.models import (
    PromptSettings,
    list_accelerators,
    load_tokenizer,
    parameter_count,
    pick_device,
    read_shape,
    resolve_model,
)
from ftis_node.node.startup.prompts import prompts_of_model
from ftis_node.tasks import load_task
from ftis_node.tasks.scorer import IsolatedScorer
from ftis_node.telemetry.log import unwatched
from ftis_node.telemetry.terminal_text import GIB

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ftis_node.evaluation.result import EvaluationRow
    from ftis_node.generation.engines import EngineName
    from ftis_node.generation.engines.mixture_engine import MixtureWeights
    from ftis_node.models import ModelSource
    from ftis_node.tasks.base import Task, TaskItem
    from ftis_node.telemetry.log import OnProgress

MAX_TEXT_BYTES = 1 << 30
MIXTURES: Final = ("posterior", "cached", "mean", "answer")
MODES: Final = (*MIXTURES, "vote", "confidence", "route", "gate")
DEFAULT_DEV_PROMPTS: Final = 32
DEFAULT_GATE_PROMPTS: Final = 256
DEFAULT_DECAY: Final = 0.9
TRAINING_USE: Final = {"cached": "takes its prior from", "gate": "learns from"}
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
    dev_prompts: int = DEFAULT_DEV_PROMPTS,
    decay: float = DEFAULT_DECAY,
    gate_prompts: int = DEFAULT_GATE_PROMPTS,
    gate_task: str | None = None,
    seed: int | None = None,
    text: Path | None = None,
    prompts: PromptSettings | None = None,
    on_progress: OnProgress = unwatched,
) -> EnsembleResult:
    """Evaluate each model alone and each of `modes` on the first `limit` test problems of `task`.

    `max_tokens` bounds prompt and completion together. `engine` serves the experts alone, and so the modes that choose
    among their answers. The torch engine serves a mixture. `cached` takes its prior from the last `dev_prompts`
    training prompts. `gate` learns from `gate_prompts` of `gate_task`, or of `task` if it is None. `text` is a file
    whose perplexity is measured, too. With a `seed` samples are the same each time. `prompts` say how prompts are
    rendered for a model that is of no home; its own run sets the date.

    Raises ConfigError, ModelError, TaskError, MachineError, EngineError and NetworkError.
    """
    _check_modes(modes, dev_prompts=dev_prompts, gate_prompts=gate_prompts, decay=decay)
    open_engine = choose_engine(engine)
    experts = _load_experts(as_members(models), prompts or PromptSettings(), on_progress)
    mixtures = [mode for mode in modes if mode in MIXTURES]
    if mixtures:
        _check_one_tokenizer(experts)
        check_mixture_fits([expert.source for expert in experts], max_tokens=max_tokens)
    on_progress(None, f"loading the problems of {task}")
    problems = load_task(task, split="test")
    eval_items = _first(problems, limit) if {"route", "gate"} & set(modes) else []
    training = {
        mode: _training_task(of, mode) for mode, of in (("cached", task), ("gate", gate_task or task)) if mode in modes
    }
    async with IsolatedScorer(problems, scored_only=[training["gate"]] if "gate" in modes else []) as scorer:
        study = Study(
            experts,
            problems,
            scorer,
            limit=limit,
            k=k,
            max_tokens=max_tokens,
            seed=seed,
            routed=eval_items if "route" in modes else [],
            dev=_last(training["cached"], dev_prompts) if "cached" in modes else [],
            gated=_exclude(_last(training["gate"], gate_prompts), eval_items) if "gate" in modes else [],
            text=_read_text(text) if text is not None else "",
            on_progress=on_progress,
            num_parts=len(experts) * (1 + ("gate" in modes)) + len(mixtures),
        )
        seen = [await study.evaluate_expert(expert, open_engine) for expert in experts]
        weights_by_mode = _mixture_weights(mixtures, seen, decay=decay)
        mixed = await study.mix(weights_by_mode) if mixtures else {}
    names = [expert.member.name for expert in experts]
    rows = mixed | _selection_rows(modes, seen, problems, eval_items, names=names, k=k)
    cached = weights_by_mode.get("cached")
    return EnsembleResult(
        task=task,
        n=len(seen[0].answered),
        k=k,
        experts=tuple(study.alone(expert, each) for expert, each in zip(experts, seen, strict=True)),
        modes=tuple(rows[mode] for mode in dict.fromkeys(modes)),
        prior=tuple(map(exp, cached.log_prior)) if cached is not None else None,
        gate=gate_figures([each.gated for each in seen]) if "gate" in modes else None,
        text=_text_figures(names, seen, weights_by_mode) if text is not None else (),
    )


def _load_experts(members: list[Member], prompts: PromptSettings, on_progress: OnProgress) -> list[Expert]:
    experts = []
    for member in members:
        source = resolve_model(member.model, trains=False, on_progress=on_progress)
        tokenizer = load_tokenizer(source, prompts=prompts_of_model(source, member.prompts or prompts))
        experts.append(Expert(member, replace(source, name=member.name), tokenizer))
    return experts


def _check_modes(modes: Sequence[str], *, dev_prompts: int, gate_prompts: int, decay: float) -> None:
    unknown = [mode for mode in modes if mode not in MODES]
    if unknown or not modes:
        raise ConfigError(f"no mode {unknown[0] if unknown else ''!r}: use all, or some of {', '.join(MODES)}")
    if not 0.0 < decay <= 1.0:
        raise ConfigError(f"--decay is {decay:g}: it must be above 0 and at most 1")
    if dev_prompts < 1:
        raise ConfigError("--dev-prompts must be at least 1")
    if gate_prompts < 1:
        raise ConfigError("--gate-prompts must be at least 1")


def _check_one_tokenizer(experts: Sequence[Expert]) -> None:
    first = experts[0]
    for other in experts[1:]:
        if other.tokenizer.fingerprint != first.tokenizer.fingerprint:
            raise ConfigError(
                f"{first.member.name} and {other.member.name} have different tokenizers, so their tokens cannot be "
                "mixed: use --mode vote or --mode route"
            )


def _training_task(task: str, mode: str) -> Task:
    try:
        return load_task(task, split="train")
    except TaskError as error:
        raise TaskError(f"the mode {mode} {TRAINING_USE[mode]} training prompts: {error}") from error


def _first(problems: Task, num_prompts: int) -> list[TaskItem]:
    return [problems[index] for index in range(min(num_prompts, len(problems)))]


def _last(problems: Task, num_prompts: int) -> list[TaskItem]:
    """Return the last prompts of the training split. If one file serves both splits, evaluation uses these last."""
    return [problems[index] for index in range(max(0, len(problems) - num_prompts), len(problems))]


def _exclude(items: list[TaskItem], eval_items: list[TaskItem]) -> list[TaskItem]:
    """Return the problems whose prompts are not evaluated; one file for both splits would contain them twice."""
    remaining = [item for item in items if all(item.prompt != other.prompt for other in eval_items)]
    if not remaining:
        raise TaskError(
            "the mode gate needs training prompts that are not evaluated: give a smaller --limit, or another task with "
            "--gate-task"
        )
    return remaining


def _selection_rows(
    modes: Sequence[str],
    seen: Sequence[ExpertOutputs],
    problems: Task,
    eval_items: Sequence[TaskItem],
    *,
    names: Sequence[str],
    k: int,
) -> dict[str, EvaluationRow]:
    """Return the rows of the modes that choose among the answers of the single models."""
    answers = [each.answered for each in seen]
    scores: dict[str, Callable[[], list[list[float]]]] = {
        "confidence": lambda: confidences(answers),
        "route": lambda: [each.prompts for each in seen],  # the model under which the prompt is likeliest
        "gate": lambda: _gate_chances(seen, eval_items),
    }
    rows = {
        mode: chosen_row(mode, answers, score(), problems, names=names, k=k)
        for mode, score in scores.items()
        if mode in modes
    }
    return rows | ({"vote": vote_row(answers, problems, k=k)} if "vote" in modes else {})


def _gate_chances(seen: Sequence[ExpertOutputs], eval_items: Sequence[TaskItem]) -> list[list[float]]:
    from ftis_node.generation.gate import train_gate

    rewarded = [[is_right(problem) for problem in each.gated] for each in seen]
    gate = train_gate([problem.item.prompt for problem in seen[0].gated], rewarded)
    return gate.chances([item.prompt for item in eval_items])


def _read_text(path: Path) -> str:
    try:
        text = read_text(path.expanduser(), max_bytes=MAX_TEXT_BYTES)
    except OSError as error:
        raise ConfigError(f"the text {path} cannot be read: {error}") from None
    if not text:
        raise ConfigError(f"the text {path} is empty")
    return text


def _mixture_weights(
    mixtures: Sequence[str], seen: Sequence[ExpertOutputs], *, decay: float
) -> dict[str, MixtureWeights]:
    if not mixtures:
        return {}
    from ftis_node.generation.engines.mixture_engine import cached_mixture_weights, uniform_mixture_weights

    makers = {
        "posterior": lambda: uniform_mixture_weights(len(seen)),
        "cached": lambda: cached_mixture_weights(list(zip(*(each.dev for each in seen), strict=True)), decay=decay),
        "mean": lambda: uniform_mixture_weights(len(seen), learns=False),
        "answer": lambda: uniform_mixture_weights(len(seen), reads_prompt=False),
    }
    return {mode: makers[mode]() for mode in mixtures}


def _text_figures(
    names: Sequence[str], seen: Sequence[ExpertOutputs], weights_by_mode: dict[str, MixtureWeights]
) -> tuple[TextFigures, ...]:
    """Return the text's likelihood under each expert alone, then under each of the mixtures."""
    figures = [
        TextFigures(name, tokens=sum(map(len, each.windows)), nats=-sum(map(sum, each.windows)))
        for name, each in zip(names, seen, strict=True)
    ]
    if weights_by_mode:
        from ftis_node.generation.engines.mixture_engine import mixture_nats

        windows = list(zip(*(each.windows for each in seen), strict=True))
        num_tokens = figures[0].tokens
        figures += [TextFigures(mode, num_tokens, mixture_nats(windows, how)) for mode, how in weights_by_mode.items()]
    return tuple(figures)


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
            "free: name fewer or smaller models, lower --max-tokens, or use --mode vote,route"
        )


def free_bytes(device: str) -> int:
    """Return the memory that models may use: most of the first GPU, or the free memory of the host."""
    if device == "cuda":
        return int(USABLE_SHARE * list_accelerators()[0].memory_bytes)
    return int(psutil.virtual_memory().available)
