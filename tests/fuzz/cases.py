"""All targets by name: readers, and chains of code behind them. The first byte of a case is the index of its target."""

from __future__ import annotations

import asyncio
from functools import cache
from typing import TYPE_CHECKING

from tests.fuzz import targets
from tests.fuzz.chains import announcements, directory, http, records, serving, training, weights
from tests.fuzz.mutator import split

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

CHAINS: dict[str, ModuleType] = {
    module.__name__.rsplit(".", 1)[-1]: module
    for module in (announcements, records, directory, training, serving, weights, http)
}
NAMES = (*(target.__name__ for target in targets.TARGETS), *CHAINS)


@cache
def _runner() -> asyncio.Runner:
    return asyncio.Runner()


def target_of(name: str) -> Callable[[bytes], None]:
    """Return a target. It takes a case without the first byte, and raises an exception if the tested code is wrong."""
    if (module := CHAINS.get(name)) is None:
        return targets.TARGETS[NAMES.index(name)]

    def run(data: bytes) -> None:
        _runner().run(module.chain(split(data)))

    return run


def run_case(case: bytes) -> None:
    """Run the target of `case`."""
    if case:
        target_of(name_of(case))(case[1:])


def name_of(case: bytes) -> str:
    """Return the name of the target of a case."""
    return NAMES[case[0] % len(NAMES)]


def seed_cases() -> list[bytes]:
    """Return valid inputs of all targets as cases."""
    chained = [bytes([NAMES.index(name)]) + data for name, module in CHAINS.items() for data in module.seeds()]
    return [*targets.seed_cases(), *chained]
