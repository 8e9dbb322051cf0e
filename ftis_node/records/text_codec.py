"""The text form of a group on the wire, and the reader for a body in either form.

Completions carry no policy versions in this form, only the group does: readers do not need them.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

from ftis_node.errors import RecordError
from ftis_node.records import rollout_pb2 as pb
from ftis_node.records.bounds import HASH_BYTES
from ftis_node.records.codec import CODECS, read_group
from ftis_node.records.group import TextCompletion, TextGroup
from ftis_node.records.parsing import FINISH_FROM_WIRE, make_body, read_body, read_header, require_header, settle

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from ftis_node.records.group import Group

TEXT = "text"


def hash_messages(messages: Sequence[Mapping[str, object]]) -> bytes:
    """Return 16 bytes that identify a prompt's chat messages, whatever tokenizer or template renders them."""
    canonical = json.dumps([dict(message) for message in messages], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).digest()[:HASH_BYTES]


def pack_text_group(group: TextGroup) -> bytes:
    """Return the bytes of a `Body` in the text form. Raises ValueError for an impossible group."""
    return make_body(
        group,
        [completion.num_tokens for completion in group.completions],
        codec=pb.CODEC_TEXT,
        texts=[completion.text for completion in group.completions],
        mean_logprobs=[completion.mean_logprob for completion in group.completions],
        retells=group.retells,
    )


def unpack_any(body_bytes: bytes, *, codecs: Collection[str] = tuple(CODECS)) -> Group | TextGroup:
    """Return the group inside the bytes of a `Body`: as text, or in one of `codecs`.

    Raises RecordError: `parse` (not a `Body`, or a text that is not UTF-8), `version`, `codec`, `malformed`.
    """
    body = read_body(body_bytes, codecs=(*codecs, TEXT))
    return read_text_group(body) if body.codec == pb.CODEC_TEXT else read_group(body)


def read_text_group(body: pb.Body) -> TextGroup:
    """Return the group in a body of the text form, from `read_body`. Raises RecordError: `malformed`."""
    require_header(body)
    if len(body.texts) != len(body.lengths) or len(body.mean_logprobs) != len(body.lengths):
        raise RecordError("malformed", "texts or mean log-probs do not count as many as lengths")
    return TextGroup(
        **read_header(body),
        policy_version=body.policy_version,
        policy_version_newest=body.policy_version + body.policy_version_span,
        retells=body.retells,
        completions=tuple(
            TextCompletion(
                text=text,
                mean_logprob=settle(mean_logprob),
                num_tokens=num_tokens,
                finish_reason=FINISH_FROM_WIRE[finish],
                reward=settle(reward),
            )
            for text, mean_logprob, num_tokens, finish, reward in zip(
                body.texts, body.mean_logprobs, body.lengths, body.finishes, body.rewards, strict=True
            )
        ),
    )
