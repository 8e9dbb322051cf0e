"""Evaluation without a daemon: models on one task, one after another in an engine of this process.

A study queries every model alone, and then the mixture of an ensemble.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from ftis_node.config.home import Home
from ftis_node.config.manifest import RunManifest, load_manifest, preset_for_task
from ftis_node.evaluation.members import Member, as_members
from ftis_node.generation.engines import EngineName, choose_engine
from ftis_node.generation.engines.base import Engine, EngineSettings
from ftis_node.generation.evaluate import Answered, answer_problems
from ftis_node.models import ModelSource, PromptSettings, PromptTokenizer, load_tokenizer, resolve_model
from ftis_node.tasks import load_task
from ftis_node.tasks.base import Task
from ftis_node.tasks.episodes.episode import is_episode
from ftis_node.tasks.scorer import IsolatedScorer
from ftis_node.telemetry.log import OnProgress, unwatched

if TYPE_CHECKING:
    from ftis_node.generation.engines.mixture_engine import MixtureMode


@dataclass(frozen=True, slots=True, kw_only=True)
class Asking:
    """How models are asked the first `limit` test problems of a task.

    For `k` above 1 samples are drawn, too. `max_tokens` bounds prompt and completion together, `max_completion_tokens`
    the completion if it has one turn. `engine` serves single models. `prompts` say how prompts are rendered for a model
    that is of no home; its own run sets the date. Episodes have the limits of the run of a model, the last one's first,
    else those of the preset.
    """

    limit: int = 512
    k: int = 1
    max_tokens: int = 760
    max_completion_tokens: int | None = None
    engine: EngineName = "auto"
    prompts: PromptSettings = PromptSettings()
    on_progress: OnProgress = unwatched


@dataclass(frozen=True, slots=True)
class Expert:
    """A member with its resolved model files."""

    member: Member
    source: ModelSource
    tokenizer: PromptTokenizer


@dataclass(slots=True)
class Study:
    """Problems for every model. One progress bar shows the `num_parts` parts of the work."""

    experts: list[Expert]
    problems: Task
    scorer: IsolatedScorer
    asking: Asking
    num_parts: int
    num_done: int = 0

    async def answers_of(self, expert: Expert) -> list[Answered]:
        """Return the answers of one model alone, which is in memory only during its evaluation."""
        name, open_engine = expert.member.name, choose_engine(self.asking.engine)
        self.asking.on_progress(None, f"loading {name} into the engine")
        opened = await open_engine(expert.source, self._settings(expert.tokenizer), lambda: None)
        try:
            return await self._answers(opened, expert.tokenizer, name)
        finally:
            await opened.close()

    async def mix(self, modes: Sequence[MixtureMode]) -> dict[str, list[Answered]]:
        """Run all models at once, in each of the modes in turn. The first model's template renders the prompt."""
        from ftis_node.generation.engines.mixture_engine import open_mixture

        tokenizer = self.experts[0].tokenizer
        eos_ids = {token for expert in self.experts for token in expert.tokenizer.eos_ids}
        sources = [expert.source for expert in self.experts]
        opened = open_mixture(sources, self._settings(tokenizer), modes[0], on_progress=self.asking.on_progress)
        answers: dict[str, list[Answered]] = {}
        try:
            for mode in modes:
                opened.mix_by(mode)
                answers[mode] = await self._answers(opened, tokenizer, mode, eos_ids=eos_ids)
        finally:
            await opened.close()
        return answers

    async def _answers(
        self, opened: Engine, tokenizer: PromptTokenizer, name: str, *, eos_ids: Collection[int] | None = None
    ) -> list[Answered]:
        def report(done: int, total: int) -> None:
            share = (self.num_done + done / total) / self.num_parts
            self.asking.on_progress(share, f"{name}: {done} of {total} problems")

        run, max_tokens = self._run(), self.asking.max_tokens
        one_turn = self.asking.max_completion_tokens or max_tokens
        max_turn_tokens = run.sampling.max_completion_tokens if is_episode(self.problems) else one_turn
        answered = await answer_problems(
            opened,
            self.problems,
            tokenizer,
            scorer=self.scorer,
            limit=self.asking.limit,
            k=self.asking.k,
            eos_ids=eos_ids,
            completion_limit=lambda num_prompt_tokens: min(max_turn_tokens, max_tokens - num_prompt_tokens),
            episode=run.episode,
            on_progress=report,
        )
        self.num_done += 1
        return answered

    def _run(self) -> RunManifest:
        """Return the run in a model's folder if it is about the same episodes, else the preset for the task.

        All models have the limits of one run: `eval` compares a model with the last one, which is the home's. Raises
        ConfigError for a run that cannot be read.
        """
        task = self.problems.name
        for expert in reversed(self.experts) if is_episode(self.problems) else ():
            if (path := Home(expert.source.path).run_toml).is_file():
                run = load_manifest(str(path))
                if run.episode is not None and run.task == task:
                    return run
        return load_manifest(preset_for_task(task))

    def _settings(self, tokenizer: PromptTokenizer) -> EngineSettings:
        return EngineSettings(vocab_size=tokenizer.vocab_size, max_model_len=self.asking.max_tokens)


def load_experts(members: Sequence[Member], prompts: PromptSettings, on_progress: OnProgress) -> list[Expert]:
    """Return the members with their files and tokenizers. Raises ModelError and NetworkError."""
    experts = []
    for member in members:
        source = resolve_model(member.model, trains=False, on_progress=on_progress)
        tokenizer = load_tokenizer(source, prompts=member.prompts or prompts)
        experts.append(Expert(member, replace(source, name=member.name), tokenizer))
    return experts


@asynccontextmanager
async def studying(members: Sequence[Member], task: str, asking: Asking) -> AsyncIterator[Study]:
    """Yield a study of these models, one part of work for each.

    Raises ConfigError, ModelError, TaskError, EngineError, NetworkError.
    """
    choose_engine(asking.engine)  # an unknown one is an error before a download
    experts = load_experts(members, asking.prompts, asking.on_progress)
    asking.on_progress(None, f"loading the problems of {task}")
    problems = load_task(task, split="test")
    async with IsolatedScorer(problems) as scorer:
        yield Study(experts, problems, scorer, asking, len(experts))


async def answers_of(models: Sequence[str | Member], task: str, **options: Any) -> list[list[Answered]]:
    """Return the answers of each model to the same test problems. The options are those of `Asking`.

    Raises the exceptions of `studying`.
    """
    async with studying(as_members(models), task, Asking(**options)) as study:
        return [await study.answers_of(expert) for expert in study.experts]


def difference(before: Sequence[Answered], after: Sequence[Answered]) -> dict[str, float]:
    """Return the gain in greedy pass@1 of `after` over `before` on the same problems, with the error of paired means.

    `gained` counts the problems that only `after` solves, `lost` those that only `before` solves.
    """
    changes = [new.is_right - old.is_right for old, new in zip(before, after, strict=True)]
    n, gained, lost = len(changes), changes.count(1), changes.count(-1)
    mean = (gained - lost) / n
    error = math.sqrt(max(0.0, (gained + lost) / n - mean**2) / n)
    return {"pass_at_1": mean, "standard_error": error, "gained": gained, "lost": lost}


def shown_problems(answers: Mapping[str, Sequence[Answered]], *, limit: int) -> list[dict[str, Any]]:
    """Return the first `limit` problems, the right answers, and by its name in `answers` the answer of each model."""
    return [
        {"problem": row[0].item.prompt[-1]["content"], "right_answer": row[0].item.answer}
        | {
            name: {"text": each.greedy.text if each.greedy else "", "is_right": each.is_right}
            for name, each in zip(answers, row, strict=True)
        }
        for row in islice(zip(*answers.values(), strict=True), limit)
    ]
