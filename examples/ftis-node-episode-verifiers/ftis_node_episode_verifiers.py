"""The episode `higher-lower`: an environment of verifiers 0.4, without a model's client.

`Env.run` of verifiers is one coroutine for a whole episode. Each step here runs it from the beginning with the texts so
far, until it asks for the next one. The message with which it asks is the observation. So the state is the texts.
"""

import asyncio
from contextlib import asynccontextmanager
from types import SimpleNamespace

import higher_lower
import verifiers.v1 as vf

from ftis_node.records.group import PromptRef
from ftis_node.tasks import TaskItem


class NextTurn(BaseException):
    """The environment asks for a turn that has no text yet. `observation` is its message."""

    def __init__(self, observation: str) -> None:
        super().__init__(observation)
        self.observation = observation


class Player:
    """An agent of verifiers whose replies are known: all that `Env.run` gets of a model."""

    def __init__(self, texts: list[str]) -> None:
        self._texts = iter(texts)

    @asynccontextmanager
    async def interaction(self, task: vf.Task):
        row, agent = vf.TraceTask(type=type(task).__name__, data=task.data), vf.AgentInfo(config=vf.AgentConfig())
        self.trace = vf.Trace(task=row, agent=agent)
        yield SimpleNamespace(trace=self.trace, turn=self._turn)

    async def _turn(self, observation: str = "") -> SimpleNamespace:
        text = next(self._texts, None)
        if text is None:
            raise NextTurn(observation)
        return SimpleNamespace(last_reply=text, terminated=False)


class VerifiersEpisode:
    name, taskset, env, config = "higher-lower", "higher_lower", higher_lower.HigherLowerEnv, higher_lower.GuesserConfig

    def __init__(self, split: str) -> None:
        self.split = split
        self._env = self.env(self.config(taskset=vf.TasksetConfig(id=self.taskset)))
        tasks = list(self._env.taskset)
        self._tasks = tasks[:-20] if split == "train" else tasks[-20:]

    def __len__(self) -> int:
        return len(self._tasks)

    def __getitem__(self, index: int) -> TaskItem:
        prompt = ({"role": "user", "content": self._tasks[index].data.prompt_text},)
        return TaskItem(PromptRef(self.name, self.split, index), prompt, "")

    def resolve(self, ref: PromptRef) -> TaskItem:
        if (ref.task, ref.split) != (self.name, self.split) or not 0 <= ref.index < len(self):
            raise KeyError(str(ref))
        return self[ref.index]

    def begin(self, item: TaskItem) -> tuple[int, tuple[str, ...]]:
        return item.ref.index, ()

    def step(self, state: tuple[int, tuple[str, ...]], text: str) -> tuple[str | None, tuple[int, tuple[str, ...]]]:
        index, texts = state[0], (*state[1], text)
        try:
            self._run(index, list(texts))
        except NextTurn as asked:
            return asked.observation, (index, texts)
        return None, (index, texts)

    def score(self, item: TaskItem, texts: list[str]) -> float:
        try:
            return self._run(item.ref.index, texts).reward
        except NextTurn:  # the limit of turns or of tokens ended the episode
            return 0.0

    def _run(self, index: int, texts: list[str]) -> vf.Trace:
        player = Player(texts)
        asyncio.run(self._env.run(self._tasks[index], SimpleNamespace(player=player)))
        return player.trace
