"""A sentence for each reason for which a group is rejected or a peer loses reputation.

docs/reference/rejections.md has the same sentences and who is at fault for each; a test compares the two.
`REFUSALS` are reasons of the validation, `BEHAVIOUR` the other entries of a peer's record.
"""

from __future__ import annotations

REFUSALS = {
    "size": "it has more bytes than the run allows",
    "parse": "it is no envelope, or no body",
    "unasked": "it is none of those that the peer was asked for",
    "version": "its schema is another",
    "codec": "its codec is not known here",
    "malformed": "its fields contradict each other",
    "run": "it belongs to another run",
    "text_form": "it is told as text, and this run, or this sender's tokenizer, has the exact form",
    "banned": "its sender is refused here now, or not on the allow-list",
    "quota": "its sender, or all strangers together, sent more than their allowance",
    "signature": "its sender did not sign it",
    "duplicate": "it is here already",
    "number": "its sender used the running number before",
    "weights_of": "it claims weights of this node that this node has not offered",
    "clock": "it was made more than `validation.max_clock_skew_s` from now",
    "stale": "it is older than the run's `step.max_age_s`",
    "tokenizer": "its ids are another tokenizer's",
    "group_size": "it has more or fewer completions than the run's groups",
    "sampling": "it was sampled with other settings than the run's",
    "length": "a completion is longer than the run allows",
    "reward_range": "a claimed reward lies outside [0, 1]",
    "vocabulary": "an id is none of the tokenizer's",
    "logprobs": (
        "a log-prob is not finite or above 0, all of more than 16 are equal though the completions differ or "
        "are not certain, or their mean is below `validation.min_mean_logprob`"
    ),
    "finish": "a finish reason does not fit the last token",
    "prompt": "there is no such problem here, or it reads otherwise",
    "text": "our tokenizer cannot say one of its texts",
    "copy": "its completions were in another peer's group before, or in an earlier one of its sender",
    "copy_ours": "its completions were in a group of this node before",
    "reward": "a claimed reward is not the one that we find",
    "scoring_quota": "scoring its sender's groups, or those of all strangers, took more time than their allowance",
    "scoring_time": "its problem, or one of its completions, took the whole processor time for making or scoring it",
    "unscored": "scoring it here failed, or this machine was too busy for it",
    "audit": "(after the door) its log-probs are not those of the weights that it claims",
    "understated": "(after the door) our learner finds a completion far likelier than its log-probs say",
}
AFTER_VALIDATION = frozenset({"audit", "understated"})
BEHAVIOUR = {
    "mishap": "a group was of no use, and that may happen to anyone",
    "pull_failed": "it announced a group and did not deliver it",
    "flooded": "it sent more than its allowance",
    "slow": "scoring its completions took the whole time limit",
    "copied": "its completions were in another peer's group before",
    "refused": "it sent what no honest node of this run sends",
    "fault": "a value that it sent made this node's code fail: please report the line of the log",
    "poisoned": "the learner failed in three steps that had a group of it",
    "lied": "it made a wrong claim under its own signature",
    "by the operator": "you, or whoever runs this node, decided so",
    "announcement_flood": "it announced far more than this node reads",
    "announcement_clock": "it announces groups dated further ahead than a clock may be off",
    "announcement_version": "it announces in another version of the wire: update the older of the two nodes",
    "pull_complete": "it announced groups as its own, and its complete answer had none of them",
    "question_version": "it asks in another version of the wire: update the older of the two nodes",
    "record_version": "its record is of another version of the wire: update the older of the two nodes",
}
PULL = "pull_"  # followed by the outcome of the pull
ANNOUNCEMENT = "announcement_"  # followed by the reason why it is invalid
UNKNOWN = "no sentence is known for this name"


def sentence(reason: str) -> str:
    """Return what a reason means, as a clause."""
    if known := REFUSALS.get(reason) or BEHAVIOUR.get(reason):
        return known
    if reason.startswith(PULL):
        return f"it announced groups, and fetching them ended as {reason.removeprefix(PULL).replace('_', ' ')!r}"
    if reason.startswith(ANNOUNCEMENT):
        return f"its announcement was no announcement: {reason.removeprefix(ANNOUNCEMENT).replace('_', ' ')!r}"
    return UNKNOWN
