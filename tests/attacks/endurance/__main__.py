"""Run all attackers of this folder at once on one real node.

    python -m tests.attacks.endurance --minutes 60 --seed 1 --out DIR

The run has one `ftis-node join` with a tiny model, and two honest senders. Quiet phases and attacks alternate, three
and six minutes long in a run of an hour. So the rate of admitted honest groups is compared within the run.

Ten attackers act at once, in a separate process of lower priority. All kinds (`kinds.py`) take turns in shuffled
rounds. Each phase prints a line; the last line is JSON.

After a violation the exit code is 1, and the run keeps homes and logs. These are violations: The node ended or wrote a
traceback. Honest groups were admitted at less than 90 % of the undisturbed rate. Memory, descriptors, threads or disk
grow. An honest peer was banned. A false claim was accepted.
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
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from bench.stubs.group_maker import GroupMaker
from ftis_node.config.manifest import load_manifest
from tests.attacks.endurance import verdict
from tests.attacks.endurance.attacker_process import AttackerProcess, attacking_process
from tests.attacks.endurance.verdict import Phase, plan
from tests.attacks.endurance.watch import Watch
from tests.attacks.member import Member, joined, sending
from tests.attacks.victim import CONSTANTS, Victim, running_victim
from tests.trained_models import trained_model

NUM_HONEST = 2
HONEST_EVERY_S = 1.0
TRAINS_S = 240.0
SETTLE_S = 3.0  # between phases
# Files rotate during the warm-up, so they reach their bounds before growth is judged.
SMALL_FILES = {
    "ftis_node.config.limits.EVENT_FILE_BYTES": 256 << 10,
    "ftis_node.config.limits.LOG_FILE_BYTES": 256 << 10,
}
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


def main() -> None:
    """Run, print the result, and exit with 1 after a violation."""
    options = arguments()
    os.environ.update(ONE_THREAD)
    for number in (signal.SIGINT, signal.SIGTERM):  # as for Ctrl-C, also in the background: first end all processes
        signal.signal(number, signal.default_int_handler)
    out = options.out.absolute() if options.out else Path(tempfile.mkdtemp(prefix="endurance-"))
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="fte") as sockets:
        try:
            result = asyncio.run(endure(out, Path(sockets), options))
        except KeyboardInterrupt:
            sys.exit(f"interrupted; homes and logs are in {out}")
    found = verdict.violations(result)
    for one in found:
        log(f"VIOLATION {one}")
    if found:
        log(f"homes and logs are in {out}")
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
    parser.add_argument("--minutes", type=float, default=60.0, help="length of all phases together")
    parser.add_argument("--seed", type=int, default=0, help="seed of the attackers' choices")
    parser.add_argument("--out", type=Path, help="folder for the home, logs and samples.csv; it is kept")
    parser.add_argument("--without", default="", help="omit kinds whose names contain these words, separated by commas")
    return parser.parse_args()


async def endure(out: Path, sockets: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Run all phases and return the figures. All started processes have ended at the return."""
    model = trained_model("s")
    phases = plan(options.minutes)
    async with AsyncExitStack() as stack:
        victim = await stack.enter_async_context(running_victim(out, model, constants=SMALL_FILES | CONSTANTS))
        maker = GroupMaker(model, load_manifest(str(out / "run.toml")))
        honest = [
            await stack.enter_async_context(joined(sockets / f"h{at}", maker, victim)) for at in range(NUM_HONEST)
        ]
        for one in honest:
            await stack.enter_async_context(sending(one, period_s=HONEST_EVERY_S))
        await victim.until(lambda: _trains(victim, honest), within_s=TRAINS_S)
        attackers = await stack.enter_async_context(
            attacking_process(attacker_config(victim, out, model, options), out / "attackers.log")
        )
        log(f"{len(attackers.kinds)} kinds of attackers, {len(phases)} phases; files are in {out}")
        watch = Watch(victim, out)
        watching = asyncio.create_task(watch.run())
        stack.callback(watching.cancel)
        done: list[Phase] = []
        for attacked, minutes in phases:
            done.append(await play(attackers, watch, watching, honest, attacked=attacked, minutes=minutes))
            log(_line(done[-1], attackers))
            if watching.done() or attackers.listening.done():
                break
        watching.cancel()
        await watch.read_peers()
        status = await watch.status()
        return verdict.summary(victim, honest, attackers, watch.seen, done, status)


def attacker_config(victim: Victim, out: Path, model: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Return the configuration of the attacking process."""
    node = victim.node
    return {
        "pid": node.process.pid,
        "home": str(node.home),
        "log": str(node.log),
        "model": str(model),
        "manifest": str(out / "run.toml"),
        "seed": options.seed,
        "without": [word for word in options.without.split(",") if word],
    }


async def play(
    attackers: AttackerProcess,
    watch: Watch,
    watching: asyncio.Task[None],
    honest: Sequence[Member],
    *,
    attacked: bool,
    minutes: float,
) -> Phase:
    """Run one phase and count the honest groups between its start and its end."""
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


async def _trains(victim: Victim, honest: Sequence[Member]) -> bool:
    accepted = [await victim.num_accepted(one.peer_id) for one in honest]
    return min(accepted) >= 3 and await victim.step() >= 2


def _line(phase: Phase, attackers: AttackerProcess) -> str:
    name = "attack" if phase.attacked else "quiet"
    return (
        f"{name:8} {phase.minutes:4.1f} min: {phase.admitted} of {phase.sent} honest groups,"
        f" {phase.rate:.1f} per minute, {phase.steps} steps; attackers so far: {attackers.done.total()} actions,"
        f" {len(attackers.kind_of)} members, {attackers.errors.total()} errors"
    )


def log(text: str) -> None:
    """Print a line without buffering."""
    sys.stdout.write(f"{time.strftime('%H:%M:%S')} {text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
