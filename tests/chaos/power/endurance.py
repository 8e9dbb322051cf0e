"""`python -m tests.chaos.power --cuts 50 --seed N`: kill -9 of a whole node at random instants, repeatedly.

A real node with a tiny model trains with one peer. Each cut kills all its processes at once, and the same command
starts it again. It must work within 30 s and resume at the newest complete step. It must not lose acknowledged state
(`home_state.py`) or contradict its peer (`recording_peer.py`).

It prints one line per cut. The last line is JSON. The exit code is 1 if anything was lost or late.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bench.stubs.group_maker import GroupMaker
from ftis_node.config.home import Home
from ftis_node.config.manifest import RunManifest, load_manifest
from ftis_node.node.http_api.node_client import post_document
from ftis_node.records.identity import Identity
from tests.chaos.power.cut import Cut, cut_power, plan_cuts, stolen_seconds, wait_for_event
from tests.chaos.power.home_state import HomeState, events_in, losses, read_home_state, resumption_errors
from tests.chaos.power.recording_peer import RecordingPeer, recording_peer
from tests.node.support import ANY_PORT, RunningNode, started
from tests.trained_models import trained_model

LIMIT_S = 30.0  # from the command to the first work
GIVE_UP_S = 1200.0  # a slow start on a busy machine is late and no error
POLL_S = 0.05
WORK_S = 5.0
FIRST_START_S = 12.0  # the assumed duration of a start before the first measurement
MANIFEST = RunManifest(
    name="power",
    task="arithmetic",
    sampling={"group_size": 4, "max_prompt_tokens": 32, "max_completion_tokens": 16, "max_total_tokens": 48},
    step={"own_groups": 4, "foreign_groups": 2, "foreign_wait_s": 0.5},
    eval={"every_steps": 0},
    wire={"announcement_shards": 1},
)
# A checkpoint for each step, before the step is logged: `resumption_errors` is valid for such a node only.
SETTINGS = """
[learner]
checkpoint_every_steps = 1
[swarm]
pull_policy = "all"
"""

CONSTANTS = {
    "ftis_node.swarm.rate_limits.GROUPS_PER_MINUTE": 600.0,
    "ftis_node.node.loops.directory.RECORD_PERIOD_S": 2.0,
}


@dataclass
class Outcome:
    """The results of all cuts."""

    start_s: list[float] = field(default_factory=list)
    num_by_kind: dict[str, int] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)
    state: HomeState = field(default_factory=HomeState)
    num_acknowledged: int = 0

    @property
    def num_late(self) -> int:
        """The number of starts that took longer than `LIMIT_S`."""
        return sum(took_s > LIMIT_S for took_s in self.start_s)

    def summary(self, *, seed: int) -> dict[str, Any]:
        """Return the content of the last line."""
        return {
            "seed": seed,
            "cuts": sum(self.num_by_kind.values()),
            "by_kind": self.num_by_kind,
            "violations": len(self.violations),
            "late": self.num_late,
            "longest_start_s": round(max(self.start_s, default=0.0), 1),
            "steps": self.state.newest_step,
            "groups_stored": len(self.state.groups),
            "groups_acknowledged": self.num_acknowledged,
            "bans": len(self.state.banned),
        }


class Victim:
    """The node that is cut repeatedly: its home and its command."""

    def __init__(self, folder: Path, model: Path, peer: str) -> None:
        self.home = folder / "home"
        self.home.mkdir()
        (self.home / "node.toml").write_text(SETTINGS)
        self.command = (
            *("join", "--model", str(model), "--run", str(folder / "run.toml"), "--listen", ANY_PORT),
            *("--peers", peer, "--engine", "torch", "--name", "victim", "--seed", "1"),
        )

    def events_since(self, before: HomeState) -> list[dict[str, Any]]:
        """Return the events that were logged after this state."""
        start = before.events.rfind(b"\n") + 1
        events = self.home / "events.jsonl"
        return events_in(events.read_bytes()[start:]) if events.exists() else []

    def is_working(self, before: HomeState) -> bool:
        """Return whether the node runs and has logged a step or an own group since this state."""
        work = (event for event in self.events_since(before) if event["event"] == "step" or event.get("own"))
        return Home(self.home).running_url() is not None and any(work)

    def ban_new_peer(self) -> str:
        """Ban a made-up peer and return its id after the node has acknowledged the ban."""
        peer_id = Identity.generate().peer_id
        post_document(Home(self.home), "/peers/ban", {"peer": peer_id, "for_s": 864000})
        return peer_id


async def run_cuts(folder: Path, model: Path, *, cuts: list[Cut], log: Callable[[str], None]) -> Outcome:
    """Run the cuts, then a start that ends in order."""
    (folder / "run.toml").write_text(MANIFEST.to_toml())
    maker = GroupMaker(model, load_manifest(str(folder / "run.toml")))
    outcome = Outcome()
    with tempfile.TemporaryDirectory(prefix="ftis") as sockets:
        async with recording_peer(Path(sockets) / "p", maker) as peer:
            victim = Victim(folder, model, peer.address)
            for number, cut in enumerate(cuts):
                log(f"{number + 1}: {await _start_and_cut(victim, cut, peer, outcome)}")
            log(f"the last: {await _start_and_cut(victim, None, peer, outcome)}")
            outcome.violations += peer.contradictions
            outcome.num_acknowledged = len(peer.acknowledged)
    return outcome


async def _start_and_cut(victim: Victim, cut: Cut | None, peer: RecordingPeer, outcome: Outcome) -> str:
    """Start the node, cut it or stop it in order, compare the states, and return a line for the report."""
    before, acknowledged, num_violations = outcome.state, dict(peer.acknowledged), len(outcome.violations)
    began_at, stolen_before_s = time.monotonic(), stolen_seconds()
    with started(victim.home, *victim.command, constants=CONSTANTS) as node:
        line = "cut during the start"
        if cut is None or cut.kind != "start-up":
            took_s = await _wait_for_work(victim, node, before, began_at=began_at)
            outcome.start_s.append(took_s)
            stolen = (stolen_seconds() - stolen_before_s) / took_s  # by the host of a virtual machine
            line = f"working after {took_s:.1f} s ({stolen:.0%} stolen), steps from {before.newest_step}"
            banned = await asyncio.to_thread(victim.ban_new_peer)
            before = replace(before, banned=before.banned | {banned})
        if cut is None:
            await asyncio.to_thread(node.stop)
        else:
            last_start_s = outcome.start_s[-1] if outcome.start_s else FIRST_START_S
            await _wait_for_cut(cut, victim, until_s=began_at + cut.after * last_start_s)
            line += f", {cut.kind}: {cut_power(node)} processes killed"
            outcome.num_by_kind[cut.kind] = outcome.num_by_kind.get(cut.kind, 0) + 1
    after = await asyncio.to_thread(read_home_state, victim.home)
    steps = [event["step"] for event in victim.events_since(before) if event["event"] == "step"]
    known = replace(before, groups={**before.groups, **acknowledged})
    outcome.violations += [*losses(known, after), *resumption_errors(before, steps)]
    outcome.state = after
    return f"{line}, {len(after.groups)} groups, step {after.newest_step}" + "".join(
        f"\n   VIOLATION: {violation}" for violation in outcome.violations[num_violations:]
    )


async def _wait_for_work(victim: Victim, node: RunningNode, before: HomeState, *, began_at: float) -> float:
    """Wait until the node works and return the seconds since `began_at`. Fails if the node ends or never works."""
    while not await asyncio.to_thread(victim.is_working, before):
        assert node.process.poll() is None, node.log.read_text()[-3000:]
        assert time.monotonic() < began_at + GIVE_UP_S, node.log.read_text()[-3000:]
        await asyncio.sleep(POLL_S)
    return time.monotonic() - began_at


async def _wait_for_cut(cut: Cut, victim: Victim, *, until_s: float) -> None:
    """Wait until the time of the cut. `until_s` is that of a cut during the start, by the monotonic clock."""
    if cut.kind == "start-up":
        await asyncio.sleep(max(0.0, until_s - time.monotonic()))
        return
    await asyncio.sleep(cut.after * WORK_S)
    await asyncio.to_thread(wait_for_event, cut.kind, victim.home)
    await asyncio.sleep(cut.delay_s)


def main() -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.power", description=(__doc__ or "").split("\n\n")[1])
    parser.add_argument("--cuts", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C, so that no node remains running

    def log(line: str) -> None:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()

    return asyncio.run(_main(options, log))


async def _main(options: argparse.Namespace, log: Callable[[str], None]) -> int:
    with tempfile.TemporaryDirectory(prefix="ftis-power-") as name:
        folder = Path(name)
        shutil.copytree(trained_model("s", scale=0.1), folder / "model")
        cuts = plan_cuts(options.cuts, seed=options.seed)
        outcome = await run_cuts(folder, folder / "model", cuts=cuts, log=log)
        log(json.dumps(outcome.summary(seed=options.seed)))
        return 1 if outcome.violations or outcome.num_late else 0
