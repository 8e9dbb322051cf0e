"""Names on the wire: topics, protocols and keys of the directory.

Each name contains the run id, so that different runs share no topic, no protocol and no record.
"""

from __future__ import annotations

import re
from enum import StrEnum

PREFIX = "/ftis/1"
RUN_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


class RpcService(StrEnum):
    HELLO = "hello"  # empty request; one empty item: this peer is a member of the run
    FETCH = "fetch"  # ids; returns envelopes
    FETCH_TEXT = "fetch_text"  # ids of envelopes that the peer created; returns them re-encoded as text
    CONFIRM = "confirm"  # ids; one empty item acknowledges
    ASK = "ask"  # a query; returns answers
    WEIGHTS = "weights"  # a query about a learner's weights; returns an offer, hashes or chunks


def topic(run_id: str, shard: int) -> str:
    return f"{PREFIX}/{run_id}/{shard}"


def protocol(run_id: str, service: RpcService) -> str:
    return f"{PREFIX}/{run_id}/{service}"


def service_of(protocol_name: str) -> RpcService:
    """Return the service in a protocol name. Raises ValueError for a name that `protocol` never returns."""
    return RpcService(protocol_name.rsplit("/", 1)[-1])


def record_key(run_id: str, peer_id: str) -> str:
    return f"{PREFIX}/{run_id}/record/{peer_id}"


def manifest_key(run_id: str) -> str:
    return f"{PREFIX}/{run_id}/manifest"


def bucket_key(run_id: str, bucket: int) -> str:
    return f"{PREFIX}/{run_id}/members/{bucket}"
