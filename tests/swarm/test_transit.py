"""Weight versions in transit, and which of them a generator fetches and a learner keeps."""

import random

import pytest

from ftis_node.config.roles import parse_delay
from ftis_node.errors import ConfigError
from ftis_node.swarm.transit import VersionsInTransit, outdated_offers, should_fetch


def test_a_version_arrives_after_its_delay_and_never_after_a_newer_one():
    transit = VersionsInTransit(parse_delay("fixed:2.5", unit="seconds"), random.Random(0))
    for version, at in ((1, 10.0), (2, 11.0), (3, 12.0)):
        transit.send(version, at=at)
    assert transit.receive(12.4) is None
    assert transit.receive(13.9) == 2, "the newest that has arrived"
    assert transit.versions == [3]
    assert transit.receive(13.9) is None
    transit.send(1, at=0.0)
    assert transit.receive(20.0) == 3
    transit.send(1, at=0.0)
    assert transit.receive(99.0) is None, "an older version never replaces a newer one"
    transit.send(4, at=99.0)
    assert transit.go_back(2) == [4]
    transit.send(2, at=99.0)
    assert transit.receive(200.0) == 2, "the learner has lost the versions from there on"


def test_a_delay_in_seconds_is_not_rounded():
    delay = parse_delay("lognormal:0.5-1800", unit="seconds")
    drawn = [delay.draw(random.Random(seed)) for seed in range(200)]
    assert min(drawn) >= 0.5
    assert max(drawn) <= 1800
    assert all(one != round(one) for one in drawn if 0.5 < one < 1800)


@pytest.mark.parametrize("spec", ["fixed:1801", "lognormal:0-8", "lognormal:1-1800.5", "fixed:-1", "uniform:1-2"])
def test_an_invalid_delay_in_seconds_is_refused(spec):
    with pytest.raises(ConfigError):
        parse_delay(spec, unit="seconds", most=1800)


def test_versions_in_transit_are_spread_over_a_long_delay():
    delay = parse_delay("fixed:100", unit="seconds")
    transit, held_at, most = VersionsInTransit(delay, random.Random(0)), -1e9, 0
    ages = []
    made_at: dict[int, float] = {}
    for now in range(1000):  # one version per second
        if should_fetch(delay, num_held=len(transit.versions), max_held=4, since_last=now - held_at):
            transit.send(now + 1, at=now)
            made_at[now + 1], held_at = now, now
        most = max(most, len(transit.versions))
        transit.receive(now)
        if transit.served:
            ages.append(now - made_at[transit.served])
    assert most <= 4
    assert min(ages) == 100
    assert max(ages) <= 130, "without spreading, a version is served for nearly another delay"


def test_a_learner_keeps_the_newest_versions_and_those_being_fetched():
    requested_at = {1: 90.0, 2: 0.0, 3: 95.0, 4: 99.0, 5: 0.0, 6: 0.0}
    assert outdated_offers(requested_at, now=100.0, max_offered=8) == [2]
    assert outdated_offers(requested_at, now=100.0, max_offered=4) == [2, 1]
    assert outdated_offers(requested_at, now=200.0, max_offered=8) == [4, 3, 2, 1]
