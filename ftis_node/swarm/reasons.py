"""Dictionary of reasons: for the rejection of a group and for a peer's loss of reputation.

Status, events, screens, the report and docs/reference/rejections.md use these names and sentences; tests compare them.
"""

from __future__ import annotations

from typing import NamedTuple

from ftis_node.swarm.reputation import Behaviour

REFUSALS = {
    "size": "it has more bytes than the run allows",
    "parse": "it is not a valid envelope or body",
    "unsolicited": "the node did not request it from this peer",
    "version": "it has another schema version: one of the two nodes is older",
    "codec": "its codec is unknown here: one of the two nodes is older",
    "malformed": "its fields contradict each other",
    "run": "it belongs to another run",
    "wrong_encoding": "it is encoded as text, but the exact form is available from this sender or required by the run",
    "banned": "its sender is banned or not on the allow-list",
    "quota": "its sender, or all new peers together, exceeded their rate limit",
    "signature": "the signature is not its sender's",
    "duplicate": "the node has it already",
    "sequence_reused": "its sender used the sequence number before, as two nodes with one identity do",
    "weights_not_offered": "it claims weights of this node that this node has not offered",
    "clock_skew": "its time is more than a minute ahead: one of the two clocks is wrong",
    "stale": "it is older than the run's `step.max_age_s`, or than this node's last buffer reset",
    "tokenizer": "its token ids are those of another tokenizer",
    "group_size": "its number of completions differs from the run's group size",
    "sampling": "it was sampled with other settings than the run's",
    "length": "a completion is longer than the run allows",
    "reward_range": "a claimed reward is outside [0, 1]",
    "token_out_of_range": "a token id is outside the tokenizer's vocabulary",
    "logprobs": (
        "a log-prob is not finite or above 0, more than 16 are equal for different or uncertain completions, or "
        "their mean is below -14 nats"
    ),
    "finish_reason": "a finish reason does not fit the end tokens that its sender names",
    "scoring_quota": "scoring the groups of its sender, or of all new peers, exceeded their time limit",
    "prompt_mismatch": "the problem does not exist here, or its text differs",
    "opening": "the beginning of the answer that its sender's chat template wrote is not a think block",
    "too_long_here": "its problem is longer in this node's chat template, and leaves no space for its completions",
    "not_encodable": "the tokenizer or the chat template here cannot encode its problem or one of its texts",
    "no_embedding": "it has a token of which this node's model has no embedding",
    "duplicate_completions": (
        "its completions were in a known peer's group long before, or in an earlier one of its sender"
    ),
    "duplicate_of_own": "its completions were in a group of this node before",
    "duplicate_undecided": "its completions were in a group of another peer before; either may be the original",
    "scoring_failed": "scoring it here failed, or this machine was too busy",
    "scoring_timeout": "making its problem or scoring one of its completions reached the time limit",
    "reward_mismatch": "a claimed reward differs from the one computed here",
    "logprob_mismatch": "(after validation) its log-probs differ from those of the weights that it claims",
    "understated_logprobs": "(after validation) the learner finds a completion far likelier than its log-probs say",
}
AFTER_VALIDATION = frozenset({"logprob_mismatch", "understated_logprobs"})
BEHAVIOUR = {
    "harmless": "a group was of no use, without fault of the peer",
    "pull_failed": "it announced a group and did not deliver it",
    "rate_limited": "it exceeded its rate limit",
    "slow": "scoring its completions took the whole time limit",
    "copied": "its completions were in its own earlier group, or in a known peer's",
    "displaced": "an equal group of another peer was announced before its group",
    "refused": "it sent what no correct node of this run sends",
    "fault": "a value that it sent made this node's code fail: please report the line of the log",
    "poisoned": "the learner failed in three steps that had a group of it",
    "false_claim": "it made a false claim under its own signature",
    "by the operator": "an operator of this node decided so",
    "announcement_flood": "it announced more groups than this node reads",
    "announcement_clock_skew": "it announced groups with a time more than a minute ahead",
    "announcement_version": "it announces in another wire version: update the older of the two nodes",
    "pull_complete": "it announced groups as its own, and its complete answer had none of them",
    "question_version": "its queries have another wire version: update the older of the two nodes",
    "record_version": "its record has another wire version: update the older of the two nodes",
}
PULL = "pull_"  # followed by the outcome of the pull
ANNOUNCEMENT = "announcement_"  # followed by the reason why it is invalid
UNKNOWN = "this version does not know the reason"
ORIGIN_FAULT = {
    "unsolicited": Behaviour.REFUSED,
    "size": Behaviour.REFUSED,
    "parse": Behaviour.REFUSED,
    "malformed": Behaviour.REFUSED,
    "signature": Behaviour.FALSE_CLAIM,
}
NO_FAULT = frozenset(
    {
        *("version", "codec"),  # another software version
        *("banned", "duplicate", "sequence_reused", "stale", "clock_skew"),
        *(
            "scoring_failed",
            "not_encodable",
            "scoring_quota",
            "too_long_here",
            "no_embedding",
        ),  # this node scores and tokenizes
        "duplicate_undecided",
    }
)
GRADED = frozenset({"reward_mismatch", "prompt_mismatch"})
"""Reasons that depend on the releases of the packages that make and grade problems."""
SIGNER_FAULT = {
    "scoring_timeout": Behaviour.SLOW,
    "reward_mismatch": Behaviour.FALSE_CLAIM,
    "duplicate_of_own": Behaviour.FALSE_CLAIM,
    "duplicate_completions": Behaviour.COPIED,
}


class Attribution(NamedTuple):
    """The peer at fault and its behavior. The group also counts against that peer's quota."""

    peer_id: str
    conduct: Behaviour


def attribute_refusal(
    reason: str, *, origin: str, sender: str | None, signed: bool, grades_alike: bool = True
) -> Attribution:
    """Return the peer at fault: `origin` sent the group, `sender` is its named creator, verified if `signed`.

    Any peer may serve any group. So a reason found before the signature check is not charged to the named creator,
    because any peer can write that name. A reason that a relaying peer cannot know, such as our clock, quotas or bans,
    is not charged to that peer. It knows form and signature, because its own validation checks them.

    `grades_alike`: the sender says that it has this node's releases. Otherwise its rewards and problem texts may differ
    without fault.
    """
    if conduct := ORIGIN_FAULT.get(reason):
        return Attribution(origin, conduct)
    if reason in NO_FAULT or (reason in GRADED and not grades_alike):
        return Attribution(origin, Behaviour.HARMLESS)
    if reason == "quota":
        return Attribution(origin, Behaviour.RATE_LIMITED if sender == origin else Behaviour.HARMLESS)
    if signed and sender is not None:
        return Attribution(sender, SIGNER_FAULT.get(reason, Behaviour.REFUSED))
    return Attribution(origin, Behaviour.REFUSED)


def sentence(reason: str) -> str:
    """Return the meaning of a reason as a clause."""
    if known := REFUSALS.get(reason) or BEHAVIOUR.get(reason):
        return known
    if reason.startswith(PULL):
        return f"it announced groups, and fetching them ended as {reason.removeprefix(PULL).replace('_', ' ')!r}"
    if reason.startswith(ANNOUNCEMENT):
        return f"its announcement is invalid: {reason.removeprefix(ANNOUNCEMENT).replace('_', ' ')!r}"
    return UNKNOWN


def full_sentence(reason: str) -> str:
    """Return the meaning of a reason as a sentence."""
    clause = sentence(reason)
    return f"{clause[0].upper()}{clause[1:]}."
