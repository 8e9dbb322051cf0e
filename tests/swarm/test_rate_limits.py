"""Limits of peers: token bucket, rates of known and new senders, slots, upload budget, shares of the buffer."""

import pytest

from ftis_node.swarm import rate_limits
from ftis_node.swarm.rate_limits import (
    MAX_WAIT_S,
    PeerSlots,
    Quotas,
    ShareCap,
    TokenBucket,
    UploadBudget,
    minute_buckets,
    subnet_of,
)


@pytest.fixture(autouse=True)
def low_limits(monkeypatch):
    monkeypatch.setattr(rate_limits, "GROUPS_PER_MINUTE", 60.0)
    monkeypatch.setattr(rate_limits, "TOKENS_PER_MINUTE", 6000.0)
    monkeypatch.setattr(rate_limits, "NEW_PEERS_GROUPS_PER_MINUTE", 120.0)
    monkeypatch.setattr(rate_limits, "NEW_PEERS_TOKENS_PER_MINUTE", 1e6)


def spend(quotas: Quotas, peer_id: str, *, groups: int, tokens: int = 1, is_new: bool = False) -> int:
    """Return how many of these groups are allowed, all at time 0."""
    allowed = 0
    for _ in range(groups):
        if quotas.allows(peer_id, is_new_peer=is_new, now=0.0):
            quotas.spend(peer_id, tokens, is_new_peer=is_new, now=0.0)
            allowed += 1
    return allowed


def test_a_sender_may_use_one_minutes_allowance_and_then_its_rate():
    quotas = Quotas()
    assert spend(quotas, "ann", groups=100) == 60
    assert quotas.allows("bob", is_new_peer=False, now=0.0)
    assert not quotas.allows("ann", is_new_peer=False, now=0.9)
    assert quotas.allows("ann", is_new_peer=False, now=1.1)


def test_the_number_of_tokens_is_bounded_too():
    assert spend(Quotas(), "ann", groups=100, tokens=2000) == 3


def test_a_thousand_new_peers_share_one_limit_and_do_not_use_that_of_a_known_peer():
    quotas = Quotas(max_peers=50)
    assert sum(spend(quotas, f"new{i}", groups=2, is_new=True) for i in range(1000)) == 120
    assert not quotas.allows("new5000", is_new_peer=True, now=0.0)
    assert spend(quotas, "ann", groups=100) == 60
    assert len(quotas._groups._senders._buckets) <= 50


def test_no_charge_of_one_peer_locks_all_new_peers_out_for_longer_than_a_minute():
    quotas = Quotas()
    quotas.spend("new", 2**42, is_new_peer=True, now=0.0)
    assert not quotas.allows("other", is_new_peer=True, now=59.0)
    assert quotas.allows("other", is_new_peer=True, now=61.0) and quotas.allows("new", is_new_peer=True, now=61.0)


@pytest.mark.parametrize(
    ("num_peers", "peer", "places"),
    [(1, "ann", 100), (2, "ann", 50), (3, "ann", 33), (4, "ann", 25), (99, "ann", 25), (99, "friend", 50)],
)
def test_few_peers_divide_the_buffer_equally_and_of_many_none_exceeds_its_share(num_peers, peer, places):
    cap = ShareCap(share=0.25, trusted_share=0.5, trusted=frozenset({"friend"}))
    assert cap.places(peer, num_neighbors=num_peers, capacity=100) == places
    assert cap.places(peer, num_neighbors=num_peers, capacity=2) >= 1


@pytest.mark.parametrize(
    ("addresses", "network"),
    [
        (["/ip4/8.8.8.8/tcp/1"], "8.8.8.0/24"),
        (["/ip4/127.0.0.1/tcp/1", "/ip4/10.1.2.3/tcp/1", "/ip4/8.8.4.4/udp/1/quic-v1"], "8.8.4.0/24"),
        (["/ip6/2001:4860:4860::8888/tcp/1"], "2001:4860:4860::/48"),
        (["/ip4/8.8.8.8/tcp/1/p2p/RELAY/p2p-circuit"], None),
        (["/ip4/192.168.1.1/tcp/1", "", "nonsense", "/ip4/x/tcp/1", "/dns4/example.org/tcp/1"], None),
    ],
)
def test_the_subnet_is_that_of_the_first_public_address(addresses, network):
    assert subnet_of(addresses) == network


def test_a_bucket_allows_its_burst_at_once_and_then_the_rate():
    bucket = TokenBucket(rate_per_s=10.0, burst=20.0)
    assert bucket.take(20.0, now=100.0)
    assert not bucket.take(1.0, now=100.0)
    assert bucket.wait_s(5.0, now=100.0) == pytest.approx(0.5)
    assert bucket.take(5.0, now=100.5)
    assert not bucket.take(1.0, now=100.5)


def test_a_bucket_never_holds_more_than_its_burst():
    bucket = TokenBucket(rate_per_s=10.0, burst=20.0)
    bucket.take(20.0, now=0.0)
    assert bucket.left(now=1e6) == 20.0
    assert bucket.wait_s(50.0, now=1e6) == 0.0, "a request above the burst waits for a full bucket only"


def test_a_debt_is_paid_before_more_is_allowed():
    bucket = TokenBucket(rate_per_s=10.0, burst=20.0)
    assert bucket.spend(50.0, now=0.0) == pytest.approx(3.0)
    assert not bucket.take(1.0, now=3.0)
    assert bucket.take(1.0, now=3.1)


def test_each_key_has_its_own_bucket_and_the_one_used_longest_ago_is_dropped():
    buckets = minute_buckets(1, capacity=2)
    for peer in ("ann", "bob", "ann", "carol"):  # ann again, so bob is dropped
        buckets.of(peer).take(1.0, now=0.0)
    assert not buckets.of("ann").take(1.0, now=0.0)
    assert buckets.peek("bob").left(now=0.0) == 1.0, "a query is not remembered"
    assert buckets.of("bob").take(1.0, now=0.0)


def test_slots_are_bounded_in_all_and_per_peer():
    slots = PeerSlots()
    assert [slots.take(peer, "", 3, per_peer=2) for peer in "aaabb"] == [True, True, False, True, False]
    assert (slots.num_held("a"), slots.num_held(), "c" in slots) == (2, 3, False)
    slots.release("a")
    assert [slots.take("b", "", 3, per_peer=2) for _ in range(2)] == [True, False]
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
    assert slots.take("quick", kind="slower", most=1, per_peer=2)
    slots.release("quick", "slower")
    assert slots.num_held("quick", kind="quick") == 1


def budget(*, bytes_per_s: float = 1000, requests: float = 60) -> UploadBudget:
    return UploadBudget(max_bytes_per_s=bytes_per_s, max_requests_per_minute=requests)


def test_one_minutes_requests_are_taken_at_once_and_then_one_per_second():
    serving = budget(requests=60)
    assert all(serving.takes_request("a", "fetch", now=0) for _ in range(60))
    assert not serving.takes_request("a", "fetch", now=0)
    assert serving.takes_request("a", "confirm", now=0)  # another service
    assert serving.takes_request("b", "fetch", now=0)  # another peer
    assert serving.takes_request("a", "fetch", now=1)
    assert not serving.takes_request("a", "fetch", now=1)
    assert sum(serving.takes_request("a", "ask", cost=10, now=1) for _ in range(20)) == 6


def test_bytes_above_the_rate_wait_and_then_are_refused():
    serving = budget(bytes_per_s=1000)
    assert serving.wait_s("a", 1000, now=0) == 0
    waits = [serving.wait_s("a", 500, now=0) for _ in range(6)]
    assert waits == [pytest.approx(0.5), pytest.approx(1.0), pytest.approx(1.5), pytest.approx(MAX_WAIT_S), None, None]
    assert serving.wait_s("a", 500, now=10) == 0


def test_an_item_larger_than_one_seconds_bytes_is_sent_only_if_the_budget_is_idle():
    serving = budget(bytes_per_s=1000)
    assert serving.wait_s("a", 5000, now=0) == 0
    assert serving.wait_s("a", 1, now=1) is None
    assert serving.wait_s("a", 1, now=5) == 0


def test_above_the_budget_the_peer_that_took_most_is_refused_first():
    serving = budget(bytes_per_s=1000)
    assert (serving.wait_s("modest", 100, now=0), serving.wait_s("greedy", 900, now=0)) == (0, 0)
    assert serving.wait_s("greedy", 100, now=0) is None
    assert serving.wait_s("modest", 100, now=0) == pytest.approx(0.1)
    assert serving.wait_s("greedy", 100, now=60) == 0  # bytes sent long ago no longer count
