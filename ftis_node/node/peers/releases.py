"""Releases of packages that decide how a node judges groups: this node's, and how a peer's differ.

A grader of another release gives another reward to the same text, and no node is wrong. So refusals that depend on the
grader are no fault while the two nodes name other releases (`swarm/reasons.py`). Both nodes log the difference.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata

from ftis_node import __version__
from ftis_node.models import PromptTokenizer
from ftis_node.node.context import NodeDescription
from ftis_node.records.bounds import MAX_GRADER_BYTES, MAX_RELEASE_BYTES
from ftis_node.records.envelope import PeerRecord
from ftis_node.records.peer_messages import Releases
from ftis_node.tasks import grader_releases
from ftis_node.tasks.base import Task
from ftis_node.telemetry.terminal_text import printable


def own_releases(task: Task, tokenizer: PromptTokenizer) -> Releases:
    """Return the releases with which this node judges groups of `task`."""
    packages = ", ".join(filter(None, [f"ftis-node {__version__}", grader_releases(task)]))
    return Releases(
        grader=packages.encode()[:MAX_GRADER_BYTES].decode(errors="ignore"),
        transformers=metadata.version("transformers")[:MAX_RELEASE_BYTES],
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
