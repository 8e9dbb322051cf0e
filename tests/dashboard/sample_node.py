"""Fixed documents of one node, for views and snapshots."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from ftis_node.dashboard.screens.groups import GroupScreen, GroupsScreen
from ftis_node.dashboard.watcher import Watcher
from ftis_node.replay.group_history import CompletionDetails, GroupHistory, PromptDetails
from ftis_node.replay.reader import GroupSummary
from ftis_node.telemetry.history import EvaluationPoint, History, StepPoint
from ftis_node.telemetry.status import (
    GenerationStatus,
    HealthStatus,
    LearnerStatus,
    ModelStatus,
    NodeStatus,
    ReplayStatus,
    RunStatus,
    Status,
    SwarmStatus,
)
from ftis_node.view.snapshot import GpuUsage, MachineUsage, NodeSnapshot

NOW = 1_800_000_000.0
ANN, BOB = "12D3KooWAnnAnnAnnAnnAnnAnnAnnAnnAnnAnnAnnAnnAnnAAAA", "12D3KooWBobBobBobBobBobBobBobBobBobBobBobBobBobBBBB"
HOSTILE = "\x1b[2J[red]evil[/]\u202e"
GROUP_ID = "ab" * 32

STATUS = Status(
    node=NodeStatus(peer_id="12D3KooWMe", name="ada", version="0.1.0", state="running", uptime_s=751.0),
    run=RunStatus(id="f790a811" * 4, name="gsm8k-ftis", method="ftis", task="gsm8k"),
    model=ModelStatus(name="Qwen/Qwen2.5-3B", parameters=3_085_938_688, policy_version=101),
    generation=GenerationStatus(
        engine="vllm", state="ready", tokens_per_s=2412.0, groups_made=412, tokens_made=1_482_000, policy_version=101
    ),
    learner=LearnerStatus(
        state="ready", step=101, loss=-0.0212, reward_mean=0.61, kept_fraction=0.93, tokens_per_s=3310.0,
        own_groups=808, foreign_groups=404, learning_rate=1e-6, completion_tokens=148.0, cut_fraction=0.04,
        no_signal_fraction=0.25, entropy=0.41, kl_to_start=0.012, last_step_at=NOW - 12,
    ),
    swarm=SwarmStatus(
        state="connected",
        reason="2 other members of this run",
        clock_skew_s=0.02,
        peers_known=2,
        peers_connected=2,
        groups_sent=410,
        groups_confirmed=402,
        groups_received=398,
        groups_refused={"stale": 3, "wrong_reward": 2},
        bytes_in=31_000_000,
        bytes_out=33_100_000,
    ),
    replay=ReplayStatus(waiting=3, ready=12, taken=8, tokens=90_000, disk_bytes=212_000_000),
    health=HealthStatus(healthy=True, ready=True, taken_at=NOW),
)  # fmt: skip
PEERS: tuple[dict[str, Any], ...] = (
    {"peer_id": ANN, "name": "ann", "model": "Qwen/Qwen2.5-7B", "parameters": 7_615_616_512, "role": "full",
        "policy_version": 88, "groups_accepted": 398, "groups_refused": {"stale": 3}, "failed_pulls": 1,
        "groups_confirmed": 400, "last_seen": NOW - 3, "trust_level": "good", "score": 7.25, "banned_until": None,
        "ban_reason": "", "reasons": {"stale": 3}, "trusted": False, "training": {
        "steps": 20, "groups": 80, "completions": 960, "kept": 0.91, "kept_negatives": 0.82, "signal": 0.65,
        "ess": 0.74, "effective": 0.43, "weight_mean": 0.96, "weight_variance": 0.31, "clipped": 0.0,
        "truncated": 0.08, "mean_log_ratio": -0.21, "mean_kl": 3.4}},
    {"peer_id": BOB, "name": HOSTILE, "model": HOSTILE, "parameters": 1_543_714_304, "role": "generator",
        "policy_version": None, "groups_accepted": 0, "groups_refused": {"wrong_reward": 2}, "failed_pulls": 0,
        "groups_confirmed": 2, "last_seen": NOW - 400, "trust_level": "banned", "score": -10.5,
        "banned_until": NOW + 300, "ban_reason": HOSTILE, "reasons": {HOSTILE: 2}, "trusted": False, "training": None,
        },
)  # fmt: skip
HISTORY = History(
    steps=tuple(
        StepPoint(
            time=NOW - (101 - step) * 7, step=step, reward_mean=0.3 + step / 330 + ((step * 37) % 11 - 5) / 125
        )
        for step in range(1, 102)
    ),
    evaluations=tuple(
        EvaluationPoint(time=NOW - 700 + 7 * step, step=step, task="gsm8k", pass_at_1=0.42 + 0.0017 * step, n=256)
        for step in range(0, 101, 10)
    ),
    events=(
        {"time": NOW - 751, "event": "start", "run": "f790a811", "peer": "12D3KooWMe", "model": "Qwen2.5-3B"},
        {"time": NOW - 12, "event": "admitted", "group": GROUP_ID, "own": True},
        {
            "time": NOW - 9, "event": "refused", "group": None, "origin": BOB, "reason": "wrong_reward",
            "detail": HOSTILE,
        },
        {"time": NOW - 5, "event": "eval", "step": 100, "task": "gsm8k", "pass_at_1": 0.59, "n": 256},
        {
            "time": NOW - 2, "event": "step", "step": 101, "reward_mean": 0.61, "loss": -0.0212,
            "own_groups": 8, "foreign_groups": 4, "duration_s": 6.91,
        },
    ),
)  # fmt: skip
MACHINE = MachineUsage(
    num_processes=4,
    resident_bytes=9_300_000_000,
    ram_used_bytes=21_000_000_000,
    ram_total_bytes=64_000_000_000,
    gpus=(GpuUsage(used_bytes=21_300_000_000, total_bytes=25_800_000_000, busy=0.87, watts=231.4),),
)
RUNNING = NodeSnapshot(
    taken_at=NOW,
    status=STATUS,
    peers=PEERS,
    history=HISTORY,
    machine=MACHINE,
    start_command="ftis-node join --model Qwen/Qwen2.5-3B --home /home/ada/node",
    logs="/home/ada/node/logs",
)
STOPPED = replace(
    RUNNING,
    status=structs.replace(
        STATUS,
        node=structs.replace(STATUS.node, state="stopped", end="stopped"),
        health=HealthStatus(taken_at=NOW - 60),
    ),
    machine=replace(MACHINE, num_processes=0, resident_bytes=0, gpus=()),
    history=replace(HISTORY, events=(*HISTORY.events, {"time": NOW - 60, "event": "stop", "step": 101})),
)
SUMMARY = GroupSummary(
    id=GROUP_ID, own=False, sender=ANN, number=17, state="released", reason="trained", step=100, task="gsm8k",
    prompt_index=5, model="Qwen/Qwen2.5-7B", policy_version=88, created_at=NOW - 30, admitted_at=NOW - 28,
    num_tokens=6, rewards=[1.0, 0.0],
)  # fmt: skip
GROUP = GroupHistory(
    id=GROUP_ID,
    summary=SUMMARY,
    prompt=PromptDetails("gsm8k", "train", 5, "user: What is 6 x 7?", "42"),
    temperature=1.0,
    texts_missing="",
    verdict="admitted",
    used="trained in step 100",
    completions=(
        CompletionDetails(
            text="42", token_ids=[10, 11, 2], pieces=["4", "2", "<end>"], num_tokens=3, finish_reason="stop",
            reward=1.0, claimed_reward=1.0, mean_logprob=-1.1, lowest_logprob=-2.9, logprobs=[-0.1, -2.9, -0.3],
            versions=(88, 88),
        ),
        CompletionDetails(
            text=None, token_ids=[12, 13, 14], pieces=["12", "13", HOSTILE], num_tokens=3, finish_reason="length",
            reward=0.0, claimed_reward=0.0, mean_logprob=-0.5, lowest_logprob=-0.5, logprobs=[-0.5, -0.5, -0.5],
            versions=(88, 89),
        ),
    ),
    events=(
        {"time": NOW - 28, "event": "admitted", "group": GROUP_ID, "own": False},
        {"time": NOW - 20, "event": "taken", "group": GROUP_ID, "step": 100},
    ),
)  # fmt: skip


def use_snapshots(monkeypatch: pytest.MonkeyPatch, poll: Callable[[], NodeSnapshot]) -> None:
    """Make the dashboard read its snapshots from `poll`, and its groups from this module."""
    monkeypatch.setattr(Watcher, "poll", lambda watcher, with_history=True: poll())
    monkeypatch.setattr(GroupsScreen, "read", lambda screen: [SUMMARY])
    monkeypatch.setattr(GroupScreen, "read", lambda screen: GROUP)
