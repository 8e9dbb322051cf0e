"""Delays in virtual time: the parsing of a spec, and the version that a generator serves."""

import random

import pytest

from ftis_node.config.delay import Delay, parse_delay
from ftis_node.errors import UsageError
from ftis_node.lab.experiment.specs import NO_DELAY, delay_alone, parse_delays
from ftis_node.swarm.transit import VersionsInTransit


def served(delay: Delay, steps: int) -> list[int]:
    transit = VersionsInTransit(delay, random.Random(3))
    versions = []
    for step in range(1, steps + 1):
        transit.send(step, at=step)
        transit.receive(step)
        versions.append(transit.served)
    return versions


def test_a_fixed_delay_is_a_number_of_steps():
    assert served(parse_delay("fixed:3"), 6) == [0, 0, 0, 1, 2, 3]


def test_the_served_version_never_decreases():
    versions = served(parse_delay("lognormal:1-16"), 200)
    assert versions == sorted(versions)
    lags = [step - version for step, version in enumerate(versions, start=1)]
    assert min(lags) >= 1
    assert max(lags) <= 16
    assert len(set(lags[20:])) > 2  # the delay varies


@pytest.mark.parametrize(
    ("spec", "of_all", "of_last", "alone"),
    [
        ("none", NO_DELAY, None, "none"),
        ("fixed:3", Delay(3, 3), None, "fixed:3"),
        ("fixed:3@peer", NO_DELAY, Delay(3, 3), "none"),
        ("lognormal:1-64@peer", NO_DELAY, Delay(1, 64), "none"),
    ],
)
def test_a_delay_applies_to_all_nodes_or_to_the_last(spec, of_all, of_last, alone):
    assert parse_delays(spec) == (of_all, of_last)
    assert delay_alone(spec) == alone


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("later", "invalid delay 'later': use none, fixed:K or lognormal:MIN-MAX, in steps; DELAY@peer"),
        ("fixed:3@pear", "invalid delay 'fixed:3@pear'"),
        ("lognormal:9-8@peer", "0 < MIN <= MAX"),
        ("@peer", "invalid delay ''"),
        ("none@peer", "'none@peer': a late peer needs a delay above 0"),
    ],
)
def test_an_invalid_delay_of_a_peer_is_refused_in_one_line(spec, words):
    with pytest.raises(UsageError) as refusal:
        parse_delays(spec)
    assert words in str(refusal.value)
    assert "\n" not in str(refusal.value)
