"""Evaluation without a daemon: one engine in this process, one task, one result."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from ftis_node.errors import ConfigError
from ftis_node.generation.engines import choose_engine
from ftis_node.generation.engines.base import EngineSettings
from ftis_node.generation.evaluate import EvalResult, evaluate
from ftis_node.models import load_tokenizer, resolve_model
from ftis_node.tasks import load_task
from ftis_node.tasks.scorer import IsolatedScorer
from ftis_node.telemetry.progress import unwatched

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from ftis_node.generation.engines import OpenEngine
    from ftis_node.generation.engines.base import Engine
    from ftis_node.models import ModelSource
    from ftis_node.telemetry.progress import OnProgress

ENGINE_NAMES = ("auto", "vllm", "torch")


def evaluate_model(
    model: str,
    task: str,
    *,
    limit: int,
    k: int,
    max_tokens: int,
    engine: str,
    on_progress: OnProgress = unwatched,
) -> EvalResult:
    """Return pass@1, and pass@k for k > 1, on the test problems of a task. `max_tokens` bounds prompt and completion
    together.

    Raises ConfigError, ModelError, TaskError, EngineError, NetworkError.
    """
    check_engine_name(engine)
    return asyncio.run(_evaluate(model, task, engine, max_tokens, limit=limit, k=k, on_progress=on_progress))


def check_engine_name(engine: Any) -> None:
    """Raise ConfigError if no engine has this name."""
    if engine not in ENGINE_NAMES:
        raise ConfigError(f"no engine {engine!r}: use one of {', '.join(ENGINE_NAMES)}")


@asynccontextmanager
async def serving(open_engine: OpenEngine, source: ModelSource, settings: EngineSettings) -> AsyncIterator[Engine]:
    """Yield the model in an engine of this process; close it at the end."""
    opened = await open_engine(source, settings, lambda: None)
    try:
        yield opened
    finally:
        await opened.close()


async def _evaluate(
    model: str, task: str, engine: Any, max_tokens: int, *, on_progress: OnProgress, **options: Any
) -> EvalResult:
    open_engine = choose_engine(engine)
    source = resolve_model(model, on_progress=on_progress)
    on_progress(None, f"loading the problems of {task}")
    problems = load_task(task, split="test")
    on_progress(None, "loading the tokenizer")
    tokenizer = load_tokenizer(source)
    settings = EngineSettings(vocab_size=tokenizer.vocab_size, max_model_len=max_tokens)
    on_progress(None, f"loading {source.name} into the engine")
    async with serving(open_engine, source, settings) as opened, IsolatedScorer(problems) as scorer:
        return await evaluate(
            opened,
            problems,
            tokenizer,
            scorer=scorer,
            completion_limit=lambda num_prompt_tokens: max_tokens - num_prompt_tokens,
            on_progress=lambda done, total: on_progress(done / total, f"{done} of {total} problems"),
            **options,
        )
