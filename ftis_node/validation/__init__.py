"""The door: ordered pure rules over an envelope, and one verdict with one reason."""

from __future__ import annotations

from ftis_node.records.envelope import Accepted
from ftis_node.validation.context import DoorContext, DoorLimits
from ftis_node.validation.door import Refused, Verdict, judge
from ftis_node.validation.rules import RULES, Refusal
from ftis_node.validation.text_rules import TEXT_RULES

__all__ = ["RULES", "TEXT_RULES", "Accepted", "DoorContext", "DoorLimits", "Refusal", "Refused", "Verdict", "judge"]
