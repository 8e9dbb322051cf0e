"""Step policy: decides whether a step may start, and with which groups. Pure functions of counts and times.

A step takes I own and J foreign groups. It waits for own groups without a limit. It waits for foreign ones up to the
run's patience (`step.foreign_wait_s`). If no peer is connected, it waits only in the first `foreign_wait_s` after the
start of the node.

A learner that generates nothing takes I + J groups of any peers: the first I replace its own ones. A node that has
stopped generating first uses its remaining own groups, and then does the same. It may end in two cases: the run takes
no foreign groups, or no peer was connected for the whole patience.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ftis_node.config.manifest import RunManifest


@dataclass(frozen=True, slots=True)
class StepQuota:
    """I and J of the manifest, and the patience in seconds.

    If the node generates more groups per step (`generated`) than a step takes, the step waits for all of them.
    """

    own: int
    foreign: int
    foreign_wait_s: float
    generated: int = 0

    @property
    def own_waited_for(self) -> int:
        """Return the number of own groups that must be READY before the step starts."""
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
    """Return how many own and foreign groups a step takes, by signer.

    `own_left` is the number of READY own groups of a node that has stopped generating.
    """
    if generates:
        return needs.own, needs.foreign
    own = min(own_left, needs.own)
    return own, needs.own + needs.foreign - own


def substitute_foreign(ready: int, *, needs: StepQuota) -> tuple[int, int]:
    """Return the READY groups as (own, foreign) for a node that does not generate: the first I count as own."""
    standing_in = min(ready, needs.own)
    return standing_in, ready - standing_in


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Inputs of the policy. `waited_s` is the time since all own groups were READY, `uptime_s` since the node started.

    `alone_s` is the time since a member was last connected, or since the start.
    """

    own_ready: int
    foreign_ready: int
    waited_s: float
    uptime_s: float
    has_members: bool
    alone_s: float = 0.0


def may_start(needs: StepQuota, outlook: StepInputs) -> bool:
    """Return whether the step may start now."""
    if outlook.own_ready < needs.own_waited_for:
        return False
    if outlook.foreign_ready >= needs.foreign:
        return True
    if outlook.own_ready + outlook.foreign_ready == 0:
        return False
    somebody_may_come = outlook.has_members or outlook.uptime_s < needs.foreign_wait_s
    return not somebody_may_come or outlook.waited_s >= needs.foreign_wait_s


def never_starts(needs: StepQuota, outlook: StepInputs) -> bool:
    """Return whether the next step of a node that has stopped generating can never start: no peer will complete it."""
    if outlook.own_ready >= needs.own and outlook.own_ready + outlook.foreign_ready > 0:
        return False
    return not needs.foreign or (not outlook.has_members and outlook.alone_s >= needs.foreign_wait_s)
