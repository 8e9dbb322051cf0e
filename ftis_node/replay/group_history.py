"""History of one group for users: prompt, completions as text, result of validation, and the step that used it.

All data comes from the home of a running or stopped node. The prompt is made again from the task, as validation did.
Text of peers is returned unchanged: the code that prints it must escape it (`telemetry/terminal_text.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ftis_node.config.home import Home
from ftis_node.config.home_files import remembered_paths
from ftis_node.errors import ConfigError, FtisError
from ftis_node.files import read_toml
from ftis_node.models.decoder import Decoder
from ftis_node.records.codec import hash_messages, unpack_any
from ftis_node.records.envelope import open_envelope
from ftis_node.records.group import Completion, Group, TextCompletion, TextGroup, interleave
from ftis_node.records.think_block import split_opening
from ftis_node.replay.reader import MIN_ID_PREFIX, GroupSummary, ReplayReader
from ftis_node.tasks.base import ChatMessage, Task
from ftis_node.telemetry.events import EventReader
from ftis_node.telemetry.history import event_or_none

UNUSED = {  # why a released group was not used
    "stale": "its weights were too old",
    "evicted": "the buffer was full",
    "discarded": "the run's selection preferred others",
    "poisoned": "the learner failed in several steps that had it",
    "refused": "the learner refused its step, or the step changed nothing",
    "copy": "an equal group of another peer was announced before it",
    "audit": "its log-probs do not match the weights that it names",
    "damaged": "its row changed on disk",
    "delivered": "a peer has it, and this node does not train",
}
HEX = frozenset("0123456789abcdef")
MAX_EVENTS = 64


@dataclass(frozen=True, slots=True)
class ResolvedPrompt:
    """Chat messages and expected answer; without messages, `missing` is the reason."""

    messages: Sequence[ChatMessage] = ()
    answer: str | None = None
    missing: str = ""

    @property
    def text(self) -> str | None:
        """Return the messages, one per line, each after its role; None if there are none."""
        return "\n".join(f"{message['role']}: {message['content']}" for message in self.messages) or None

    @property
    def content(self) -> str | None:
        """Return the content of the only message; `text` if there are several."""
        return self.messages[0]["content"] if len(self.messages) == 1 else self.text


class PromptResolver:
    """Resolver of one home's prompts. It loads a task once for each split."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._tasks: dict[str, Task | FtisError] = {}

    def resolve(self, group: Group | TextGroup) -> ResolvedPrompt:
        task = self._task(group.prompt_ref.split)
        if isinstance(task, FtisError):
            return ResolvedPrompt(missing=str(task))
        try:
            item = task.resolve(group.prompt_ref)
        except KeyError:
            return ResolvedPrompt(missing="this task has no such problem")
        except FtisError as error:
            return ResolvedPrompt(missing=str(error))
        if hash_messages(item.prompt) != group.problem_hash:
            return ResolvedPrompt(missing="the problem reads otherwise now")
        return ResolvedPrompt(item.prompt, item.answer)

    def _task(self, split: str) -> Task | FtisError:
        if split not in self._tasks:
            try:
                self._tasks[split] = self._load(split)
            except FtisError as error:
                self._tasks[split] = error
        return self._tasks[split]

    def _load(self, split: str) -> Task:
        from ftis_node.tasks import load_task, parse_spec

        if not self._home.run_toml.exists():
            raise ConfigError("the home has no run.toml")
        if (task := read_toml(self._home.run_toml).get("task")) is None:
            raise ConfigError("the home's run.toml names no task")
        spec = parse_spec(str(task))
        return load_task(spec.with_paths(remembered_paths(self._home)), split=split)


@dataclass(frozen=True, slots=True)
class PromptDetails:
    """Prompt of a group as text.

    If it cannot be made again, `missing` is the reason, and `text` is that of the stored token ids, if there is one.
    """

    task: str
    split: str
    index: int
    text: str | None
    answer: str | None
    missing: str = ""


@dataclass(frozen=True, slots=True)
class CompletionDetails:
    """One completion with the sampler's log-probs, in nats per token. `token_ids` is empty if it was sent as text.

    `text` is None without a tokenizer. `pieces` are the tokens one by one as text, also special ones.
    `claimed_reward` is the sender's score, `reward` is this node's. `versions` are the policy versions of the first and
    the last token, None if it was sent as text. `turns` are the texts of an episode, with `observations` between them.
    """

    text: str | None
    token_ids: list[int]
    pieces: list[str]
    num_tokens: int
    finish_reason: str
    reward: float
    claimed_reward: float
    mean_logprob: float
    lowest_logprob: float | None
    logprobs: list[float]
    versions: tuple[int, int] | None = None
    turns: tuple[str, ...] = ()
    observations: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupHistory:
    """History of one group. If the group is not stored, `summary` is None and most other fields are empty."""

    id: str
    summary: GroupSummary | None = None
    weights_of: str | None = None
    tokenizer: str = ""
    temperature: float | None = None
    prompt: PromptDetails | None = None
    completions: tuple[CompletionDetails, ...] = ()
    texts_missing: str
    verdict: str
    reason: str | None = None
    detail: str = ""
    used: str
    events: tuple[dict[str, Any], ...]


def read_group_history(
    home: Home, id_prefix: str, *, decoder: Decoder | None = None, prompts: PromptResolver | None = None
) -> GroupHistory | None:
    """Return the history of the group whose hex id starts with `id_prefix`. None if no group or several groups match.

    The event log finds groups that are not in the buffer. `decoder` and `prompts`, if given, keep the tokenizer and the
    tasks for further calls. Raises ConfigError if no node has run on this home.
    """
    id_prefix = id_prefix.lower()
    with closing(ReplayReader(home.replay)) as reader:
        found = reader.find(id_prefix)
        prompt_ids = reader.prompt_ids(bytes.fromhex(found[0].id)) if found else ()
        observations = reader.observation_ids(bytes.fromhex(found[0].id)) if found else ()
    if found is None:
        return _refused_history(home, id_prefix)
    summary, data = found
    group = unpack_any(open_envelope(data).body)
    decoder, prompts = decoder or Decoder(home), prompts or PromptResolver(home)
    ref, prompt = group.prompt_ref, prompts.resolve(group)
    text = prompt.text or decoder.text(prompt_ids)
    return GroupHistory(
        id=summary.id,
        summary=summary,
        weights_of=group.weights_of,
        tokenizer=group.tokenizer,
        temperature=group.sampling.temperature,
        prompt=PromptDetails(ref.task, ref.split, ref.index, text, prompt.answer, prompt.missing),
        completions=read_completions(group, summary.rewards, decoder, observations),
        texts_missing=decoder.missing if isinstance(group, Group) else "",
        verdict="admitted",
        used=_used(summary),
        events=tuple(itertools.islice(_lines_with(home.events, summary.id), MAX_EVENTS)),
    )


def _lines_with(path: Path, group_id: str) -> Iterator[dict[str, Any]]:
    """Yield the lines of the event log that contain this hex id, oldest first."""
    for line in EventReader(path).read_new():
        if group_id.encode() in line and (event := event_or_none(line)) is not None:
            yield event


def _refused_history(home: Home, id_prefix: str) -> GroupHistory | None:
    """Return the history of a group that only the event log has. None if no group or several groups match."""
    if len(id_prefix) < MIN_ID_PREFIX or not set(id_prefix) <= HEX:
        return None
    lines = [line for line in _lines_with(home.events, id_prefix) if str(line.get("group", "")).startswith(id_prefix)]
    ids = {line["group"] for line in lines}
    if len(ids) != 1:
        return None
    refused = next((line for line in reversed(lines) if line["event"] == "refused"), None)
    admitted = any(line["event"] == "admitted" for line in lines)
    verdict = "admitted" if admitted or refused is None else "refused"
    steps = [line["step"] for line in lines if line["event"] == "taken"]
    used = f"taken by step {steps[-1]}" if steps else "unknown: the event log has no such line"
    return GroupHistory(
        id=str(ids.pop()),
        texts_missing="refused groups are not kept" if verdict == "refused" else "it was pruned from the buffer",
        verdict=verdict,
        reason=refused["reason"] if refused and verdict == "refused" else None,
        detail=str(refused.get("detail", "")) if refused and verdict == "refused" else "",
        used="not used" if verdict == "refused" else used,
        events=tuple(lines[:MAX_EVENTS]),
    )


def _used(summary: GroupSummary) -> str:
    if summary.state == "ready":
        return "not yet: it waits for a step"
    if summary.state == "taken":
        return f"being trained in step {summary.step}"
    if summary.reason == "trained":
        return f"trained in step {summary.step}"
    return f"not used: {summary.reason} ({UNUSED.get(str(summary.reason), 'unknown here')})"


def read_completions(
    group: Group | TextGroup,
    rewards: Sequence[float],
    decoder: Decoder,
    observations: Sequence[Sequence[int]],
) -> tuple[CompletionDetails, ...]:
    """Return the completions of a stored group for users. `observations` are those of all completions, in order."""
    completions: Sequence[Completion | TextCompletion] = group.completions
    unread = iter(observations)
    return tuple(
        read_completion(completion, reward, decoder, end_ids=group.end_ids, observations=unread)
        for completion, reward in zip(completions, rewards, strict=True)
    )


def read_completion(
    completion: Completion | TextCompletion,
    reward: float,
    decoder: Decoder,
    *,
    end_ids: Sequence[int],
    observations: Iterable[Sequence[int]] = (),
) -> CompletionDetails:
    """Return a stored completion for users, with this node's reward.

    The observations of an episode are the next of `observations`. Its `text` has them as the chat template renders
    them. Nothing is replayed, because the turns are a peer's texts and this process has no limits.
    """
    ids, logprobs, versions = [], [], None
    turns: tuple[str, ...] = ()
    observed: tuple[str, ...] = ()
    if isinstance(completion, Completion):
        ids, logprobs = completion.token_ids.tolist(), completion.logprobs.tolist()
        between = list(itertools.islice(observations, max(0, len(completion.turn_lengths) - 1)))
        whole = interleave(completion.token_ids, completion.turn_lengths, between)[0].tolist() if between else ids
        text, num_tokens = decoder.answer(whole, end_ids=end_ids), len(ids)
        if text is not None and completion.turn_lengths:
            bounds = itertools.pairwise((0, *itertools.accumulate(completion.turn_lengths)))
            turns = tuple(decoder.answer(ids[begin:end], end_ids=end_ids) or "" for begin, end in bounds)
            observed = tuple(_without_template(decoder.text(one) or "") for one in between)
        mean_logprob = float(completion.logprobs.mean(dtype="float64"))
        versions = (completion.policy_version, completion.policy_version_newest)
    else:
        text, num_tokens, mean_logprob = completion.text, completion.num_tokens, completion.mean_logprob
    return CompletionDetails(
        text=text,
        token_ids=ids,
        pieces=[decoder.text([token], with_special_tokens=True) or str(token) for token in ids],
        num_tokens=num_tokens,
        finish_reason=completion.finish_reason.value,
        reward=reward,
        claimed_reward=completion.reward,
        mean_logprob=mean_logprob,
        lowest_logprob=min(logprobs, default=None),
        logprobs=logprobs,
        versions=versions,
        turns=turns,
        observations=observed,
    )


def _without_template(text: str) -> str:
    """Return an observation without the role names that a chat template writes around it, if it has the usual ones."""
    text = split_opening(text)[0].strip()
    for role in ("user\n", "User:"):
        text = text.removeprefix(role)
    for role in ("\nassistant", "\nAssistant:"):
        text = text.removesuffix(role)
    return text.strip()
