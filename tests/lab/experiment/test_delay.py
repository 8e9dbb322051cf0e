"""Delays in steps, of all nodes or of the last one."""

import random

import pytest

from ftis_node.config.delay import Delay, parse_delay
from ftis_node.errors import UsageError
from ftis_node.lab.experiment.specs import NO_DELAY, delay_alone, parse_delays


def test_a_delay_is_a_whole_number_of_steps():
    drawn = {parse_delay("lognormal:1-16").draw(random.Random(seed)) for seed in range(100)}
    assert len(drawn) > 2 and drawn <= set(range(1, 17))


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
