"""The objects behind the bytes that docs/reference/wire-format.md shows, made by this package."""

import hashlib

import numpy as np

from ftis_node.gossip.directory.entries import EntryKind, pack_member, sign_entry
from ftis_node.records import rollout_pb2 as pb
from ftis_node.records.codec import hash_messages, hash_prompt
from ftis_node.records.envelope import Envelope, announce_group, seal_group
from ftis_node.records.group import Completion, FinishReason, Group, PromptRef, SamplingSettings
from ftis_node.records.identity import PEER_DOMAIN, WEIGHTS_DOMAIN, Identity
from ftis_node.records.peer_messages import BackfillRequest
from ftis_node.tasks.arithmetic import ArithmeticTask

IDENTITY = Identity.from_seed(bytes(range(32)))
RUN_ID = "ab" * 16
PROMPT_IDS = (5, 6, 7)
PROMPT = ArithmeticTask()[5].prompt
EXPIRES_AT = 1767226200.0
ADDRESS = "/ip4/203.0.113.7/tcp/4001"


def _completion(ids: list[int], logprobs: list[float], finish: FinishReason, reward: float) -> Completion:
    return Completion(
        token_ids=np.array(ids, dtype=np.int32),
        logprobs=np.array(logprobs, dtype=np.float32),
        finish_reason=finish,
        reward=reward,
        policy_version=3,
        policy_version_newest=3,
    )


GROUP = Group.from_completions(
    run_id=RUN_ID,
    sender=IDENTITY.peer_id,
    number=1,
    prompt_ref=PromptRef("arithmetic", "train", 5),
    problem_hash=hash_messages(PROMPT),
    prompt_hash=hash_prompt(PROMPT_IDS),
    completions=(
        _completion([10, 300, 2], [-0.5, -0.25, -0.125], FinishReason.STOP, 1.0),
        _completion([12, 13], [-1.0, -2.0], FinishReason.LENGTH, 0.0),
    ),
    sampling=SamplingSettings(),
    model="tiny-s",
    tokenizer="cd" * 16,
    created_at=1767225600.0,
    end_ids=(2,),
)


def envelope() -> Envelope:
    return seal_group(GROUP, IDENTITY)


def announcement() -> bytes:
    sealed = envelope()
    return announce_group(sealed, GROUP, envelope_bytes=len(sealed.to_bytes())).to_bytes()


def question() -> bytes:
    """Return a backfill request for the sender's groups with the numbers 2 to 9."""
    return BackfillRequest(sender=IDENTITY.peer_id, first_number=2, last_number=9).to_bytes()


def member() -> bytes:
    """Return a directory entry: a member of the run with one address."""
    payload = pack_member([ADDRESS], num_shards=8)
    return sign_entry(IDENTITY, EntryKind.MEMBER, RUN_ID, payload, expires_at=EXPIRES_AT)


def sign_peer_info(body: bytes, identity: Identity = IDENTITY) -> bytes:
    """Return the directory record of a body, signed by `identity`."""
    return pb.PeerRecord(body=body, signature=identity.sign(PEER_DOMAIN, body)).SerializeToString()


def sign_weights_info(body: bytes, identity: Identity = IDENTITY) -> bytes:
    """Return the weight offer of a body, signed by `identity`."""
    return pb.WeightsOffer(body=body, signature=identity.sign(WEIGHTS_DOMAIN, body)).SerializeToString()


def hash_chunks(chunks: list[bytes]) -> bytes:
    """Return the concatenated SHA-256 hashes of the chunks."""
    return b"".join(hashlib.sha256(chunk).digest() for chunk in chunks)
