"""`python -m tests.chaos.power --cuts 50 --seed N`: kill -9 of a whole node at random instants, again and again.

A real node with a tiny model trains beside one peer. At each cut every process of it dies at once; the same command
starts it again, as systemd would. Then it must be at work within 30 s, go on at the newest complete step, and have kept
whatever it acknowledged (`kept.py`) or told its peer (`witness.py`). A line a cut; the last line is JSON.
Exit code 1 where anything was lost or late. `cpu_s` is what a start costs, whatever else the machine does meanwhile;
`stolen_percent` what its host gave to others during the starts, and each line says it of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import shutil
import signal
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.stubs.group_maker import GroupMaker
from ftis_node.config.home import Home
from ftis_node.config.manifest import RunManifest, load_manifest
from ftis_node.node.http_api.node_client import post_document
from ftis_node.records.identity import Identity
from tests.chaos.power.cut import Cut, await_sight, cpu_seconds, cut_power, plan_cuts, stolen_seconds
from tests.chaos.power.kept import Kept, events_in, losses, read_kept, wrong_resumption
from tests.chaos.power.witness import Witness, witness
from tests.node.support import ANY_PORT, started
from tests.trained_models import trained_model

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.node.support import RunningNode

LIMIT_S = 30.0  # from the command to work
GIVE_UP_S = 1200.0  # a machine with a lot else to do is late, not wrong
LOOK_S = 0.05
LIFE_S = 5.0
FIRST_START_S = 12.0  # before one was measured
MANIFEST = RunManifest(
    name="power",
    task="arithmetic",
    sampling={"group_size": 4, "max_prompt_tokens": 32, "max_completion_tokens": 16, "max_total_tokens": 48},
    step={"own_groups": 4, "foreign_groups": 2, "foreign_wait_s": 0.5},
    eval={"every_steps": 0},
    wire={"announcement_shards": 1},
)
# Each step has its checkpoint before it is reported: what is checked below holds for such a node.
SETTINGS = """
[rate_limits]
groups_per_minute = 600
[learner]
checkpoint_every_steps = 1
[swarm]
directory_period_s = 2.0
pull_all_max_peers = 200
"""


@dataclass
class Outcome:
    """What all the cuts did."""

    at_work_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    stolen_percent: list[float] = field(default_factory=list)
    num_by_kind: dict[str, int] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)
    kept: Kept = field(default_factory=Kept)
    num_told: int = 0

    @property
    def num_late(self) -> int:
        """Restarts that took longer than they may."""
        return sum(took_s > LIMIT_S for took_s in self.at_work_s)

    def summary(self, *, seed: int) -> dict[str, Any]:
        """The last line."""
        return {
            "seed": seed,
            "cuts": sum(self.num_by_kind.values()),
            "by_kind": self.num_by_kind,
            "violations": len(self.violations),
            "late": self.num_late,
            "at_work_s": _spread(self.at_work_s),
            "cpu_s": _spread(self.cpu_s),
            "stolen_percent": _spread(self.stolen_percent),
            "load": round(os.getloadavg()[2], 1),
            "cores": os.cpu_count(),
            "steps": self.kept.newest_step,
            "groups_kept": len(self.kept.groups),
            "groups_told": self.num_told,
            "bans_kept": len(self.kept.banned),
        }


class Victim:
    """The home and the command; one life after the other."""

    def __init__(self, folder: Path, model: Path, peer: str) -> None:
        self.home = folder / "home"
        self.home.mkdir()
        (self.home / "node.toml").write_text(SETTINGS)
        self.command = (
            *("join", "--model", str(model), "--run", str(folder / "run.toml"), "--listen", ANY_PORT),
            *("--peers", peer, "--engine", "torch", "--name", "victim", "--seed", "1"),
        )

    def told_since(self, kept: Kept) -> list[dict[str, Any]]:
        start = kept.events.rfind(b"\n") + 1
        events = self.home / "events.jsonl"
        return events_in(events.read_bytes()[start:]) if events.exists() else []

    def is_at_work(self, kept: Kept) -> bool:
        """Up, and a group was made or a step taken since what was kept."""
        made = (event for event in self.told_since(kept) if event["event"] == "step" or event.get("own"))
        return Home(self.home).running_url() is not None and any(made)

    def ban_somebody(self) -> str:
        """Bans a made-up peer on the running node; its id, once the node has acknowledged that."""
        peer_id = Identity.generate().peer_id
        post_document(Home(self.home), "/peers/ban", {"peer": peer_id, "for_s": 864000})
        return peer_id


async def run_cuts(
    folder: Path, model: Path, *, cuts: list[Cut], say: Callable[[str], None], until_s: float = math.inf
) -> Outcome:
    """The cuts that fit into `until_s` (of the monotonic clock), and a last life that ends in order."""
    (folder / "run.toml").write_text(MANIFEST.to_toml())
    maker = GroupMaker(model, load_manifest(str(folder / "run.toml")))
    outcome = Outcome()
    with tempfile.TemporaryDirectory(prefix="ftis") as sockets:
        async with witness(Path(sockets) / "w", maker) as peer:
            victim = Victim(folder, model, peer.address)
            for number, cut in enumerate(cuts):
                if time.monotonic() > until_s:
                    break
                say(f"{number + 1}: {await _one_life(victim, cut, peer, outcome)}")
            say(f"the last: {await _one_life(victim, None, peer, outcome)}")
            outcome.violations += peer.contradictions
            outcome.num_told = len(peer.told)
    return outcome


async def _one_life(victim: Victim, cut: Cut | None, peer: Witness, outcome: Outcome) -> str:
    """From the command to a cut, or to an orderly end where there is none; what happened, as a line."""
    before, told, num_violations = outcome.kept, dict(peer.told), len(outcome.violations)
    began_at, stolen_before_s = time.monotonic(), stolen_seconds()
    with started(victim.home, *victim.command) as node:
        line = "cut while starting"
        if cut is None or cut.kind != "start-up":
            took_s = await _until_at_work(victim, node, before, began_at=began_at)
            outcome.at_work_s.append(took_s)
            outcome.cpu_s.append(cpu_seconds(node))
            stolen = (stolen_seconds() - stolen_before_s) / took_s
            outcome.stolen_percent.append(100 * stolen)
            line = f"at work after {took_s:.1f} s (the host took {stolen:.0%}), steps from {before.newest_step}"
            banned = await asyncio.to_thread(victim.ban_somebody)
            before = Kept(**{**_fields(before), "banned": before.banned | {banned}})
        if cut is None:
            await asyncio.to_thread(node.stop)
        else:
            last_start_s = outcome.at_work_s[-1] if outcome.at_work_s else FIRST_START_S
            await _until_cut(cut, victim, until_s=began_at + cut.after * last_start_s)
            line += f", {cut.kind}: {cut_power(node)} processes cut"
            outcome.num_by_kind[cut.kind] = outcome.num_by_kind.get(cut.kind, 0) + 1
    after = await asyncio.to_thread(read_kept, victim.home)
    steps = [event["step"] for event in victim.told_since(before) if event["event"] == "step"]
    known = Kept(**{**_fields(before), "groups": {**before.groups, **told}})
    outcome.violations += [*losses(known, after), *wrong_resumption(before, steps)]
    outcome.kept = after
    return f"{line}, {len(after.groups)} groups, step {after.newest_step}" + "".join(
        f"\n   VIOLATION: {violation}" for violation in outcome.violations[num_violations:]
    )


def _fields(kept: Kept) -> dict[str, Any]:
    return {name: getattr(kept, name) for name in Kept.__slots__}


async def _until_at_work(victim: Victim, node: RunningNode, before: Kept, *, began_at: float) -> float:
    """Seconds from the command until it is. Fails where the node ends before, or never is."""
    while not await asyncio.to_thread(victim.is_at_work, before):
        assert node.process.poll() is None, node.log.read_text()[-3000:]
        assert time.monotonic() < began_at + GIVE_UP_S, node.log.read_text()[-3000:]
        await asyncio.sleep(LOOK_S)
    return time.monotonic() - began_at


async def _until_cut(cut: Cut, victim: Victim, *, until_s: float) -> None:
    """`until_s`: when to cut a start, by the monotonic clock."""
    if cut.kind == "start-up":
        await asyncio.sleep(max(0.0, until_s - time.monotonic()))
        return
    await asyncio.sleep(cut.after * LIFE_S)
    await asyncio.to_thread(await_sight, cut.kind, victim.home)
    await asyncio.sleep(cut.more_s)


def _spread(figures: list[float]) -> dict[str, float]:
    ordered = sorted(figures)
    at = {"shortest": 0, "median": len(ordered) // 2, "p90": int(0.9 * (len(ordered) - 1)), "longest": -1}
    return {name: round(ordered[index], 1) for name, index in at.items()}


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.power", description=(__doc__ or "").split("\n\n")[1])
    parser.add_argument("--cuts", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=math.inf, help="no further cut after so long")
    parser.add_argument("--keep", type=Path, help="a new folder for the node's home and log; else they are removed")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as ctrl-C, so that no node is left running

    def say(line: str) -> None:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()

    return asyncio.run(_main(options, say))


async def _main(options: argparse.Namespace, say: Callable[[str], None]) -> int:
    async with AsyncExitStack() as stack:
        folder = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ftis-power-")))
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copytree(trained_model("s", scale=0.1), folder / "model")
        cuts, until_s = plan_cuts(options.cuts, seed=options.seed), time.monotonic() + 60 * options.minutes
        outcome = await run_cuts(folder, folder / "model", cuts=cuts, say=say, until_s=until_s)
        say(json.dumps(outcome.summary(seed=options.seed)))
        return 1 if outcome.violations or outcome.num_late else 0
