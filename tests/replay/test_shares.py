"""Who must go when the buffer is full, and whose turn it is: one loud peer pushes out its own."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from ftis_node.replay.lifecycle import Candidate, choose_evicted, choose_foreign
from ftis_node.swarm.quotas import ShareCap


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


def test_many_identities_at_one_address_are_one_neighbour() -> None:
    fakes = [f"fake{i}" for i in range(20)]
    cap = ShareCap(share=0.25, networks=dict.fromkeys(fakes, "8.8.8.0/24"))
    ready = [c for name in fakes for c in groups(name, 2, start=1000)]
    ready += [c for name in ("ann", "bob", "cat") for c in groups(name, 6)]
    after = kept(ready, choose_evicted(ready, keep=24, cap=cap))
    assert (after["ann"], after["bob"], after["cat"]) == (6, 6, 6)
    assert sum(after[name] for name in fakes) == 6
    chosen = Counter(c.sender for c in choose_foreign(ready, 8, neighbour=cap.neighbour))
    assert sum(chosen[name] for name in fakes) == 2
    assert max(chosen[name] for name in fakes) == 1


def test_large_groups_count_by_their_bytes_and_whoever_has_most_gives_first() -> None:
    small, large = groups("small", 6), [replace(c, num_bytes=1000) for c in groups("large", 6)]
    ready = [replace(c, num_bytes=10) for c in small + groups("me", 3)] + large
    evicted = choose_evicted(ready, keep=100, keep_bytes=2100, cap=ShareCap(share=1.0))
    assert kept(ready, evicted) == {"small": 6, "large": 2, "me": 3}
    assert {c.arrival for c in evicted} == {0, 1, 2, 3}, "the oldest of them"
    assert len(choose_evicted(ready, keep=100, keep_bytes=0, cap=ShareCap(share=1.0))) == 12, "never own ones"
