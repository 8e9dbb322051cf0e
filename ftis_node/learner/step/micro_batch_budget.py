"""The token budget of a micro-batch: it shrinks after out-of-memory errors, and grows slowly after good steps.

    ran out     return to the last good budget, if this was a trial of more; else half of the budget in use
    good steps  after `growth_interval` of them a quarter more, up to the setting; a failed trial doubles the interval

The free memory of a GPU changes (another process, longer completions, fragments), so the budget keeps adapting. A pure
state machine: events in, the next budget out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

FIRST_GROWTH_INTERVAL = 16  # steps
LONGEST_GROWTH_INTERVAL = 1024
GROWTH = 1.25


@dataclass(frozen=True, slots=True)
class MicroBatchBudget:
    """The budget's state. `max_tokens` is in use, at most `setting`. A failed trial of more restores `good_tokens`."""

    setting: int
    max_tokens: int
    good_tokens: int | None = None
    num_good_steps: int = 0
    growth_interval: int = FIRST_GROWTH_INTERVAL

    @classmethod
    def of(cls, setting: int) -> MicroBatchBudget:
        """Return the initial budget of a learner."""
        return cls(setting=setting, max_tokens=setting)

    def after_out_of_memory(self, *, whole: int, longest: int) -> MicroBatchBudget | None:
        """Return the next budget for a batch of `whole` tokens whose longest sequence has `longest`; None if none is
        smaller.

        A sequence is never divided, so a micro-batch cannot be smaller than the longest one.
        """
        in_use = max(min(self.max_tokens, whole), longest)
        if in_use <= longest:
            return None
        if self.good_tokens is not None and self.good_tokens < in_use:
            growth_interval = min(2 * self.growth_interval, LONGEST_GROWTH_INTERVAL)
            return replace(
                self, max_tokens=self.good_tokens, good_tokens=None, num_good_steps=0, growth_interval=growth_interval
            )
        return replace(self, max_tokens=max(in_use // 2, longest), good_tokens=None, num_good_steps=0)

    def after_good_step(self, *, whole: int) -> MicroBatchBudget:
        """Return the next step's budget. A batch of `whole` tokens that fits in one micro-batch tests no budget."""
        if self.max_tokens >= self.setting or self.max_tokens > whole:
            return self
        if self.num_good_steps + 1 < self.growth_interval:
            return replace(self, num_good_steps=self.num_good_steps + 1)
        more = min(int(GROWTH * self.max_tokens) + 1, self.setting)
        return replace(self, max_tokens=more, good_tokens=self.max_tokens, num_good_steps=0)
