"""Names on the wire. Each carries the run id, so that nodes of different runs share no topic, no call and no record."""

from __future__ import annotations

import re
from enum import StrEnum

PREFIX = "/ftis/1"
RUN_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


class RpcService(StrEnum):
    """What a member may ask of another."""

    HELLO = "hello"  # nothing; one empty item says that a member of this run is here
    FETCH = "fetch"  # ids; bodies come back
    FETCH_TEXT = "fetch_text"  # ids of the asked peer's own; the bodies told again as text come back
    CONFIRM = "confirm"  # ids; one empty item says that they were heard
    ASK = "ask"  # a question; answers come back
    WEIGHTS = "weights"  # a question about a learner's weights; an offer, hashes or chunks come back


def check_run_id(run_id: str) -> str:
    """`run_id` itself. Raises ValueError where it cannot be part of a name."""
    if RUN_ID.fullmatch(run_id) is None:
        raise ValueError(f"{run_id!r} is no run id: letters, digits, '_' and '-', at most 64 of them")
    return run_id


def topic(run_id: str, shard: int) -> str:
    """The gossipsub topic of a shard of a run."""
    return f"{PREFIX}/{run_id}/{shard}"


def protocol(run_id: str, service: RpcService) -> str:
    """The libp2p protocol of a service in a run."""
    return f"{PREFIX}/{run_id}/{service}"


def service_of(protocol_name: str) -> RpcService:
    """The service that `protocol` named. Raises ValueError for a name it never gives."""
    return RpcService(protocol_name.rsplit("/", 1)[-1])


def record_key(run_id: str, peer_id: str) -> str:
    """The directory key of a peer's record."""
    return f"{PREFIX}/{run_id}/record/{peer_id}"


def manifest_key(run_id: str) -> str:
    """The directory key of a run's manifest."""
    return f"{PREFIX}/{run_id}/manifest"


def bucket_key(run_id: str, bucket: int) -> str:
    """The directory key under which a part of the run's members register."""
    return f"{PREFIX}/{run_id}/members/{bucket}"
