"""The reasons for the refusal of a group and for a peer's loss of reputation: meaning, who is charged, what to do.

Status, events, screens, the report and docs/reference/refusals.md use these names and sentences; tests compare them.
"""

from __future__ import annotations

from typing import NamedTuple

from ftis_node.swarm.reputation import BY_OPERATOR, Behaviour

READ_MORE = "ftis-node docs reference/refusals"
SAME_RELEASE = "install the same release of ftis-node on both nodes"
CLOCKS = "switch on time synchronization (systemd-timesyncd, chrony) on both nodes"
CHECK_ENGINE = "check the sender's engine: the warning `mismatch` in its log"
UNBAN = "the refusing node's operator may end it: ftis-node peers unban PEER"
OWN_HOME = "give each node its own home and seed: two send the same completions"
SEND_FEWER = "send fewer groups"
HARMLESS, FALSE_CLAIM = Behaviour.HARMLESS, Behaviour.FALSE_CLAIM
UNCHARGED = frozenset({"banned", "quota", "scoring_quota"})  # these refusals cost little; a charge would extend itself
NO_NEWS = frozenset({"duplicate", "unsolicited"})  # another copy of the group may be used


class Reason(NamedTuple):
    """A reason as a clause. `behaviour` is charged to the peer that signed the group.

    If `is_of_origin`, it is charged to the peer that served it, which could see the fault. If `is_graded`, the reason
    depends on the releases of the packages that make and grade problems. `advice` holds for both nodes: the one that
    refuses and the sender.
    """

    meaning: str
    behaviour: Behaviour = Behaviour.REFUSED
    is_of_origin: bool = False
    is_graded: bool = False
    advice: str = READ_MORE


REFUSALS = {
    "size": Reason(
        "it has more bytes than the run allows, or claims more than 524,288 tokens",
        is_of_origin=True,
        advice="raise wire.max_envelope_bytes in the run, or generate shorter completions",
    ),
    "parse": Reason("it is not a valid envelope or body", is_of_origin=True, advice=SAME_RELEASE),
    "unsolicited": Reason("the node did not request it from this peer", is_of_origin=True),
    "version": Reason("it has another schema version: one of the two nodes is older", HARMLESS, advice=SAME_RELEASE),
    "codec": Reason("its codec is unknown here: one of the two nodes is older", HARMLESS, advice=SAME_RELEASE),
    "malformed": Reason("its fields contradict each other", is_of_origin=True, advice=SAME_RELEASE),
    "run": Reason("it belongs to another run"),
    "wrong_encoding": Reason(
        "it is encoded as text, but the exact form is available from this sender or required by the run",
        HARMLESS,
        advice=SAME_RELEASE,
    ),
    "banned": Reason("its sender is banned or not on the allow-list", HARMLESS, advice=UNBAN),
    "quota": Reason(
        "its sender, or all new peers together, exceeded their rate limit", Behaviour.RATE_LIMITED, advice=SEND_FEWER
    ),
    "signature": Reason("the signature is not its sender's", FALSE_CLAIM, is_of_origin=True),
    "duplicate": Reason("the node has it already", HARMLESS),
    "sequence_reused": Reason(
        "its sender used the sequence number before, as two nodes with one identity do",
        HARMLESS,
        advice="one home per node: two nodes use the same identity.key",
    ),
    "weights_not_offered": Reason(
        "it claims weights of this node, which offers none",
        advice="start the refusing node with --role learner, or let the sender follow another node",
    ),
    "version_not_offered": Reason(
        "it claims a version above those that this node can have offered, as followers of a learner that lost steps do",
        HARMLESS,
        advice="wait: the sender fetches this node's weights; if it refuses them (goes_back), delete its weights/",
    ),
    "clock_skew": Reason(
        "its time is more than a minute ahead: one of the two clocks is wrong", HARMLESS, advice=CLOCKS
    ),
    "stale": Reason(
        "it is older than the run's `step.max_age_s`, or than this node's last buffer reset",
        HARMLESS,
        advice=f"{CLOCKS}; on a slow link raise step.max_age_s in the run",
    ),
    "tokenizer": Reason(
        "its token ids are those of another tokenizer",
        HARMLESS,
        advice='use models of one family, or a run with step.other_tokenizers = "text"',
    ),
    "group_size": Reason("its number of completions differs from the run's group size"),
    "sampling": Reason("it was sampled with other settings than the run's"),
    "length": Reason("a completion is longer than the run allows"),
    "reward_range": Reason("a claimed reward is outside [0, 1]"),
    "token_out_of_range": Reason(
        "a token id is outside the tokenizer's vocabulary", advice="compare the tokenizers: the sender's has more ids"
    ),
    "logprobs": Reason(
        "a log-prob is not finite or above 0, more than 16 are equal for different or uncertain completions, or "
        "their mean is below -14 nats",
        advice=CHECK_ENGINE,
    ),
    "finish_reason": Reason("a finish reason does not fit the end tokens that its sender names", advice=SAME_RELEASE),
    "scoring_quota": Reason(
        "scoring groups of its sender, of all new or all known peers, or the search for copies exceeded the time limit",
        HARMLESS,
        advice="send shorter completions or fewer groups: scoring them takes too long",
    ),
    "prompt_mismatch": Reason(
        "the problem does not exist here, or its text differs",
        is_graded=True,
        advice="use the same data file, and the same releases of ftis-node and of the task, on both nodes",
    ),
    "opening": Reason(
        "the beginning of the answer that its sender's chat template wrote is not a think block",
        advice=f"{SAME_RELEASE}, and check the sender's chat template",
    ),
    "too_long_here": Reason(
        "its problem is longer in this node's chat template, and leaves no space for its completions",
        HARMLESS,
        advice="raise sampling.max_total_tokens in the run, or use shorter chat templates",
    ),
    "not_encodable": Reason(
        "the tokenizer or the chat template here cannot encode its problem or one of its texts",
        HARMLESS,
        advice="use models of one family",
    ),
    "no_embedding": Reason(
        "it has a token of which this node's model has no embedding",
        HARMLESS,
        advice="use a model whose embedding has a row for each token of the tokenizer",
    ),
    "duplicate_completions": Reason(
        "its completions were in a known peer's group long before, or in an earlier one of its sender",
        Behaviour.COPIED,
        advice=OWN_HOME,
    ),
    "duplicate_of_own": Reason("its completions were in a group of this node before", FALSE_CLAIM, advice=OWN_HOME),
    "duplicate_undecided": Reason(
        "its completions were in a group of another peer before, and either may be the original; or one of the two "
        "came as text",
        HARMLESS,
    ),
    "scoring_failed": Reason(
        "scoring it here failed, or this machine was too busy",
        HARMLESS,
        advice="the refusing node is too busy: fewer groups per step, or more cores",
    ),
    "scoring_timeout": Reason(
        "making its problem or scoring one of its completions reached the time limit",
        Behaviour.SLOW,
        advice="shorter problems or completions: scoring one took the whole time limit",
    ),
    "reward_mismatch": Reason(
        "a claimed reward differs from the one computed here",
        FALSE_CLAIM,
        is_graded=True,
        advice="install the same releases of ftis-node and of the graders on both nodes",
    ),
    "episode_mismatch": Reason(
        "an episode has other turns or observations than its replay here",
        FALSE_CLAIM,
        is_graded=True,
        advice="install the same releases of ftis-node and of the episode on both nodes",
    ),
    "episode_cut": Reason(
        "an episode ends early, and its sender's chat template or engine may be the reason",
        HARMLESS,
        advice="use the same chat template on both nodes",
    ),
    "logprob_mismatch": Reason(
        "(after validation) its log-probs differ from those of the weights that it claims", advice=CHECK_ENGINE
    ),
    "understated_logprobs": Reason(
        "(after validation) the learner finds a completion far likelier than its log-probs say", advice=CHECK_ENGINE
    ),
}
AFTER_VALIDATION = frozenset({"logprob_mismatch", "understated_logprobs"})
BEHAVIOUR = {
    "harmless": Reason("a group was of no use, without fault of the peer"),
    "pull_failed": Reason("it announced a group and did not deliver it"),
    "rate_limited": Reason("it exceeded its rate limit"),
    "slow": Reason("scoring its completions took the whole time limit"),
    "copied": Reason("its completions were in its own earlier group, or in a known peer's"),
    "displaced": Reason("an equal group of another peer was announced before its group"),
    "refused": Reason("it sent what no correct node of this run sends"),
    "fault": Reason(
        "a value that it sent made this node's code fail: please report the line of the log",
        advice="report the line of the refusing node's log; install the same release on both nodes",
    ),
    "poisoned": Reason("the learner failed in three steps that had a group of it, and none of other peers"),
    "false_claim": Reason("it made a false claim under its own signature"),
    BY_OPERATOR: Reason("an operator of this node decided so", advice=UNBAN),
    "announcement_flood": Reason("it announced more groups than this node reads", advice=SEND_FEWER),
    "announcement_clock_skew": Reason("it announced groups with a time more than a minute ahead"),
    "announcement_version": Reason("it announces in another wire version: update the older of the two nodes"),
    "pull_complete": Reason("it announced groups as its own, and its complete answer had none of them"),
    "question_version": Reason("its queries have another wire version: update the older of the two nodes"),
    "record_version": Reason("its record has another wire version: update the older of the two nodes"),
}
PULL = "pull_"  # followed by the outcome of the pull
ANNOUNCEMENT = "announcement_"  # followed by the reason why it is invalid
UNKNOWN = "this version does not know the reason"
OTHER = Reason(UNKNOWN)


def attribute_refusal(
    reason: str, *, origin: str, sender: str | None, signed: bool, grades_alike: bool = True
) -> tuple[str, Behaviour]:
    """Return the peer at fault, and its behavior; the group also counts against that peer's quota.

    `origin` sent the group, `sender` is its named creator, verified if `signed`.

    Any peer may serve any group. So a reason found before the signature check is not charged to the named creator,
    because any peer can write that name. A reason that a relaying peer cannot know, such as our clock, quotas or bans,
    is not charged to that peer. It knows form and signature, because its own validation checks them.

    `grades_alike`: the sender says that it has this node's releases. Otherwise its rewards and problem texts may differ
    without fault.
    """
    known = REFUSALS.get(reason, OTHER)
    if known.is_of_origin:
        return origin, known.behaviour
    if known.behaviour is Behaviour.HARMLESS or (known.is_graded and not grades_alike):
        return origin, Behaviour.HARMLESS
    if known.behaviour is Behaviour.RATE_LIMITED:
        return origin, Behaviour.RATE_LIMITED if sender == origin else Behaviour.HARMLESS
    if signed and sender is not None:
        return sender, known.behaviour
    return origin, Behaviour.REFUSED


def sentence(reason: str) -> str:
    if known := REFUSALS.get(reason) or BEHAVIOUR.get(reason):
        return known.meaning
    if reason.startswith(PULL):
        return f"it announced groups, and fetching them ended as {reason.removeprefix(PULL).replace('_', ' ')!r}"
    if reason.startswith(ANNOUNCEMENT):
        return f"its announcement is invalid: {reason.removeprefix(ANNOUNCEMENT).replace('_', ' ')!r}"
    return UNKNOWN


def full_sentence(reason: str) -> str:
    clause = sentence(reason)
    return f"{clause[0].upper()}{clause[1:]}."


def advice_for(reason: str) -> str:
    return (REFUSALS.get(reason) or BEHAVIOUR.get(reason) or OTHER).advice
