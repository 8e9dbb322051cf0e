"""The choice of the groups of a step."""

from ftis_node.replay.group_choice import choose_sapo, has_signal
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
