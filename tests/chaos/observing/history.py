"""The history of steps that counts, from a trail with crashes in it.

A crash takes the learner back to its newest checkpoint; steps after that are done again, by other groups perhaps. What
they did the first time is as if it had not been: the weights do not know it. So the last attempt of each step counts,
and none of a step that was not tried again yet.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.chaos.observing.trail import Event

BEGINNINGS = frozenset({"start", "step_lost"})  # after these the learner stands at its checkpoint


@dataclass
class History:
    """`groups` by the step that took them, `reports` by step. `noted`: the last step that was reported, counted or not.
    `saved`: that of the newest complete checkpoint.

    `is_settling`: a life has begun, and not yet taken groups: it stands at a checkpoint that the trail does not name.
    """

    groups: dict[int, list[str]] = field(default_factory=dict)
    reports: dict[int, Event] = field(default_factory=dict)
    noted: int = 0
    saved: int = 0
    is_settling: bool = False
    _open: int | None = None  # the step whose groups are being noted

    @property
    def steps(self) -> tuple[int, int]:
        """The lowest and the highest step that the node may stand at, as far as the trail and its checkpoint tell."""
        return (min(self.saved, self.noted), max(self.saved, self.noted)) if self.is_settling else (self.noted,) * 2

    def add(self, event: Event) -> None:
        """The trail's next event."""
        if event.name in BEGINNINGS:
            self._open, self.is_settling = None, True
        elif event.name == "taken":
            self._take(event["step"], event["group"])
        elif event.name == "step":
            self._report(event["step"], event)

    def _take(self, step: int, group: str) -> None:
        if self._open != step:
            self._drop_from(step)
            self.groups[step] = []
            self._open, self.is_settling = step, False
        self.groups[step].append(group)

    def _report(self, step: int, event: Event) -> None:
        tried_now = self._open == step or self.is_settling  # while settling: by the life before, which did not tell
        self._drop_from(step + 1 if tried_now else step)
        self.reports[step] = event
        self.noted, self._open = step, None

    def _drop_from(self, step: int) -> None:
        """Both are in the order of their steps, so that thousands of steps cost no more than there are to drop."""
        for kept in (self.groups, self.reports):
            while kept and (last := next(reversed(kept))) >= step:
                del kept[last]


def counted(events: Iterable[Event], *, saved: int) -> History:
    """The history of `events`, of a node whose newest complete checkpoint is that of step `saved` (0: none)."""
    history = History(saved=saved)
    for event in events:
        history.add(event)
    if history.is_settling:
        history._drop_from(saved + 1)
    return history
