"""What the daemon knows of the network: announcements, bodies, confirmations, a directory, and who is there.

The room carries bytes and does not look inside: an announcement is at most 1 KiB of the caller's, a body is a signed
envelope, ids are its 32-byte hash. Checking what comes out is the caller's business; who sent it, how much of it and
for how long is checked here. Two classes keep this protocol: `libp2p.Libp2pGossip` and its in-process twin
`loopback.LoopbackGossip`.

A peer that does not answer, or answers rubbish, is no exception: a pull ends with an outcome, and counters count it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ftis_node.errors import RecordError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator

    from ftis_node.gossip.membership.reachability import Reachability
    from ftis_node.swarm.peer_guard import PeerGuard

ID_BYTES = 32
MAX_ANSWERS = 256  # to one question

Lookup = Callable[[Sequence[bytes]], Awaitable[Sequence[bytes]]]
"""Ids in, the bodies held of them out, in the order of the ids; what is not held is left out."""

AnswerQuery = Callable[[str, bytes], Awaitable[Sequence[bytes]]]
"""A peer's id and its question in; answers, each no longer than an announcement, out."""

ServeWeights = Callable[[str, bytes], "AsyncGenerator[bytes, None]"]
"""A peer's id and its question about weights; items of at most `max_weights_item_bytes` out. RecordError: a bad one."""

OnConfirm = Callable[[str, Sequence[bytes]], Awaitable[None]]
"""A peer's id and the ids of the bodies that it fetched and checked."""

OnSent = Callable[[str, bytes], None]
"""A peer's id and the id of a body that was sent to it whole. Cheap, without IO."""

OnRefusal = Callable[[str, RecordError], None]
"""A peer's id and why one of its announcements was not delivered. Cheap, without IO."""

IsRefused = Callable[[str], bool]
"""Whether a peer, by its id, is served nothing at all just now. Asked for every stream: cheap, without IO."""


class SwarmPhase(StrEnum):
    """Where a node stands in its swarm."""

    STARTING = "starting"  # the network process is not up (yet, or again)
    SOLO = "solo"  # it is up, but no other member of the run is connected
    CONNECTED = "connected"  # at least one other member of the run is connected


@dataclass(frozen=True, slots=True)
class SwarmState:
    """The phase, and one sentence for people that says why."""

    state: SwarmPhase
    reason: str

    def __str__(self) -> str:
        return f"{self.state}: {self.reason}"


@dataclass(frozen=True, slots=True)
class PeerConnection:
    """A peer with an open connection and the addresses it is connected by."""

    peer_id: str
    addresses: tuple[str, ...]


class GossipMessage(NamedTuple):
    """A message of one of the run's topics; `sender` is proven by the network's own signature."""

    sender: str
    payload: bytes
    shard: int = 0


class FetchOutcome(StrEnum):
    """How a pull ended. Whatever arrived before is kept."""

    COMPLETE = "complete"  # the peer sent all that it holds of what was asked
    BUSY = "busy"  # the peer serves as many streams as it is willing to: ask another, or later
    UNREACHABLE = "unreachable"  # no connection, or the peer does not know this run
    TIMED_OUT = "timed_out"  # nothing came for too long, or the whole took too long
    TOO_LARGE = "too_large"  # the peer sent more, or larger items, than asked for
    BROKEN = "broken"  # the stream was cut, or was no stream of ours


@dataclass(frozen=True, slots=True)
class Fetched:
    """What a pull gave, and how it ended."""

    bodies: tuple[bytes, ...]
    outcome: FetchOutcome


@dataclass(frozen=True, slots=True)
class GossipLimits:
    """Bounds on what is sent, kept and waited for; equal in meaning on both ends of a stream."""

    max_announcement_bytes: int = 1024
    max_queued_announcements: int = 8192  # the oldest is dropped
    max_body_bytes: int = 1 << 20
    max_ids_per_request: int = 64
    max_request_bytes: int = 16 << 20  # bodies of one pull together
    max_answers: int = MAX_ANSWERS
    idle_timeout_s: float = 10.0  # no byte moved
    fetch_timeout_s: float = 60.0  # one pull, as seen by either end
    num_bodies_per_lookup: int = 4  # read from the store at a time while serving
    max_streams: int = 32  # served at the same time
    max_streams_per_peer: int = 4
    max_upload_bytes_per_s: float = 64 << 20  # of items served to all peers together
    max_requests_per_minute: float = 1200  # of one peer for one service
    max_weights_item_bytes: int = 1 << 20  # a chunk of a file of weights, and whatever else is said of it
    max_record_bytes: int = 2048  # directory record
    max_record_ttl_s: float = 600.0

    def __post_init__(self) -> None:
        for entry in fields(self):
            if not getattr(self, entry.name) > 0:
                raise ValueError(f"{entry.name} must be above 0")


@dataclass(slots=True)
class GossipCounters:
    """What happened since the start. Only this room writes it."""

    announcements_sent: int = 0
    announcements_received: int = 0
    announcements_dropped: int = 0  # the queue was full
    announcements_refused: int = 0  # over the size limit, or not sealed with the run's secret
    announcements_unsent: int = 0  # the network process was down
    bodies_in: int = 0
    bodies_out: int = 0
    body_bytes_in: int = 0
    body_bytes_out: int = 0
    weights_bytes_in: int = 0  # chunks of weights, their hashes, offers
    weights_bytes_out: int = 0
    confirmed_in: int = 0  # ids that peers confirmed to us
    confirmed_out: int = 0
    fetch_errors: dict[str, int] = field(default_factory=dict)  # by FetchOutcome
    serve_errors: dict[str, int] = field(default_factory=dict)  # streams served that ended early, by reason
    records_refused: int = 0  # of the directory: not their owner's, too large, or for too long
    non_ed25519: dict[str, int] = field(default_factory=dict)  # ignored for the type of their peer's key, by what it is
    restarts: int = 0  # of the network process

    def count_fetch_error(self, outcome: FetchOutcome) -> None:
        """One pull that did not complete."""
        self.fetch_errors[outcome.value] = self.fetch_errors.get(outcome.value, 0) + 1

    def count_non_ed25519(self, what: str) -> None:
        """One connection, message or stream of a peer whose id holds no Ed25519 key."""
        self.non_ed25519[what] = self.non_ed25519.get(what, 0) + 1

    def count_refused_record(self) -> None:
        """One directory record that was neither stored nor believed."""
        self.records_refused += 1

    def count_serve_error(self, reason: str) -> None:
        """One served stream that ended early."""
        self.serve_errors[reason] = self.serve_errors.get(reason, 0) + 1


class Gossip(Protocol):
    """One node's part in one run's swarm. Call `serve` before `start`; after `close` nothing is usable."""

    @property
    def peer_id(self) -> str:
        """This node's peer id (`12D3Koo...`)."""
        ...

    @property
    def guard(self) -> PeerGuard:
        """Catches what work for one peer raises; the node sets its `on_fault` before `start`."""
        ...

    @property
    def addresses(self) -> list[str]:
        """Multiaddrs with `/p2p/ID` by which others can dial this node; empty until started."""
        ...

    @property
    def state(self) -> SwarmState:
        """Where this node stands, as of now."""
        ...

    @property
    def counters(self) -> GossipCounters:
        """Counts since the start."""
        ...

    @property
    def clock_skew_s(self) -> float | None:
        """Another peer's clock less ours, in seconds; None until one was met."""
        ...

    @property
    def reachability(self) -> Reachability:
        """Whether others can dial this node, as far as is known."""
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
        """Says where bodies come from, who hears of confirmations, and who answers questions.

        `lookup_text` gives, for ids of this node's own bodies, the same told as text. Streams of peers that `is_refused`
        names are closed before they are read. `on_sent` is called for each body that a peer took, `on_refusal` for each
        announcement that was too large.
        """
        ...

    def serve_weights(self, give: ServeWeights) -> None:
        """Says where answers to questions about weights come from; until then there are none. At any time."""
        ...

    async def start(self) -> None:
        """Joins. Returns once this node can be dialled, whether or not any peer is there.

        Raises UsageError where the listen address is taken and MachineError where the network process does not start.
        """
        ...

    async def close(self) -> None:
        """Leaves, and leaves nothing running or lying about."""
        ...

    async def announce(self, payload: bytes, *, shard: int = 0) -> bool:
        """Tells the members that read a shard; False where the network process is down just now.

        Raises ValueError for a payload over `max_announcement_bytes`.
        """
        ...

    async def read_shards(self, shards: Collection[int]) -> None:
        """Reads these shards from now on, and no others. New ones are read before old ones are given up."""
        ...

    def announcements(self) -> AsyncIterator[GossipMessage]:
        """Announcements of others, in the order of arrival, until closed. One reader at a time."""
        ...

    async def fetch(
        self, peer_id: str, ids: Sequence[bytes], *, as_text: bool = False, timeout_s: float | None = None
    ) -> Fetched:
        """Bodies of `ids` (32 bytes each, at most `max_ids_per_request`) from a peer. Raises ValueError for bad ids.

        `as_text` asks the peer that made them to tell them as text; a peer that cannot is UNREACHABLE for that.
        """
        ...

    async def ask(self, peer_id: str, question: bytes, *, timeout_s: float | None = None) -> Fetched:
        """A peer's answers to a question (at most `max_announcement_bytes`), such as which groups it holds."""
        ...

    async def ask_weights(
        self, peer_id: str, question: bytes, *, max_items: int, timeout_s: float | None = None
    ) -> Fetched:
        """A peer's items in answer to a question about weights, at most `max_items`."""
        ...

    async def confirm(self, peer_id: str, ids: Sequence[bytes]) -> bool:
        """Tells a peer that its bodies were fetched and checked; whether it heard."""
        ...

    async def publish_record(self, value: bytes, *, ttl_s: float) -> bool:
        """Puts this node's record into the directory; whether it was kept. Raises ValueError over the limits."""
        ...

    async def publish_manifest(self, canonical: bytes, *, ttl_s: float) -> bool:
        """Puts the run's manifest into the directory under the run's id, whose hash it has; whether it was kept.

        Where the run has a secret nothing is put: its manifest is for those who were given it.
        """
        ...

    async def get_record(self, peer_id: str) -> bytes | None:
        """A peer's record in this run's directory, None where there is none or the directory does not answer."""
        ...

    async def connected_peers(self) -> list[PeerConnection]:
        """Peers with an open connection: members, bootstrap nodes, relays, strangers."""
        ...

    async def members(self) -> list[str]:
        """Peer ids of connected members of this run."""
        ...

    async def known_members(self) -> list[str]:
        """Peer ids of other members, connected or seen in the directory lately: all of a small run, many of a large."""
        ...

    async def shard_members(self) -> list[str]:
        """Peer ids of the other members of this node's own shard, connected or listed in the directory."""
        ...
