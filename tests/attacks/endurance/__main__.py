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

import argparse
import asyncio
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from bench.stubs.group_maker import GroupMaker
from ftis_node.config.manifest import load_manifest
from tests.attacks.endurance.verdict import Attacks, Phase, Sample, growing, plan, ratio, violations
from tests.attacks.member import Member, joined, sending
from tests.attacks.victim import CONSTANTS, Victim, none_if_unanswered, running_victim
from tests.chaos.swarm import role_of
from tests.trained_models import trained_model
from tests.waiting import eventually

NUM_HONEST = 2
HONEST_EVERY_S, SAMPLE_EVERY_S = 1.0, 10.0
TRAINS_S, READY_S, QUIET_S = 240.0, 300.0, 120.0  # on a busy machine
NICE = 10  # real attackers use other machines
MAX_FAULT_EVENTS = 20
# Files rotate in the first phases, so they reach their bounds before growth is judged.
SMALL_FILES = {
    "ftis_node.config.limits.EVENT_FILE_BYTES": 256 << 10,
    "ftis_node.config.limits.LOG_FILE_BYTES": 256 << 10,
}
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


class Run:
    """The victim during the phases. The node forgets peers that left long ago, so their newest rows are kept here."""

    def __init__(self, victim: Victim, honest: Sequence[Member], config: dict[str, Any], out: Path) -> None:
        self.victim, self.honest, self._config, self._out = victim, honest, config, out
        self.attacks = Attacks()
        self.rows: dict[str, dict[str, Any]] = {}
        self.banned: set[str] = set()

    async def play(self, *, attacked: bool, minutes: float) -> Phase:
        """Run one phase, with or without the process of the attackers."""
        async with AsyncExitStack() as stack:
            if attacked:
                await stack.enter_async_context(self._attacking())
            ends_at, samples = time.monotonic() + 60 * minutes, list[Sample]()
            before, began_at = await self._progress(), time.monotonic()
            while time.monotonic() < ends_at and self.victim.node.process.poll() is None:
                await asyncio.sleep(min(SAMPLE_EVERY_S, max(0.0, ends_at - time.monotonic())))
                admitted, steps = await self._progress()
                samples.append(self._sample())
            took = (time.monotonic() - began_at) / 60
        return Phase(attacked, took, admitted - before[0], steps - before[1], samples)

    async def _progress(self) -> tuple[int, int]:
        """Keep each peer's row; return the number of admitted honest groups and the learner's step."""
        for row in await none_if_unanswered(self.victim.rows) or ():
            self.rows[row["peer_id"]] = row
            self.banned |= {row["peer_id"]} if row["trust_level"] == "banned" else set()
        admitted = sum(self.rows.get(one.peer_id, {}).get("groups_accepted", 0) for one in self.honest)
        return admitted, int(await none_if_unanswered(self.victim.step) or 0)

    def _sample(self) -> Sample:
        found: Counter[tuple[str, str]] = Counter()
        with suppress(psutil.NoSuchProcess):
            for process in self.victim.node.processes():
                role = role_of(process, daemon_pid=self.victim.node.process.pid)
                found["rss_mib", role] += process.memory_info().rss >> 20
                found["descriptors", role] += process.num_fds()
                found["threads", role] += process.num_threads()
            found["disk_mib", "home"] = self.victim.file_bytes("*") + self.victim.file_bytes("logs/*") >> 20
        return found

    @asynccontextmanager
    async def _attacking(self) -> AsyncIterator[None]:
        """Run the attackers, and read their reports at the end. An attack that failed is no error of the run."""
        reports = self._out / f"attackers-{self.attacks.num_attacks}.jsonl"
        command = (sys.executable, "-m", "tests.attacks.endurance.attackers")
        config = json.dumps({**self._config, "skip": self.attacks.num_attacks})
        with reports.open("wb") as output, reports.with_suffix(".log").open("wb") as log:
            child = await asyncio.create_subprocess_exec(
                *(*command, config),
                stdin=asyncio.subprocess.PIPE,
                stdout=output,
                stderr=log,
                preexec_fn=lambda: os.nice(NICE),
                start_new_session=True,  # the run handles Ctrl-C
            )
        assert child.stdin is not None
        try:
            await eventually(lambda: "kinds" in reports.read_text(), within_s=READY_S)
            yield
        finally:
            child.stdin.close()
            with suppress(TimeoutError):
                async with asyncio.timeout(QUIET_S):
                    await child.wait()
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            await child.wait()
        for line in reports.read_text().splitlines():
            with suppress(ValueError):  # a line of a library
                self.attacks.add(json.loads(line))

    async def result(self, phases: Sequence[Phase]) -> dict[str, Any]:
        await self._progress()
        share, attacks, node = ratio(phases), self.attacks, self.victim.node
        accepted = {peer: self.rows[peer]["groups_accepted"] for peer in attacks.malicious & self.rows.keys()}
        status = await none_if_unanswered(self.victim.status) or {"swarm": {"groups_refused": {}}}
        return {
            "minutes": round(sum(phase.minutes for phase in phases), 1),
            "exit_code": node.process.poll(),
            "starts": len(node.events("start")),  # 0 if the event log was rotated
            "steps": sum(phase.steps for phase in phases),
            "honest_ratio": None if share is None else round(share, 3),
            "honest_banned": sorted(self.banned & {one.peer_id for one in self.honest}),
            "members_attacking": len(attacks.kind_of),
            "members_banned": len(self.banned & attacks.kind_of.keys()),
            "accepted_malicious_groups": [
                f"{attacks.kind_of[peer]}: {count} of {peer}" for peer, count in sorted(accepted.items()) if count
            ],
            "fault_events": node.events("peer_fault")[:MAX_FAULT_EVENTS],
            "tracebacks": self.victim.log_text().count("Traceback (most recent call last)"),
            "refused": status["swarm"]["groups_refused"],
            "actions": dict(attacks.done),
            "idle_kinds": sorted(attacks.kinds - attacks.done.keys()),
            "attacker_errors": dict(attacks.errors),
            "attacker_last_errors": attacks.last_errors,
            "growing": growing(phases),
        }


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
        node = victim.node
        config = {
            **{"pid": node.process.pid, "home": str(node.home), "log": str(node.log), "model": str(model)},
            **{"manifest": str(out / "run.toml"), "seed": options.seed},
            "without": [word for word in options.without.split(",") if word],
        }
        run, done = Run(victim, honest, config, out), list[Phase]()
        log(f"{len(phases)} phases; files are in {out}")
        for attacked, minutes in phases:
            done.append(phase := await run.play(attacked=attacked, minutes=minutes))
            name, num_errors = "attack" if attacked else "quiet", run.attacks.errors.total()
            log(
                f"{name:8} {phase.minutes:4.1f} min: {phase.rate:.1f} honest groups per minute, {phase.steps} steps;"
                f" attackers so far: {run.attacks.done.total()} actions, {num_errors} errors"
            )
            if node.process.poll() is not None:
                break
        return await run.result(done)


async def _trains(victim: Victim, honest: Sequence[Member]) -> bool:
    accepted = [await victim.num_accepted(one.peer_id) for one in honest]
    return min(accepted) >= 3 and await victim.step() >= 2


def log(text: str) -> None:
    sys.stdout.write(f"{time.strftime('%H:%M:%S')} {text}\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.attacks.endurance",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=60.0, help="length of all phases together")
    parser.add_argument("--seed", type=int, default=0, help="seed of the attackers' choices")
    parser.add_argument("--out", type=Path, help="folder for the home, logs and reports; it is kept")
    parser.add_argument("--without", default="", help="omit kinds whose names contain these words, separated by commas")
    options = parser.parse_args()
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
    found = violations(result)
    for one in found:
        log(f"VIOLATION {one}")
    if found:
        log(f"homes and logs are in {out}")
    elif not options.out:
        shutil.rmtree(out)
    line = json.dumps({"endurance": not found, "seed": options.seed, **result, "violations": found})
    sys.stdout.write(f"{line}\n")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
