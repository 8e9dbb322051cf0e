"""Who must go when the buffer is full, whose turn it is, and what is most useful: one loud peer pushes out its own."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

from ftis_node.replay.lifecycle import Candidate, choose_evicted, choose_foreign, choose_useful
from ftis_node.swarm.demand import OwnDomain
from ftis_node.swarm.rate_limits import ShareCap


def groups(sender: str, count: int, *, start: int = 0) -> list[Candidate]:
    return [
        Candidate(
            id=f"{sender}{i}".encode(), sender=sender, own=sender == "me", arrival=i, created_at=float(start + i),
            policy_version=0,
        )
        for i in range(count)
    ]  # fmt: skip


def kept(candidates: list[Candidate], evicted: list[Candidate]) -> Counter[str]:
    return Counter(c.sender for c in candidates) - Counter(c.sender for c in evicted)


def test_a_loud_peer_pushes_out_its_own_oldest_though_others_are_older() -> None:
    ready = groups("ann", 3) + groups("bob", 3) + groups("loud", 40, start=1000) + groups("me", 9)
    evicted = choose_evicted(ready, keep=12, cap=ShareCap(share=0.25))
    assert kept(ready, evicted) == {"ann": 3, "bob": 3, "loud": 4, "me": 9}, "a third of the places, of three peers"
    assert {c.arrival for c in ready if c.sender == "loud"} - {c.arrival for c in evicted} == {36, 37, 38, 39}


def test_the_only_peer_may_hold_all_and_one_of_many_its_share() -> None:
    only = groups("ann", 20)
    assert kept(only, choose_evicted(only, keep=12, cap=ShareCap(share=0.25))) == {"ann": 12}
    many = [c for name in "abcdefgh" for c in groups(name, 1)] + groups("loud", 40)
    assert kept(many, choose_evicted(many, keep=40, cap=ShareCap(share=0.25)))["loud"] == 10
    trusted = ShareCap(share=0.25, trusted_share=0.5, trusted=frozenset({"loud"}))
    assert kept(many, choose_evicted(many, keep=40, cap=trusted))["loud"] == 20


def test_of_peers_within_their_shares_the_oldest_of_who_has_most_go() -> None:
    ready = groups("ann", 5) + groups("bob", 5, start=1000) + groups("cat", 4)
    evicted = choose_evicted(ready, keep=12, cap=ShareCap(share=0.5))
    assert {(c.sender, c.arrival) for c in evicted} == {("ann", 0), ("bob", 0)}


def test_nobody_goes_while_there_is_room() -> None:
    ready = groups("ann", 3) + groups("bob", 2)
    assert choose_evicted(ready, keep=12, cap=ShareCap(share=0.25)) == []


def test_many_identities_at_one_address_are_one_neighbor() -> None:
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


def test_large_groups_count_by_their_bytes_and_whoever_has_most_gives_first() -> None:
    small, large = groups("small", 6), [replace(c, num_bytes=1000) for c in groups("large", 6)]
    ready = [replace(c, num_bytes=10) for c in small + groups("me", 3)] + large
    evicted = choose_evicted(ready, keep=100, keep_bytes=2100, cap=ShareCap(share=1.0))
    assert kept(ready, evicted) == {"small": 6, "large": 2, "me": 3}
    assert {c.arrival for c in evicted} == {0, 1, 2, 3}, "the oldest of them"
    assert len(choose_evicted(ready, keep=100, keep_bytes=0, cap=ShareCap(share=1.0))) == 12, "never own ones"


def scored(sender: str, *num_right: int, task: str = "add", start: int = 0) -> list[Candidate]:
    """Groups of four completions, so many of each right; each by newer weights than the one before."""
    rewards = [tuple(float(place < right) for place in range(4)) for right in num_right]
    return [
        replace(c, id=f"{task}{i}".encode() + c.id, task=task, rewards=rewards[i], policy_version=i)
        for i, c in enumerate(groups(sender, len(num_right), start=start))
    ]


def test_the_most_useful_are_taken_and_the_others_discarded() -> None:
    mine = scored("me", 4, 2, 0)
    ann, bob, cat = scored("ann", 2), scored("bob", 1, task="sub"), scored("cat", 1)
    dan = scored("dan", 4, task="sub", start=9)
    ready = [*dan, *mine[::-1], *cat, *ann, *bob]  # 0, own, 0.1875 / 4, 0.25 / 4, 0.1875
    for num, taken in ((0, []), (1, bob), (2, [*bob, *ann]), (3, [*bob, *ann, *cat]), (9, [*bob, *ann, *cat, *dan])):
        selection = choose_useful(ready, 2, num, pass_rates={"add": 0.75})
        assert selection.taken == (*mine[:2], *taken)
        assert {c.sender for c in selection.discarded} == {"ann", "bob", "cat", "dan"} - {c.sender for c in taken}
    assert choose_useful(ready, 0, 1, pass_rates={"add": 0.2, "sub": 0.5}).taken == (*ann,), "0.2 and 0.09375"
    assert choose_useful([], 2, 2, pass_rates={}).taken == ()


def test_what_looks_most_useful_is_at_most_an_even_share_while_others_have_some() -> None:
    ready = scored("liar", *[2] * 10, start=1000) + scored("ann", 1, 1, 1) + scored("bob", 3) + scored("cat", 0, 4)

    def of(num: int) -> Counter[str]:
        return Counter(c.sender for c in choose_useful(ready, 0, num, pass_rates={}).taken)

    assert of(1) == {"liar": 1}
    assert of(3) == {"liar": 1, "ann": 1, "bob": 1}
    assert of(4) == {"liar": 2, "ann": 1, "bob": 1}
    assert of(6) == {"liar": 3, "ann": 2, "bob": 1}, "what bob has not got goes to the best of the others"
    assert of(14) == {"liar": 10, "ann": 3, "bob": 1}, "cat's groups teach nothing"
    assert of(15) == {"liar": 10, "ann": 3, "bob": 1, "cat": 1}


def test_identities_at_one_address_have_one_even_share_of_what_is_useful() -> None:
    fakes = [f"fake{i}" for i in range(20)]
    cap = ShareCap(networks=dict.fromkeys(fakes, "8.8.8.0/24"))
    ready = [c for name in fakes for c in scored(name, 2)] + scored("ann", 1, 1, 1) + scored("bob", 1, 1, 1)
    chosen = choose_useful(ready, 0, 6, pass_rates={}, neighbor=cap.neighbor).taken
    assert Counter(c.sender[:4] for c in chosen) == {"fake": 2, "ann": 2, "bob": 2}


def test_of_what_is_as_useful_the_newest_weights_come_first_and_another_sender_begins_each_time() -> None:
    ready = scored("ann", 2, 2, start=100) + scored("bob", 2, 2) + scored("cat", 1, 2) + scored("dan", 3, 2)
    ready = [replace(c, created_at=-c.created_at) for c in ready]  # what a clock says does not count
    for turn in range(8):
        chosen = choose_useful(ready, 0, 5, pass_rates={}, turn=turn).taken
        counts = Counter(c.sender for c in chosen)
        assert sorted(counts.values()) == [1, 1, 1, 2]
        assert {(c.sender, c.arrival) for c in chosen} >= {(name, 1) for name in counts}
        random.Random(turn).shuffle(ready)
        assert choose_useful(ready, 0, 5, pass_rates={}, turn=turn).taken == chosen
    left_out = [
        {"ann", "bob", "cat", "dan"} - {c.sender for c in choose_useful(ready, 0, 3, pass_rates={}, turn=turn).taken}
        for turn in range(4)
    ]
    assert sorted(left_out, key=str) == [{"ann"}, {"bob"}, {"cat"}, {"dan"}]


def test_a_domain_comes_before_usefulness_but_not_before_a_signal() -> None:
    near, far = scored("ann", 1, 4, 4), scored("bob", 2, 2, 2, task="sub")
    for share, expected in ((1.0, {"ann": 1, "bob": 1}), (0.5, {"ann": 1, "bob": 1}), (0.0, {"bob": 2})):
        domain = OwnDomain(frozenset({"add"}), share)
        chosen = choose_useful(near + far, 0, 2, pass_rates={"add": 0.9}, domain=domain, turn=1).taken
        assert Counter(c.sender for c in chosen) == expected
