"""The interface between the daemon and the network: messages, bodies, confirmations, the directory, the members.

This package transports bytes and does not parse them. A message holds at most `max_announcement_bytes`, a body is a
signed envelope, an id is its 32-byte hash. The caller validates the contents; this package enforces sender, size and
time limits. Two classes implement the protocol `Gossip`: `libp2p.Libp2pGossip` and, within one process,
`loopback.LoopbackGossip`.

Calls raise no exception if a peer does not answer or sends invalid data. A fetch returns its outcome, and counters
record it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ftis_node.errors import RecordError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator

    from ftis_node.gossip.multiaddr import Reachability
    from ftis_node.swarm.peer_guard import PeerGuard

ID_BYTES = 32
MAX_ANSWERS = 256  # answers to one query

Lookup = Callable[[Sequence[bytes]], Awaitable[Sequence[bytes]]]
"""Returns the bodies held of the given ids, in the order of the ids; ids without a body are skipped."""

AnswerQuery = Callable[[str, bytes], Awaitable[Sequence[bytes]]]
"""Takes a peer id and its query; returns answers of at most `max_announcement_bytes` each."""

ServeWeights = Callable[[str, bytes], "AsyncGenerator[bytes, None]"]
"""Takes a peer id and its query; yields items of at most `max_weights_item_bytes`. RecordError: invalid query."""

OnConfirm = Callable[[str, Sequence[bytes]], Awaitable[None]]
"""Takes a peer id and the ids of the bodies that it fetched and validated."""

OnSent = Callable[[str, bytes], None]
"""Takes a peer id and the id of a body that was sent to it completely. Must be cheap, without IO."""

OnRefusal = Callable[[str, RecordError], None]
"""Takes a peer id and why one of its announcements was rejected. Must be cheap, without IO."""

IsRefused = Callable[[str], bool]
"""Returns whether a peer is refused all service. Called for every stream: must be cheap, without IO."""


class SwarmPhase(StrEnum):
    """State of a node's connection to its swarm."""

    STARTING = "starting"  # the network process is starting or restarting
    STANDALONE = "standalone"  # running, but no other member of the run is connected
    CONNECTED = "connected"  # at least one other member of the run is connected


@dataclass(frozen=True, slots=True)
class SwarmState:
    """The phase, and a sentence for users with its cause."""

    state: SwarmPhase
    reason: str

    def __str__(self) -> str:
        return f"{self.state}: {self.reason}"


@dataclass(frozen=True, slots=True)
class PeerConnection:
    """A connected peer and the addresses of its connections."""

    peer_id: str
    addresses: tuple[str, ...]


class GossipMessage(NamedTuple):
    """A message of one of the run's topics; `sender` is authenticated by libp2p's message signature."""

    sender: str
    payload: bytes
    shard: int = 0


class FetchOutcome(StrEnum):
    """Outcome of a fetch. Bodies that arrived before the end are kept."""

    COMPLETE = "complete"  # the peer sent everything that it holds of the request
    BUSY = "busy"  # the peer is at its limits: ask another peer, or retry later
    UNREACHABLE = "unreachable"  # no connection, or the peer is not a member of this run
    TIMED_OUT = "timed_out"  # no progress for too long, or the total time limit was reached
    TOO_LARGE = "too_large"  # the peer sent more or larger items than requested
    BROKEN = "broken"  # the stream ended early, or violated the protocol


@dataclass(frozen=True, slots=True)
class Fetched:
    """The bodies that a fetch received, and its outcome."""

    bodies: tuple[bytes, ...]
    outcome: FetchOutcome


@dataclass(frozen=True, slots=True)
class GossipLimits:
    """Limits on sizes, rates and waiting times. They have the same meaning at both ends of a stream."""

    max_announcement_bytes: int = 1024
    max_queued_announcements: int = 8192  # the oldest is dropped
    max_body_bytes: int = 1 << 20
    max_ids_per_request: int = 64
    max_request_bytes: int = 16 << 20  # all bodies of one request
    max_answers: int = MAX_ANSWERS
    idle_timeout_s: float = 10.0  # without progress
    fetch_timeout_s: float = 60.0  # one request, at either end
    num_bodies_per_lookup: int = 4  # read from the buffer at a time while serving
    max_streams: int = 32  # served concurrently
    max_streams_per_peer: int = 4
    max_upload_bytes_per_s: float = 64 << 20  # over all peers
    max_requests_per_minute: float = 1200  # of one peer for one service
    max_weights_item_bytes: int = 1 << 20  # a chunk of a weight file, or any other item of that service
    max_record_bytes: int = 2048  # directory record
    max_record_ttl_s: float = 600.0

    def __post_init__(self) -> None:
        for entry in fields(self):
            if not getattr(self, entry.name) > 0:
                raise ValueError(f"{entry.name} must be above 0")


@dataclass(slots=True)
class GossipCounters:
    """Counters since the start. Only this package changes them."""

    announcements_sent: int = 0
    announcements_received: int = 0
    announcements_dropped: int = 0  # the queue was full
    announcements_refused: int = 0  # above the size limit, or not encrypted with the run's secret
    announcements_unsent: int = 0  # the network process was down
    bodies_in: int = 0
    bodies_out: int = 0
    body_bytes_in: int = 0
    body_bytes_out: int = 0
    weights_bytes_in: int = 0  # chunks of weights, their hashes, offers
    weights_bytes_out: int = 0
    confirmed_in: int = 0  # ids that peers confirmed to this node
    confirmed_out: int = 0
    fetch_errors: dict[str, int] = field(default_factory=dict)  # by FetchOutcome
    serve_errors: dict[str, int] = field(default_factory=dict)  # served streams that ended early, by reason
    records_refused: int = 0  # directory records: invalid signature, too large, or expiry too late
    non_ed25519: dict[str, int] = field(default_factory=dict)  # ignored because the peer's key is not Ed25519, by kind
    restarts: int = 0  # of the network process

    def count_fetch_error(self, outcome: FetchOutcome) -> None:
        self.fetch_errors[outcome.value] = self.fetch_errors.get(outcome.value, 0) + 1

    def count_non_ed25519(self, what: str) -> None:
        """Count a connection, message or stream of a peer whose id is not an Ed25519 key."""
        self.non_ed25519[what] = self.non_ed25519.get(what, 0) + 1

    def count_refused_record(self) -> None:
        """Count a directory record that was rejected when stored or read."""
        self.records_refused += 1

    def count_serve_error(self, reason: str) -> None:
        self.serve_errors[reason] = self.serve_errors.get(reason, 0) + 1


class Gossip(Protocol):
    """One node's connection to the swarm of one run. Call `serve` before `start`; nothing works after `close`."""

    @property
    def peer_id(self) -> str:
        """Return this node's peer id (`12D3Koo...`)."""
        ...

    @property
    def guard(self) -> PeerGuard:
        """Return the exception barrier for work for peers. The node sets its `on_fault` before `start`."""
        ...

    @property
    def addresses(self) -> list[str]:
        """Return the multiaddrs with `/p2p/ID` at which peers can dial this node; empty before the start."""
        ...

    @property
    def state(self) -> SwarmState:
        """Return the current state of the connection to the swarm."""
        ...

    @property
    def counters(self) -> GossipCounters:
        """Return the counters since the start."""
        ...

    @property
    def clock_skew_s(self) -> float | None:
        """Return the clock offset to peers in seconds (peer minus local); None before the first measurement."""
        ...

    @property
    def reachability(self) -> Reachability:
        """Return how peers can dial this node, as far as known."""
        ...

    def serve(
        self,
        lookup: Lookup,
        *,
        on_confirm: OnConfirm | None = None,
        answer: AnswerQuery | None = None,
        lookup_text: Lookup | None = None,
        is_refused: IsRefused | None = None,
        on_sent: OnSent | None = None,
        on_refusal: OnRefusal | None = None,
    ) -> None:
        """Set the look-ups of bodies, and the callbacks for confirmations and queries.

        `lookup_text` returns, for ids of this node's own bodies, the same groups re-encoded as text. Streams of peers
        for which `is_refused` is true are closed before they are read. `on_sent` is called for each body sent
        completely, `on_refusal` for each announcement that was too large.
        """
        ...

    def serve_weights(self, give: ServeWeights) -> None:
        """Set the handler for requests about weights, at any time. Before that such requests get no items."""
        ...

    async def start(self) -> None:
        """Join the swarm. Return once this node can be dialed, whether or not a peer is connected.

        Raises UsageError if the listen address is taken, MachineError if the network process does not start.
        """
        ...

    async def close(self) -> None:
        """Leave the swarm; end all child processes and remove temporary files."""
        ...

    async def announce(self, payload: bytes, *, shard: int = 0) -> bool:
        """Publish a message to the members that read a shard; return False if the network process is down.

        Raises ValueError for a payload above `max_announcement_bytes`.
        """
        ...

    async def all_read_batches(self) -> bool:
        """Return whether an announcement may hold several groups: every known member is connected and says so."""
        ...

    async def read_shards(self, shards: Collection[int]) -> None:
        """Read exactly these shards from now on. Subscribe to new ones before leaving old ones."""
        ...

    def announcements(self) -> AsyncIterator[GossipMessage]:
        """Iterate over messages of other nodes in order of arrival, until closed. One reader at a time."""
        ...

    async def fetch(
        self, peer_id: str, ids: Sequence[bytes], *, as_text: bool = False, timeout_s: float | None = None
    ) -> Fetched:
        """Fetch the bodies of `ids` (32 bytes each, at most `max_ids_per_request`). Raises ValueError for invalid ids.

        `as_text` requests the text form, which only the creator has; other peers are UNREACHABLE for that service.
        """
        ...

    async def request_backfill(self, peer_id: str, question: bytes, *, timeout_s: float | None = None) -> Fetched:
        """Send a query for a peer's groups (at most `max_announcement_bytes`); return its answers."""
        ...

    async def request_weights(
        self, peer_id: str, question: bytes, *, max_items: int, timeout_s: float | None = None
    ) -> Fetched:
        """Send a query about weights; return at most `max_items` items."""
        ...

    async def confirm(self, peer_id: str, ids: Sequence[bytes]) -> bool:
        """Confirm to a peer that its bodies were fetched and validated; return whether it received the confirmation."""
        ...

    async def publish_record(self, value: bytes, *, ttl_s: float) -> bool:
        """Store this node's record in the directory; return the success. Raises ValueError above the limits."""
        ...

    async def publish_manifest(self, canonical: bytes, *, ttl_s: float) -> bool:
        """Store the run's manifest in the directory under the run id, its hash; return whether it was accepted.

        Nothing is stored for a run with a secret, because its manifest is private.
        """
        ...

    async def get_record(self, peer_id: str) -> bytes | None:
        """Return a peer's record in this run's directory; None if there is none or the directory does not answer."""
        ...

    async def connected_peers(self) -> list[PeerConnection]:
        """Return all connected peers: members, bootstrap nodes, relays, others."""
        ...

    async def members(self) -> list[str]:
        """Return the peer ids of connected members of this run."""
        ...

    async def known_members(self) -> list[str]:
        """Return members that are connected or were recently listed: all of a small run, many of a large one."""
        ...

    async def shard_members(self) -> list[str]:
        """Return the other members of this node's own shard that are connected or listed in the directory."""
        ...
