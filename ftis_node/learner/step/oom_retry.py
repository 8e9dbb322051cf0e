"""Retry of a step that runs out of memory, with less memory, instead of ending the learner.

    activations are kept --> they are recomputed (a third more time) --> smaller micro-batches

Before its first update a step has changed nothing and can start over. The results are equal up to rounding. Each lack
of memory halves the budget of a micro-batch until the next start.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

from ftis_node.errors import MachineError, says_out_of_memory

Outcome = TypeVar("Outcome")
log = logging.getLogger(__name__)


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


class OomRetry:
    """The budget of a learner's micro-batches in tokens, and the number of out-of-memory errors of the newest step.

    `recompute` enables activation recomputation, and returns whether it was off until now.
    """

    def __init__(self, max_tokens: int, *, recompute: Callable[[], bool] = lambda: False) -> None:
        self.max_tokens = max_tokens
        self.num_out_of_memory = 0
        self._recompute = recompute

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
        in_use = max(min(self.max_tokens, whole), longest)
        if in_use <= longest:  # a sequence is never divided
            return False
        self.max_tokens = max(in_use // 2, longest)
        log.warning(
            "step %d ran out of memory with micro-batches of %d tokens: %d from now on", step, in_use, self.max_tokens
        )
        return True
