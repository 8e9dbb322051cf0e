"""The LoRA adapters in vLLM's core, one for each version that is served or still has completions in flight.

Each load gets a new number, because vLLM reuses an adapter whose number it knows. A version can come twice, since the
learner makes it again after a crash. The core must not get more adapters than it has slots for. It would drop one that
is in use, and look for its file again, which may be gone by then. So a slot is freed first.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Set
    from pathlib import Path


class LoraAdapters:
    """The adapters of one core; `current` is the number of the one that is served, None for none.

    `make_request` is vLLM's `LoRARequest`, `num_places` the number of adapters that the core can hold.
    """

    def __init__(self, make_request: Callable[..., Any], num_places: int) -> None:
        self._make_request = make_request
        self._num_places = num_places
        self._held: dict[int, Any] = {}
        self._numbers = itertools.count(1)
        self.current: int | None = None

    def request(self, number: int | None) -> Any:
        """Return the `LoRARequest` of every request that uses the adapter; None for None."""
        return None if number is None else self._held[number]

    def oldest_in_the_way(self) -> int | None:
        """Return the adapter to drop before another can be loaded; None if a slot is free."""
        if len(self._held) < self._num_places:
            return None
        return min(number for number in self._held if number != self.current)

    def load(self, core: Any, folder: Path, version: int) -> None:
        """Serve the adapter in `folder`. If vLLM refuses it, this raises, and nothing has changed."""
        number = next(self._numbers)
        adapter = self._make_request(lora_name=f"{number}-version-{version}", lora_int_id=number, lora_path=str(folder))
        core.add_lora(adapter)
        self._held[number] = adapter
        self.current = number

    def drop_unused(self, core: Any, in_use: Set[int | None]) -> None:
        """Have the core forget all but the current one and those `in_use`."""
        for number in self._held.keys() - in_use - {self.current}:
            core.remove_lora(number)
            del self._held[number]
