"""What all tables of the two configuration files have in common."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[float, Field(gt=0)]


class Section(BaseModel):
    """A table of the manifest or of `node.toml`: frozen, and strict about its keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)
