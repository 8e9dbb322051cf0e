"""Swarm SAPO's choice of groups."""

from __future__ import annotations

import pytest

from ftis_node.algorithms import GroupChoice, choose_groups

DEAD, ALIVE = (1.0, 1.0), (0.0, 1.0)


def test_groups_that_teach_nothing_are_never_chosen() -> None:
    choice = choose_groups([DEAD, ALIVE, DEAD], [ALIVE, (0.5,), (), ALIVE], seed=0)
    assert choice == GroupChoice(own=(1,), foreign=(0, 3))


def test_the_wanted_numbers_without_repeats() -> None:
    choice = choose_groups([ALIVE] * 9, [ALIVE] * 7, num_own=3, num_foreign=5, seed=1)
    assert (len(set(choice.own)), len(set(choice.foreign))) == (3, 5)
    assert max(choice.own) < 9
    assert max(choice.foreign) < 7


def test_a_gap_on_one_side_is_not_filled_from_the_other() -> None:
    choice = choose_groups([ALIVE] * 9, [DEAD] * 9, num_own=4, num_foreign=4, seed=2)
    assert (len(choice.own), choice.foreign) == (4, ())


def test_the_seed_decides() -> None:
    choices = [choose_groups([ALIVE] * 30, [ALIVE] * 30, seed=seed) for seed in (3, 3, 4)]
    assert choices[0] == choices[1] != choices[2]


def test_sampling_is_uniform() -> None:
    num_draws = 3000
    counts = [0] * 6
    for seed in range(num_draws):
        for position in choose_groups([ALIVE] * 6, [], num_own=2, seed=seed).own:
            counts[position] += 1
    # Each is chosen with probability 1/3: 1000 of 3000, standard deviation 26.
    assert all(abs(count - num_draws / 3) < 130 for count in counts)


def test_negative_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="num_own"):
        choose_groups([ALIVE], [ALIVE], num_own=-1, seed=0)
