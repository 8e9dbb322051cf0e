"""A home with many kinds of events, and peers whose texts contain HTML."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from ftis_node.config.home import Home
from ftis_node.records.identity import Identity
from ftis_node.telemetry.status import (
    LearnerStatus,
    ModelStatus,
    NodeStatus,
    ReceiptFigures,
    RunStatus,
    Status,
    SwarmStatus,
)
from tests.conftest import accept, fill_buffer, make_group, make_text_group

ATTACK = "<script>alert(1)</script><img src=http://evil.example/x onerror=alert(2)>\" '\x1b[2J\u202e"
PEER_ID = "12D3KooWHostileHostileHostileHostileHostile"
NUM_STEPS, BEGAN_AT = 60, 1_790_000_000.0
SKIPPED = range(12, 18)
ME, PEER = Identity.from_seed(bytes([1]) * 32), Identity.from_seed(bytes([2]) * 32)


def write_home(root: Path) -> Home:
    """Write events, status, peers and a buffer with two groups."""
    home = Home(root)
    home.create()
    home.events.write_text("".join(json.dumps(event) + "\n" for event in _events()))
    status = json.loads(_status().to_json()) | {"peers": [_peer()]}
    home.status.write_text(json.dumps(status))
    home.run_toml.write_text(f"# {ATTACK}\nname = 'fixed'\n")
    _fill(home)
    return home


def step_events() -> list[dict[str, Any]]:
    """Return the step events, with figures that tests compare."""
    return [
        {
            **{"time": BEGAN_AT + 10 * step, "event": "step", "step": step, "reward_mean": step / 100},
            **{"loss": -step / 1000, "kept_fraction": 0.5, "truncated_fraction": 0.01, "mean_kl": 0.02},
            **{"grad_norm": 1.5, "tokens_per_s": 1000.0 + step, "own_groups": 3, "foreign_groups": 5},
            **{"mismatch_kl": 1e-7, "num_tokens": 100, "duration_s": 2.0, "refused": None},
            **{"completion_tokens": 40.0, "cut_fraction": 0.25, "no_signal_fraction": 0.5, "entropy": 1.5},
            "kl_from_start": step / 1000,
            "skipped": "no group has unequal rewards" if step in SKIPPED else None,
        }
        for step in range(1, NUM_STEPS + 1)
    ]


def _events() -> list[dict[str, Any]]:
    def at(second: float, event: str, **fields: Any) -> dict[str, Any]:
        return {"time": BEGAN_AT + second, "event": event, **fields}

    refused = [
        at(200 + n, "refused", group="ab", origin=PEER_ID, reason="reward_mismatch", detail=ATTACK) for n in range(37)
    ]
    admitted = [at(5 + n, "admitted", own=n % 3 == 0, num_tokens=10, sender=PEER_ID) for n in range(90)]
    admitted[0] |= {"num_turns": 5, "num_observations": 3}
    others = [
        at(0, "start", model="tiny"), at(1, "peer_joined", peer=PEER_ID),
        at(240, "reputation_changed", peer=PEER_ID, trust_level="banned", why=ATTACK, until=BEGAN_AT + 900),
        at(300, "refused", group="ab", origin=PEER_ID, reason=ATTACK, detail=""), at(400, "start", model="tiny"),
        at(450, "step_lost", step=45, error=f"see /home/someone/x/learner.log {ATTACK}"),
        at(451, "understated", group="ab", sender=PEER_ID, step=45), at(455, "recovered", file=ATTACK, why=ATTACK),
        at(457, "checkpoint_fallback", step=43, done=44), at(458, "clock_moved", jump_s=-3600.0),
        at(610, "stop", step=NUM_STEPS),
        *(at(2 + 10 * n, "eval", step=n, task="arithmetic", pass_at_1=n / 80, n=64) for n in (0, 20, 40, 60)),
        *(at(6, "announced", group="ab"), at(7, "confirmed", group="ab", peer=PEER_ID)),
    ]  # fmt: skip
    return sorted([*refused, *admitted, *others, *step_events()], key=lambda event: event["time"])


def _status() -> Status:
    return Status(
        node=NodeStatus(peer_id=ME.peer_id, name="ann", version="0.1.0", addresses=["/ip4/203.0.113.7/tcp/4001"]),
        run=RunStatus(id="ab" * 16, name="fixed", method="ftis", task="arithmetic"),
        model=ModelStatus(name=ATTACK, parameters=1000, trainable_parameters=10),
        learner=LearnerStatus(step=NUM_STEPS),
        swarm=SwarmStatus(used_by_peers=ReceiptFigures(peers=3, groups=1041)),
    )


def _peer() -> dict[str, Any]:
    return {
        **{"peer_id": PEER_ID, "name": ATTACK, "model": ATTACK, "parameters": 5, "role": ATTACK, "policy_version": 4},
        **{"groups_accepted": 60, "groups_refused": {"reward_mismatch": 37, ATTACK: 1}, "failed_pulls": 0},
        **{"groups_confirmed": 1, "last_seen": BEGAN_AT, "trust_level": "banned", "score": -12.0, "trusted": False},
        **{"banned_until": BEGAN_AT + 900, "ban_reason": ATTACK, "reasons": {}},
    }


def _fill(home: Home) -> None:
    hostile = make_text_group(PEER, number=2)
    first, second = hostile.completions
    hostile = replace(hostile, model=ATTACK, completions=(replace(first, text=ATTACK), second))
    fill_buffer(home.replay, accept(make_group(ME), ME), accept(hostile, PEER), own=ME)
