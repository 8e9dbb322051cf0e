"""This node's record in the directory: what it is, and how its training goes.

It names the releases of the packages that decide how the node judges groups. A grader of another release gives another
reward to the same text, and no node is wrong. So refusals that depend on the grader are no fault while two nodes name
other releases (`swarm/reasons.py`). Both nodes log the difference.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import metadata

from ftis_node import __version__
from ftis_node.models import PromptTokenizer
from ftis_node.node.context import NodeDescription
from ftis_node.node.peers.node_part import NodePart
from ftis_node.node.worker_interfaces import Generation, Learning
from ftis_node.records.bounds import MAX_GRADER_BYTES, MAX_REFUSED_SENDERS, MAX_RELEASE_BYTES
from ftis_node.records.envelope import PeerRecord
from ftis_node.records.parsing import clip_name
from ftis_node.records.peer_messages import PeerStats, Releases
from ftis_node.swarm.reasons import REFUSALS
from ftis_node.swarm.receipts import in_turn
from ftis_node.tasks import grader_releases
from ftis_node.tasks.base import Task
from ftis_node.telemetry.terminal_text import printable

NUM_SAMPLES = 10  # number of directory periods over which the rate of groups averages
MINUTE_S = 60.0


@dataclass(eq=False, repr=False)
class OwnRecord(NodePart):
    """Maker of the record. `sample` is called once for each directory period, `make` at any time."""

    generation: Generation
    learner: Learning
    _turn: int = field(default=0, init=False)
    _samples: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=NUM_SAMPLES), init=False)

    def sample(self) -> None:
        """Note how many groups have been sent; the rate is an average since the oldest of the noted numbers."""
        self._samples.append((time.monotonic(), self.store.reader.last_number()))
        self._turn += 1

    def make(self) -> PeerRecord:
        about, learner, last_number = self.context.about, self.learner.state, self.store.reader.last_number()
        return PeerRecord(
            run_id=self.context.manifest.run_id,
            peer_id=self.context.peer_id,
            name=about.name,
            model=about.model,
            parameters=learner.parameters if learner else 0,
            tokenizer=about.tokenizer,
            role=self.context.settings.role,
            last_number=last_number,
            policy_version=self.generation.policy_version,
            tokens_per_s=self.generation.tokens_per_s,
            created_at=time.time(),
            software=__version__,
            read_shards=self.context.state.read_shards,
            domain=about.domain,
            stats=self._stats(last_number) if self.context.settings.swarm.publish_stats else None,
            releases=about.releases,
        )

    def _stats(self, last_number: int) -> PeerStats:
        counters = self.context.counters
        sources: Counter[str] = Counter()
        for groups in counters.recent_sources:
            sources.update(groups)
        evaluations = self.context.evaluations.entries
        return PeerStats(
            step=max(self.context.state.step, self.peers.receipts.least_steps()),
            groups_per_minute=self._groups_per_minute(last_number),
            refused_groups=sum(counters.refused.values()),
            pass_rates=tuple((one.step, one.pass_at_1) for one in evaluations if one.task == evaluations[0].task),
            sources=tuple((peer_id, groups) for peer_id, groups in sources.most_common() if peer_id and groups > 0),
            trained_groups=sum(sources.values()),
            refused_senders=self._refused_senders(),
            # An exchange node does not know on which groups its trainer has trained.
            receipts=() if self.context.settings.role == "exchange" else self.peers.receipts.receipts(self._turn),
        )

    def _refused_senders(self) -> tuple[tuple[str, str, int], ...]:
        """Return as many refused senders as a record holds, others in each turn."""
        ordered = in_turn(self.peers.refused_senders(), self._turn, most=MAX_REFUSED_SENDERS)
        # A ban may have any reason: peers know the names in REFUSALS.
        reasons = [sender.reason if sender.reason in REFUSALS else "banned" for sender in ordered]
        return tuple((one.peer_id, reason, one.num_groups) for one, reason in zip(ordered, reasons, strict=True))

    def _groups_per_minute(self, last_number: int) -> float:
        if not self._samples:
            return 0.0
        (first_s, first), now_s = self._samples[0], time.monotonic()
        return MINUTE_S * (last_number - first) / (now_s - first_s) if now_s > first_s else 0.0


def own_releases(task: Task, tokenizer: PromptTokenizer) -> Releases:
    """Return the releases with which this node judges groups of `task`."""
    packages = ", ".join(filter(None, [f"ftis-node {__version__}", grader_releases(task)]))
    return Releases(
        grader=clip_name(packages, MAX_GRADER_BYTES),
        transformers=clip_name(metadata.version("transformers"), MAX_RELEASE_BYTES),
        template=tokenizer.template_digest,
    )


def release_differences(record: PeerRecord, about: NodeDescription) -> Iterator[str]:
    """Yield one clause per difference that may cause refusals, without the peer's name. The peer logs the same."""
    theirs, ours = record.releases, about.releases
    if theirs.grader and theirs.grader != ours.grader:
        yield (
            f"grades with {printable(theirs.grader)}, this node with {ours.grader}: groups whose rewards differ are "
            "refused without a charge; install the same releases"
        )
    if record.model == about.model and record.tokenizer != about.tokenizer:
        yield (
            f"has this model with another tokenizer, {record.tokenizer[:8]} by transformers "
            f"{printable(theirs.transformers) or '(not named)'}, here {about.tokenizer[:8]} by {ours.transformers}: "
            "install the same release of transformers to use its groups"
        )
