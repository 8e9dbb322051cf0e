"""Small swarms in virtual time meet the claims about scale; a claim fails if the mechanism behind it is off."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from ftis_node.swarm.demand import is_assigned
from swarm_simulation import SimulationSettings, simulate
from swarm_simulation.announcement import AnnouncementEvent
from swarm_simulation.settings import copies_of, shards_for, simulated_shards_for

SMALL = SimulationSettings(
    num_nodes=30, minutes=3.0, num_shards=1, warm_up_s=60.0, settle_s=75.0, step_s=50.0, leave_share_per_hour=1.0,
    num_observed=2,
)  # fmt: skip


@pytest.fixture(scope="module")
def small():
    return simulate(SMALL)


def test_a_small_swarm_with_attackers_meets_the_claims(small):
    assert small.num_groups > 200 and small.pulled_share > 0.99
    assert 0 < small.top_share_of_cap <= 1.0 and small.full_steps_share > 0.97


def test_traffic_and_memory_per_node_hardly_grow_with_the_swarm(small):
    larger = simulate(replace(SMALL, num_nodes=120, num_shards=4, num_simulated_shards=2, announcements_per_s=10.0))
    assert larger.num_simulated < 80 and larger.pulled_share > 0.99
    assert larger.received_in_all < 1.5 * small.received_in_all
    assert larger.memory_bytes < 1.5 * small.memory_bytes


def test_without_assignment_many_groups_are_not_pulled():
    honest = replace(SMALL, attackers_share=0.0)
    assert simulate(honest).pulled_share > 0.995
    assert simulate(replace(honest, with_assignment=False)).pulled_share < 0.9


def test_a_seed_gives_the_same_swarm_in_another_process():
    """Another hash seed changes the order of sets of texts and bytes."""
    output = "print(simulate(replace(SMALL, attackers_share=0.3)).without_clock())"
    script = f"from dataclasses import replace; from tests.bench.test_simulation import SMALL, simulate; {output}"
    outputs = {
        subprocess.run(
            [sys.executable, "-c", script],
            env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            cwd=Path(__file__).parents[2],
            check=True,
            capture_output=True,
        ).stdout
        for seed in ("0", "1")
    }
    assert len(outputs) == 1


def test_peers_that_serve_invalid_groups_are_banned_and_honest_ones_are_not():
    figures = simulate(replace(SMALL, num_nodes=12, minutes=5.0, attackers_share=0.25))
    assert figures.bans_share["garbage"] > 0.9 and figures.bans_share["honest"] == 0.0


def test_the_fast_assignment_equals_the_policy():
    random = Random(3)
    peers = [f"peer-{number}" for number in range(14)]
    num_assigned = 0
    for attempt in range(300):
        views = tuple(frozenset(random.sample(peers, random.randint(0, 13))) for _ in range(3))
        group_id, sender = random.randbytes(32), peers[0]
        call = AnnouncementEvent(group_id, sender, views, shard=0, attempt=attempt % 5, num_bytes=1.0)
        for view, members in enumerate(views):
            for peer in peers[1:]:
                expected = is_assigned(group_id, peer, members - {sender}, attempt=attempt % 5)
                assert call.is_assigned(peer, view=view) == expected
                num_assigned += expected
    assert num_assigned > 300


def test_the_number_of_shards_grows_with_the_swarm():
    assert [shards_for(size) for size in (10, 1000, 2000, 5000, 10000)] == [8, 8, 16, 32, 64]
    assert simulated_shards_for(10000, 64, most_nodes=1000) == 6
    assert simulated_shards_for(100, 8, most_nodes=1000) == 8
    assert [copies_of(1), copies_of(2), copies_of(8), copies_of(1000)] == [0.0, 1.0, 5.7, 8.7]
