"""The choice of the groups of a step."""

from hypothesis import given
from hypothesis import strategies as st

from ftis_node.algorithms.group_choice import GroupChoice, choose_groups, split_foreign

NO_SIGNAL, SIGNAL = (1.0, 1.0), (0.0, 1.0)


def test_groups_without_a_signal_are_never_chosen():
    choice = choose_groups([NO_SIGNAL, SIGNAL, NO_SIGNAL], [SIGNAL, (0.5,), (), SIGNAL], seed=0)
    assert choice == GroupChoice(own=(1,), foreign=(0, 3))


def test_the_requested_numbers_are_chosen_without_repeats():
    choice = choose_groups([SIGNAL] * 9, [SIGNAL] * 7, num_own=3, num_foreign=5, seed=1)
    assert (len(set(choice.own)), len(set(choice.foreign))) == (3, 5)
    assert max(choice.own) < 9
    assert max(choice.foreign) < 7


def test_missing_foreign_groups_are_not_replaced_by_own_groups():
    choice = choose_groups([SIGNAL] * 9, [NO_SIGNAL] * 9, num_own=4, num_foreign=4, seed=2)
    assert (len(choice.own), choice.foreign) == (4, ())


def test_the_seed_decides():
    choices = [choose_groups([SIGNAL] * 30, [SIGNAL] * 30, seed=seed) for seed in (3, 3, 4)]
    assert choices[0] == choices[1] != choices[2]


COUNTS = st.integers(0, 40)
SHARES = st.floats(0, 1)


@given(num=COUNTS, near=COUNTS, far=COUNTS, share=SHARES, turn=st.integers(1, 10_000))
def test_groups_of_either_domain_replace_missing_groups_of_the_other(num, near, far, share, turn):
    taken_near, taken_far = split_foreign(num, num_near=near, num_far=far, share=share, turn=turn)
    assert 0 <= taken_near <= near and 0 <= taken_far <= far
    assert taken_near + taken_far == min(num, near + far)
    if share == 1:
        assert taken_near == min(num, near)
    if share == 0:
        assert taken_far == min(num, far)


@given(num=st.integers(1, 12), share=SHARES, first=st.integers(1, 500), steps=st.integers(1, 60))
def test_over_many_steps_the_share_is_exact_within_one_group(num, share, first, steps):
    taken = [
        split_foreign(num, num_near=num, num_far=num, share=share, turn=turn)[0] for turn in range(first, first + steps)
    ]
    assert max(taken) - min(taken) <= 1
    assert abs(sum(taken) - share * num * steps) < 1 + 1e-6


def test_a_third_of_four_groups_by_hand():
    taken = [split_foreign(4, num_near=9, num_far=9, share=1 / 3, turn=turn) for turn in (1, 2, 3)]
    assert taken == [(1, 3), (1, 3), (2, 2)]
    assert split_foreign(4, num_near=1, num_far=9, share=1.0, turn=1) == (1, 3)
    assert split_foreign(4, num_near=9, num_far=1, share=0.0, turn=1) == (3, 1)


def test_the_domain_share_counts_only_groups_with_a_signal():
    foreign = [SIGNAL] * 12 + [NO_SIGNAL] * 3
    is_near = [position % 3 == 0 for position in range(15)]  # four with a signal, one without
    choice = choose_groups([SIGNAL], foreign, num_foreign=4, seed=5, is_near=is_near, near_share=0.75)
    assert [is_near[position] for position in choice.foreign].count(True) == 3
    choice = choose_groups([SIGNAL], foreign, num_foreign=6, seed=5, is_near=is_near, near_share=1.0)
    assert [is_near[position] for position in choice.foreign].count(True) == 4
    assert len(choice.foreign) == 6
