"""The bounded sets of ids by peer behind claims and confirmations."""

import random
from collections import Counter

from ftis_node.swarm.lru import IdsByPeer


def test_a_full_set_first_drops_ids_of_the_peer_with_most():
    sent = IdsByPeer(capacity=10)
    sent.add("honest", b"x")
    for number in range(1000):
        sent.add("greedy", number.to_bytes(2, "big"))
    assert len(sent) == 10
    assert sent.has("honest", b"x")
    assert sent.has("greedy", (999).to_bytes(2, "big"))
    for number in range(100):
        sent.add(f"identity {number}", b"x")
    assert len(sent) == 10


class _Counted(str):
    """A peer id that counts how often its hash is used."""

    num_hashes = 0

    def __hash__(self) -> int:
        _Counted.num_hashes += 1
        return super().__hash__()


def test_an_id_of_one_of_many_peers_is_added_in_constant_time_and_drops_one_of_the_peer_with_most():
    ids, draws, held = IdsByPeer(capacity=1000), random.Random(1), Counter[str]()
    peers = [_Counted(f"peer {number}") for number in range(900)]
    for number in range(5000):
        peer = peers[min(draws.randrange(900), draws.randrange(900))] if number % 3 else peers[draws.randrange(3)]
        before = _Counted.num_hashes
        dropped = ids.add(peer, b"%d of " % number + peer.encode())
        assert _Counted.num_hashes - before < 30
        held[str(peer)] += 1
        if dropped is not None:
            owner = dropped.decode().partition(" of ")[2]
            assert held[owner] == max(held.values())
            held[owner] -= 1
        if number % 7 == 0:
            held.subtract(str(taken) for taken, _ in ids.take(1))
    assert len(ids) == held.total() > 900


def test_claims_are_bounded_and_peers_take_turns():
    claims = IdsByPeer(capacity=6)
    claims.add("honest", b"x")
    for number in range(100):
        claims.add("loud", bytes([number]))
    claims.add("loud", bytes([99]))
    assert (len(claims), claims.take(8)) == (6, [("honest", b"x"), ("loud", bytes([95]))])
    claims.add("late", b"y")
    assert (claims.take(1), claims.take(1)) == ([("loud", bytes([96]))], [("late", b"y")])
    assert [claims.take(1) for _ in range(3)] == [[("loud", bytes([number]))] for number in (97, 98, 99)]
    assert claims.take(8) == []


def test_all_ids_of_a_peer_are_taken_at_once_and_peers_take_turns():
    ids = IdsByPeer(capacity=100)
    for peer, group_id in (("a", b"1"), ("b", b"2"), ("a", b"3")):
        ids.add(peer, group_id)
    assert ids.take_of_next(lambda peer: True, most=64) == ("a", [b"1", b"3"])
    ids.add("a", b"4")
    assert ids.take_of_next(lambda peer: True, most=64) == ("b", [b"2"]), "b comes before a, which just had its turn"
    assert ids.take_of_next(lambda peer: peer != "a", most=64) is None
    assert ids.take_of_next(lambda peer: True, most=64) == ("a", [b"4"])
    assert len(ids) == 0


def test_ids_beyond_one_message_wait_for_the_next_turn():
    ids = IdsByPeer(capacity=100)
    for peer, group_id in (("a", b"1"), ("a", b"2"), ("a", b"3"), ("b", b"4")):
        ids.add(peer, group_id)
    taken = [ids.take_of_next(lambda peer: True, most=2) for _ in range(4)]
    assert taken == [("a", [b"1", b"2"]), ("b", [b"4"]), ("a", [b"3"]), None]
