"""How a peer's weight follows from agreement, step by step."""

from __future__ import annotations

import pytest

from ftis_node.node.training.step_peers import MAX_PEERS, MIN_WEIGHT, PeerWeights


def after(steps: int, *, peer: float, own: float | None) -> float:
    weights = PeerWeights()
    for _ in range(steps):
        weights.note({"peer": peer}, own)
    return weights.weight("peer")


def test_a_peer_counts_by_its_agreement_beside_that_of_the_own_halves() -> None:
    assert after(5, peer=0.2, own=0.4) == pytest.approx(0.5)
    assert after(5, peer=0.6, own=0.4) == 1.0
    assert after(5, peer=-0.6, own=0.4) == MIN_WEIGHT


@pytest.mark.parametrize(("steps", "own"), [(0, 0.4), (1, 0.4), (9, 0.01), (9, None)])
def test_who_cannot_be_judged_counts_fully(steps: int, own: float | None) -> None:
    assert after(steps, peer=-0.6, own=own) == 1.0


def test_a_peer_that_betters_itself_counts_again() -> None:
    weights = PeerWeights()
    for agreement in (*[-0.5] * 10, *[0.5] * 10):
        weights.note({"peer": agreement}, 0.4)
    assert weights.weight("peer") == pytest.approx(0.9, abs=0.15)


def test_of_too_many_peers_the_oldest_are_forgotten() -> None:
    weights = PeerWeights()
    for number in range(MAX_PEERS + 1):
        for _ in range(3):
            weights.note({f"peer-{number}": -1.0}, 0.5)
    assert weights.weight("peer-0") == 1.0
    assert weights.weight(f"peer-{MAX_PEERS}") == weights.weight("peer-1") == MIN_WEIGHT
