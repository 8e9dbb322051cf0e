"""Hypothesis runs the chains of the fuzzer, which pass a peer's values through the node's loops."""

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
from tests.fuzz.chains import announcements, training
from tests.fuzz.mutator import MAX_ITEMS, Item, boundary_variants, join, mutated, split
from tests.fuzz.run import origin_of

if TYPE_CHECKING:
    from collections.abc import Callable

EXAMPLES = {"directory": 300}
MAX_VARIANTS = 600  # of one chain
NUM_EXAMPLES = 40  # of each other chain


def _raw(rng: random.Random) -> Callable[[bytes], bytes]:
    """Return a function that changes arbitrary bytes, like libFuzzer."""

    def change(data: bytes) -> bytes:
        changed = bytearray(data)
        at = rng.randrange(len(changed) + 1)
        changed[at : at + rng.randrange(3)] = rng.randbytes(rng.randrange(4))
        return bytes(changed)

    return change


@pytest.mark.parametrize("name", cases.CHAINS)
def test_changed_fields_cause_no_error_behind_the_readers(name: str) -> None:
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
def test_each_field_with_boundary_values_causes_no_error(name: str) -> None:
    """A case has many items, each a message of the seeds with one field at a boundary value."""
    module = cases.CHAINS[name]
    changed: dict[Item, None] = {}
    for item in dict.fromkeys(item for seed in module.seeds() for item in split(seed)):
        kind = module.kinds(item.tag)
        if kind is not None:
            variants = boundary_variants(kind.FromString(item.data))
            changed |= {item._replace(data=variant.SerializeToString()): None for variant in variants}
    items = random.Random(0).sample(list(changed), min(len(changed), MAX_VARIANTS))
    for at in range(0, len(items), MAX_ITEMS):
        asyncio.run(module.chain(items[at : at + MAX_ITEMS]))


async def test_the_seeds_of_bodies_reach_the_learner() -> None:
    """Otherwise the fuzzer would see only rejections."""
    with patch.object(training, "_learn", wraps=training._learn) as learn:
        for seed in training.seeds():
            await training.chain(split(seed))
    assert learn.call_count >= len(training.seeds()) - 1  # all but a text that has no ids
    assert max(len(call.args[0]) for call in learn.call_args_list) == 3


async def test_the_seeds_of_announcements_reach_the_pull_queue_and_gaps() -> None:
    with patch.object(announcements, "_backfill", wraps=announcements._backfill) as backfill:
        await announcements.chain(split(announcements.seeds()[1]))
        handlers = [call.args[0].wiring.announcements for call in backfill.call_args_list]
    assert any(handler.senders() for handler in handlers)
    assert backfill.call_count == 2


async def test_a_chain_reports_an_exception_that_the_guard_catches() -> None:
    """An exception that the guard catches shows that a value passed the bounds."""

    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    with patch("ftis_node.node.loops.announcements.AnnouncementHandler._take", fail), pytest.raises(ZeroDivisionError):
        await announcements.chain(split(announcements.seeds()[0]))


async def test_a_chain_reports_a_loop_that_ends() -> None:
    async def fail(*_: Any) -> None:
        raise ZeroDivisionError

    with patch.object(IntakeLoop, "_judge_all", fail), pytest.raises(ExceptionGroup) as caught:
        await training.chain(split(training.seeds()[0]))
    assert "ZeroDivisionError" in origin_of(caught.value)


def test_joined_items_are_split_again() -> None:
    items = [Item(0, b""), Item(255, b"x" * 300), Item(7, bytes(range(256)))]
    assert split(join(items)) == items
    assert split(join(items)[:-1])[-1].data == bytes(range(255))
