"""Describes a node's connection to its swarm. Pure: takes facts, returns state and reason."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ftis_node.gossip.interface import SwarmPhase, SwarmState

DUPLICATE_IDENTITY = "another node uses this identity: give each node its own home"


@dataclass(frozen=True, slots=True)
class ConnectionFacts:
    """Facts about the connection while the network process is up.

    `num_given` peers were configured (`--peers`), of which `num_given_connected` are connected. `num_connected` peers
    are connected in all. `dial_error` is the error of the configured peer that was dialed last. `has_looked` is true
    after the first round of dialing.
    """

    num_members: int = 0
    num_connected: int = 0
    num_given: int = 0
    num_given_connected: int = 0
    dial_error: str = ""
    has_looked: bool = False

    def describe(self, *, next_try_in_s: float) -> SwarmState:
        """Return the state. Only another member counts for CONNECTED, because a bootstrap node uses no groups."""
        if self.num_members:
            return SwarmState(SwarmPhase.CONNECTED, f"{_counted(self.num_members, 'other member')} of this run")
        if not self.has_looked:
            return SwarmState(SwarmPhase.STARTING, "looking for peers")
        again = f"in {next_try_in_s:.0f} s" if next_try_in_s >= 0.5 else "now"
        if self.num_given and not self.num_given_connected and not self.num_connected:
            why = f" ({self.dial_error})" if self.dial_error else ""
            return SwarmState(SwarmPhase.STANDALONE, f"no bootstrap peer answers, retrying {again}{why}")
        if self.num_connected:
            who = _counted(self.num_connected, "peer")
            return SwarmState(
                SwarmPhase.STANDALONE, f"{who} connected, but no member of this run yet; looking again {again}"
            )
        return SwarmState(SwarmPhase.STANDALONE, "no peers were given; waiting for others to dial this node")


def with_duplicate_identity(state: SwarmState) -> SwarmState:
    """Return the state with a note that another node uses this node's identity."""
    return replace(state, reason=f"{state.reason}; {DUPLICATE_IDENTITY}")


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
