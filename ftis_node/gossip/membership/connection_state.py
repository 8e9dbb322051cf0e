"""Where a node stands, in words. Facts in, a state and its reason out: nothing here waits or asks."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ftis_node.gossip.interface import SwarmPhase, SwarmState

DUPLICATE_IDENTITY = "another node uses this identity: give each node its own home"


@dataclass(frozen=True, slots=True)
class ConnectionFacts:
    """What is known of the swarm while the network process is up.

    `num_given` peers were given to dial first and `num_given_connected` of them are connected, as are `num_connected`
    peers in all. `dial_error` is what the last given peer that was dialled in vain said. `has_looked`: a first round of
    dialling is over.
    """

    num_members: int = 0
    num_connected: int = 0
    num_given: int = 0
    num_given_connected: int = 0
    dial_error: str = ""
    has_looked: bool = False

    def describe(self, *, next_try_in_s: float) -> SwarmState:
        """The state. Only another member of the run makes a node connected: a bootstrap node reads no rollouts."""
        if self.num_members:
            return SwarmState(SwarmPhase.CONNECTED, f"{_counted(self.num_members, 'other member')} of this run")
        if not self.has_looked:
            return SwarmState(SwarmPhase.STARTING, "looking for peers")
        again = f"in {next_try_in_s:.0f} s" if next_try_in_s >= 0.5 else "now"
        if self.num_given and not self.num_given_connected and not self.num_connected:
            why = f" ({self.dial_error})" if self.dial_error else ""
            return SwarmState(SwarmPhase.SOLO, f"no bootstrap peer answers, retrying {again}{why}")
        if self.num_connected:
            who = _counted(self.num_connected, "peer")
            return SwarmState(SwarmPhase.SOLO, f"{who} connected, but no member of this run yet; looking again {again}")
        return SwarmState(SwarmPhase.SOLO, "no peers were given; waiting for others to dial this node")


def with_duplicate_identity(state: SwarmState) -> SwarmState:
    """The state where another node uses this node's identity."""
    return replace(state, reason=f"{state.reason}; {DUPLICATE_IDENTITY}")


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
