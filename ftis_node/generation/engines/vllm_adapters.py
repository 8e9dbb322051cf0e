"""The LoRA adapters that vLLM's core holds, one for each version that is served or still has completions in flight.

Each gets a number of its own, because vLLM takes an adapter whose number it knows for the one that it has, and a
version can come twice: after a crash the learner makes it anew. Nor may vLLM be given more than it has places for: it
would drop one that is in use and look for its file again, which may be gone by then. So room is made first.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Set
    from pathlib import Path


class Adapters:
    """Those held by one core; `current` is the number of the one that is served, None for none.

    `make_request` is vLLM's `LoRARequest`, `num_places` how many the core has room for.
    """

    def __init__(self, make_request: Callable[..., Any], num_places: int) -> None:
        self._make_request = make_request
        self._num_places = num_places
        self._held: dict[int, Any] = {}
        self._numbers = itertools.count(1)
        self.current: int | None = None

    def request(self, number: int | None) -> Any:
        """The `LoRARequest` that goes with every request that is to use the adapter; None for None."""
        return None if number is None else self._held[number]

    def oldest_in_the_way(self) -> int | None:
        """The one to be given up before another can be loaded; None where there is room."""
        if len(self._held) < self._num_places:
            return None
        return min(number for number in self._held if number != self.current)

    def load(self, core: Any, folder: Path, version: int) -> None:
        """Serve the adapter in `folder`. Where vLLM refuses it, it raises, and nothing has changed."""
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
