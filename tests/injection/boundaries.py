"""Points inside each boundary at which an item of a peer enters a node, and the kinds of exceptions raised there."""

from collections.abc import Callable

from ftis_node.swarm.peer_guard import Place
from tests.injection.injector import Unexpected

STORE = "replay.buffer:ReplayBuffer.admit_many"  # raises for a batch of groups, then for the single group
CONNECT = "gossip.p2pd.client:P2pdClient.connect"
POINTS: dict[Place, tuple[str, ...]] = {
    Place.ANNOUNCEMENT: (
        "node.peers.announcements:AnnouncementHandler.handle",
        "node.peers.copied_groups:CopyCatalog.note_announced",
        "records.envelope:open_announcement",
    ),
    Place.AUDIT: ("node.loops.logprob_checks:sampled_by", "replay.stored_rows:StoredGroup.from_accepted"),
    Place.CATCH_UP: ("gossip.frames:ItemCollector.add",),
    Place.COUNT: ("node.loops.logprob_checks:AuditLoop.offer",),
    Place.DIAL: (CONNECT,),
    Place.DIRECTORY: (
        "gossip.directory.entries:has_valid_expiry",
        "gossip.directory.entries:verify_entry",
        "gossip.directory.storage:unpack_bytes",
        "gossip.multiaddr:usable_addresses",
    ),
    Place.HELLO: ("gossip.p2pd.client:P2pdClient.stream",),
    Place.JUDGE: (
        "node.peers.copied_groups:CopyCatalog.duplicate_reason",
        "node.peers.peer_manager:PeerManager.remember",
        "node.peers.peer_manager:PeerManager.settle",
        "node.peers.peer_manager:PeerManager.within_quota",
        "validation.pipeline:validate",
    ),
    Place.MESSAGE: ("gossip.pubsub:AnnouncementQueue.put",),
    Place.PULL: ("node.peers.announcements:AnnouncementHandler.refuse_of",),
    Place.RECORD: ("node.loops.announcement_backfill:BackfillLoop.note_record", "records.envelope:open_peer_record"),
    Place.SERVE: (
        "gossip.services:AdmissionControl.admitted", "gossip.services:AdmissionControl.before_item",
        "gossip.frames:unpack_ids", "node.peers.group_requests:PeerRequestHandler.answer",
        "node.peers.group_requests:PeerRequestHandler.confirmed",
        "node.peers.group_requests:PeerRequestHandler.lookup", "node.peers.group_requests:PeerRequestHandler.sent",
    ),
    Place.STATUS: ("node.peers.peer_registry:PeerActivity.as_dict",),
    Place.STORE: (STORE,),
}  # fmt: skip
"""The points by the place that the event `peer_fault` has."""

ELSEWHERE = {
    Place.CONFIRM: "tests/node/loops/test_send_confirmations.py",
    Place.PRESENCE: "tests/gossip/test_untrusted_values.py",
    Place.WEIGHTS: "tests/injection/test_weights.py",
}  # fmt: skip
"""The tests of places that a full node with two peers does not reach."""

GENERATORS = (
    "node.storage.weight_versions:VersionStore.put",
    "records.peer_messages:open_offer",
    "validation.weights_rules:refuse_offer",
)
LEARNERS = ("node.loops.weight_offer:OfferLoop.give", "records.peer_messages:open_weights_request")

KINDS: dict[type[Exception], Callable[[str], Exception]] = {
    Unexpected: Unexpected, ValueError: ValueError, OverflowError: OverflowError, RecursionError: RecursionError,
    MemoryError: MemoryError, TimeoutError: TimeoutError,
    UnicodeDecodeError: lambda point: UnicodeDecodeError("utf-8", b"\xff", 0, 1, point),
}  # fmt: skip


def points_for(kind: type[Exception]) -> set[str]:
    """Return the points that raise this kind. A dial that reaches its time limit means that p2pd is lost."""
    every = {point for points in POINTS.values() for point in points}
    return every - {CONNECT} if kind is TimeoutError else every
