"""The episode `lock`: find three digits from the number of digits that are in their place."""

import random

from ftis_node.records.group import PromptRef
from ftis_node.tasks import TaskItem


class LockEpisode:
    """`open 3 digits` wants `482`, in six turns. A state is the answer and the number of turns so far."""

    name = "lock"

    def __init__(self, split: str) -> None:
        self.split = split

    def __len__(self) -> int:
        return 1_000_000 if self.split == "train" else 500

    def __getitem__(self, index: int) -> TaskItem:
        digits = "".join(random.Random(f"{self.split}/{index}").choices("0123456789", k=3))
        prompt = ({"role": "user", "content": f"open 3 digits, lock {index}"},)
        return TaskItem(PromptRef(self.name, self.split, index), prompt, digits)

    def resolve(self, ref: PromptRef) -> TaskItem:
        if (ref.task, ref.split) != (self.name, self.split) or not 0 <= ref.index < len(self):
            raise KeyError(str(ref))
        return self[ref.index]

    def begin(self, item: TaskItem) -> tuple[str, int]:
        return item.answer, 0

    def step(self, state: tuple[str, int], text: str) -> tuple[str | None, tuple[str, int]]:
        answer, turn = state
        if text.strip() == answer or turn == 5:
            return None, state
        return str(sum(map(str.__eq__, text.strip(), answer))), (answer, turn + 1)

    def score(self, item: TaskItem, texts: list[str]) -> float:
        return float(texts[-1].strip() == item.answer)
