"""All kinds of false groups: how a member makes them, the reason of their refusal, and whether it bans the member.

A kind gives announcements of at least six groups, because five refusals ban and reputation recovers a little between
them. `test_groups.py` sends each kind, and `make chaos` sends some beside other faults.
"""

import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import NamedTuple

import numpy as np
import zstandard

from ftis_node.records import rollout_pb2 as pb
from ftis_node.records.codec import pack_group
from ftis_node.records.envelope import Envelope
from ftis_node.records.group import Group
from tests.attacks.member import UNUSED, Claims, Member, change_completion, sign_body, varint
from tests.attacks.victim import MAX_ENVELOPE_BYTES

NUM_GROUPS = 6
NUM_BODIES = 8  # more than a ban needs, in any order of arrival
DAY_S = 86400.0
BOMB_BYTES = 512 << 20
FOUR_GIB = 2**32 - 1
HIDDEN_ID, NUM_HIDDEN = 0, 20  # <|endoftext|>
UNPUBLISHED_VERSION = 10**6
LOWEST_MEAN = -13.0  # nats per token: the lowest mean that validation allows


class FalseGroup(NamedTuple):
    """One kind. `make` returns the announcements of a member's groups. A kind that does not ban costs no reputation."""

    make: Callable[[Member], Claims]
    reason: str
    bans: bool = True


def _groups(change: Callable[[Group], Group], member: Member) -> Claims:
    return member.claims(*(change(member.group()) for _ in range(NUM_GROUPS)))


def _logprob(value: float, group: Group) -> Group:
    logprobs = group.completions[1].logprobs.copy()
    logprobs[0] = value
    return change_completion(group, logprobs=logprobs)


def _all_logprobs(value: float, group: Group) -> Group:
    return group.with_completions(
        [replace(one, logprobs=np.full_like(one.logprobs, value)) for one in group.completions]
    )


def _first_id(value: int, group: Group) -> Group:
    ids = group.completions[1].token_ids.copy()
    ids[0] = value
    return change_completion(group, token_ids=ids)


def _sampled(group: Group, **changes: float) -> Group:
    return replace(group, sampling=replace(group.sampling, **changes))


def with_special_tokens(group: Group) -> Group:
    """Return the group with 20 special tokens, which no text shows, after the first token of its right answer."""
    right = group.completions[0]
    assert right.reward == 1.0
    ids = np.insert(right.token_ids, 1, [HIDDEN_ID] * NUM_HIDDEN).astype(np.int32)
    logprobs = np.insert(right.logprobs, 1, np.linspace(-1.0, -2.0, NUM_HIDDEN)).astype(np.float32)
    return change_completion(group, 0, token_ids=ids, logprobs=logprobs)


def with_wrong_reward(group: Group) -> Group:
    return change_completion(group, reward=1.0)


def with_claimed_weights(group: Group, weights_of: str, version: int) -> Group:
    """Return the group with claimed weights, and log-probs far below those of these weights."""
    rng = np.random.default_rng(group.number)
    completions = [
        replace(
            one,
            logprobs=(LOWEST_MEAN + rng.uniform(0, 0.5, len(one.token_ids))).astype(np.float32),
            policy_version=version,
            policy_version_newest=version,
        )
        for one in group.completions
    ]
    return replace(group.with_completions(completions), weights_of=weights_of)


def _claimed_weights(member: Member) -> Claims:
    return _groups(partial(with_claimed_weights, weights_of=member.victim_id, version=UNPUBLISHED_VERSION), member)


def _bytes(make: Callable[[], bytes], member: Member) -> Claims:
    return {one: member.claim(one, make()) for one in (os.urandom(32) for _ in range(NUM_BODIES))}


def _bodies(change: Callable[[pb.Body], object], codec: str, member: Member) -> Claims:
    envelopes = []
    for _ in range(NUM_BODIES):
        body = pb.Body.FromString(pack_group(member.group(), codec=codec))
        change(body)
        envelopes.append(sign_body(body.SerializeToString(), member.identity))
    assert max(len(one.body) for one in envelopes) < MAX_ENVELOPE_BYTES
    return member.claims(*envelopes)


@cache
def _bomb() -> bytes:
    """Return a few kB that unpack to half a gigabyte."""
    return zstandard.ZstdCompressor(level=19).compress(bytes(BOMB_BYTES))


def _add_bomb(body: pb.Body) -> None:
    del body.id_planes[:]
    body.id_planes.append(_bomb())


def _lengthen(body: pb.Body) -> None:
    body.lengths[1] = FOUR_GIB


def _of_another_sender(member: Member, *, is_forged: bool = False) -> Claims:
    """Return bodies of another sender with the member's signature; `is_forged`: announced under its name."""
    groups = [member.maker.group(member.other, UNUSED + at) for at in range(NUM_GROUPS)]
    envelopes = [sign_body(pack_group(group), member.identity) for group in groups]
    return member.claims(*envelopes, **({"sender": member.other.peer_id} if is_forged else {}))


def _unsolicited(member: Member) -> Claims:
    data = member.envelope(member.group()).to_bytes()
    return {one: member.claim(one, data) for one in (os.urandom(32) for _ in range(NUM_GROUPS))}


def padded_envelope(member: Member) -> Envelope:
    """Return a valid envelope that an unknown field fills almost up to the limit of the run."""
    size = MAX_ENVELOPE_BYTES - 4096
    unknown = b"\xa2\x06" + varint(size) + bytes(size)  # field 100
    return sign_body(pack_group(member.group()) + unknown, member.identity)


CHANGES: dict[str, tuple[Callable[[Group], Group], str, bool]] = {
    "ids out of range": (partial(_first_id, 2**31 - 1), "token_out_of_range", True),
    "ids below zero": (partial(_first_id, -1), "token_out_of_range", True),
    "NaN": (partial(_logprob, float("nan")), "logprobs", True),
    "+inf": (partial(_logprob, float("inf")), "logprobs", True),
    "-inf": (partial(_logprob, float("-inf")), "logprobs", True),
    "positive log-probs": (partial(_logprob, 0.5), "logprobs", True),
    "constant log-probs": (partial(_all_logprobs, -0.5), "logprobs", True),
    "implausibly low log-probs": (partial(_logprob, -1e6), "logprobs", True),
    "wrong claimed rewards": (with_wrong_reward, "reward_mismatch", False),
    "a changed problem": (lambda group: replace(group, problem_hash=bytes(16)), "prompt_mismatch", False),
    "special tokens in a right answer": (with_special_tokens, "reward_mismatch", False),
    "an opening that is no think block": (lambda group: replace(group, opening="<answer>"), "opening", True),
    "an end id inside an answer": (
        lambda group: replace(group, end_ids=(*group.end_ids, int(group.tokens.token_ids[0]))), "finish_reason", True),
    "an end id out of range": (lambda group: replace(group, end_ids=(*group.end_ids, FOUR_GIB)), "token_out_of_range",
        True),
    "groups of one": (lambda group: group.with_completions(group.completions[:1]), "group_size", True),
    "a clock a day ahead": (lambda group: replace(group, created_at=time.time() + DAY_S), "clock_skew", False),
    "a clock a day behind": (lambda group: replace(group, created_at=time.time() - DAY_S), "stale", False),
    "another run": (lambda group: replace(group, run_id="ab" * 16), "run", True),
    "a temperature of NaN": (partial(_sampled, temperature=float("nan")), "sampling", True),
    "a top_p of NaN": (partial(_sampled, top_p=float("nan")), "sampling", True),
}  # fmt: skip
BYTES: dict[str, Callable[[], bytes]] = {
    "random bytes": lambda: os.urandom(2000),
    "a varint of 4 GiB": lambda: b"\x0a\xff\xff\xff\xff\x0f" + bytes(100),
    "no bytes": lambda: b"",
}


FALSE_GROUPS: dict[str, FalseGroup] = {
    **{name: FalseGroup(partial(_groups, change), *expected) for name, (change, *expected) in CHANGES.items()},
    "weights of the victim": FalseGroup(_claimed_weights, "weights_not_offered"),
    **{f"{name} for a body": FalseGroup(partial(_bytes, make), "parse") for name, make in BYTES.items()},
    "a plane of half a gigabyte": FalseGroup(partial(_bodies, _add_bomb, "lossless"), "malformed"),
    "lengths of four billion": FalseGroup(partial(_bodies, _lengthen, "lossless"), "size"),
    "a codec that the run does not allow": FalseGroup(
        partial(_bodies, lambda body: None, "lossy"), "codec", bans=False
    ),
    "another peer's body": FalseGroup(_of_another_sender, "signature"),
    "a forged sender": FalseGroup(partial(_of_another_sender, is_forged=True), "signature"),
    "unsolicited bodies": FalseGroup(_unsolicited, "unsolicited"),
}
