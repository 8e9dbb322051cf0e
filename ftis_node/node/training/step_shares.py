"""Shares of own and foreign groups in the next step, and whether this node still generates groups.

A step takes I own and J foreign groups; I + J is constant. A step is smaller if foreign groups do not arrive or are
refused. If the run has `step.backfill_with_own`, the node shares the shortfall evenly with the senders of the present
foreign groups. Each of them gets the groups of all others. If there is a surplus of foreign groups, the node generates
fewer extra groups. It divides the surplus by the same number of nodes and keeps the remainder for the next steps. So
peers that send less than one group per step also count.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftis_node.node.training.step_policy import StepQuota, shares_of_step

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ftis_node.node.context import NodeContext
    from ftis_node.node.training.slots import SlotPool
    from ftis_node.node.training.token_budget import GenerateBudget
    from ftis_node.replay.reader import ReplayReader


class StepShares:
    """Computes the shares of a step from the manifest, adjusted if the node generates nothing or its budget is used."""

    def __init__(self, *, context: NodeContext, budget: GenerateBudget, slots: SlotPool, reader: ReplayReader) -> None:
        self._context = context
        self._budget = budget
        self._slots = slots
        self._reader = reader

    @property
    def makes_more(self) -> bool:
        """Return whether more own groups will be stored: budget is left, or a group is still in generation."""
        return self._context.settings.generates and not (self._budget.is_used_up and not self._slots.waiting)

    @property
    def is_learned_out(self) -> bool:
        """Return whether the budget of training tokens (`budget.learn_tokens`) is used up."""
        limit = self._context.settings.budget.learn_tokens
        return limit is not None and self._reader.trained_tokens() >= limit

    def of_next_step(self, needs: StepQuota | None = None) -> tuple[int, int]:
        """Return the own and foreign groups of the next step, by signer. `needs` defaults to the manifest's quota."""
        needs = needs or StepQuota.of(self._context.manifest)
        settings = self._context.settings
        if settings.role == "exchange":  # the trainer beside it makes the own groups
            return needs.own, needs.foreign
        generates = settings.generates
        if not generates or self.makes_more or not needs.foreign:
            return shares_of_step(needs, generates=generates)
        own_left, _ = self._reader.ready_counts()
        return shares_of_step(needs, generates=False, own_left=own_left)


class ForeignShortfall:
    """Controller of `extra`: the own groups beyond I in the next step, which replace foreign ones; 0 at the start."""

    def __init__(self) -> None:
        self.extra = 0
        self._left = 0
        self._plenty = 0  # surplus of earlier steps that has not reduced `extra` yet

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
