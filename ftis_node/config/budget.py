"""The table `[budget]` of `node.toml`: the node's total work."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from ftis_node.config.section import Section

Amount = Annotated[int, Field(ge=1, le=1 << 53)]


class BudgetSection(Section):
    """The node's total work over all restarts of its home. An unset limit is none (ftis-node docs train/domains)."""

    generate_tokens: Amount | None = Field(
        default=None,
        description="Completion tokens that the node generates. At the limit it cancels the groups in flight and "
        "trains on those of peers only. Evaluations do not count.",
    )
    learn_steps: Amount | None = Field(
        default=None, description="Optimizer steps after which the node ends, as `--steps`."
    )
    learn_tokens: Amount | None = Field(
        default=None,
        description="Completion tokens, own and foreign, on which the node trains before it ends. It completes the "
        "step that reaches the limit.",
    )
