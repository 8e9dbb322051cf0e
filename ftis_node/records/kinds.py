"""Closed sets of words that peers send and settings name: the roles of nodes, and the codecs of groups."""

from __future__ import annotations

from typing import Literal

Role = Literal["full", "generator", "learner", "exchange"]
Codec = Literal["exact", "lossless", "lossy"]
