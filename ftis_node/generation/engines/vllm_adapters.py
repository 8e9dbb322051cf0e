"""The LoRA adapters in vLLM's core, one for each version that is served or still has completions in flight.

Each load gets a new number, because vLLM reuses an adapter with a known number. A version can be loaded twice, because
the learner repeats it after a crash. The core must not get more adapters than it has slots. It would evict one that is
in use and later reload it from a file that may no longer exist. So a slot is freed first.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Set
    from pathlib import Path


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
