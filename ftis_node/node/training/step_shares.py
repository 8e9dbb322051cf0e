"""How many own and foreign groups the next step takes, and whether this node still generates groups."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftis_node.node.training.step_policy import StepQuota, shares_of_step

if TYPE_CHECKING:
    from ftis_node.node.context import NodeContext
    from ftis_node.node.training.slots import SlotPool
    from ftis_node.node.training.token_budget import GenerateBudget
    from ftis_node.replay.reader import ReplayReader


class StepShares:
    """The manifest's shares of a step, corrected for a node that generates nothing or has used up its budget."""

    def __init__(self, *, context: NodeContext, budget: GenerateBudget, slots: SlotPool, reader: ReplayReader) -> None:
        self._context = context
        self._budget = budget
        self._slots = slots
        self._reader = reader

    @property
    def makes_more(self) -> bool:
        """Return whether own groups will come: the node generates, and its budget is not used up and published."""
        return self._context.settings.generates and not (self._budget.is_used_up and not self._slots.waiting)

    @property
    def is_learned_out(self) -> bool:
        """Return whether the tokens that may be trained on are used up."""
        limit = self._context.settings.budget.learn_tokens
        return limit is not None and self._reader.trained_tokens() >= limit

    def of_next_step(self, needs: StepQuota | None = None) -> tuple[int, int]:
        """Return the own and foreign groups of the next step, by signer. `needs`: the manifest's if not given."""
        needs = needs or StepQuota.of(self._context.manifest)
        generates = self._context.settings.generates
        if not generates or self.makes_more or not needs.foreign:
            return shares_of_step(needs, generates=generates)
        own_left, _ = self._reader.ready_counts()
        return shares_of_step(needs, generates=False, own_left=own_left)
