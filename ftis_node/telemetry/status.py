"""The status snapshot: what `/status`, `status --json` and the dashboard show.

Frozen records that spell the contract; the daemon makes one a second from its parts' own figures.
"""

from __future__ import annotations

from typing import Any

import msgspec


class NodeStatus(msgspec.Struct, frozen=True):
    """Who the node is. `state`: starting, running, stopping, stopped, failed."""

    peer_id: str = ""
    name: str = ""
    version: str = ""
    role: str = "full"
    state: str = "stopped"
    uptime_s: float = 0.0
    addresses: list[str] = []


class RunStatus(msgspec.Struct, frozen=True):
    """Which run it belongs to."""

    id: str = ""
    name: str = ""
    method: str = ""
    task: str = ""


class ModelStatus(msgspec.Struct, frozen=True):
    """The model it trains. `policy_version` is the learner's newest."""

    name: str = ""
    parameters: int = 0
    trainable_parameters: int = 0
    tokenizer_fingerprint: str = ""
    policy_version: int = 0


class GenerationStatus(msgspec.Struct, frozen=True):
    """The generation worker. `tokens_per_s` over the last moments; counts since the home was made."""

    engine: str = ""
    state: str = "stopped"
    tokens_per_s: float = 0.0
    groups_made: int = 0
    tokens_made: int = 0
    restarts: int = 0
    policy_version: int = 0


class LearnerStatus(msgspec.Struct, frozen=True):
    """The learner worker: figures of the last step; `own_groups` and `foreign_groups` used in all steps.

    `micro_batch_tokens` is what the step was done with, smaller than set after it ran out of memory `out_of_memory`
    times.

    `mismatch_kl` (nats a token) and `mismatch_share` (of tokens whose ratio is off by more than 1 %) say what engine
    and learner disagree by; as last measured, which was under `mismatch_version`. `kl_to_start` is None where the run
    has no such term.
    """

    state: str = "stopped"
    step: int = 0
    loss: float | None = None
    reward_mean: float | None = None
    kept_fraction: float | None = None
    truncated_fraction: float | None = None
    mean_kl: float | None = None
    grad_norm: float | None = None
    tokens_per_s: float = 0.0
    micro_batch_tokens: int | None = None
    out_of_memory: int | None = None
    own_groups: int = 0
    foreign_groups: int = 0
    restarts: int = 0
    learning_rate: float | None = None
    kl_to_start: float | None = None
    mismatch_kl: float | None = None
    mismatch_share: float | None = None
    mismatch_version: int | None = None


class SwarmStatus(msgspec.Struct, frozen=True):
    """Traffic with peers. `bytes_per_token`: envelope bytes received over completion tokens received."""

    state: str = "stopped"
    reason: str = ""
    peers_known: int = 0
    peers_connected: int = 0
    groups_sent: int = 0
    groups_confirmed: int = 0
    groups_received: int = 0
    groups_refused: dict[str, int] = {}
    groups_repaired: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    tokens_in: int = 0
    bytes_per_token: float | None = None


class ReplayStatus(msgspec.Struct, frozen=True):
    """The replay buffer: groups by state, and what is on disk."""

    waiting: int = 0
    ready: int = 0
    taken: int = 0
    released: dict[str, int] = {}
    tokens: int = 0
    disk_bytes: int = 0


class EvalStatus(msgspec.Struct, frozen=True):
    """One evaluation: greedy pass@1 over `n` held-out problems with the weights of `step`."""

    step: int
    task: str
    pass_at_1: float
    n: int


class Status(msgspec.Struct, frozen=True):
    """The whole snapshot."""

    schema: int = 1
    node: NodeStatus = NodeStatus()
    run: RunStatus = RunStatus()
    model: ModelStatus = ModelStatus()
    generation: GenerationStatus = GenerationStatus()
    learner: LearnerStatus = LearnerStatus()
    swarm: SwarmStatus = SwarmStatus()
    replay: ReplayStatus = ReplayStatus()
    eval: list[EvalStatus] = []

    def to_json(self) -> bytes:
        """The snapshot as JSON."""
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, data: bytes) -> Status:
        """A snapshot from JSON. Raises msgspec.DecodeError for anything else."""
        return msgspec.json.decode(data, type=cls)


def stopped(status: Status) -> Status:
    """The same figures as those of a node that no longer runs."""
    changes: dict[str, Any] = {
        "node": msgspec.structs.replace(status.node, state="stopped"),
        "generation": msgspec.structs.replace(status.generation, state="stopped", tokens_per_s=0.0),
        "learner": msgspec.structs.replace(status.learner, state="stopped"),
        "swarm": msgspec.structs.replace(
            status.swarm, state="stopped", reason="the node is not running", peers_connected=0
        ),
    }
    return msgspec.structs.replace(status, **changes)
