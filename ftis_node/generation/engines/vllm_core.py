"""Sleep, wake and weight updates of a vLLM engine core, in the order that the core requires. Does not import vLLM.

    awake    --sleep(1)--> asleep, weights in host memory --wake-----------------------> awake
             --sleep(2)--> asleep, weights discarded      --new weights, nothing else--> awake

Level 2 avoids copying all weights to the host and back. vLLM keeps a model's buffers itself. At the wake-up it
allocates the parameters again, uninitialized: nothing may be computed before new weights are loaded.

Weights change only while generation is paused. The core stamps the version on a step's tokens at their output, not at
their computation. So a step in progress would be stamped with a version that it did not use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ftis_node.errors import FtisError, SharingError, WorkerTaskError

if TYPE_CHECKING:
    from collections.abc import Sequence

KEEP_LEVEL, DISCARD_LEVEL = 1, 2
PAUSE_LEVEL = 0
WAKE_ORDER = ("weights", "kv_cache")
DISCARDED = "the engine has discarded its weights: it serves nothing before it is given others"


class VllmCore:
    """An adapter of vLLM's `EngineCoreClient`, for use in one thread. `can_sleep`: it frees memory during sleep.

    `is_asleep`: it computes nothing; `has_weights`: it holds weights.
    """

    def __init__(self, client: Any, *, can_sleep: bool) -> None:
        self._client = client
        self._can_sleep = can_sleep
        self.is_asleep = False
        self.has_weights = True
        self._unmapped: tuple[str, ...] = ()  # the core refuses the whole call if one of the named tags is awake

    def sleep(self, *, discard: bool) -> None:
        """Free memory if supported; with `discard` also the weights. No request may be in flight."""
        if self._can_sleep and not self.is_asleep:
            self.has_weights = not discard
            self._client.sleep(DISCARD_LEVEL if discard else KEEP_LEVEL)
            self._unmapped = WAKE_ORDER
        self.is_asleep = True

    def wake(self) -> None:
        """Continue with the loaded weights. Raises WorkerTaskError if they were discarded: it stays asleep."""
        if not self.has_weights:
            raise WorkerTaskError(DISCARDED)
        self._wake_memory(*WAKE_ORDER)
        self.is_asleep = False

    def load(self, path: str, version: int, *, is_locked: bool = False) -> dict[str, int]:
        """Serve the file at `path` from the next step on, and wake up. Returns the checksums of the first worker, which
        has those of its unsharded tensors.
        """
        return self._load("ftis_load", (path, is_locked), version)

    def load_shared(self, shared: bytes, version: int) -> dict[str, int]:
        """Serve the learner's own tensors, as `load` does. Raises SharingError, without a change, if a worker cannot
        map them.
        """
        for refused in self._client.collective_rpc("ftis_open", args=(shared,)):
            if refused:
                raise SharingError(refused)
        return self._load("ftis_load_shared", (), version)

    def _load(self, method: str, arguments: Sequence[Any], version: int) -> dict[str, int]:
        self._wake_memory("weights")
        if not self.is_asleep:
            self._client.sleep(PAUSE_LEVEL, "keep")  # starts no step, and waits for those in progress
        try:
            checksums: dict[str, int] = self._client.collective_rpc(method, args=tuple(arguments))[0]
        except FtisError:  # of this process, before any weight changed
            if not self.is_asleep:
                self._client.wake_up(["scheduling"])
            raise
        self._client.set_weight_version(str(version))
        self.has_weights = True
        if self.is_asleep:
            self._wake_memory("kv_cache")  # only after the update has freed its temporary memory
            self.is_asleep = False
        else:
            self._client.wake_up(["scheduling"])
        return checksums

    def _wake_memory(self, *tags: str) -> None:
        if due := [tag for tag in tags if tag in self._unmapped]:
            self._unmapped = tuple(tag for tag in self._unmapped if tag not in due)
            self._client.wake_up(due)
