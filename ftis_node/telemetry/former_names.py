"""Old and current names in stored data: events, rejection reasons, kinds of behavior, trust levels.

Event logs keep the names of the version that wrote them; their readers apply these tables. `peers.sqlite` is upgraded.
"""

from __future__ import annotations

from typing import Any

EVENT_SCHEMA = 4  # in each `start` event; a log without it has the names of schema 1
EVENTS = {  # of schema 1
    "tidied": "disk_reclaimed",
    "saved": "recovered",
    "fell_back": "checkpoint_fallback",
    "buffer_behind": "buffer_rolled_back",
    "asked": "backfill_requested",
    "announced_again": "reannounced",
    "standing": "reputation_changed",
    "hand_over_failed": "weight_sync_failed",
    "hand_over_fell_back": "weight_sync_fallback",
    "proof_failed": "weight_check_failed",
    "member_joined": "peer_joined",
    "member_left": "peer_left",
}
REASONS = {  # of schemas 2 and 3, in `refused` and `reputation_changed` and in a peer's record
    "unasked": "unsolicited",
    "number": "sequence_reused",
    "clock": "clock_skew",
    "text_form": "wrong_encoding",
    "vocabulary": "token_out_of_range",
    "prompt": "prompt_mismatch",
    "text": "not_encodable",
    "reward": "reward_mismatch",
    "unscored": "scoring_failed",
    "audit": "logprob_mismatch",
    "understated": "understated_logprobs",
    "finish": "finish_reason",
    "announcement_clock": "announcement_clock_skew",
    "copy": "duplicate_completions",
    "copy_ours": "duplicate_of_own",
    "weights_of": "weights_not_offered",
    "scoring_time": "scoring_timeout",
    "mishap": "harmless",
    "flooded": "rate_limited",
    "lied": "false_claim",
}
TRUST_LEVELS = {"watched": "probation"}  # of schema 2, in `reputation_changed`


def present_name(name: str) -> str:
    """Return the current name of an event of any schema."""
    return EVENTS.get(name, name)


def present_reason(reason: str) -> str:
    """Return the current name of a rejection reason or kind of behavior of any schema."""
    return REASONS.get(reason, reason)


def with_present_name(event: dict[str, Any]) -> dict[str, Any]:
    """Return the event with current names. Raise KeyError for an event without a name."""
    if not isinstance(event["event"], str):
        return event
    name = present_name(event["event"])
    if name == "refused":
        return event | _present_fields(event, "reason", REASONS) | {"event": name}
    if name == "reputation_changed":
        standing = _present_fields(event, "standing", TRUST_LEVELS)
        return event | standing | _present_fields(event, "why", REASONS) | {"event": name}
    return event if name == event["event"] else event | {"event": name}


def _present_fields(event: dict[str, Any], field: str, names: dict[str, str]) -> dict[str, str]:
    """Return a field with its current name. The field holds a name, or a name, a colon and details."""
    if not isinstance(value := event.get(field), str):
        return {}
    name, colon, details = value.partition(":")
    return {field: names.get(name, name) + colon + details}
