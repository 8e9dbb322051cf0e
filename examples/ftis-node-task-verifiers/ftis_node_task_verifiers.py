"""The task `reverse-words`: a single-turn taskset of verifiers 0.4, scored without a client by its own rewards."""

import asyncio
import inspect

import verifiers.v1 as vf

from ftis_node.records.group import PromptRef
from ftis_node.tasks import TaskItem


class VerifiersTask:
    name, taskset = "reverse-words", "reverse_words"
    isolate_scoring = True

    def __init__(self, split: str) -> None:
        self.split = split
        tasks = list(vf.load_taskset(vf.TasksetConfig(id=self.taskset)))
        self._tasks = tasks[:-20] if split == "train" else tasks[-20:]
        first, rewards = tasks[0], tasks[0].hooks("reward")
        needs_runtime = any("runtime" in inspect.signature(reward).parameters for reward in rewards)
        if first.NEEDS_CONTAINER or needs_runtime or first.toolsets(first.config) or first.plugged_judges():
            raise ValueError("a task with a container, tools or a judge needs a running model")
        self._total = sum(reward._vf_weight for reward in rewards)

    def __len__(self) -> int:
        return len(self._tasks)

    def __getitem__(self, index: int) -> TaskItem:
        prompt = ({"role": "user", "content": self._tasks[index].data.prompt_text},)
        return TaskItem(PromptRef(self.name, self.split, index), prompt, "")

    def resolve(self, ref: PromptRef) -> TaskItem:
        if (ref.task, ref.split) != (self.name, self.split) or not 0 <= ref.index < len(self):
            raise KeyError(str(ref))
        return self[ref.index]

    def score(self, item: TaskItem, completion_text: str) -> float:
        task = self._tasks[item.ref.index]
        row, agent = vf.TraceTask(type=type(task).__name__, data=task.data), vf.AgentInfo(config=vf.AgentConfig())
        reply = vf.MessageNode(message=vf.AssistantMessage(content=completion_text), sampled=True)
        trace = vf.Trace(task=row, agent=agent, nodes=[reply])
        asyncio.run(task.score(trace))
        return trace.reward / self._total
