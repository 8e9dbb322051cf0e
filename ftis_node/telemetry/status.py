"""The status snapshot behind `/status`, `status --json` and the dashboard.

These frozen records define the JSON form. The daemon builds one snapshot each second. `metrics.toml` explains each
number, with its unit. A number is None before its first measurement.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from ftis_node.telemetry.secrets import redacted


class EndWord(StrEnum):
    """How a node ended."""

    FINISHED = "finished"  # its budget was used up
    STOPPED = "stopped"  # by a signal
    FAILED = "failed"
    KILLED = "killed"  # without a last status: killed, or the machine lost power


class NodeStatus(msgspec.Struct, frozen=True):
    """Identity of the node. `state` is starting, running, stopping, stopped or failed.

    `domain` names the parts of the run's task for which the node generates, "" for all. `end` is how a stopped node
    ended (see `EndWord`), "" for a running one. `resume` is the command that starts a stopped node again. `waits_for`
    names what a stopping node waits for, "" in any other state.
    """

    peer_id: str = ""
    name: str = ""
    version: str = ""
    role: str = "full"
    state: str = "stopped"
    uptime_s: float = 0.0
    addresses: list[str] = []
    domain: str = ""
    end: str = ""
    resume: str = ""
    waits_for: str = ""


class RunStatus(msgspec.Struct, frozen=True):
    """The run to which the node belongs."""

    id: str = ""
    name: str = ""
    method: str = ""
    task: str = ""


class ModelStatus(msgspec.Struct, frozen=True):
    """The node's model. `policy_version` is the learner's newest.

    `training` states which parameters are trained, and why; it is empty if the node trains nothing.
    """

    name: str = ""
    parameters: int = 0
    trainable_parameters: int = 0
    tokenizer_fingerprint: str = ""
    policy_version: int = 0
    training: str = ""


class GenerationStatus(msgspec.Struct, frozen=True):
    """The generation worker.

    `weight_transfer` is the method of the last weight sync: `CUDA IPC`, `page-locked file` or `file`. Brackets hold
    the reason if a faster method was planned and failed. It is empty before the first sync. `groups_without_reward`
    counts the newest groups in a row in which no completion had a reward; `sample` is a completion of the last one.
    Turns, and the environment's observations between them, are those of own episodes since the node started.
    """

    engine: str = ""
    state: str = "stopped"
    tokens_per_s: float = 0.0
    groups_made: int = 0
    tokens_made: int = 0
    restarts: int = 0
    policy_version: int = 0
    weight_transfer: str = ""
    max_completion_tokens: int | None = None
    groups_without_reward: int = 0
    sample: str = ""
    last_group_at: float | None = None
    turns_made: int = 0
    observations_made: int = 0


class StepFigures(msgspec.Struct, frozen=True):
    """Figures of one step, in the learner's report and in the status. Fractions and means are of its first pass.

    Five fields describe the completions that this node's weights sampled. `completion_tokens` is their mean length.
    `cut_fraction` is the share without an end, mostly cut at the token limit. `no_signal_fraction` is the share of
    their groups without an advantage. In the status both are means over the last ten steps. `entropy` is that of
    the sampling policy in nats a token, the mean of the sampled tokens' -log p. `kl_to_start` is KL(policy ||
    starting model) in nats a token over the whole batch, if it is part of the loss. Otherwise every fifth step measures
    `kl_from_start`, KL(starting model || policy) on two groups that the starting model sampled. The status has the last
    value.

    `micro_batch_tokens` is the budget of the step's passes, after it ran out of memory `out_of_memory` times.
    The training-inference mismatch is measured from time to time, on tokens that `mismatch_version` sampled.
    """

    loss: float | None = None
    reward_mean: float | None = None
    kept_fraction: float | None = None
    truncated_fraction: float | None = None
    mean_kl: float | None = None
    grad_norm: float | None = None
    learning_rate: float | None = None
    completion_tokens: float | None = None
    cut_fraction: float | None = None
    no_signal_fraction: float | None = None
    entropy: float | None = None
    kl_to_start: float | None = None
    kl_from_start: float | None = None
    tokens_per_s: float = 0.0
    micro_batch_tokens: int | None = None
    out_of_memory: int | None = None
    mismatch_kl: float | None = None
    mismatch_share: float | None = None
    mismatch_version: int | None = None


class LearnerStatus(StepFigures, frozen=True):
    """The learner worker, with the figures of the last step; the groups are totals over all steps.

    `layout` is packed or padded rows; `kernels` names the implementation of a layer (`learner.kernels`). Both are None
    before the learner has started.
    """

    state: str = "stopped"
    step: int = 0
    own_groups: int = 0
    foreign_groups: int = 0
    restarts: int = 0
    last_step_at: float | None = None
    layout: str | None = None
    kernels: str | None = None


class RefusalStatus(msgspec.Struct, frozen=True):
    """A sender whose groups this node refuses, or a peer that refuses this node's; `since` is Unix time in seconds.

    `reason` is the most frequent one, `meaning` its meaning, and `advice` what to do. Name and reason of a peer that
    refuses are its claims.
    """

    peer_id: str
    name: str
    reason: str
    meaning: str
    groups: int
    since: float
    advice: str


class ReceiptFigures(msgspec.Struct, frozen=True):
    """What peers have trained on of this node: how many `peers`, on how many `groups` with how many `tokens`.

    They are sums of signed receipts (`swarm/receipts.py`). `recent_peers` and `recent_groups` count since the beginning
    of yesterday (UTC).
    """

    peers: int = 0
    groups: int = 0
    tokens: int = 0
    recent_peers: int = 0
    recent_groups: int = 0


class SwarmStatus(msgspec.Struct, frozen=True):
    """Traffic with peers. The `weights_*` fields describe the transfer between a learner and its generators.

    `reachability` is unknown, local, relayed or public. docs/develop/network-protocol.md has the reasons of
    `serve_errors`. `update` is the advice to update if most members have a newer wire version, `newer_release` if they
    say that they run a newer release. `refused_peers` are the senders that this node refuses, `refused_by` the peers
    that refuse this node's groups.
    """

    state: str = "stopped"
    reason: str = ""
    reachability: str = "unknown"
    clock_skew_s: float | None = None
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
    fetch_errors: dict[str, int] = {}
    serve_errors: dict[str, int] = {}
    announcements_refused: int = 0
    confirmations_unproven: int = 0
    non_ed25519: dict[str, int] = {}
    weights_bytes_in: int = 0
    weights_bytes_out: int = 0
    weights_age_s: float | None = None
    weights_refused: dict[str, int] = {}
    announcements_dropped: int = 0
    records_refused: int = 0
    peers_newer: int = 0
    peers_older: int = 0
    update: str = ""
    newer_release: str = ""
    refused_peers: list[RefusalStatus] = []
    refused_by: list[RefusalStatus] = []
    used_by_peers: ReceiptFigures = ReceiptFigures()


class AmountStatus(msgspec.Struct, frozen=True):
    """Amount used since the creation of the home. `limit` and `left` are None if there is no limit."""

    used: int = 0
    limit: int | None = None
    left: int | None = None


def amount(used: int, limit: int | None) -> AmountStatus:
    """Return the amount with the remainder of its limit, at least 0."""
    return AmountStatus(used=used, limit=limit, left=None if limit is None else max(0, limit - used))


class BudgetStatus(msgspec.Struct, frozen=True):
    generate_tokens: AmountStatus = AmountStatus()
    learn_steps: AmountStatus = AmountStatus()
    learn_tokens: AmountStatus = AmountStatus()


class ReplayStatus(msgspec.Struct, frozen=True):
    """The replay buffer: groups by state, and its size on disk."""

    waiting: int = 0
    ready: int = 0
    taken: int = 0
    released: dict[str, int] = {}
    tokens: int = 0
    disk_bytes: int = 0


class LimitsStatus(msgspec.Struct, frozen=True):
    """Use of the node's limits, in bytes. A limit is None if it is not set.

    `paused` is the reason why the node generates and pulls nothing until there is disk space, "" if it is not paused.
    """

    paused: str = ""
    home_bytes: int | None = None
    home_limit_bytes: int | None = None
    disk_free_bytes: int | None = None
    buffer_bytes: int = 0
    buffer_limit_bytes: int = 0
    ready_bytes: int = 0
    ready_limit_bytes: int = 0
    open_files: int | None = None
    open_files_limit: int | None = None
    out_of_files: int = 0
    http_refused: dict[str, int] = {}


class EvalStatus(msgspec.Struct, frozen=True):
    """One evaluation: greedy pass@1 over `n` held-out problems with the weights of `step`.

    `completion_tokens` is the mean length of the answers, `cut_fraction` the share that reached the token limit.
    """

    step: int
    task: str
    pass_at_1: float
    n: int
    completion_tokens: float | None = None
    cut_fraction: float | None = None


class HealthStatus(msgspec.Struct, frozen=True):
    """Health behind `/healthz` and `/readyz`. `problems` holds one sentence each; `healthy` is true if it is empty.

    `failing` holds a sentence for each kind of work that fails again and again; a restart need not help.

    `ready` is true if the network and the role's workers are up; otherwise `waits_for` names the missing part.
    The lag of the event loop is the mean and the maximum over the last minute.
    """

    healthy: bool = False
    ready: bool = False
    problems: list[str] = []
    failing: list[str] = []
    waits_for: str = ""
    taken_at: float = 0.0
    event_loop_lag_s: float | None = None
    event_loop_lag_longest_s: float | None = None


class PauseStatus(msgspec.Struct, frozen=True):
    """A pause: its reason, "" without one; its end, if known, in Unix time; whether the workers have ended.

    `resumed_at` is the end of the last pause since the start, in Unix time.
    """

    reason: str = ""
    until: float | None = None
    in_effect: bool = False
    resumed_at: float | None = None


class Status(msgspec.Struct, frozen=True):
    """The complete snapshot."""

    schema: int = 1
    node: NodeStatus = NodeStatus()
    run: RunStatus = RunStatus()
    model: ModelStatus = ModelStatus()
    generation: GenerationStatus = GenerationStatus()
    learner: LearnerStatus = LearnerStatus()
    swarm: SwarmStatus = SwarmStatus()
    replay: ReplayStatus = ReplayStatus()
    limits: LimitsStatus = LimitsStatus()
    budget: BudgetStatus = BudgetStatus()
    eval: list[EvalStatus] = []
    health: HealthStatus = HealthStatus()
    pause: PauseStatus = PauseStatus()

    def to_json(self) -> bytes:
        return redacted(msgspec.json.encode(self).decode()).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Status:
        """Return the snapshot in a JSON text. Raises msgspec.DecodeError if it is invalid."""
        return msgspec.json.decode(data, type=cls)
