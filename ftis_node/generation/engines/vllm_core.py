"""Sleep, wake and weight updates of a vLLM engine core, in the order that the core requires. Does not import vLLM.

    awake    --sleep(1)--> asleep, weights in host memory --wake-----------------------> awake
             --sleep(2)--> asleep, weights discarded      --new weights, nothing else--> awake

Level 2 avoids copying all weights to the host and back. vLLM keeps a model's buffers itself. At the wake-up it
allocates the parameters again, uninitialized: nothing may be computed before new weights are loaded.

Weights change only while generation is paused. The core stamps the version on a step's tokens at their output, not at
their computation. So a step in progress would be stamped with a version that it did not use.

The LoRA adapters in vLLM's core, one for each version that is served or still has completions in flight.

Each load gets a new number, because vLLM reuses an adapter with a known number. A version can be loaded twice, because
the learner repeats it after a crash. The core must not get more adapters than it has slots. It would evict one that is
in use and later reload it from a file that may no longer exist. So a slot is freed first.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from ftis_node.errors import FtisError, SharingError, WorkerTaskError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence, Set
    from pathlib import Path

KEEP_LEVEL, DISCARD_LEVEL = 1, 2
PAUSE_LEVEL = 0
WAKE_ORDER = ("weights", "kv_cache")
DISCARDED = "the engine has discarded its weights: it serves nothing before it is given others"


class LoraAdapters:
    """The adapters of one core; `current` is the number of the served one, None for none.

    `make_request` is vLLM's `LoRARequest`, `num_places` the number of adapters that the core can hold.
    """

    def __init__(self, make_request: Callable[..., Any], num_places: int) -> None:
        self._make_request = make_request
        self._num_places = num_places
        self._held: dict[int, Any] = {}
        self._numbers = itertools.count(1)
        self.current: int | None = None

    def request(self, number: int | None) -> Any:
        """Return the `LoRARequest` shared by all requests with that adapter; None for None."""
        return None if number is None else self._held[number]

    def oldest_in_the_way(self) -> int | None:
        """Return the adapter to drop before another can be loaded; None if a slot is free."""
        if len(self._held) < self._num_places:
            return None
        return min(number for number in self._held if number != self.current)

    def load(self, core: Any, folder: Path, version: int) -> None:
        """Serve the adapter in `folder`. If vLLM refuses it, the call raises and changes nothing."""
        number = next(self._numbers)
        adapter = self._make_request(lora_name=f"{number}-version-{version}", lora_int_id=number, lora_path=str(folder))
        core.add_lora(adapter)
        self._held[number] = adapter
        self.current = number

    def drop_unused(self, core: Any, in_use: Set[int | None]) -> None:
        """Remove all adapters from the core except the current one and those `in_use`."""
        for number in self._held.keys() - in_use - {self.current}:
            core.remove_lora(number)
            del self._held[number]


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
