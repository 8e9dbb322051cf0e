"""Prompt of a stored group, made again from the task of the home's run, as validation did."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ftis_node.config.resume import remembered_paths
from ftis_node.errors import ConfigError, FtisError
from ftis_node.files import read_toml
from ftis_node.records.group import Group
from ftis_node.records.text_codec import hash_messages

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ftis_node.config.home import Home
    from ftis_node.records.text_group import TextGroup
    from ftis_node.tasks.base import ChatMessage, Task


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
        """Return the prompt of a group, or the reason why it cannot be made."""
        task = self._task(group.prompt_ref.split)
        if isinstance(task, FtisError):
            return ResolvedPrompt(missing=str(task))
        try:
            item = task.resolve(group.prompt_ref)
        except KeyError:
            return ResolvedPrompt(missing="this task has no such problem")
        except FtisError as error:
            return ResolvedPrompt(missing=str(error))
        if not isinstance(group, Group) and hash_messages(item.prompt) != group.prompt_hash:
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
        spec = parse_spec(str(read_toml(self._home.run_toml)["task"]))
        return load_task(spec.with_paths(remembered_paths(self._home)), split=split)
