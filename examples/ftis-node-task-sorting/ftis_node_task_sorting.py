"""The task `sorting`: put four digits in order. The reward `brief`: half for the answer, half for no other text."""

import random

from ftis_node.records.group import PromptRef
from ftis_node.tasks import TaskItem


class SortingTask:
    """`sort 3142=` wants `1234`. The index is the seed, so that every node makes the same problems."""

    name = "sorting"
    isolate_scoring = True

    def __init__(self, split: str) -> None:
        self.split = split

    def __len__(self) -> int:
        return 1_000_000 if self.split == "train" else 500

    def __getitem__(self, index: int) -> TaskItem:
        digits = random.Random(f"{self.split}/{index}").choices("0123456789", k=4)
        prompt = ({"role": "user", "content": f"sort {''.join(digits)}="},)
        return TaskItem(PromptRef(self.name, self.split, index), prompt, "".join(sorted(digits)))

    def resolve(self, ref: PromptRef) -> TaskItem:
        if (ref.task, ref.split) != (self.name, self.split) or not 0 <= ref.index < len(self):
            raise KeyError(str(ref))
        return self[ref.index]

    def score(self, item: TaskItem, completion_text: str) -> float:
        text = completion_text.strip()
        if len(text) != len(item.answer):
            return 0.0
        return sum(map(str.__eq__, text, item.answer)) / len(text)


def brief(item: TaskItem, completion_text: str) -> float:
    return 0.5 * (item.answer in completion_text) + 0.5 * (item.answer == completion_text.strip())
