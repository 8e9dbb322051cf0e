"""A model in memory that answers questions token by token, and remembers the conversation.

In a conversation with episodes the environment of a run's task answers what the model writes. A question is looked up
among the task's problems. A built-in environment without a state, such as a calculator, plays any other question, too.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import torch
from transformers import GenerationConfig, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from ftis_node.config.manifest import EpisodeSection
from ftis_node.errors import ModelError, OutOfMemoryError, WorkerDiedError
from ftis_node.generation.rollouts import OBSERVATION_MARK
from ftis_node.models import ModelSource, PromptSettings, PromptTokenizer, load_causal_lm, load_tokenizer, pick_device
from ftis_node.models.accelerators import Device
from ftis_node.tasks import held_out_spec, load_task
from ftis_node.tasks.base import Task, TaskItem, leaves
from ftis_node.tasks.episodes.episode import EpisodeTask, Play, is_episode
from ftis_node.tasks.scorer import IsolatedScorer
from ftis_node.tasks.scoring_worker import ScoringCost

log = logging.getLogger(__name__)

OnText: TypeAlias = Callable[[str], None]
HALF_CHARACTER = "\N{REPLACEMENT CHARACTER}"
NUM_SEARCHED: Final = 1000  # problems of a split


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """One answer. `truncated` says that it reached the limit of tokens before an end token."""

    text: str
    num_tokens: int
    truncated: bool


@dataclass(slots=True)
class ChatPlay:
    """An episode under way, with the texts so far. `limits` are those of the run."""

    task: Task
    item: TaskItem
    limits: EpisodeSection
    texts: list[str] = field(default_factory=list)

    def observation(self, text: str) -> str | None:
        """Return what the environment answers to the next text; None if the episode ends with it, or fails."""
        self.texts.append(text)
        if len(self.texts) >= self.limits.max_turns:
            return None
        play = asyncio.run(_played(self.task, self.item, self.texts))
        return None if play is None or play.is_over else play.observations[-1]


async def _played(task: Task, item: TaskItem, texts: Sequence[str]) -> Play | None:
    """Return the replay, in a new scoring process if the task needs one; None if it fails."""
    scorer = IsolatedScorer(task)
    try:
        return await scorer.play(item, texts, cost=ScoringCost())
    except WorkerDiedError as error:
        log.warning("%s: its environment ended: %s", item.ref, error)
        return None
    finally:
        await scorer.close()


@dataclass(frozen=True, slots=True)
class ChatEnvironments:
    """The environments of a run: the held-out problems, then the others. `limits` are those of the run."""

    tasks: tuple[Task, ...]
    limits: EpisodeSection

    def begin(self, question: str) -> ChatPlay | None:
        """Return the episode of a question; None if no environment has the problem, or plays any question."""
        for task in self.tasks:
            for item in map(task.__getitem__, range(min(NUM_SEARCHED, len(task)))):
                if item.prompt[-1]["content"] == question:
                    return ChatPlay(task, item, self.limits)
        built_in = (task for task in self.tasks if isinstance(task, EpisodeTask))
        free = next((task for task in built_in if not task.has_state(task[0])), None)
        return None if free is None else ChatPlay(free, free[0], self.limits)


def chat_environments(spec: str, limits: EpisodeSection) -> ChatEnvironments:
    """Return the environments of a task SPEC whose completions have several turns. Raises TaskError."""
    held_out = held_out_spec(spec)
    splits = [*([load_task(held_out, "test")] if held_out else []), load_task(spec)]
    tasks = [leaf for split in splits for leaf in leaves(split)]
    return ChatEnvironments(tuple(filter(is_episode, tasks)), limits)


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """How models answer. A temperature of 0 is greedy, and an empty `system` is no message.

    `max_tokens` bounds an answer, or each turn of one. With `environments` one of them answers each turn.
    """

    system: str = ""
    max_tokens: int = 256
    temperature: float = 0.0
    device: Device = "auto"
    environments: ChatEnvironments | None = None


class _Streamer(BaseStreamer):  # type: ignore[misc]  # transformers is not typed
    """Streamer that passes each new piece of text to `on_text`, never a part of a character."""

    def __init__(self, tokenizer: PromptTokenizer, on_text: OnText) -> None:
        self._tokenizer = tokenizer
        self._on_text = on_text
        self._ids: list[int] | None = None  # None until the prompt has come
        self._length = 0

    def put(self, value: torch.Tensor) -> None:
        """Add a token; the first call has the prompt."""
        if self._ids is None:
            self._ids = []
            return
        self._ids += value.flatten().tolist()
        if not (text := self._tokenizer.decode(self._ids)).endswith(HALF_CHARACTER):
            self._pass_on(text)

    def end(self) -> None:
        """Pass on the rest, if the answer ended within a character."""
        self._pass_on(self._tokenizer.decode(self._ids or []))

    def _pass_on(self, text: str) -> None:
        if new := text[self._length :]:
            self._on_text(new)
        self._length = len(text)


class ChatModel:
    """A model in memory and its conversation. `role` is base, trained or model."""

    def __init__(self, role: str, source: ModelSource, *, prompts: PromptSettings, settings: ChatSettings) -> None:
        """Load the model. Raises ModelError, and MachineError if memory is short."""
        self.role = role
        self.name = source.name
        self._tokenizer = load_tokenizer(source, prompts=prompts)
        self._settings = settings
        self._system = [{"role": "system", "content": settings.system}] if settings.system else []
        target = pick_device(settings.device)
        try:
            self._model = load_causal_lm(source, dtype="float32" if target == "cpu" else "bfloat16", device=target)
        except torch.OutOfMemoryError as error:
            raise OutOfMemoryError(f"{self.name} does not fit into the GPU: add --alone or --device cpu") from error
        # Its temperature and penalties would make another policy than the one that the node trains.
        self._model.generation_config = GenerationConfig()
        self._history: list[dict[str, str]] = []

    def reset(self) -> None:
        """Forget the conversation."""
        self._history.clear()

    def ask(self, question: str, *, on_text: OnText | None = None) -> ChatAnswer:
        """Return the answer, and pass its text to `on_text` as it comes, with the observations between its turns.

        Without space for another turn an episode ends. Raises ModelError if the conversation is too long for the first
        one, and OutOfMemoryError.
        """
        said = [{"role": "user", "content": question}]
        prompt = self._tokenizer.render_prompt([*self._system, *self._history, *said])
        play = self._settings.environments.begin(question) if self._settings.environments else None
        token_ids, num_tokens = [*prompt.token_ids], 0
        shown: list[str] = []

        def show(text: str) -> None:
            shown.append(text)
            if on_text is not None:
                on_text(text)

        while True:
            num_before = len(shown)
            if prompt.opening:
                show(prompt.opening)
            strings = play.limits.stop if play else ()
            ids = self._completion(tuple(token_ids), show, strings)
            num_tokens += len(ids)
            has_end = ids[-1] in self._tokenizer.eos_ids
            has_stopped = has_end or self._tokenizer.num_until_stop(ids, strings) is not None
            said.append({"role": "assistant", "content": "".join(shown[num_before:]).strip()})
            text = self._tokenizer.answer_text(ids, has_end=has_end, opening=prompt.opening)
            if play is None or text is None or not has_stopped or (observation := play.observation(text)) is None:
                break
            try:
                token_ids += ids + self._tokenizer.encode_observation(
                    observation,
                    opening=prompt.opening,
                    max_tokens=play.limits.max_observation_tokens,
                    has_end=has_end,
                )
                self._room(len(token_ids))
            except ModelError:  # as in a rollout, the episode ends
                break
            show(f"{OBSERVATION_MARK}{observation}\n")
            said.append({"role": "user", "content": observation})
        self._history += said
        return ChatAnswer("".join(shown), num_tokens, truncated=not has_stopped)

    def _room(self, num_tokens: int) -> int:
        """Return how many tokens a turn after `num_tokens` may have. Raises ModelError if there are none."""
        context = getattr(self._model.config.get_text_config(), "max_position_embeddings", None)
        room = self._settings.max_tokens if context is None else min(self._settings.max_tokens, context - num_tokens)
        if room < 1:
            raise ModelError(
                f"the conversation has {num_tokens:,} tokens, and {self.name} reads {context:,} at most: "
                "/reset starts a new one"
            )
        return room

    @torch.inference_mode()
    def _completion(self, prompt_ids: tuple[int, ...], on_text: OnText, strings: Sequence[str]) -> list[int]:
        def has_stopped(ids: torch.Tensor, scores: object, **unused: object) -> bool:
            return self._tokenizer.num_until_stop(ids[0, len(prompt_ids) :].tolist(), strings) is not None

        room, temperature = self._room(len(prompt_ids)), self._settings.temperature
        ends = list(self._tokenizer.end_ids) or None
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
        config = GenerationConfig(max_new_tokens=room, eos_token_id=ends, pad_token_id=0, **sampling)
        ids = torch.tensor([prompt_ids], device=self._model.device)
        try:
            made = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                generation_config=config,
                streamer=_Streamer(self._tokenizer, on_text),
                stopping_criteria=StoppingCriteriaList([has_stopped] if strings else []),
            )
        except torch.OutOfMemoryError as error:
            raise OutOfMemoryError(f"the GPU's memory is full: add --device cpu, or ask {self.name} later") from error
        return [int(token) for token in made[0, len(prompt_ids) :]]
