"""Write `proto/vectors.json`: envelopes of each codec, invalid envelopes, and an announcement of several groups.

The contents are the values below, not results of the reader under test. Run it again only if the format changes:

    python -m tests.records.make_vectors
"""

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from ftis_node.records import rollout_pb2 as pb
from ftis_node.records.codec import CODECS
from ftis_node.records.envelope import Announcement, join_announcements, seal_group
from ftis_node.records.group import FinishReason, GroupHeader, TextCompletion, TextGroup
from ftis_node.records.identity import ENVELOPE_DOMAIN
from ftis_node.records.token_batch import TokenBatch

from . import wire_example as example

VECTORS = Path(__file__).parents[2] / "proto/vectors.json"

TOKEN_IDS = [[10, 300, 151643], [12, 13]]  # the third id needs three planes
LOGPROBS = [[-0.5, -0.125, -0.0078125], [-300.0, -0.1]]  # the lossy codec caps the fourth and rounds the last
LOSSY_LOGPROBS = [[-0.5, -0.125, -0.0078125], [-65535 / 256, -26 / 256]]
TEXTS, MEAN_LOGPROBS = ["10", "na\u00efve \u4eac"], [-0.25, -2.0]


def _float32(rows: list[list[float]]) -> list[list[float]]:
    return [np.array(row, dtype="<f4").tolist() for row in rows]


def valid() -> list[dict[str, Any]]:
    """Return one envelope of each codec: its bytes, its id, and the contents that a reader must return."""
    group = replace(example.GROUP, tokens=TokenBatch.from_parts(TOKEN_IDS, LOGPROBS))
    common = {"sender": group.sender, "lengths": [3, 2], "finishes": [1, 2], "rewards": [1.0, 0.0]}
    made = []
    exact_id = seal_group(group, example.IDENTITY).id
    for codec in CODECS:
        sealed = seal_group(group, example.IDENTITY, codec=codec)
        logprobs = LOSSY_LOGPROBS if codec == "lossy" else _float32(LOGPROBS)
        content = {"token_ids": TOKEN_IDS, "logprobs": logprobs}
        made.append({"codec": codec, "envelope": sealed.to_bytes().hex(), "id": sealed.id.hex(), **common, **content})
    finishes = (FinishReason.STOP, FinishReason.LENGTH)
    text = TextGroup(
        **{field.name: getattr(group, field.name) for field in fields(GroupHeader)},
        policy_version=3,
        policy_version_newest=3,
        exact_group=exact_id,
        completions=tuple(
            TextCompletion(text, mean_logprob=mean, num_tokens=num_tokens, finish_reason=finish, reward=reward)
            for text, mean, num_tokens, finish, reward in zip(
                TEXTS, MEAN_LOGPROBS, (3, 2), finishes, (1.0, 0.0), strict=True
            )
        ),
    )
    sealed = seal_group(text, example.IDENTITY)
    content = {"texts": TEXTS, "mean_logprobs": MEAN_LOGPROBS, "exact_group": exact_id.hex()}
    made.append({"codec": "text", "envelope": sealed.to_bytes().hex(), "id": sealed.id.hex(), **common, **content})
    return made


def refused() -> list[dict[str, str]]:
    """Return envelopes that a reader refuses, each with one fault and the reason of docs/reference/refusals.md."""
    body = pb.Body.FromString(example.envelope().body)

    def changed(**changes: Any) -> pb.Body:
        copy = pb.Body.FromString(example.envelope().body)
        for name, value in changes.items():
            getattr(copy, name).extend(value) if isinstance(value, list) else setattr(copy, name, value)
        return copy

    unsigned = pb.Envelope(body=example.envelope().body, signature=bytes(64))
    faults = {
        "no envelope": ("parse", b"\xff\xff"),
        "schema 2": ("version", sign_body(changed(schema=2))),
        "codec 9": ("codec", sign_body(changed(codec=9))),
        "a text in an exact body": ("malformed", sign_body(changed(texts=["10"]))),
        "a length of 0": ("malformed", sign_body(changed(lengths=[0], finishes=[1], rewards=[0.0]))),
        "a third reward": ("malformed", sign_body(changed(rewards=[1.0]))),
        "a byte too few": ("malformed", sign_body(changed(token_ids=body.token_ids[:-1]))),
        "another signature": ("signature", unsigned.SerializeToString()),
    }
    return [{"fault": fault, "reason": reason, "envelope": data.hex()} for fault, (reason, data) in faults.items()]


def batches() -> list[dict[str, Any]]:
    """Return an announcement of three groups: its bytes, and the groups that a reader must return."""
    groups = [
        {"id": bytes([number] * 32).hex(), "number": number, "envelope_bytes": 500 + number, "num_tokens": 20 + number}
        | {"created_ms": 1_767_225_600_000 + 125 * number}
        for number in (7, 8, 9)
    ]
    tokenizer, version = b"tokenizr", 3
    made = [
        Announcement(
            *(bytes.fromhex(group["id"]), group["number"], group["envelope_bytes"], group["num_tokens"]),
            *(tokenizer, version, group["created_ms"] / 1000),
        )
        for group in groups
    ]
    (joined,) = join_announcements(made)
    common = {"tokenizer": tokenizer.hex(), "policy_version": version}
    return [{"announcement": joined.to_bytes().hex(), **common, "groups": groups}]


def sign_body(body: pb.Body) -> bytes:
    """Return the envelope of a body, signed with the example's key."""
    data = body.SerializeToString()
    return pb.Envelope(body=data, signature=example.IDENTITY.sign(ENVELOPE_DOMAIN, data)).SerializeToString()


if __name__ == "__main__":
    VECTORS.write_text(json.dumps({"valid": valid(), "refused": refused(), "batches": batches()}, indent=1) + "\n")
