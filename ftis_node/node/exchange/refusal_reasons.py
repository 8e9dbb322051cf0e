"""Reasons for which an exchange node refuses a group or a request of the trainer, before validation.

Validation refuses a group under the reasons of `swarm/reasons.py`. The page docs/train/trl.md has them all.
"""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

from ftis_node.validation import Refusal

# Why a group is refused before it is scored or signed: a part of the reasons of validation.
GroupReason: TypeAlias = Literal[
    "clock_skew",
    "group_size",
    "logprobs",
    "prompt_mismatch",
    "scoring_timeout",
    "token_out_of_range",
    "tokenizer",
]
# Why a request is refused, whatever group it has.
RequestReason: TypeAlias = Literal["busy", "paused", "token", "size", "slow", "malformed"]
REQUEST_REASONS: Final[dict[RequestReason, str]] = {
    "busy": "16 groups wait to be scored, or no peer has fetched the last groups yet",
    "paused": "the disk of the node is full",
    "token": "the header with the token of the home is missing or wrong",
    "size": "the request has more bytes than a group of the run can have",
    "slow": "the request was not complete within 10 s",
    "malformed": "the request is no such message, or a field is out of bounds",
}
PASSING: Final[frozenset[GroupReason | RequestReason]] = frozenset({"busy", "paused", "scoring_timeout"})


def refuse(reason: GroupReason | RequestReason, detail: str) -> Refusal:
    """Return the refusal of a group or of a request."""
    return Refusal(reason, detail)
