"""The slots that peers hold: in all, by kind, by peer."""

from ftis_node.swarm.peer_slots import PeerSlots


def test_slots_are_bounded_in_all_and_per_peer():
    slots = PeerSlots()
    assert [slots.take(peer, most=3, per_peer=2) for peer in "aaabb"] == [True, True, False, True, False]
    assert (slots.num_held("a"), slots.num_held(), "c" in slots) == (2, 3, False)
    slots.release("a")
    assert [slots.take("b", most=3, per_peer=2) for _ in range(2)] == [True, False]
    for peer in "abb":
        slots.release(peer)
    assert slots.num_held() == 0 and "a" not in slots


def test_each_kind_has_separate_slots_but_a_peer_has_one_limit():
    slots = PeerSlots()
    assert slots.take("slow", kind="slow", most=1)
    assert not slots.has_free("slower", kind="slow", most=1)
    assert slots.take("quick", kind="quick", most=1)
    assert not slots.take("slow", kind="new", most=1)
    assert slots.num_held("slow", kind="slow") == 1
