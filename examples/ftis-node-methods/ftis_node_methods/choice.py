"""The choice `need`: takes foreign groups of the tasks at which this node fails and its peers succeed.

    places of a task ~ (1 - p_own) p_peers s_peers

p is the mean reward of the ready groups, with one right and one wrong answer added. The share of groups with a signal
is s. Groups without a signal come last. With one task, it differs from `newest` only by that.
"""

from collections import Counter, deque
from collections.abc import Sequence

from ftis_node.replay.group_choice import Candidate, choose_foreign, choose_own, has_signal


def rate(groups: Sequence[Candidate]) -> float:
    rewards = [reward for group in groups for reward in group.rewards]
    return (1 + sum(rewards)) / (2 + len(rewards))


def need(candidates: Sequence[Candidate], own: int, foreign: int, step: int) -> list[Candidate]:
    needs, queues, taken = {}, {}, Counter[str]()
    theirs, mine = ([c for c in candidates if c.own is is_own] for is_own in (False, True))
    for task in sorted({c.task for c in theirs}):
        groups = [c for c in theirs if c.task == task]
        useful = [c for c in groups if has_signal(c.rewards)]
        needs[task] = (1 - rate([c for c in mine if c.task == task])) * rate(groups) * len(useful) / len(groups)
        queues[task] = deque(choose_foreign(useful, foreign))
    chosen: list[Candidate] = []
    while len(chosen) < foreign and (waiting := [task for task in queues if queues[task]]):
        task = max(waiting, key=lambda task: needs[task] / (1 + taken[task]))
        taken[task] += 1
        chosen.append(queues[task].popleft())
    rest = choose_foreign([c for c in theirs if not has_signal(c.rewards)], foreign - len(chosen))
    return [*choose_own(candidates, own), *chosen, *rest]
