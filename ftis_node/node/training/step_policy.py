"""Step policy: whether a step may start, and with which groups; a pure rule over counts and a clock.

A step takes I own and J foreign groups. It waits for its own groups as long as it takes. It waits for foreign ones only
up to the run's patience, and not at all if no peer could send any.

A learner that generates nothing takes I + J groups of any peers: the first I replace its own ones. So does a node that
generates no more, with the remaining own groups. It may end in two cases: the run takes no foreign groups, or no peer
was there to send any for the whole patience.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ftis_node.config.manifest import RunManifest


@dataclass(frozen=True, slots=True)
class StepQuota:
    """I and J of the manifest, and the patience limit in seconds.

    Where more own groups are `generated` than a step takes, it waits for all of them.
    """

    own: int
    foreign: int
    foreign_wait_s: float
    generated: int = 0

    @property
    def own_waited_for(self) -> int:
        """Own groups that are there when the step starts."""
        return max(self.own, self.generated)

    @classmethod
    def of(cls, manifest: RunManifest) -> StepQuota:
        """Return the run's quota."""
        step = manifest.step
        return cls(
            own=step.own_groups,
            foreign=step.foreign_groups,
            foreign_wait_s=step.foreign_wait_s,
            generated=step.generated_groups or 0,
        )


def shares_of_step(needs: StepQuota, *, generates: bool, own_left: int = 0) -> tuple[int, int]:
    """Return how many own and foreign groups a step takes, by who signed them.

    `own_left` are READY ones of a node that generates no more.
    """
    if generates:
        return needs.own, needs.foreign
    own = min(own_left, needs.own)
    return own, needs.own + needs.foreign - own


def substitute_foreign(ready: int, *, needs: StepQuota) -> tuple[int, int]:
    """READY groups of a node that generates nothing, or no more, counted as (own, foreign)."""
    standing_in = min(ready, needs.own)
    return standing_in, ready - standing_in


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What is there. `waited_s`: since all own groups were ready. `uptime_s`: since the node started.

    `alone_s`: since a member was there, or since the start.
    """

    own_ready: int
    foreign_ready: int
    waited_s: float
    uptime_s: float
    has_members: bool
    alone_s: float = 0.0


def may_start(needs: StepQuota, outlook: StepInputs) -> bool:
    """Return whether the step goes now."""
    if outlook.own_ready < needs.own_waited_for:
        return False
    if outlook.foreign_ready >= needs.foreign:
        return True
    if outlook.own_ready + outlook.foreign_ready == 0:
        return False
    somebody_may_come = outlook.has_members or outlook.uptime_s < needs.foreign_wait_s
    return not somebody_may_come or outlook.waited_s >= needs.foreign_wait_s


def never_starts(needs: StepQuota, outlook: StepInputs) -> bool:
    """Return whether a node that generates no more need not wait for its next step: no peer will complete it."""
    if outlook.own_ready >= needs.own and outlook.own_ready + outlook.foreign_ready > 0:
        return False
    return not needs.foreign or (not outlook.has_members and outlook.alone_s >= needs.foreign_wait_s)
