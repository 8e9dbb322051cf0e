"""The choice of the groups of a step."""

from hypothesis import given
from hypothesis import strategies as st

from ftis_node.replay.group_choice import choose_sapo, has_signal, split_foreign
from ftis_node.swarm.demand import OwnDomain
from tests.replay.test_shares import scored


def places(selection):
    return [(c.sender, c.arrival) for c in selection.taken]


def test_groups_without_a_signal_are_never_chosen():
    groups = scored("me", 4, 1, 0) + scored("ann", 1, 0, 4, 3)
    chosen = choose_sapo(groups, 4, 4, seed=0)
    assert places(chosen) == [("me", 1), ("ann", 0), ("ann", 3)]
    assert set(chosen.taken + chosen.discarded) == set(groups)
    assert not any(map(has_signal, [(), (0.5,), (1.0, 1.0)]))


def test_missing_foreign_groups_are_not_replaced_by_own_groups():
    groups = scored("me", *[1] * 9) + scored("ann", *[0] * 9)
    assert [sender for sender, _ in places(choose_sapo(groups, 4, 4, seed=2))] == ["me"] * 4


def test_the_seed_decides():
    groups = scored("me", *[1] * 30) + scored("ann", *[1] * 30)
    choices = [places(choose_sapo(groups, 3, 5, seed=seed)) for seed in (3, 3, 4)]
    assert choices[0] == choices[1] != choices[2]
    assert [sender for sender, _ in choices[0]] == ["me"] * 3 + ["ann"] * 5


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
    near = scored("ann", 1, 1, 1, 1, 0, task="near")
    groups = near + scored("bob", *[1] * 8, 0, 0, task="far")
    for num, share, expected in ((4, 0.75, 3), (6, 1.0, 4)):
        taken = choose_sapo(groups, 0, num, seed=5, domain=OwnDomain(tasks=frozenset({"near"}), share=share)).taken
        assert [len(taken), sum(c in near for c in taken)] == [num, expected]
