"""Retry of a step that runs out of memory, with less memory, instead of ending the learner.

    activations are kept --> they are recomputed (a third more time) --> smaller micro-batches

Before its first update a step has changed nothing and can start over. The results are equal up to rounding. The free
memory of a GPU changes (another process, longer completions, fragments), so the budget of a micro-batch keeps adapting:

    ran out     return to the last good budget, if this was a trial of more; else half of the budget in use
    good steps  after `growth_interval` of them a quarter more, up to the setting; a failed trial doubles the interval
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from ftis_node.errors import MachineError, says_out_of_memory
from ftis_node.learner.messages import LearnerBoot
from ftis_node.workers.shared_tensors import grow_segments

Outcome = TypeVar("Outcome")
log = logging.getLogger(__name__)
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
        return cls(setting=setting, max_tokens=setting)

    def after_out_of_memory(self, *, whole: int, longest: int) -> MicroBatchBudget | None:
        """Return the next budget for a batch of `whole` tokens; None if none is smaller.

        A sequence is never divided, so a micro-batch cannot be smaller than the `longest` one.
        """
        in_use = max(min(self.max_tokens, whole), longest)
        if in_use <= longest:
            return None
        smaller = replace(self, max_tokens=max(in_use // 2, longest), good_tokens=None, num_good_steps=0)
        if self.good_tokens is None or self.good_tokens >= in_use:
            return smaller
        growth_interval = min(2 * self.growth_interval, LONGEST_GROWTH_INTERVAL)
        return replace(smaller, max_tokens=self.good_tokens, growth_interval=growth_interval)

    def after_good_step(self, *, whole: int) -> MicroBatchBudget:
        """Return the next step's budget. A batch of `whole` tokens that fits in one micro-batch tests no budget."""
        if self.max_tokens >= self.setting or self.max_tokens > whole:
            return self
        if self.num_good_steps + 1 < self.growth_interval:
            return replace(self, num_good_steps=self.num_good_steps + 1)
        more = min(int(GROWTH * self.max_tokens) + 1, self.setting)
        return replace(self, max_tokens=more, good_tokens=self.max_tokens, num_good_steps=0)


@contextmanager
def one_out_of_memory_error() -> Iterator[None]:
    """Raise torch.OutOfMemoryError for any library's lack of memory inside."""
    try:
        yield
    except MemoryError as error:
        raise torch.OutOfMemoryError(str(error) or "out of memory") from error
    except RuntimeError as error:
        if says_out_of_memory(str(error)):
            raise torch.OutOfMemoryError(str(error)) from error
        raise


def keep_to_share(share: float | None) -> None:
    """Limit this process's tensors to this share of the GPU; None: all of it.

    Beyond it the step is repeated with less memory. Without a limit the generator on the same GPU would fail.
    """
    if share is not None:
        torch.cuda.set_per_process_memory_fraction(share)


def grow_segments_after_weights(boot: LearnerBoot) -> None:
    """Enable expandable segments, in which weights that an engine maps cannot be (`workers/shared_tensors.py`)."""
    if boot.transfer == "ipc" and boot.memory_share is not None and not grow_segments():
        log.info("torch's allocator has no expandable segments")


class OomRetry:
    """The budget of a learner's micro-batches, and the number of out-of-memory errors of the newest step.

    `recompute` enables activation recomputation, and returns whether it was off until now.
    """

    def __init__(self, max_tokens: int, *, recompute: Callable[[], bool] = lambda: False) -> None:
        self._budget = MicroBatchBudget.of(max_tokens)
        self._recompute = recompute
        self.num_out_of_memory = 0

    @property
    def max_tokens(self) -> int:
        return self._budget.max_tokens

    def run(self, attempt: Callable[[], Outcome], *, step: int, whole: int, longest: int) -> Outcome:
        """Return the outcome of `attempt`, repeated with less memory while it runs out of memory.

        The batch has `whole` tokens, its longest sequence `longest`. Raises MachineError if that alone is too much.
        """
        self.num_out_of_memory = 0
        while True:
            try:
                with one_out_of_memory_error():
                    return attempt()
            except torch.OutOfMemoryError as error:
                reason = str(error)  # the text only: the error's traceback holds the step's tensors
            if not self.note_out_of_memory(step=step, whole=whole, longest=longest):
                raise MachineError(
                    f"step {step} does not fit in memory with one sequence of {longest} tokens: set "
                    "learner.recompute_activations = true or learner.optimizer_states = '8bit', or train an adapter "
                    f"(--lora) ({reason.splitlines()[0]})"
                )

    def note_out_of_memory(self, *, step: int, whole: int, longest: int) -> bool:
        """Free memory, and use recomputation or a smaller budget from now on. Returns False if neither is left."""
        self.num_out_of_memory += 1
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if self._recompute():
            log.warning(
                "step %d ran out of memory: activations are recomputed from now on, which takes a third more time",
                step,
            )
            return True
        smaller = self._budget.after_out_of_memory(whole=whole, longest=longest)
        if smaller is None:
            return False
        log.warning(
            "step %d ran out of memory with micro-batches of %d tokens: %d from now on",
            step,
            min(self.max_tokens, whole),
            smaller.max_tokens,
        )
        self._budget = smaller
        return True

    def note_good_step(self, *, whole: int) -> None:
        before, self._budget = self._budget, self._budget.after_good_step(whole=whole)
        if self._budget.max_tokens != before.max_tokens:
            log.info("micro-batches of %d tokens are tried again", self.max_tokens)
