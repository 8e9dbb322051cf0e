"""From a peer's values to what the loops do with them: the chains of the fuzzer, with hypothesis in its place."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ftis_node.node.loops.intake import IntakeLoop
from tests.fuzz import cases
from tests.fuzz.chains import announced, taken
from tests.fuzz.mutator import MAX_ITEMS, Item, at_edges, join, mutated, split
from tests.fuzz.run import place_of

if TYPE_CHECKING:
    from collections.abc import Callable

EXAMPLES = {"listed": 300}
MAX_EDGES = 600  # of one chain
NUM_EXAMPLES = 40  # of every other chain


def _raw(rng: random.Random) -> Callable[[bytes], bytes]:
    """Blind changes, as libFuzzer makes them."""

    def change(data: bytes) -> bytes:
        changed = bytearray(data)
        at = rng.randrange(len(changed) + 1)
        changed[at : at + rng.randrange(3)] = rng.randbytes(rng.randrange(4))
        return bytes(changed)

    return change


@pytest.mark.parametrize("name", cases.CHAINS)
def test_changed_fields_break_nothing_behind_the_readers(name: str) -> None:
    module = cases.CHAINS[name]
    target = cases.target_of(name)

    @settings(max_examples=EXAMPLES.get(name, NUM_EXAMPLES), deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.sampled_from(module.seeds()), st.integers(0, 2**32), st.integers(0, 4))
    def run(seed: bytes, number: int, num_changes: int) -> None:
        rng = random.Random(number)
        for _ in range(num_changes):
            seed = mutated(seed, rng, kinds=module.kinds, raw=_raw(rng))
        target(seed)

    run()


@pytest.mark.parametrize("name", [name for name, module in cases.CHAINS.items() if any(map(module.kinds, range(8)))])
def test_every_field_at_its_edges(name: str) -> None:
    """All edges of the fields of all messages in a chain's seeds; many items are one case."""
    module = cases.CHAINS[name]
    changed: dict[Item, None] = {}
    for item in dict.fromkeys(item for seed in module.seeds() for item in split(seed)):
        kind = module.kinds(item.tag)
        if kind is not None:
            edges = at_edges(kind.FromString(item.data))
            changed |= {item._replace(data=edge.SerializeToString()): None for edge in edges}
    items = random.Random(0).sample(list(changed), min(len(changed), MAX_EDGES))
    for at in range(0, len(items), MAX_ITEMS):
        asyncio.run(module.chain(items[at : at + MAX_ITEMS]))


async def test_the_seeds_of_bodies_reach_the_learner() -> None:
    """Else the fuzzer would only ever see refusals."""
    with patch.object(taken, "_learn", wraps=taken._learn) as learn:
        for seed in taken.seeds():
            await taken.chain(split(seed))
    assert learn.call_count >= len(taken.seeds()) - 1  # all but a text that no id says
    assert max(len(call.args[0]) for call in learn.call_args_list) == 3


async def test_the_seeds_of_announcements_reach_wants_and_gaps() -> None:
    seen: list[Any] = []
    with patch.object(announced, "_repair", wraps=announced._repair) as repair:
        await announced.chain(split(announced.seeds()[1]))
        seen = [call.args[0].wiring.announcements for call in repair.call_args_list]
    assert any(ear.senders() for ear in seen)
    assert repair.call_count == 2


async def test_a_chain_reports_what_the_guard_swallows() -> None:
    """What the second line catches is a finding here: a value got past the bounds."""

    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    with patch("ftis_node.node.loops.announcements.AnnouncementHandler._take", fail), pytest.raises(ZeroDivisionError):
        await announced.chain(split(announced.seeds()[0]))


async def test_a_chain_reports_a_dead_loop() -> None:
    async def fail(*_: Any) -> None:
        raise ZeroDivisionError

    with patch.object(IntakeLoop, "_judge_all", fail), pytest.raises(ExceptionGroup) as caught:
        await taken.chain(split(taken.seeds()[0]))
    assert "ZeroDivisionError" in place_of(caught.value)


def test_items_survive_the_way_there_and_back() -> None:
    items = [Item(0, b""), Item(255, b"x" * 300), Item(7, bytes(range(256)))]
    assert split(join(items)) == items
    assert split(join(items)[:-1])[-1].data == bytes(range(255))
