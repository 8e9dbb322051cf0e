"""Shares of own and foreign groups in the next step, and whether this node still generates groups."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftis_node.node.training.step_policy import StepQuota, shares_of_step

if TYPE_CHECKING:
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
        generates = self._context.settings.generates
        if not generates or self.makes_more or not needs.foreign:
            return shares_of_step(needs, generates=generates)
        own_left, _ = self._reader.ready_counts()
        return shares_of_step(needs, generates=False, own_left=own_left)
