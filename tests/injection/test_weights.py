"""Unexpected exceptions at the points that transfer weights: a generator still serves the next version of a learner."""

import os
from contextlib import ExitStack

import pytest

from ftis_node.swarm.peer_guard import Place
from tests.injection.boundaries import GENERATORS, LEARNERS
from tests.injection.injector import Injector
from tests.node.loops.test_weights import _pair, _same_model
from tests.waiting import eventually

__all__ = ["_same_model"]  # the fixture of that file

MAX_VERSIONS = 40
NUM_BYTES = 64


@pytest.mark.parametrize("points", [GENERATORS, LEARNERS], ids=["generator", "learner"])
async def test_weights_arrive_after_an_exception_at_each_point(tmp_path, points):
    injector, version = Injector(), 1
    with ExitStack() as stack:
        injector.install(points, stack)
        async with _pair(tmp_path) as pair:
            injector.arm(points, for_all_peers=True)
            while injector.armed and version < MAX_VERSIONS:
                num_left = len(injector.armed)
                await pair.offer(version, os.urandom(NUM_BYTES))
                offered = version
                await eventually(lambda num=num_left, v=offered: len(injector.armed) < num or pair.served[-1:] == [v])
                version += 1
            assert not injector.armed, f"not reached: {sorted(injector.armed)}"
            await pair.offer(version, os.urandom(NUM_BYTES))
            await eventually(lambda: pair.served[-1:] == [version])
            faults = (
                pair.generator.gossip.guard.num_faults if points is GENERATORS else pair.learner.gossip.guard.num_faults
            )
            assert faults == {Place.WEIGHTS if points is GENERATORS else Place.SERVE: len(points)}
