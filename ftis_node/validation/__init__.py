"""Validation of groups: ordered pure rules over an envelope, and one verdict with one reason."""

from __future__ import annotations

from ftis_node.records.envelope import Accepted
from ftis_node.validation.pipeline import Refused, ValidationResult, validate
from ftis_node.validation.rules import Refusal, ValidationContext

__all__ = [
    "Accepted",
    "ValidationContext",
    "Refusal",
    "Refused",
    "ValidationResult",
    "validate",
]
