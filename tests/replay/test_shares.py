"""Which groups a full buffer evicts, and which a step takes: a peer with many groups displaces only its own."""

import itertools
import sqlite3
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest

from ftis_node.node.training.step_groups import TrainGroupBuilder
from ftis_node.records.group import PromptRef
from ftis_node.records.identity import Identity
from ftis_node.replay.buffer import ReplayBuffer
from ftis_node.replay.group_choice import (
    MAX_PER_PROBLEM,
    Candidate,
    choose_evicted,
    choose_foreign,
    choose_newest,
    choose_own,
    choose_same_prompts,
    choose_sapo,
)
from ftis_node.swarm.rate_limits import ShareCap
from ftis_node.tasks.arithmetic import ArithmeticTask
from tests.conftest import problem_hash
from tests.replay.test_buffer import ANN, BOB, ME, accepted

PROBLEMS = itertools.count()  # each group is about another one


def groups(sender: str, count: int, *, start: int = 0) -> list[Candidate]:
    return [
        Candidate(
            id=f"{sender}{i}".encode(), sender=sender, own=sender == "me", arrival=i, created_at=float(start + i),
            policy_version=0, problem=b"%d" % next(PROBLEMS),
        )
        for i in range(count)
    ]  # fmt: skip


def kept(candidates: list[Candidate], evicted: list[Candidate]) -> Counter[str]:
    return Counter(c.sender for c in candidates) - Counter(c.sender for c in evicted)


def test_a_busy_peers_oldest_groups_are_evicted_before_older_ones_of_others():
    ready = groups("ann", 3) + groups("bob", 3) + groups("busy", 40, start=1000) + groups("me", 9)
    evicted = choose_evicted(ready, keep=12, cap=ShareCap(share=0.25))
    assert kept(ready, evicted) == {"ann": 3, "bob": 3, "busy": 4, "me": 9}, "a third for each of three peers"
    assert {c.arrival for c in ready if c.sender == "busy"} - {c.arrival for c in evicted} == {36, 37, 38, 39}


def test_a_single_peer_may_fill_the_buffer_and_one_of_many_its_share():
    only = groups("ann", 20)
    assert kept(only, choose_evicted(only, keep=12, cap=ShareCap(share=0.25))) == {"ann": 12}
    many = [c for name in "abcdefgh" for c in groups(name, 1)] + groups("busy", 40)
    assert kept(many, choose_evicted(many, keep=40, cap=ShareCap(share=0.25)))["busy"] == 10
    trusted = ShareCap(share=0.25, trusted_share=0.5, trusted=frozenset({"busy"}))
    assert kept(many, choose_evicted(many, keep=40, cap=trusted))["busy"] == 20


def test_within_the_shares_the_oldest_groups_of_the_peers_with_most_are_evicted():
    ready = groups("ann", 5) + groups("bob", 5, start=1000) + groups("cat", 4)
    evicted = choose_evicted(ready, keep=12, cap=ShareCap(share=0.5))
    assert {(c.sender, c.arrival) for c in evicted} == {("ann", 0), ("bob", 0)}


def test_many_identities_in_one_network_share_one_part():
    fakes = [f"fake{i}" for i in range(20)]
    cap = ShareCap(share=0.25, networks=dict.fromkeys(fakes, "8.8.8.0/24"))
    ready = [c for name in fakes for c in groups(name, 2, start=1000)]
    ready += [c for name in ("ann", "bob", "cat") for c in groups(name, 6)]
    after = kept(ready, choose_evicted(ready, keep=24, cap=cap))
    assert (after["ann"], after["bob"], after["cat"]) == (6, 6, 6)
    assert sum(after[name] for name in fakes) == 6
    chosen = Counter(c.sender for c in choose_foreign(ready, 8, neighbor=cap.neighbor))
    assert sum(chosen[name] for name in fakes) == 2
    assert max(chosen[name] for name in fakes) == 1


def test_groups_of_the_peer_with_most_bytes_are_evicted_first():
    small, large = groups("small", 6), [replace(c, num_bytes=1000) for c in groups("large", 6)]
    ready = [replace(c, num_bytes=10) for c in small + groups("me", 3)] + large
    evicted = choose_evicted(ready, keep=100, keep_bytes=2100, cap=ShareCap(share=1.0))
    assert kept(ready, evicted) == {"small": 6, "large": 2, "me": 3}
    assert {c.arrival for c in evicted} == {0, 1, 2, 3}, "its oldest groups"
    assert len(choose_evicted(ready, keep=100, keep_bytes=0, cap=ShareCap(share=1.0))) == 12, "never own groups"


def scored(sender: str, *num_right: int, start: int = 0) -> list[Candidate]:
    """Return groups of four completions with `num_right` right ones each; each group is from newer weights."""
    rewards = [tuple(float(place < right) for place in range(4)) for right in num_right]
    return [
        replace(c, id=f"{i}".encode() + c.id, rewards=rewards[i], policy_version=i)
        for i, c in enumerate(groups(sender, len(num_right), start=start))
    ]


def test_identities_in_one_network_get_one_even_share_together():
    fakes = [f"fake{i}" for i in range(20)]
    cap = ShareCap(networks=dict.fromkeys(fakes, "8.8.8.0/24"))
    ready = [c for name in fakes for c in scored(name, 2)] + scored("ann", 1, 1, 1) + scored("bob", 1, 1, 1)
    chosen = choose_newest(ready, 0, 6, neighbor=cap.neighbor).taken
    assert Counter(c.sender[:4] for c in chosen) == {"fake": 2, "ann": 2, "bob": 2}


def test_senders_take_turns_and_their_newest_groups_come_first():
    own = groups("me", 1)
    candidates = groups("busy", 6) + groups("quiet", 1) + own
    chosen = choose_foreign(candidates, 4)
    assert [(c.sender, c.arrival) for c in chosen] == [("busy", 5), ("quiet", 0), ("busy", 4), ("busy", 3)]
    assert choose_own(candidates, 4) == own


def test_groups_of_one_millisecond_are_chosen_by_their_senders_count_not_by_arrival():
    ready = [replace(c, created_at=0.0, number=c.arrival) for c in scored("ann", *[2] * 9)]
    swapped = [replace(c, arrival=-c.arrival) for c in ready]
    for rule in (choose_newest, partial(choose_sapo, seed=1)):
        assert [c.id for c in rule(ready, 0, 3).taken] == [c.id for c in rule(swapped, 0, 3).taken]
    assert [c.number for c in choose_newest(swapped, 0, 3).taken] == [8, 7, 6]


def about(problem: int, ready: list[Candidate]) -> list[Candidate]:
    rewards = (0.0, 1.0)
    return [replace(c, id=c.id + b"%d" % problem, problem=b"of %d" % problem, rewards=rewards) for c in ready]


def test_a_sender_has_one_place_per_problem_in_a_step_and_two_in_the_buffer():
    own = about(7, groups("me", 5))
    ready = own + about(7, groups("one", 40, start=100)) + about(7, groups("ann", 1)) + about(8, groups("ann", 1))
    once = dict.fromkeys((("one", b"7"), ("ann", b"7"), ("ann", b"8")), 1)
    for rule in (choose_newest, choose_same_prompts, partial(choose_sapo, seed=1)):
        assert Counter((c.sender, c.problem[3:]) for c in rule(ready, 0, 8).taken) == once
    newest = choose_newest(ready, 0, 8).taken
    assert [c.arrival for c in newest if c.sender == "one"] == [39]
    evicted = choose_evicted(ready, keep=100, cap=ShareCap())
    assert kept(ready, evicted) == {"me": 5, "one": 2, "ann": 2}
    assert {c.arrival for c in ready if c.sender == "one"} - {c.arrival for c in evicted} == {38, 39}


def test_groups_of_two_senders_about_one_problem_share_a_step_only_if_there_are_no_others():
    """A copy of a likely answer cannot be detected; it replaces the original, and both are not used together."""
    honest = [c for problem in range(4) for c in about(problem, groups("ann", 1, start=problem))]
    copies = [replace(c, sender="thief", id=b"copy" + c.id) for c in honest]
    chosen = choose_newest(honest + copies, 0, 4)
    assert sorted(c.problem for c in chosen.taken) == [b"of 0", b"of 1", b"of 2", b"of 3"]
    assert len(choose_newest(honest + copies, 0, 8).taken) == 8, "no other problems are left"
    together = choose_same_prompts(about(2, groups("me", 1)) + honest + copies, 1, 2).taken
    in_the_horizontal_mode = {(c.sender, c.problem) for c in together}
    assert in_the_horizontal_mode == {(name, b"of 2") for name in ("me", "ann", "thief")}


INDICES = (69, 382, 691, 754, 1641)


def admit(buffer: ReplayBuffer, identity: Identity, *indices: int) -> None:
    for at, index in enumerate(indices):
        changes = {"prompt_ref": PromptRef("arithmetic", "train", index), "problem_hash": problem_hash(index)}
        assert buffer.admit(accepted(identity, 10 + at, **changes), own=identity is ME)


def test_the_indices_have_one_text():
    assert {ArithmeticTask()[index].prompt[-1]["content"] for index in INDICES} == {"45+20="}


@pytest.mark.parametrize("rule", [choose_newest, choose_same_prompts])
def test_other_indices_of_one_text_get_one_place_in_a_step(buffer, rule):
    admit(buffer, ANN, *INDICES)
    assert [group.number for group in buffer.take(1, own=0, foreign=8, rule=rule).groups] == [14]


def test_other_indices_of_one_text_get_two_places_in_the_buffer(buffer):
    admit(buffer, ANN, *INDICES, 5)
    admit(buffer, BOB, *INDICES[:1])
    assert len(buffer.evict_foreign(keep=100)) == len(INDICES) - MAX_PER_PROBLEM
    assert Counter(group.sender for group in buffer._candidates()) == {ANN.peer_id: 3, BOB.peer_id: 1}


def test_answers_to_one_text_are_compared_in_the_horizontal_mode(buffer):
    admit(buffer, ME, 69)
    admit(buffer, ANN, 7, 382)
    taken = buffer.take(1, own=1, foreign=1, rule=choose_same_prompts).groups
    assert [group.prompt_ref.index for group in taken] == [69, 382]
    assert len({TrainGroupBuilder("horizontal").build(group).advantage_key for group in taken}) == 1


def test_a_changed_problem_is_damage(path, buffer):
    admit(buffer, ANN, 5)
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE groups SET problem = x'00'")
    connection.close()
    assert len(buffer.release_damaged()) == 1
