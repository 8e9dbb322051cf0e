"""How much a node does in all: the table `[budget]` of `node.toml`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from ftis_node.config.section import Section

Amount = Annotated[int, Field(ge=1, le=1 << 53)]


class BudgetSection(Section):
    """What a node may do in all lives of its home together; what is unset has no end (ftis-node docs train/domains)."""

    generate_tokens: Amount | None = Field(
        default=None,
        description="Completion tokens that the node generates; then it makes no more groups, and trains on those of "
        "others while it can. Groups under way are ended. Evaluations are not counted.",
    )
    learn_steps: Amount | None = Field(
        default=None, description="Optimiser steps after which the node ends; what `--steps` says."
    )
    learn_tokens: Amount | None = Field(
        default=None,
        description="Completion tokens, own and foreign, that the node trains on before it ends. A step is done whole.",
    )
