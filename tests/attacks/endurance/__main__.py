"""All attackers of this folder at once on one real node, for as long as one likes.

    python -m tests.attacks.endurance --minutes 60 --seed 1 --out DIR

One `ftis-node join` with a tiny model, and two honest senders. Phases without and with attackers take turns (three and
six minutes in an hour's run), so the rate at which honest groups are admitted is compared within the run. Attackers are
in a process of their own with a lower priority, ten at once; they take the kind that is furthest behind a day's worth
(`kinds.py` has each kind's actions a day). A line for each phase; the last line is JSON. Exit code 1, and homes and
logs kept, where the node ended, honest groups fell below 90 % of the undisturbed rate, memory, descriptors, threads or
disk grow, an honest peer was banned, a lie was accepted, or the node wrote a traceback.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.stubs.group_maker import GroupMaker
from ftis_node.config.home import Home
from ftis_node.config.manifest import load_manifest
from tests.attacks.endurance import verdict
from tests.attacks.endurance.crew import Crew, crew
from tests.attacks.endurance.phases import Phase, plan
from tests.attacks.endurance.watch import Watch
from tests.attacks.member import Member, joined, sending
from tests.attacks.victim import MANIFEST, SETTINGS, Victim
from tests.node.support import ANY_PORT, started
from tests.trained_models import trained_model

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

NUM_HONEST = 2
HONEST_EVERY_S = 1.0
READY_S, TRAINS_S = 240.0, 240.0
SETTLE_S = 3.0  # between phases
# Hundreds of attackers are listed as members. By `auto` the node would pull what its learner needs, and the rate of
# honest groups would be that of its steps: so everything is pulled.
BY_SIZE, EVERYTHING = "pull_all_max_peers = 200", 'pull_policy = "all"'
# Files turn over while the run warms up, so that their bounds are reached before growth is judged.
SMALL_FILES = f"""
[limits]
event_file_bytes = {256 << 10}
log_file_bytes = {256 << 10}
"""
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


def main() -> None:
    """Runs, prints, and ends with 1 where something was violated."""
    options = arguments()
    os.environ.update(ONE_THREAD)
    for number in (signal.SIGINT, signal.SIGTERM):  # as ctrl-C, also in the background: everything is ended first
        signal.signal(number, signal.default_int_handler)
    out = options.out.absolute() if options.out else Path(tempfile.mkdtemp(prefix="endurance-"))
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="fte") as sockets:
        try:
            result = asyncio.run(endure(out, Path(sockets), options))
        except KeyboardInterrupt:
            sys.exit(f"stopped before its time; homes and logs are in {out}")
    found = verdict.violations(result)
    for one in found:
        say(f"VIOLATION {one}")
    if found:
        say(f"homes and logs are in {out}")
    elif not options.out:
        shutil.rmtree(out)
    line = json.dumps({"endurance": not found, "seed": options.seed, **result, "violations": found})
    sys.stdout.write(f"{line}\n")
    sys.exit(1 if found else 0)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.attacks.endurance",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=60.0, help="of all phases together")
    parser.add_argument("--seed", type=int, default=0, help="of the attackers' choices")
    parser.add_argument("--out", type=Path, help="folder for the home, logs and samples.csv; it is kept")
    parser.add_argument("--without", default="", help="leave out kinds with these words in their names (comma between)")
    return parser.parse_args()


async def endure(out: Path, sockets: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The whole run. Everything that it started has ended when it returns."""
    model = trained_model("s")
    phases = plan(options.minutes)
    async with AsyncExitStack() as stack:
        victim = await stack.enter_async_context(running(out, model))
        maker = GroupMaker(model, load_manifest(str(out / "run.toml")))
        honest = [
            await stack.enter_async_context(joined(sockets / f"h{at}", maker, victim)) for at in range(NUM_HONEST)
        ]
        for one in honest:
            await stack.enter_async_context(sending(one, period_s=HONEST_EVERY_S))
        await victim.until(lambda: _trains(victim, honest), within_s=TRAINS_S)
        attackers = await stack.enter_async_context(
            crew(crew_config(victim, out, model, options), out / "attackers.log")
        )
        say(f"{len(attackers.per_day)} kinds of attackers, {len(phases)} phases; files are in {out}")
        watch = Watch(victim, out)
        watching = asyncio.create_task(watch.run())
        stack.callback(watching.cancel)
        done: list[Phase] = []
        for attacked, minutes in phases:
            done.append(await play(attackers, watch, watching, honest, attacked=attacked, minutes=minutes))
            say(_line(done[-1], attackers))
            if watching.done() or attackers.listening.done():
                break
        watching.cancel()
        await watch.look_at_peers()
        status = await watch.status()
        return verdict.summary(victim, honest, attackers, watch.seen, done, status)


@asynccontextmanager
async def running(out: Path, model: Path) -> AsyncIterator[Victim]:
    """The node that is attacked."""
    run, home = out / "run.toml", out / "home"
    run.write_text(MANIFEST.to_toml())
    home.mkdir()
    (home / "node.toml").write_text(SETTINGS.replace(BY_SIZE, EVERYTHING) + SMALL_FILES)
    where = ("--run", str(run), "--listen", ANY_PORT, "--name", "victim", "--engine", "torch")
    with started(home, "join", "--model", str(model), *where) as node:
        victim = Victim(node)
        await asyncio.to_thread(node.wait_for, Home(home).running_url, timeout_s=READY_S)
        await victim.until(lambda: _listens(victim), within_s=READY_S)
        yield victim


def crew_config(victim: Victim, out: Path, model: Path, options: argparse.Namespace) -> dict[str, Any]:
    """What the process of the attackers needs. A day's actions are spread over the minutes of attack."""
    node = victim.node
    return {
        "pid": node.process.pid,
        "home": str(node.home),
        "log": str(node.log),
        "model": str(model),
        "manifest": str(out / "run.toml"),
        "seed": options.seed,
        "minutes": sum(minutes for attacked, minutes in plan(options.minutes) if attacked),
        "without": [word for word in options.without.split(",") if word],
    }


async def play(
    attackers: Crew,
    watch: Watch,
    watching: asyncio.Task[None],
    honest: Sequence[Member],
    *,
    attacked: bool,
    minutes: float,
) -> Phase:
    """One phase; what the honest senders achieved in it is counted from its first to its last second."""
    if attacked:
        await attackers.on()
    await asyncio.sleep(min(SETTLE_S, 6 * minutes))
    began_at, sent = time.monotonic(), sum(one.number for one in honest)
    admitted, step = await watch.admitted(honest)
    await asyncio.wait({watching, attackers.listening}, timeout=60 * minutes, return_when=asyncio.FIRST_COMPLETED)
    admitted_after, step_after = await watch.admitted(honest)
    took = (time.monotonic() - began_at) / 60
    sent_after = sum(one.number for one in honest)
    if attacked:
        await attackers.off()
    return Phase(attacked, took, admitted_after - admitted, sent_after - sent, step_after - step)


async def _listens(victim: Victim) -> bool:
    return bool(await victim.addresses())


async def _trains(victim: Victim, honest: Sequence[Member]) -> bool:
    rows = [await victim.row(one.peer_id) for one in honest]
    return all(row.get("groups_accepted", 0) >= 3 for row in rows) and (await victim.status())["learner"]["step"] >= 2


def _line(phase: Phase, attackers: Crew) -> str:
    what = "attacked" if phase.attacked else "quiet"
    shares = sorted(attackers.shares().values())
    day = f"{sum(min(1.0, share) for share in shares) / max(1, len(shares)):.2f} of a day" if shares else ""
    return (
        f"{what:8} {phase.minutes:4.1f} min: {phase.admitted} of {phase.sent} honest groups, {phase.rate:.1f} a minute,"
        f" {phase.steps} steps; attackers so far: {attackers.done.total()} actions, {day},"
        f" {len(attackers.attack_of)} members, {attackers.errors.total()} errors"
    )


def say(text: str) -> None:
    """A line at once, for whoever watches."""
    sys.stdout.write(f"{time.strftime('%H:%M:%S')} {text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
