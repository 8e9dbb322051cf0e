"""The shares of own and foreign groups in a step.

A step takes I own and J foreign groups; I + J is constant.

If the run has `step.backfill_with_own`, the node shares the shortfall evenly with the senders of the present foreign
groups. Each of them gets the groups of all others. If there is a surplus of foreign groups, the node generates fewer
extra groups. It divides the surplus by the same number of nodes and keeps the remainder for the next steps. So peers
that send less than one group per step also count.

A learner that generates nothing takes I + J groups of any peers: the first I replace its own ones. A node that has
stopped generating first uses its remaining own groups, and then does the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ftis_node.config.step import StepSection
from ftis_node.node.context import NodeContext
from ftis_node.node.training.generation_limits import GenerateBudget, SlotPool
from ftis_node.replay.reader import ReplayReader


def substitute_foreign(ready: int, *, needs: StepSection) -> tuple[int, int]:
    """Return the READY groups as (own, foreign) for a node that does not generate: the first I count as own."""
    for_own = min(ready, needs.own_groups)
    return for_own, ready - for_own


@dataclass(eq=False, repr=False)
class StepShares:
    """Computes the shares of a step from the manifest, adjusted if the node generates nothing or its budget is used."""

    context: NodeContext
    budget: GenerateBudget
    slots: SlotPool
    reader: ReplayReader

    @property
    def makes_more(self) -> bool:
        """Return whether more own groups will be stored: budget is left, or a group is still in generation."""
        return self.context.settings.generates and not (self.budget.is_used_up and not self.slots.in_generation)

    def of_next_step(self, needs: StepSection | None = None) -> tuple[int, int]:
        """Return the own and foreign groups of the next step, by signer. `needs` defaults to those of the manifest."""
        needs, settings = needs or self.context.manifest.step, self.context.settings
        is_supplied = settings.role == "exchange" or self.makes_more  # its trainer makes an exchange node's own groups
        if is_supplied or (settings.generates and not needs.foreign_groups):
            return needs.own_groups, needs.foreign_groups
        own = min(self.reader.ready_counts()[0], needs.own_groups) if settings.generates else 0
        return own, needs.own_groups + needs.foreign_groups - own


@dataclass(slots=True)
class ForeignShortfall:
    """Controller of `extra`: the own groups beyond I in the next step, which replace foreign ones; 0 at the start."""

    extra: int = 0
    _left: int = 0
    _plenty: int = 0  # surplus of earlier steps that has not reduced `extra` yet

    def shares(self, own: int, foreign: int) -> tuple[int, int]:
        """Return I and J for the next step."""
        extra = min(self.extra, foreign)
        return own + extra, foreign - extra

    def note(self, num_foreign: int, senders: Sequence[str]) -> None:
        """Note the start of a step of up to `num_foreign` foreign groups. `senders` has an entry per READY group.

        Groups left from the last step are no surplus, because the buffer's stock shrinks: only new arrivals count.
        """
        ready, sharers = len(senders), 1 + len(set(senders))
        missing, plenty = num_foreign - ready, ready - self._left - num_foreign
        self._left = max(0, -missing)
        if missing > 0:
            self.extra += -(-missing // sharers)
            self._plenty = 0
        elif plenty > 0:
            less, self._plenty = divmod(self._plenty + plenty, sharers)
            self.extra = max(0, self.extra - less)
