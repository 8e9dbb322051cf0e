"""The weight of a peer's groups follows from its agreement, step by step."""

import pytest

from ftis_node.node.training.peer_coefficients import MAX_PEERS, MIN_WEIGHT, PeerCoefficients


def weight_after(steps: int, *, peer: float, own: float | None) -> float:
    weights = PeerCoefficients()
    for _ in range(steps):
        weights.note({"peer": peer}, own)
    return weights.weight("peer")


def test_the_weight_is_the_agreement_relative_to_that_of_the_own_halves():
    assert weight_after(5, peer=0.2, own=0.4) == pytest.approx(0.5)
    assert weight_after(5, peer=0.6, own=0.4) == 1.0
    assert weight_after(5, peer=-0.6, own=0.4) == MIN_WEIGHT


@pytest.mark.parametrize(("steps", "own"), [(0, 0.4), (1, 0.4), (9, 0.01), (9, None)])
def test_without_enough_measurements_the_weight_is_one(steps, own):
    assert weight_after(steps, peer=-0.6, own=own) == 1.0


def test_shrinkage_is_the_weight_of_least_squared_error():
    """Own gradient 0 +- sqrt(v_o), the peer's b +- sqrt(v_s): no other weight of the mean is better."""
    own_size, peer_size, variance = 8, 24, 16.0  # of one completion
    v_o, v_s = variance / own_size, variance / peer_size
    for bias in (0.0, 0.5, 3.0):
        weights = PeerCoefficients("shrinkage")
        for _ in range(3):
            weights.note({"peer": (v_o + v_s + bias**2 - v_o) * peer_size / own_size}, v_o)

        def error(weight, bias=bias):
            own, peer = own_size, weight * peer_size
            return (own**2 * v_o + peer**2 * v_s + (peer * bias) ** 2) / (own + peer) ** 2

        best = weights.weight("peer")
        assert best == pytest.approx(v_s / (v_s + bias**2))
        assert error(best) < min(error(best * 0.9), error(best * 1.1))


@pytest.mark.parametrize(("distance", "own", "weight"), [(-1.0, 0.5, 1.0), (1e9, 0.5, MIN_WEIGHT), (2.0, 0.0, 1.0)])
def test_shrinkage_is_bounded(distance, own, weight):
    weights = PeerCoefficients("shrinkage")
    for _ in range(2):
        assert weights.weight("peer") == 1.0
        weights.note({"peer": distance}, own)
    assert weights.weight("peer") == weight


def test_the_number_of_remembered_peers_is_bounded():
    weights = PeerCoefficients()
    for number in range(MAX_PEERS + 1):
        for _ in range(3):
            weights.note({f"peer-{number}": -1.0}, 0.5)
    assert weights.weight("peer-0") == 1.0
    assert weights.weight(f"peer-{MAX_PEERS}") == weights.weight("peer-1") == MIN_WEIGHT
