"""The check loop: the first own group that a new version sampled goes to the learner, which still has that version.

consumes: own groups just stored (intake)     produces: nothing; the learner's next report has the mismatch
waits for: an own group of the newest version  unblocked by: intake

Groups of a step were mostly sampled a version before the learner's, because generation runs ahead of it: only these,
seen while they are new, compare engine and learner under the same weights. One a version; one that is late is dropped.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ftis_node.errors import WorkerError
from ftis_node.node.train import train_group
from ftis_node.replay.buffer import StoredGroup

if TYPE_CHECKING:
    from ftis_node.node.intake import IntakeLoop
    from ftis_node.node.parts import Parts
    from ftis_node.records.envelope import Accepted

log = logging.getLogger(__name__)


class CheckLoop:
    """At most one group of each version is sent."""

    def __init__(self, parts: Parts, intake: IntakeLoop) -> None:
        self._parts = parts
        self._intake = intake
        self._sent_version: int | None = None

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            accepted = await self._intake.next_own()
            if self._is_due(accepted):
                self._sent_version = accepted.group.policy_version
                await self._send(accepted)

    def _is_due(self, accepted: Accepted) -> bool:
        """Whether the learner's present version, and no other, sampled the group, and it is the first such."""
        group, version = accepted.group, self._parts.figures.policy_version
        return group.policy_version == group.policy_version_newest == version != self._sent_version

    async def _send(self, accepted: Accepted) -> None:
        stored = StoredGroup(
            id=accepted.envelope.id,
            own=True,
            group=accepted.group,
            rewards=accepted.group.rewards,
            prompt_ids=accepted.prompt_ids,
        )
        try:
            await self._parts.learner.check(train_group(stored, share=self._parts.manifest.step.share))
        except WorkerError as error:  # the train loop sees to the learner; the next version has its own check
            self._parts.events.write("check_failed", group=stored.id, error=str(error))
            log.warning("the mismatch of version %d was not measured: %s", self._sent_version, error)
