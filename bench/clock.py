"""Wall time to a fraction of a lone node's final accuracy: by itself, and in a swarm of two with a core for each node.

It runs real `ftis-node join` processes over libp2p, each kept on one core with all of its workers. Alone a node
generates whole updates; in the swarm each node generates half of one and receives the rest. Time counts from a node's
first evaluation, when its model is loaded, and is interpolated between evaluations. It excludes the time in which any
node of the run evaluates. A step waits for the groups of a peer that evaluates, and a real run evaluates far less
often.

    python bench/clock.py [--steps 60] [--prompts 8] [--seeds 1] [--eval-every 5] [--eval-problems N]
        [--slow F | --slow-generation F] [--out clock-out]

`--slow-generation F` gives the generation worker of every node 1/F of its core, alone and in the swarm. Sampling takes
little of a step's time with tiny models, and most of it with models of billions of parameters. The worker evaluates
too, so fewer `--eval-problems` shorten the bench. `step_s` is the time of a step. `predicted_ratio_to_*` predicts
swarms of 4 and 8 nodes. It assumes `a + b / n` seconds a step, with `a` and `b` from the steps of one and two nodes.
It also assumes that a step learns as much as in the swarm of two.

`--slow F` gives the last node 1/F of its core, in the swarm and alone, from its first evaluation on. Its processes are
stopped and continued in turns of a tenth of a second (`nodes/slowed.py` has the reason). `speeds` are the requested
fractions; `alone_speed` and `with_peer_speed` are those that the last node had.

With `--slow` the run has the settings of nodes of different speed. With the preset's 30 s the fast node would wait for
its peer in each step. So `step.foreign_wait_s` is `--patience`: 1 s, a step or two of the fast node.
`step.backfill_with_own` is set, so that own groups replace those that the peer has not made yet, and steps keep their
size. `--no-fill` leaves steps smaller. `foreign_groups` is the mean number of the peer's groups in a step. The fast
node stays in the swarm until the slow one has done its steps; its curve ends after as many steps.

If other programs use the machine, the results mean nothing: `load` is the number of processes that wanted a core when
the run began. The last line is JSON. It has the speeds, and for each model the seconds to 0.8 and 0.9 of the lone
node's final accuracy. The seconds are given alone, with a peer, and as their ratio; null if the goal was not reached.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from ftis_node.config.manifest import load_manifest
from ftis_node.lab.child_processes import ChildProcess, children
from ftis_node.lab.experiment.pairs import TrialMember, make_models, resolve_pair, tiny_models
from ftis_node.telemetry.events import read_events
from nodes.slowed import Slowed

PAIR = "sums"
PRESET = "sums-ftis"
SHARES = (0.8, 0.9)
SIZES = (4, 8)  # swarms whose time is predicted
GENERATION_WORKER = "ftis_node.generation.worker"
START_LIMIT_S = 120.0
POLL_S = 1.0
FIRST_POLL_S = 0.1  # between two checks for a first evaluation

Curve = list[tuple[float, float]]  # seconds since the first evaluation, accuracy
Interval = tuple[float, float]  # begin and end, in seconds since the epoch


@dataclass(frozen=True, slots=True)
class NodeRun:
    """A node's curve, mean number of foreign groups per step, share of a core, and seconds per step."""

    curve: Curve
    foreign_groups: float
    speed: float
    step_s: float


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the wall time to a share of a lone node's accuracy.")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--prompts", type=int, default=8, help="in an update, over all nodes; even")
    parser.add_argument("--eval-every", type=int, default=5)
    parser.add_argument("--eval-problems", type=int, default=0, help="in an evaluation; 0: as many as in the preset")
    parser.add_argument("--seeds", type=int, default=1, help="starting models and prompts of so many seeds")
    parser.add_argument("--slow", type=float, default=1.0, metavar="F", help="the last node has 1/F of its core")
    parser.add_argument("--slow-generation", type=float, default=1.0, metavar="F", help="see above")
    parser.add_argument("--patience", type=float, default=1.0, help="seconds that a step waits for a slow peer")
    parser.add_argument(
        "--fill", action=argparse.BooleanOptionalAction, default=True, help="replace missing groups of a slow peer"
    )
    parser.add_argument("--out", type=Path, default=Path("clock-out"))
    options = parser.parse_args()
    if not 1 <= options.slow < math.inf:
        parser.error("--slow is a number from 1 on: how many times slower the last node is")
    if not 1 <= options.slow_generation < math.inf or options.slow > 1 < options.slow_generation:
        parser.error("--slow-generation is a number from 1 on, without --slow")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # and ends the nodes on the way
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        sys.exit("two cores are needed, one for each node")
    load = os.getloadavg()[0]
    found: dict[str, dict[str, list[float]]] = {}
    speeds: dict[str, float] = {}
    for seed in range(options.seeds):
        models = options.out / "models"
        make_models(tiny_models((PAIR,), seed=seed), models, watch=lambda fraction, what: None, jobs=len(cores))
        members = resolve_pair(PAIR, models, seed=seed).members
        runs = {size: _manifest(options, own=options.prompts // size) for size in (1, 2)}
        folder = options.out / f"seed-{seed}"
        factors = [*(1.0 for _ in members[1:]), options.slow]
        speeds |= {member.name: 1 / factor for member, factor in zip(members, factors, strict=True)}
        together = _train(folder / "together", members, runs[2], options, seed, cores, options.slow)
        for member, with_peer, factor in zip(members, together, factors, strict=True):
            (alone,) = _train(folder / f"alone-{member.name}", (member,), runs[1], options, seed, cores[:1], factor)
            figures = found.setdefault(member.name, {})
            for share in SHARES:
                goal = share * alone.curve[-1][1]
                for name, course in (("alone", alone), ("with_peer", with_peer)):
                    figures.setdefault(f"{name}_s_to_{share}", []).append(seconds_to(course.curve, goal))
            for name, course in (("alone", alone), ("with_peer", with_peer)):
                figures.setdefault(f"{name}_final", []).append(course.curve[-1][1])
                figures.setdefault(f"{name}_speed", []).append(course.speed)
                figures.setdefault(f"{name}_step_s", []).append(course.step_s)
            figures.setdefault("foreign_groups", []).append(with_peer.foreign_groups)
    print_figures(found, speeds, options, load)


def print_figures(
    found: dict[str, dict[str, list[float]]], speeds: dict[str, float], options: argparse.Namespace, load: float
) -> None:
    """Print a line for each model, then all as JSON.

    A goal that was not reached has no seconds and no ratio. A goal that was reached without training has no ratio.
    """
    document: dict[str, object] = {"bench": "clock", "steps": options.steps, "seeds": options.seeds, "load": load}
    document["speeds"] = {name: finite(speed) for name, speed in speeds.items()}
    document["slow_generation"] = options.slow_generation
    if options.slow > 1:
        document |= {"longest_wait_s": options.patience, "fill": options.fill}
    for name, figures in found.items():
        for share in SHARES:
            alone, peer = (figures[f"{side}_s_to_{share}"] for side in ("alone", "with_peer"))
            ratios = [there / here if here else math.nan for here, there in zip(alone, peer, strict=True)]
            figures[f"ratio_to_{share}"] = ratios
            for size in SIZES:
                figures[f"predicted_ratio_to_{share}_of_{size}"] = [
                    ratio * predicted_step_s(one, two, size) / two
                    for ratio, one, two in zip(
                        ratios, figures["alone_step_s"], figures["with_peer_step_s"], strict=True
                    )
                ]
            sys.stdout.write(
                f"{name} with {speeds[name]:.2f} of a core: {share} of alone's final accuracy "
                f"in {statistics.fmean(ratios):.2f} of its time\n"
            )
    document["models"] = {
        name: {figure: [finite(value) for value in values] for figure, values in figures.items()}
        for name, figures in found.items()
    }
    sys.stdout.write(json.dumps(document) + "\n")


def predicted_step_s(one: float, two: float, size: int) -> float:
    """Return the seconds of a step in a swarm of `size`, from those of one and two nodes, by `a + b / n`."""
    shared = 2 * (one - two)
    return one - shared + shared / size


def finite(value: float) -> float | None:
    """Return the rounded value, or None if JSON cannot represent it."""
    return round(value, 3) if math.isfinite(value) else None


def _manifest(options: argparse.Namespace, *, own: int) -> str:
    """Return the preset's TOML with these numbers of own and foreign groups and these evaluations."""
    base = load_manifest(PRESET)
    changes = {"own_groups": own, "foreign_groups": options.prompts - own}
    if options.slow > 1:
        changes |= {"foreign_wait_s": options.patience, "backfill_with_own": options.fill}
    step = base.step.model_copy(update=changes)
    limit = options.eval_problems or base.eval.limit
    evaluation = base.eval.model_copy(update={"every_steps": options.eval_every, "limit": limit})
    return base.model_copy(update={"step": step, "eval": evaluation, "name": f"clock-{own}"}).to_toml()


def _train(
    folder: Path,
    members: tuple[TrialMember, ...],
    run: str,
    options: argparse.Namespace,
    seed: int,
    cores: list[int],
    factor: float,
) -> list[NodeRun]:
    """Run the members, each with a new home, and return their results in order.

    The last member is `factor` times slower.
    """
    folder.mkdir(parents=True)
    manifest = folder / "run.toml"
    manifest.write_text(run)
    event_logs = [folder / member.name / "events.jsonl" for member in members]
    with children(folder / "logs") as commands:
        address = commands.bootstrap(folder / "bootstrap").wait_for_line(timeout_s=START_LIMIT_S)
        nodes = []
        for member, core in zip(members, cores, strict=False):
            how = {"model": member.model, "run": manifest, "engine": "torch", "seed": seed}
            if factor == 1 or member == members[-1]:
                how["steps"] = options.steps
            with on_core(core):
                nodes.append(commands.join(member.name, home=folder / member.name, peer=address, **how))
        due = options.steps - options.steps % options.eval_every
        speed = _wait(nodes, event_logs, due=due, factor=factor, generation_factor=options.slow_generation)
    speeds = [*(1.0 for _ in members[1:]), speed]
    pauses = [pause for event_log in event_logs for pause in evaluations_of(event_log)]
    return [node_run(*known, pauses, last_step=options.steps) for known in zip(event_logs, speeds, strict=True)]


@contextmanager
def on_core(core: int) -> Iterator[None]:
    """Keep processes that start inside, and their descendants, on this core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _wait(
    nodes: list[ChildProcess], event_logs: list[Path], *, due: int, factor: float, generation_factor: float = 1.0
) -> float:
    """Wait until the last node has ended and the others have ended or were evaluated at step `due`.

    Return the speed of the last node.
    """
    last, slowed = nodes[-1], None
    awaited = event_logs if generation_factor > 1 else event_logs[-1:]
    is_slowed = max(factor, generation_factor) > 1
    while last.exit_code is None:
        _check(nodes)
        if slowed is None and is_slowed and all(evaluations_of(event_log) for event_log in awaited):
            pids = [last.process.pid] if factor > 1 else [_generation_worker(node) for node in nodes]
            slowed = Slowed(pids, max(factor, generation_factor))
        if slowed is not None:
            slowed.take_turns(POLL_S)
        else:
            time.sleep(FIRST_POLL_S if is_slowed else POLL_S)
    for node, event_log in zip(nodes, event_logs, strict=True):
        while node.exit_code is None and (factor == 1 or not has_reached(event_log, due)):
            _check(nodes)
            if generation_factor > 1 and slowed is not None:
                slowed.take_turns(POLL_S)
            else:
                time.sleep(POLL_S)
    _check(nodes)
    return 1.0 if slowed is None or factor == 1 else slowed.speed


def _generation_worker(node: ChildProcess) -> int:
    family = psutil.Process(node.process.pid).children(recursive=True)
    return next(each.pid for each in family if GENERATION_WORKER in each.cmdline())


def _check(nodes: list[ChildProcess]) -> None:
    for node in nodes:
        if node.exit_code:
            sys.exit(f"{node.name} ended with exit code {node.exit_code}: {node.last_words()}")


def has_reached(events: Path, step: int) -> bool:
    """Return whether a node was evaluated at this step or a later one."""
    return any(event["step"] >= step for event in read_events(events, name="eval"))


def node_run(events: Path, speed: float, pauses: list[Interval], *, last_step: int) -> NodeRun:
    """Return a node's run up to a step, from its event log. `pauses` are the evaluations of all nodes."""
    foreign = [event["foreign_groups"] for event in read_events(events, name="step") if event["step"] <= last_step]
    curve = curve_of(events, pauses, last_step=last_step)
    steps = [event["step"] for event in read_events(events, name="eval") if event["step"] <= last_step]
    step_s = curve[-1][0] / steps[-1] if steps[-1] else math.nan
    return NodeRun(curve, statistics.fmean(foreign), speed, step_s)


def evaluations_of(events: Path) -> list[Interval]:
    """Return begin and end of a node's evaluations, in seconds since the epoch."""
    return [(event["time"] - event["duration_s"], event["time"]) for event in read_events(events, name="eval")]


def curve_of(events: Path, pauses: list[Interval], *, last_step: int) -> Curve:
    """Return the accuracy by seconds since the first evaluation, up to a step, without the time of pauses."""
    evaluated = [event for event in read_events(events, name="eval") if event["step"] <= last_step]
    if not evaluated:
        return []
    first_at = evaluated[0]["time"]
    return [
        (event["time"] - first_at - covered_s(pauses, first_at, event["time"]), event["pass_at_1"])
        for event in evaluated
    ]


def covered_s(intervals: list[Interval], begin: float, end: float) -> float:
    """Return the seconds between `begin` and `end` that at least one of the intervals covers."""
    covered = 0.0
    for first, last in sorted(intervals):
        covered += max(0.0, min(last, end) - max(first, begin))
        begin = max(begin, last)
    return covered


def seconds_to(curve: Curve, goal: float) -> float:
    """Return when a curve first reaches `goal`, by linear interpolation, or infinity if it does not."""
    if curve[0][1] >= goal:
        return 0.0
    for (before, low), (after, high) in zip(curve, curve[1:], strict=False):
        if high >= goal:
            return before + (goal - low) / (high - low) * (after - before)
    return math.inf


if __name__ == "__main__":
    main()
