"""Episodes: an environment as a pure function of a problem and the texts that a model sampled.

    prompt -> text 1 -> observation 1 -> text 2 -> observation 2 -> ... -> text n

Observations never travel. Every node that has the sampled texts computes them again, and with them the reward. So an
episode must give the same on every machine. It uses no clock, network, files, threads, hash() or order of a set. Its
random numbers come from the problem alone. It accepts any text.

A replay starts from the first text each time. So no state is kept between turns, and none leaves the process.

By a digest of the code that decides observations, peers see whether theirs may differ without fault. Of a built-in
episode it covers all modules of this folder, and those that read a text. Of a plug-in it covers the modules that its
package installs. An installation that links to a folder names none, so the folder of the episode's own module counts,
too.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, Final, Protocol, runtime_checkable

from ftis_node.records import think_block
from ftis_node.records.group import PromptRef
from ftis_node.tasks import words
from ftis_node.tasks.base import Problems, Task, TaskItem

MAX_OBSERVATION_CHARS: Final = 16_384
DIGEST_HEX: Final = 12
MAX_FILES: Final = 2000
MAX_BYTES: Final = 32 << 20  # of all files; what follows them is not read
LINK_PREFIX: Final = "__editable__"  # modules that pip writes for a link to a folder; they hold paths of this machine


@runtime_checkable
class Episode(Problems, Protocol):
    """The problems of an environment, and its answers to a model's texts.

    A state is any value. An episode with the optional member `isolate_scoring` is played in the scoring process, as
    those of packages always are.
    """

    def begin(self, item: TaskItem) -> Any:
        """Return the state before the first text."""
        ...

    def step(self, state: Any, text: str) -> tuple[str | None, Any]:
        """Return the observation that follows `text`, or None if the episode ends with it, and the next state."""
        ...

    def score(self, item: TaskItem, texts: Sequence[str]) -> float:
        """Return the reward in [0, 1] of an episode with these texts, ended or cut."""
        ...


@dataclass(frozen=True, slots=True)
class Play:
    """A replay of one or more texts.

    `observations` follow the texts in order. The last text has none if the episode `is_over`. `num_turns` counts the
    texts up to its end; any others have no meaning.
    """

    observations: tuple[str, ...]
    num_turns: int
    is_over: bool
    reward: float


class EpisodeTask:
    """An episode as a task. Its completions are played (`play`). `score` is the reward of an episode of one text."""

    def __init__(self, episode: Episode, *, code: Mapping[str, Path] | None = None) -> None:
        """`code` are the modules of a plug-in (`plugin_code`)."""
        self._code = code
        self.name = episode.name
        self.split = episode.split
        self.isolate_scoring = bool(getattr(episode, "isolate_scoring", False))
        self._episode = episode

    def __len__(self) -> int:
        return len(self._episode)

    def __getitem__(self, index: int) -> TaskItem:
        return self._episode[index]

    def resolve(self, ref: PromptRef) -> TaskItem:
        return self._episode.resolve(ref)

    def score(self, item: TaskItem, completion_text: str) -> float:
        return self.play(item, (completion_text,)).reward

    def play(self, item: TaskItem, texts: Sequence[str]) -> Play:
        """Return the replay of `texts`, one or more. Raises ValueError for an invalid observation or reward.

        Exceptions of the episode pass through.
        """
        state = self._episode.begin(item)
        observations: list[str] = []
        is_over = False
        for text in texts:
            observation, state = self._episode.step(state, text)
            if is_over := observation is None:
                break
            if not isinstance(observation, str) or len(observation) > MAX_OBSERVATION_CHARS:
                raise ValueError(f"{item.ref.task} gave no text of at most {MAX_OBSERVATION_CHARS} characters")
            observation.encode()  # a lone surrogate is no text: UnicodeEncodeError is a ValueError
            observations.append(observation)
        num_turns = len(observations) + is_over
        reward = float(self._episode.score(item, tuple(texts[:num_turns])))
        if not 0.0 <= reward <= 1.0:
            raise ValueError(f"{item.ref.task} gave the reward {reward}, which is not in [0, 1]")
        return Play(tuple(observations), num_turns, is_over, reward)

    def has_state(self, item: TaskItem) -> bool:
        """Return whether an observation depends on more than the last text, such as on the problem."""
        return self._episode.begin(item) is not None

    def answer_of(self, item: TaskItem, completion_text: str) -> str | None:
        """Return the answer in the text of an episode's last turn, for votes."""
        of_episode = getattr(self._episode, "answer_of", None)
        answer: str | None = of_episode(item, completion_text) if of_episode else completion_text.strip() or None
        return answer

    @cached_property
    def grader(self) -> str:
        """The name and a digest of the modules that decide observations. Raises OSError if they have no source."""
        return f"{self.name} code {code_digest(built_in_code() if self._code is None else self._code)}"


def is_episode(task: Task) -> bool:
    """Return whether the completions of a task have several turns."""
    return hasattr(task, "play")


def built_in_code() -> dict[str, Path]:
    """Return the modules that play the built-in episodes, by name."""
    files = [*Path(__file__).parent.glob("*.py"), Path(str(words.__file__)), Path(str(think_block.__file__))]
    return {path.name: path for path in files}


def plugin_code(entry: EntryPoint) -> dict[str, Path]:
    """Return the modules of an imported plug-in by their name in the package. It is empty for a module without a file.

    Files outside the package's own folder of modules are left out.
    """
    listed = (entry.dist.files if entry.dist else None) or ()
    names = (one for one in listed if one.suffix == ".py" and not one.parts[0].startswith(("..", LINK_PREFIX)))
    found = {str(name): Path(str(name.locate())) for name in names}
    root = sys.modules.get(entry.module.partition(".")[0])
    if root is not None and root.__file__:
        own = Path(root.__file__)
        inside = own.parent.rglob("*.py") if hasattr(root, "__path__") else [own]
        above = own.parent.parent if hasattr(root, "__path__") else own.parent
        found |= {path.relative_to(above).as_posix(): path for path in inside}
    return {name: path for name, path in found.items() if path.is_file()}


def code_digest(files: Mapping[str, Path]) -> str:
    """Return the first digits of the SHA-256 of these files with their names. Line ends count as equal.

    Raises OSError if there are none, or if one cannot be read.
    """
    if not files:
        raise OSError("the episode has no source")
    digest, left = hashlib.sha256(), MAX_BYTES
    for name, path in sorted(files.items())[:MAX_FILES]:
        with path.open("rb") as file:
            code = file.read(left)
        left -= len(code)
        code = code.replace(b"\r\n", b"\n")
        digest.update(f"{name}\0{len(code)}\0".encode() + code)
    return digest.hexdigest()[:DIGEST_HEX]
