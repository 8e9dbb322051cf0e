"""The schedule of checkpoints, and a thread that writes them in the background (write-behind).

Between two updates a checkpoint's content does not change. Weights, moments and random states stay those of the last
step while the next one computes gradients. So a thread writes them in place, without a copy, and the next update waits
for it. A learner of several processes gathers its parts first, which is a copy.

Unless the operator sets an interval, writing takes at most `SHARE` of the time. After w seconds of writing come 19 w
seconds without. A model of 3B parameters whose 37 GB take 40 s is saved every 13 minutes, a tiny one after each step.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

SHARE: Final = 0.05  # of the time
MAX_UNSAVED_STEPS: Final = 100  # however long writing takes: their groups are kept
POLL_INTERVAL_S: Final = 0.5


class CheckpointSaver:
    """A write-behind saver that writes one checkpoint at a time. Not thread-safe.

    `saved_step` is the step of the newest checkpoint on disk, and `begun_step` of the one begun last. `failed_step` is
    that of the last one that could not be written. `waited_s` is how long steps have waited in all, `write_s` how long
    the newest one took.
    """

    def __init__(self, *, every_steps: int | None, clock: Callable[[], float] = time.monotonic) -> None:
        """`every_steps` None: as often as `SHARE` allows. `clock`: seconds, never backwards."""
        self.saved_step = self.begun_step = self.failed_step = 0
        self.waited_s = self.write_s = 0.0
        self._every_steps = every_steps
        self._clock = clock
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None
        self._not_before = clock()

    def goes_on_at(self, step: int) -> None:
        """Note that the newest checkpoint on disk is of `step`."""
        self.saved_step = self.begun_step = step

    @property
    def in_background(self) -> bool:
        """Return whether steps go on while a checkpoint is written."""
        return self._every_steps is None

    def is_due(self, step: int) -> bool:
        """Return whether a checkpoint of `step` must begin now."""
        unsaved = step - self.begun_step
        if self._every_steps is not None:
            return unsaved >= self._every_steps
        return unsaved > 0 and (self._clock() >= self._not_before or unsaved >= MAX_UNSAVED_STEPS)

    def expire(self) -> None:
        """End the pause after the last checkpoint."""
        self._not_before = self._clock()

    def begin(self, step: int, write: Callable[[], object]) -> None:
        """Have the thread call `write()`, after the checkpoint before. Raises what that one raised."""
        self.wait()
        self.begun_step = step
        self._writing = self._thread.submit(self._write, step, write)

    def wait(self) -> None:
        """Wait until nothing is written any more. Raises what writing raised, once; that step is then due again."""
        if self._writing is None:
            return
        writing, self._writing = self._writing, None
        began_at = self._clock()
        try:
            writing.result()
        except BaseException:
            self.failed_step, self.begun_step = self.begun_step, self.saved_step
            raise
        finally:
            self.waited_s += self._clock() - began_at

    def raise_failure(self) -> None:
        """Raise as `wait` does, if writing has ended already; else do nothing."""
        if self._writing is not None and self._writing.done():
            self.wait()

    def pause(self, between: Callable[[], object]) -> None:
        """Wait until nothing is written any more, calling `between()` meanwhile; a failure is kept for `wait`."""
        began_at = self._clock()
        while self._writing is not None and wait([self._writing], timeout=POLL_INTERVAL_S).not_done:
            between()
        self.waited_s += self._clock() - began_at

    def close(self) -> None:
        """Finish the present write and end the thread."""
        self._thread.shutdown()

    def _write(self, step: int, write: Callable[[], object]) -> None:
        began_at = self._clock()
        write()
        ended_at = self._clock()
        self.saved_step, self.write_s = step, ended_at - began_at
        self._not_before = ended_at + (1 / SHARE - 1) * self.write_s
