"""MessagePack messages between a trainer and its exchange node. Arrays are little-endian bytes.

Both are processes of one user on one machine. The node still checks every field, here,
in `offered_groups.py` or in validation, because a trainer can be faulty.
"""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

import msgspec

from ftis_node.records.bounds import MAX_COMPLETIONS, MAX_END_IDS, MAX_TURNS

MAX_INT32: Final = 2**31 - 1
MAX_TAKEN: Final = 16
MAX_FORM_IDS: Final = 1024

Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_INT32)]
Length: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=MAX_INT32)]
Turns: TypeAlias = Annotated[list[Length], msgspec.Meta(min_length=1, max_length=MAX_TURNS)]


class OwnGroup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The trainer's completions of one problem.

    `problem` is the problem's number in the run's task, `problem_hash` identifies its chat messages
    (`codec.hash_messages`). `prompt_ids` int32 `[P]` are these messages as the trainer renders them. `token_ids` int32
    and `logprobs` float32 hold the completions one after the other. `lengths` has the tokens of each. `end_ids` are the
    ids at which the trainer ends a completion, the preferred one first; none: those of the node's model.
    `policy_version` counts the trainer's steps, `tokenizer` is its fingerprint (hex). `created_at` is the Unix time (s)
    of the sampling.

    In an episode the completions have the sampled tokens alone, and `turn_lengths` those of each turn of a completion.
    `observation_form` are the ids that the trainer's chat template writes around an observation.
    """

    problem: Count
    problem_hash: bytes
    prompt_ids: bytes
    token_ids: bytes
    logprobs: bytes
    lengths: Annotated[list[Length], msgspec.Meta(min_length=1, max_length=MAX_COMPLETIONS)]
    policy_version: Annotated[int, msgspec.Meta(ge=0, le=2**62)]
    tokenizer: Annotated[str, msgspec.Meta(max_length=64)]
    temperature: float
    top_p: float
    top_k: Count
    created_at: float
    end_ids: Annotated[list[Count], msgspec.Meta(max_length=MAX_END_IDS)] = []
    turn_lengths: Annotated[list[Turns], msgspec.Meta(max_length=MAX_COMPLETIONS)] = []
    observation_form: Annotated[list[Count], msgspec.Meta(max_length=MAX_FORM_IDS)] = []


class PublishedGroup(msgspec.Struct, frozen=True):
    """Answer to a published group: its sequence number, and the node's rewards, one per completion."""

    number: int
    rewards: list[float]


class TakeRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Request for up to `count` foreign groups."""

    count: Annotated[int, msgspec.Meta(ge=1, le=MAX_TAKEN)]


class TakenGroup(msgspec.Struct, frozen=True):
    """A foreign group: the `body` that its sender signed, and the node's own rewards.

    `prompt_ids` int32 `[P]` are the problem in the node's chat template, with the sender's opening. `observation_ids`
    are the observations between the turns of all completions, in order. They are empty without episodes.
    """

    id: bytes
    prompt_ids: bytes
    body: bytes
    rewards: list[float]
    observation_ids: list[list[Count]] = []


class TakeAnswer(msgspec.Struct, frozen=True):
    groups: list[TakenGroup]
