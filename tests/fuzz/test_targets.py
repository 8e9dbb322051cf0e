"""Readers return a value or refuse the bytes with a known reason, and the loops behind them raise no error."""

import asyncio
import random
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ftis_node.node.loops.intake import IntakeLoop
from tests.fuzz.chains import announcements, training
from tests.fuzz.fuzzed_node import quiet
from tests.fuzz.mutator import MAX_ITEMS, Item, change_bytes, mutated, split, variants
from tests.fuzz.run import CORPUS
from tests.fuzz.targets import CHAINS, READERS, TARGETS

NUM_EXAMPLES = {"directory": 300, **dict.fromkeys(READERS, 100)}
MAX_VARIANTS = 600  # of one chain


@pytest.fixture(autouse=True)
def quiet_package():
    with quiet():
        yield


@pytest.mark.parametrize("name", READERS)
@settings(max_examples=40, deadline=None)
@given(data=st.binary(max_size=600))
def test_random_bytes_are_read_or_refused(name, data):
    TARGETS[name].run(data)


@pytest.mark.parametrize("name", TARGETS)
def test_changed_seeds_cause_no_error(name):
    target = TARGETS[name]

    @settings(max_examples=NUM_EXAMPLES.get(name, 40), deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.sampled_from(target.seeds), st.integers(0, 2**32), st.integers(0, 4))
    def run(case, number, num_changes):
        rng = random.Random(number)
        for _ in range(num_changes):
            case = change_bytes(case, rng) if target.kinds is None else mutated(case, rng, kinds=target.kinds)
        target.run(case)

    run()


@pytest.mark.parametrize("name", [name for name, chain in CHAINS.items() if any(map(chain.kinds, range(8)))])
def test_each_field_with_boundary_values_causes_no_error(name):
    """A case has many items, each a message of the seeds with one changed field."""
    chain, rng = CHAINS[name], random.Random(0)
    changed: dict[Item, None] = {}
    for item in dict.fromkeys(item for seed in chain.seeds() for item in split(seed)):
        if (kind := chain.kinds(item.tag)) is not None:
            message = kind.FromString(item.data)
            some = [one.SerializeToString() for one in variants(message, rng, per_field=6)]
            changed |= dict.fromkeys(item._replace(data=data) for data in some)
    items = rng.sample(list(changed), min(len(changed), MAX_VARIANTS))
    for at in range(0, len(items), MAX_ITEMS):
        asyncio.run(chain.chain(items[at : at + MAX_ITEMS]))


@pytest.mark.parametrize("name", TARGETS)
def test_the_corpus_causes_no_error(name):
    for path in CORPUS.glob(f"{name}-*"):
        TARGETS[name].run(path.read_bytes())


async def test_the_seeds_of_bodies_reach_the_learner():
    """Otherwise the fuzzer would see only refusals."""
    with patch.object(training, "_learn", wraps=training._learn) as learn:
        for seed in training.seeds():
            await training.chain(split(seed))
    assert learn.call_count >= len(training.seeds()) - 1  # all but a text that has no ids
    assert max(len(call.args[0]) for call in learn.call_args_list) == 3


async def test_a_chain_reports_an_exception_that_the_guard_catches_and_a_loop_that_ends():
    def fail(*_):
        raise ZeroDivisionError

    with patch("ftis_node.node.peers.announcements.AnnouncementHandler._take", fail), pytest.raises(ZeroDivisionError):
        await announcements.chain(split(announcements.seeds()[0]))
    with patch.object(IntakeLoop, "_judge_all", fail), pytest.raises(ExceptionGroup) as caught:
        await training.chain(split(training.seeds()[0]))
    assert caught.group_contains(ZeroDivisionError)
