"""How many tokens a micro-batch may have: less after it ran out of memory, carefully more again when all is well.

    ran out     back to what was good before, if this was a trial of more; else half of what was in use
    good steps  after `growth_interval` of them a quarter more, up to the setting; a trial that fails doubles it

What is free on a GPU changes (another process, longer completions, fragments), so neither a failure nor a success is
for ever. A pure state machine: facts in, the next budget out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

FIRST_GROWTH_INTERVAL = 16  # steps
LONGEST_GROWTH_INTERVAL = 1024
GROWTH = 1.25


@dataclass(frozen=True, slots=True)
class MicroBatchBudget:
    """`max_tokens` is what to use now, at most `setting`. `good_tokens`: what a trial of more goes back to."""

    setting: int
    max_tokens: int
    good_tokens: int | None = None
    num_good_steps: int = 0
    growth_interval: int = FIRST_GROWTH_INTERVAL

    @classmethod
    def of(cls, setting: int) -> MicroBatchBudget:
        """The budget of a learner that starts."""
        return cls(setting=setting, max_tokens=setting)

    def after_out_of_memory(self, *, whole: int, longest: int) -> MicroBatchBudget | None:
        """What to try next on a batch of `whole` tokens whose longest sequence has `longest`; None: nothing is left.

        A sequence is never cut, so a micro-batch cannot be made smaller than the longest one.
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
        """What the next step may use. A batch of `whole` tokens that fits in one micro-batch has tried nothing."""
        if self.max_tokens >= self.setting or self.max_tokens > whole:
            return self
        if self.num_good_steps + 1 < self.growth_interval:
            return replace(self, num_good_steps=self.num_good_steps + 1)
        more = min(int(GROWTH * self.max_tokens) + 1, self.setting)
        return replace(self, max_tokens=more, good_tokens=self.max_tokens, num_good_steps=0)
