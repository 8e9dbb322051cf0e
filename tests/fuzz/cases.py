"""All targets by name: the readers, and the chains that go on from them. The first byte of a case picks its target."""

from __future__ import annotations

import asyncio
from functools import cache
from typing import TYPE_CHECKING

from tests.fuzz import targets
from tests.fuzz.chains import announced, described, listed, offered, operated, served, taken
from tests.fuzz.mutator import split

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

CHAINS: dict[str, ModuleType] = {
    module.__name__.rsplit(".", 1)[-1]: module
    for module in (announced, described, listed, taken, served, offered, operated)
}
NAMES = (*(target.__name__ for target in targets.TARGETS), *CHAINS)


@cache
def _runner() -> asyncio.Runner:
    return asyncio.Runner()


def target_of(name: str) -> Callable[[bytes], None]:
    """The target of a name: it takes a case less its first byte, and raises where something misbehaves."""
    if (module := CHAINS.get(name)) is None:
        return targets.TARGETS[NAMES.index(name)]

    def run(data: bytes) -> None:
        _runner().run(module.chain(split(data)))

    return run


def run_case(case: bytes) -> None:
    """Hands `case` to its target."""
    if case:
        target_of(name_of(case))(case[1:])


def name_of(case: bytes) -> str:
    """The name of the target that a case is for."""
    return NAMES[case[0] % len(NAMES)]


def seed_cases() -> list[bytes]:
    """Valid input of every target, as cases."""
    chained = [bytes([NAMES.index(name)]) + data for name, module in CHAINS.items() for data in module.seeds()]
    return [*targets.seed_cases(), *chained]
