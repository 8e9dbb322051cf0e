"""A sentence for each name under which the door refuses a group, as docs/reference/rejections.md explains it."""

from __future__ import annotations

REASONS = {
    "size": "It had more bytes than the run allows.",
    "parse": "It was no envelope, or no body.",
    "unasked": "It was none of those that the peer was asked for.",
    "version": "Its schema is another: one of the two nodes is older.",
    "codec": "Its codec is not known here: one of the two nodes is older.",
    "malformed": "Its fields contradict each other.",
    "run": "It belongs to another run.",
    "text_form": "It was told as text, though the exact form would have done.",
    "banned": "Its sender is refused here now, or is not on the allow-list.",
    "quota": "Its sender, or all strangers together, sent more than their allowance.",
    "signature": "Its sender did not sign it.",
    "duplicate": "It was here already.",
    "number": "The sender had used its running number before, as a restored backup does.",
    "clock": "It was made too far from now: one of the two clocks is wrong.",
    "stale": "It was older than the run allows.",
    "tokenizer": "Its ids are those of another tokenizer.",
    "group_size": "It had more or fewer completions than the run's groups have.",
    "sampling": "It was sampled with other settings than the run's.",
    "length": "A completion was longer than the run allows.",
    "reward_range": "A claimed reward was not between 0 and 1.",
    "vocabulary": "A token id is none of the tokenizer's.",
    "logprobs": "Its log-probs cannot be those of a model that sampled it.",
    "finish": "A completion's end does not fit its last token.",
    "prompt": "There is no such problem here, or it reads otherwise.",
    "text": "The tokenizer here cannot say one of its texts.",
    "copy": "Its completions had been in another group before.",
    "copy_ours": "Its completions had been in a group of this node before.",
    "reward": "A claimed reward was not the one found here.",
    "weights_of": "It claimed weights of this node that this node had not offered.",
    "scoring_quota": "Scoring the groups of its sender, or of all strangers, had taken more time than their allowance.",
    "scoring_time": "Its problem, or one of its completions, took the whole time limit of making or scoring it.",
    "unscored": "Scoring it here failed, or this machine was too busy for it.",
    "audit": "Its log-probs were not those of the weights that it claimed.",
    "understated": "The learner found a completion far likelier than its log-probs said.",
}
UNKNOWN = "A reason that this version does not know."


def sentence_for(reason: str) -> str:
    """Why a group was refused, for a person."""
    return REASONS.get(reason, UNKNOWN)
