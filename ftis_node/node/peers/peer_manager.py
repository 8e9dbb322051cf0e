"""Peer manager: records the behavior of peers, and decides which peers to refuse and how much each may send.

The loops report what a peer sent (`settle`, `refuse`, `note`). One report reaches all records: the counters, the
registry, the reputation and the event log. The loops query decisions: `is_banned`, `within_quota`, `share_cap`. The
manager connects the pure rules of `swarm/` with the clock, `peers.sqlite` and the event log, and adds no rule.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ftis_node.config.limits import AccessSection
from ftis_node.errors import RecordError, UsageError
from ftis_node.node.context import NodeCounters
from ftis_node.node.peers.copied_groups import CopyCatalog
from ftis_node.node.peers.own_group_confirmations import OwnGroupConfirmations
from ftis_node.node.peers.peer_registry import PeerRegistry
from ftis_node.node.peers.reputation_store import ReputationStore
from ftis_node.records.group import GroupHeader
from ftis_node.records.identity import peer_id_from_text
from ftis_node.records.peer_messages import Releases
from ftis_node.replay.stored_rows import StoredGroup
from ftis_node.swarm.lru import LruDict
from ftis_node.swarm.peer_guard import Place
from ftis_node.swarm.rate_limits import Quotas, ShareCap, subnet_of
from ftis_node.swarm.reasons import NO_NEWS, UNCHARGED, attribute_refusal
from ftis_node.swarm.receipts import NO_LIMITS, ReceiptBook, StepLimits
from ftis_node.swarm.refusals import RefusedSender, RefusedSenders
from ftis_node.swarm.reputation import BAN_SCORE, LONGEST_BAN_S, Behaviour, ReputationTable, TrustLevel
from ftis_node.telemetry.clock import SteadyClock
from ftis_node.telemetry.events import EventLog
from ftis_node.validation import Accepted, Refusal, Refused, ValidationResult

log = logging.getLogger(__name__)
SAVE_EVERY_S = 10.0
MAX_NETWORKS = 4096
FAULT = "fault"
MAX_TEXT = 200  # most characters of an error in an event: a peer may have chosen the text


class PeerManager:
    """Facade over all records about peers, one per node. A changed trust level is on disk when a method returns."""

    def __init__(
        self,
        path: Path,
        *,
        own_id: str,
        settings: AccessSection,
        events: EventLog,
        counters: NodeCounters | None = None,
        clock: Callable[[], float] | None = None,
        releases: Releases | None = None,
        limits: StepLimits = NO_LIMITS,
    ) -> None:
        """Open or create the file. `clock` returns Unix seconds; None uses one that never jumps. Raise ConfigError.

        `counters` are those of the node's context; None: counts that nobody else reads.
        `releases` are this node's, for `reasons.attribute_refusal`; None treats those of all peers as equal.
        `limits` are those of a step of the run, for receipts.
        """
        self.registry = PeerRegistry()
        self._counters = counters or NodeCounters()
        self.confirmations = OwnGroupConfirmations(self.registry)
        self._own_id = own_id
        self._events = events
        self._releases = releases
        self._clock = clock = clock or SteadyClock().now
        self._allowed = frozenset(settings.allow)
        self._trusted = frozenset(settings.trust)
        self._store, self._reputations = ReputationStore(path), ReputationTable()
        self._store.load(self._reputations, now=clock())
        self.receipts = ReceiptBook(own_id, limits)
        self._store.load_receipts(self.receipts)
        self._saved_at = clock()
        self._networks = LruDict[str, str](MAX_NETWORKS)
        self._met = LruDict[str, None](MAX_NETWORKS)  # peers that have connected
        self._quotas = Quotas()
        self.refusals = RefusedSenders()
        self.copies = CopyCatalog(own_id, clock=clock, is_new=self.is_new_peer, charge=self.charge_scoring)

    def close(self) -> None:
        self.save()
        self._store.close()

    def note_addresses(self, peer_id: str, addresses: Sequence[str]) -> None:
        """Note a peer's multiaddrs, because peers of one subnet share a limit on their places in the buffer."""
        self._networks.pop(peer_id, None)
        self._met[peer_id] = None
        if network := subnet_of(addresses):
            self._networks[peer_id] = network

    def is_banned(self, peer_id: str) -> bool:
        """Return whether to refuse a peer now: banned, or not on the allow-list. Always False for this node."""
        if peer_id == self._own_id:
            return False
        if self._allowed and peer_id not in self._allowed:
            return True
        return peer_id not in self._trusted and self._reputations.is_banned(peer_id, now=self._clock())

    def is_trusted(self, peer_id: str) -> bool:
        """Return whether the operator trusts a peer, by the settings or by `peers trust`."""
        return peer_id in self._trusted or self._reputations.reputation(peer_id).trusted

    def is_of_own_weights(self, group: GroupHeader | StoredGroup) -> bool:
        """Return whether a trusted peer reports that this node's weights sampled its group.

        The same report by any other peer is only a claim, and changes no counter and no check.
        """
        return group.weights_of == self._own_id and self.is_trusted(group.sender)

    def is_new_peer(self, peer_id: str) -> bool:
        """Return whether a peer has sent no good group yet, and is not trusted."""
        return not self.is_trusted(peer_id) and not self._reputations.reputation(peer_id).is_known(now=self._clock())

    def trust_level(self, peer_id: str) -> TrustLevel:
        if self.is_banned(peer_id):
            return TrustLevel.BANNED
        if self.is_trusted(peer_id):
            return TrustLevel.TRUSTED
        return self._reputations.reputation(peer_id).trust_level(now=self._clock())

    def save(self) -> None:
        self._store.save(self._reputations, self.receipts)
        self._saved_at = self._clock()

    def note(
        self, peer_id: str, behaviour: Behaviour, *, reason: str = "", detail: str = "", credit: float = 1.0
    ) -> None:
        """Note a peer's behavior. Count it by `reason` (the behavior's name if empty). `detail` is for the operator."""
        if peer_id == self._own_id or peer_id in self._trusted:
            return
        trust_level = self._reputations.note(peer_id, behaviour, now=self._clock(), reason=reason, credit=credit)
        if trust_level is not None:
            self._report(peer_id, trust_level, detail or reason or behaviour.value)
        elif self._clock() - self._saved_at >= SAVE_EVERY_S:
            self.save()

    def remember(self, accepted: Accepted) -> bytes | None:
        """Add an accepted group to the catalog that detects copies. Return the id of the group that is its copy."""
        copy = self.copies.remember(accepted)
        if copy is None:
            return None
        self.note(copy.sender, Behaviour.DISPLACED)
        return copy.group_id

    def note_used(self, group: StoredGroup) -> None:
        """Credit the sender of a foreign group that a step used, and count it for its receipt."""
        if not group.own:
            if (credit := self.copies.credit_of(group.id)) > 0:
                self.receipts.note_used(group.sender, group.num_tokens)
            self.note(group.sender, Behaviour.CONTRIBUTED, credit=credit)

    def settle(self, verdict: ValidationResult, *, origin: str, num_bytes: int = 0) -> None:
        """Record the verdict on a group of `num_bytes` that `origin` delivered: this node itself for its own groups."""
        if isinstance(verdict, Accepted):
            self._settle_accepted(verdict, origin=origin, num_bytes=num_bytes)
        else:
            self._settle_refused(verdict, origin=origin)

    def _settle_accepted(self, accepted: Accepted, *, origin: str, num_bytes: int) -> None:
        group, is_own = accepted.group, origin == self._own_id
        self._charge(group.sender, group.num_tokens)
        self._share_subnet(group.sender, origin)
        self.note(group.sender, Behaviour.ACCEPTED, credit=self.copies.credit_of(accepted.envelope.id))
        self.refusals.accepted(group.sender)
        if is_own:
            self.receipts.note_used(self._own_id, group.num_tokens)
        else:
            self._counters.groups_received += 1
            self._counters.tokens_received += group.num_tokens
            self._counters.envelope_bytes_received += num_bytes
            self.registry.seen(group.sender).accepted += 1
        turns, num_turns = {}, sum(map(len, group.turn_lengths))
        if num_turns:
            turns = {"num_turns": num_turns, "num_observations": num_turns - len(group.turn_lengths)}
            if is_own:
                self._counters.turns_made.update(turns)
        self._events.write(
            "admitted",
            group=accepted.envelope.id,
            exact_group=accepted.exact_group,
            own=is_own,
            sender=group.sender,
            number=group.number,
            prompt=str(group.prompt_ref),
            num_tokens=group.num_tokens,
            reward_mean=round(group.reward_mean, 4),
            policy_version=group.policy_version,
            **turns,
        )

    def _settle_refused(self, refused: Refused, *, origin: str) -> None:
        """Count the refusal at `origin`, and charge the peer that is responsible."""
        reason, detail, sender = refused.refusal.reason, refused.refusal.detail, refused.sender
        is_alike = self._releases is None or self.registry.grades_alike(sender or "", self._releases)
        blamed, behaviour = attribute_refusal(
            reason, origin=origin, sender=sender, signed=refused.signed, grades_alike=is_alike
        )
        if behaviour is Behaviour.RATE_LIMITED and self._quotas.allows(blamed, is_new_peer=False, now=time.monotonic()):
            behaviour = Behaviour.HARMLESS  # the others among the new peers used up what all share
        self.note_unused(sender if refused.signed and sender else origin, reason)
        if reason not in UNCHARGED:
            self._charge(blamed, refused.num_tokens)
        self.refuse(origin, reason)
        self.note(blamed, behaviour, reason=reason, detail=f"{reason}: {detail}")
        self._events.write("refused", group=refused.group_id, origin=origin, reason=reason, detail=detail)

    def refuse(
        self, peer_id: str, reason: str, behaviour: Behaviour | None = None, *, detail: str = "", unused: str = ""
    ) -> None:
        """Count an item of a peer that this node refuses, and note the peer's behavior if one is given.

        `unused` is the reason for `note_unused`; empty if the item is no new group.
        """
        self._counters.refused[reason] += 1
        if peer_id != self._own_id:
            self.registry.seen(peer_id).refused[reason] += 1
        if unused:
            self.note_unused(peer_id, unused)
        if behaviour is not None:
            self.note(peer_id, behaviour, reason=reason, detail=detail)

    def refuse_message(self, peer_id: str, what: str, error: RecordError, *, is_charged: bool = True) -> None:
        """Count a message of a peer that cannot be read. Another wire version is no fault of an honest peer."""
        reason = f"{what}_{error.reason}"
        self._counters.refused[reason] += 1
        self.registry.note_refusal(peer_id, what, error)
        if is_charged and error.reason != "version":
            self.note(peer_id, Behaviour.REFUSED, reason=reason)

    def refuse_weights(self, peer_id: str, refusal: Refusal, *, version: int | None) -> None:
        """Count weights of the followed learner that this node refuses."""
        reason, detail = refusal.reason, refusal.detail
        self._counters.weights_refused[reason] += 1
        self.registry.seen(peer_id).refused[f"weights_{reason}"] += 1
        self._events.write("weights_refused", peer=peer_id, version=version, reason=reason, detail=detail)

    def charge_fault(self, peer_id: str, place: Place, error: Exception) -> None:
        """Charge a peer whose value raised an unexpected exception: the callback of the node's guard."""
        what = f"{type(error).__name__}: {error}"[:MAX_TEXT]
        try:
            peer_id_from_text(peer_id)
        except ValueError:  # there is no peer to charge
            self._counters.refused[FAULT] += 1
            self._events.write("peer_fault", peer=ascii(peer_id)[:MAX_TEXT], place=place.value, error=what)
            return
        self._events.write("peer_fault", peer=peer_id, place=place.value, error=what)
        self.refuse(peer_id, FAULT, Behaviour.FAULT, detail=f"{FAULT} at {place}: {what}", unused=FAULT)

    def note_unused(self, sender: str, reason: str) -> None:
        """Note a group of a sender that is refused, or not pulled at all. This has no effect on its reputation."""
        if sender == self._own_id or reason in NO_NEWS:
            return
        if reason == "banned":  # its cause
            reason = self._reputations.reputation(sender).ban_reason or reason
        self.refusals.refused(sender, reason, now=self._clock())

    def refused_senders(self) -> list[RefusedSender]:
        """Return the senders most of whose last groups were refused, those with most refused groups first."""
        return self.refusals.present(now=self._clock())

    def within_quota(self, peer_id: str) -> bool:
        """Return whether the sender's quota allows validation of a group now; the query spends no quota."""
        is_new_peer, now = self.is_new_peer(peer_id), time.monotonic()
        return self._has_no_quota(peer_id) or self._quotas.allows(peer_id, is_new_peer=is_new_peer, now=now)

    def may_score(self, peer_id: str) -> bool:
        """Return whether the sender's quota allows scoring of a group now; the query spends no quota."""
        is_new_peer, now = self.is_new_peer(peer_id), time.monotonic()
        left = self._quotas.scoring_s.left
        return self._has_no_quota(peer_id) or left(peer_id, is_new_peer=is_new_peer, now=now) > 0.0

    def charge_scoring(self, peer_id: str, seconds: float) -> None:
        """Charge seconds of scoring, or of the search for copies, to the quota of a group's signer."""
        if not self._has_no_quota(peer_id):
            self._quotas.scoring_s.spend(peer_id, seconds, is_new_peer=self.is_new_peer(peer_id), now=time.monotonic())

    def share_cap(self) -> ShareCap:
        """Return the limit on each peer's places in the buffer."""
        trusted = {peer_id for peer_id, record_of in self._reputations if record_of.reputation.trusted}
        return ShareCap(trusted=self._trusted | trusted, networks=dict(self._networks))

    def ban(self, peer_id: str, length_s: float | None = None) -> None:
        """Ban a peer for the operator, by default for `LONGEST_BAN_S`. Raise UsageError for this node."""
        if peer_id == self._own_id:
            raise UsageError("this is the node itself: it cannot be banned")
        if peer_id in self._trusted:
            raise UsageError("node.toml trusts this peer: remove it from access.trust and start the node again")
        self._reputations.ban(peer_id, length_s or LONGEST_BAN_S, now=self._clock())
        self._report(peer_id, TrustLevel.BANNED, "by the operator")

    def unban(self, peer_id: str) -> None:
        """End a ban, and delete the record of the peer's past bans."""
        self._reputations.unban(peer_id, now=self._clock())
        self._report(peer_id, self.trust_level(peer_id), "by the operator")

    def trust(self, peer_id: str, trusted: bool = True) -> None:
        """Set or end trust. A node never bans a trusted peer, and gives it more places. Trust ends a ban."""
        self._reputations.trust(peer_id, trusted, now=self._clock())
        self._report(peer_id, self.trust_level(peer_id), "by the operator")

    def known(self) -> list[str]:
        """Return the ids of known peers and of those that the settings name."""
        known = {peer_id for peer_id, _ in self._reputations} | self._allowed | self._trusted
        return sorted(known - {self._own_id})

    def row(self, peer_id: str) -> dict[str, Any]:
        """Return the row of `peers --json` of any peer. `banned_until` is in Unix seconds, None without a ban."""
        record_of, now = self._reputations.record_of(peer_id), self._clock()
        known = record_of.reputation
        is_running = known.is_banned(now=now)
        return {
            "trust_level": self.trust_level(peer_id).value,
            "score": BAN_SCORE if is_running else round(known.score_at(now), 2),
            "banned_until": round(known.banned_until, 1) if is_running else None,
            "ban_reason": known.ban_reason if is_running else "",
            "reasons": dict(record_of.reasons),
            "trusted": self.is_trusted(peer_id),
        }

    def _share_subnet(self, sender: str, origin: str) -> None:
        """Count a sender that never connected to the subnet of its relay, until a known peer of another one relays."""
        if origin not in (sender, self._own_id) and sender not in self._met:
            subnet = self._networks.get(origin, origin)
            if self._networks.setdefault(sender, subnet) not in (subnet, origin) and not self.is_new_peer(origin):
                self._networks[sender] = sender

    def _has_no_quota(self, peer_id: str) -> bool:
        return peer_id == self._own_id or self.is_trusted(peer_id)

    def _charge(self, peer_id: str, num_tokens: int) -> None:
        if not self._has_no_quota(peer_id):
            self._quotas.spend(peer_id, num_tokens, is_new_peer=self.is_new_peer(peer_id), now=time.monotonic())

    def _report(self, peer_id: str, trust_level: TrustLevel, why: str) -> None:
        """Write a changed trust level to the event log, the log and the disk."""
        until = self.row(peer_id)["banned_until"]
        self._events.write("reputation_changed", peer=peer_id, trust_level=trust_level.value, why=why, until=until)
        if trust_level is TrustLevel.BANNED:
            log.warning("%s is refused for %.0f s: %s", peer_id, (until or 0) - self._clock(), why)
        self.save()
