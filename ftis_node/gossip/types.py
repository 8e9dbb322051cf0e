"""Messages, outcomes, limits and counters of the network, and the callbacks that the daemon gives it."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from ftis_node.errors import RecordError

ID_BYTES = 32
MAX_ANSWERS = 256  # answers to one query
NO_PEERS_GIVEN = "no peers were given"  # how two reasons of `ConnectionFacts.describe` begin
NOBODY_ANSWERS = "no bootstrap peer answers"
DUPLICATE_IDENTITY = "another node uses this identity: give each node its own home"

Lookup = Callable[[Sequence[bytes]], Awaitable[Sequence[bytes]]]
"""Returns the envelopes held of the given ids, in the order of the ids; ids without one are skipped."""

AnswerQuery = Callable[[str, bytes], Awaitable[Sequence[bytes]]]
"""Takes a peer id and its query; returns answers of at most `max_announcement_bytes` each."""

ServeWeights = Callable[[str, bytes], AsyncGenerator[bytes, None]]
"""Takes a peer id and its query; yields items of at most `max_weights_item_bytes`. RecordError: invalid query."""

OnConfirm = Callable[[str, Sequence[bytes]], Awaitable[None]]
"""Takes a peer id and the ids of the envelopes that it fetched and validated."""

OnSent = Callable[[str, bytes], None]
"""Takes a peer id and the id of an envelope that was sent to it completely. Must be cheap, without IO."""

OnRefusal = Callable[[str, RecordError], None]
"""Takes a peer id and why one of its announcements was refused. Must be cheap, without IO."""

PeerTest = Callable[[str], bool]
"""Returns whether a peer is refused all service, or is new. Called for every stream: must be cheap, without IO."""


class SwarmPhase(StrEnum):
    STARTING = "starting"  # the network process is starting or restarting
    STANDALONE = "standalone"  # running, but no other member of the run is connected
    CONNECTED = "connected"  # at least one other member of the run is connected


@dataclass(frozen=True, slots=True)
class SwarmState:
    state: SwarmPhase
    reason: str


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


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


@dataclass(frozen=True, slots=True)
class PeerConnection:
    peer_id: str
    addresses: tuple[str, ...]


class GossipMessage(NamedTuple):
    """A message of one of the run's topics; `sender` is authenticated by libp2p's message signature."""

    sender: str
    payload: bytes
    shard: int = 0


class FetchOutcome(StrEnum):
    """Outcome of a fetch. Envelopes that arrived before the end are kept."""

    COMPLETE = "complete"  # the peer sent everything that it holds of the request
    BUSY = "busy"  # the peer is at its limits: ask another peer, or retry later
    UNREACHABLE = "unreachable"  # no connection, or the peer is not a member of this run
    TIMED_OUT = "timed_out"  # no progress for too long, or the total time limit was reached
    TOO_LARGE = "too_large"  # the peer sent more or larger items than requested
    BROKEN = "broken"  # the stream ended early, or violated the protocol


@dataclass(frozen=True, slots=True)
class Fetched:
    items: tuple[bytes, ...]
    outcome: FetchOutcome


@dataclass(frozen=True, slots=True)
class GossipLimits:
    """Limits on sizes, rates and waiting times. They have the same meaning at both ends of a stream."""

    max_announcement_bytes: int = 1024
    max_queued_announcements: int = 8192  # the oldest is dropped
    max_envelope_bytes: int = 1 << 20
    max_ids_per_request: int = 64
    max_request_bytes: int = 16 << 20  # all envelopes of one request
    max_answers: int = MAX_ANSWERS
    idle_timeout_s: float = 10.0  # without progress
    fetch_timeout_s: float = 60.0  # one request, at either end
    max_streams: int = 32  # served concurrently
    max_streams_per_peer: int = 4
    max_upload_bytes_per_s: float = 64 << 20  # over all peers
    max_requests_per_minute: float = 1200  # of one peer for one service
    max_weights_item_bytes: int = 1 << 20  # a chunk of a weight file, or any other item of that service
    max_record_bytes: int = 2048  # directory record
    max_record_ttl_s: float = 600.0


@dataclass(slots=True)
class GossipCounters:
    """Counters since the start. Only this package changes them."""

    announcements_sent: int = 0
    announcements_received: int = 0
    announcements_dropped: int = 0  # the queue was full
    announcements_refused: int = 0  # above the size limit, or not encrypted with the run's secret
    envelopes_in: int = 0
    envelopes_out: int = 0
    envelope_bytes_in: int = 0
    envelope_bytes_out: int = 0
    weights_bytes_in: int = 0  # chunks of weights, their hashes, offers
    weights_bytes_out: int = 0
    confirmed_out: int = 0  # ids that this node confirmed to peers
    fetch_errors: Counter[str] = field(default_factory=Counter)  # by FetchOutcome
    serve_errors: Counter[str] = field(default_factory=Counter)  # served streams that ended early, by reason
    records_refused: int = 0  # directory records: invalid signature, too large, or expiry too late
    non_ed25519: Counter[str] = field(default_factory=Counter)  # ignored: the peer's key is not Ed25519; by kind
    restarts: int = 0  # of the network process
