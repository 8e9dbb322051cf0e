"""A taskset of verifiers 0.4 with two rewards: write the words of a sentence in reverse order."""

from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["ReverseTaskset"]

WORDS = "apple bridge cloud dune ember fjord grove harbor".split()


class ReverseData(vf.TaskData):
    answer: str


class ReverseTask(vf.Task[ReverseData]):
    @vf.reward(weight=1.0)
    async def is_reversed(self, task: ReverseData, trace: vf.Trace) -> float:
        return float(trace.last_reply.strip() == task.answer)

    @vf.reward(weight=0.25)
    async def is_short(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply) <= 40)


class ReverseTaskset(vf.Taskset[ReverseTask]):
    def load(self) -> Iterator[ReverseTask]:
        for first in WORDS:
            for second in WORDS:
                prompt, answer = f"Reverse: {first} {second}", f"{second} {first}"
                yield ReverseTask(ReverseData(prompt=prompt, answer=answer), self.config.task)
