"""What all tables of the two configuration files have in common."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

MOST = 1e9  # of a setting that has no natural bound: far beyond any use, and far from what float32 holds

Positive = Annotated[float, Field(gt=0, le=MOST)]


class Section(BaseModel):
    """A table of the manifest or of `node.toml`: frozen, strict about its keys, and every number is a finite one."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
