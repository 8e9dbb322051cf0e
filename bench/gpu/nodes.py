"""Whole nodes on one device: what `ftis-node join` does there, by the events and status of each home.

    models      make the models: SmolLM2-135M after a short supervised training, whole and without ten layers
    exchange    a bootstrap node and two nodes with these models; at 40 % of the steps the generation worker of the
                second is killed, at 60 % the whole node, which then joins again; export, load by transformers
    curves      two swarms of two nodes and one lone node, all at the same time: pass@1 by step

With `--small` the models are tiny ones for sums, and the task is `arithmetic`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from statistics import median
from typing import Any
from urllib.request import urlopen

import psutil
import torch

from ftis_node.config.home import Home
from ftis_node.errors import FtisError
from ftis_node.lab.card.usage import DeviceUse, gib, mean_busy, read_gpu, read_processes, sampled
from ftis_node.lab.child_processes import ChildProcess, ChildProcesses, children
from ftis_node.lab.demo import LANGUAGE_TASK, read_history
from ftis_node.lab.tiny import make_tiny
from ftis_node.telemetry.history import groups_used
from gpu.cases import Options
from results.language_models import make_missing
from soaking.sampling import role_of

POLL_S = 0.5
START_S, RETURN_S, STEPS_S = 240.0, 240.0, 600.0  # limits of one wait; the driver's is that of the stage
NODES = ("whole", "cut")
TINY = {"whole": "m", "cut": "s"}
MEMORY_SHARE = 0.9  # of the card, for the plans of all nodes together
CURVE_SEEDS = (1, 2)
LOAD = """import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16)
ids = AutoTokenizer.from_pretrained(sys.argv[1])("1", return_tensors="pt")
made = model.generate(**ids, max_new_tokens=4, do_sample=False)
assert made.shape[1] > ids.input_ids.shape[1]
"""


@dataclass(frozen=True, slots=True)
class Scale:
    """The run, its task, and how many steps nodes take: all, of a curve, and between evaluations."""

    run: str
    task: str
    steps: int
    curve_steps: int

    @classmethod
    def of(cls, options: Options) -> Scale:
        small, whole = ("arithmetic-ftis", "arithmetic", 10, 4), ("words-ftis", LANGUAGE_TASK, 80, 30)
        return cls(*(small if options.small else whole))


@dataclass(slots=True)
class Node:
    """One node of a swarm: its home, and how to start it again."""

    name: str
    home: Path
    start: Callable[[], ChildProcess]
    child: ChildProcess

    @property
    def step(self) -> int:
        history = read_history(self.home)
        return history.steps[-1].step if history.steps else 0

    def status(self) -> dict[str, Any]:
        """Return the running node's status; that of its file if it does not run."""
        if (url := Home(self.home).running_url()) is None:
            path = self.home / "status.json"
            return json.loads(path.read_text()) if path.exists() else {}
        try:
            with urlopen(f"{url}/status", timeout=START_S) as answer:
                return json.loads(answer.read())
        except (OSError, HTTPException, ValueError):  # also an answer that breaks off
            return {}

    def is_ready(self) -> bool:
        status = self.status()
        return bool(status) and status["generation"]["state"] == status["learner"]["state"] == "ready"

    def worker(self) -> psutil.Process:
        """Return the generation worker."""
        daemon = self.child.process.pid
        family = psutil.Process(daemon).children(recursive=True)
        return next(process for process in family if role_of(process, daemon=daemon) == "generation")

    def curve(self) -> list[list[float]]:
        """Return the steps of evaluations, each with its pass@1."""
        return [[each.step, round(each.pass_at_1, 3)] for each in read_history(self.home).evaluations]

    def figures(self) -> dict[str, Any]:
        """Return medians over the steps so far, and what the status counts."""
        history, status = read_history(self.home), self.status()
        lines = (self.home / "events.jsonl").read_text().splitlines()
        served = [json.loads(line) for line in lines if '"event":"served"' in line]
        transfers = [each["after_step_s"] for each in served if each.get("after_step_s") is not None]
        steps = [each.duration_s for each in history.steps if each.duration_s]
        times = [each.time for each in history.steps]
        between = [later - earlier for earlier, later in zip(times, times[1:], strict=False)]
        own, foreign = groups_used(history.steps)
        found = {
            "steps": self.step,
            "step_s": round(median(steps), 3) if steps else None,
            "between_steps_s": round(median(between), 3) if between else None,
            "transfer_s": round(median(transfers), 3) if transfers else None,
            "own_groups_used": own,
            "foreign_groups_used": foreign,
            "pass_at_1": self.curve(),
        }
        if status:
            swarm, learner = status["swarm"], status["learner"]
            found |= {key: swarm[key] for key in ("groups_sent", "groups_confirmed", "groups_received")}
            found |= {"refused": swarm["groups_refused"], "mismatch_kl": learner["mismatch_kl"]}
            found |= {"engine": status["generation"]["engine"], "transfer": status["generation"]["weight_transfer"]}
            found |= {"restarts": status["generation"]["restarts"], "out_of_memory": learner["out_of_memory"]}
        return {f"{self.name}_{key}": value for key, value in found.items()}


def models(options: Options, work: Path) -> None:
    """Make the models of `NODES`, on the CPU."""
    folder = work / "models"
    folder.mkdir(exist_ok=True)
    began = time.monotonic()
    if options.small:
        for name, size in TINY.items():
            if not (folder / f"{name}-0").exists():
                make_tiny(size, folder / f"{name}-0", scale=0.3)
    else:
        found = sorted((work / "site/model").rglob("*.gguf"))
        make_missing(folder, seeds=1, **({"source": str(found[0])} if found else {}))
    options.note(seconds=round(time.monotonic() - began, 1))


def swarm(commands: ChildProcesses, folder: Path, work: Path, names: tuple[str, ...], **how: Any) -> list[Node]:
    """Start a bootstrap node, if there are several nodes, and the nodes `names`, with the options `how`."""
    settings = how.pop("settings")
    peer = {}
    if len(names) > 1:
        bootstrap = commands.bootstrap(folder / "bootstrap")
        peer = {"peer": bootstrap.wait_for_line(timeout_s=START_S)}
    nodes = []
    for name in names:
        home = folder / name
        home.mkdir(parents=True, mode=0o700)
        (home / "node.toml").write_text(settings)

        def start(name: str = name, home: Path = home) -> ChildProcess:
            model = work / "models" / f"{name}-0"
            if peer:
                return commands.join(f"{folder.name}-{name}", home=home, model=model, **peer, **how)
            options = {"home": home, "model": model, "listen": "/ip4/127.0.0.1/tcp/0", **how}
            words = (word for key, value in options.items() for word in (f"--{key}", str(value)))
            return commands.start(f"{folder.name}-{name}", "join", *words)

        nodes.append(Node(name, home, start, start()))
    return nodes


def node_settings(options: Options, *, num_nodes: int) -> str:
    """Return the text of a node.toml: an equal part of the card's memory for each node."""
    if options.device == "cpu":
        return 'device = "cpu"\nengine = "torch"\n'
    total = torch.cuda.get_device_properties(0).total_memory
    return f"[memory]\nlimit_gib = {MEMORY_SHARE * gib(total) / num_nodes:.1f}\n"


def exchange(options: Options, work: Path) -> None:
    """Run two nodes with two faults, and note what a user would see."""
    scale = Scale.of(options)
    with ExitStack() as stack:
        commands = stack.enter_context(children(work / "stages/nodes/logs"))
        began = time.monotonic()
        first, second = both = swarm(
            commands,
            work / "stages/nodes/homes",
            work,
            NODES,
            settings=node_settings(options, num_nodes=2),
            run=scale.run,
            task=scale.task,
            steps=scale.steps,
        )
        samples = stack.enter_context(sampled(lambda: _use(options, both)))
        for node in both:
            _wait(both, node.is_ready, f"{node.name} ready", START_S)
            options.note(**{f"{node.name}_ready_s": round(time.monotonic() - began, 1)})

        def reached(share: float) -> None:
            step = int(share * scale.steps)
            _wait(both, lambda: second.step >= step, f"step {step}", STEPS_S, lambda: _note(options, both, samples))

        reached(0.4)
        second.worker().kill()
        killed = time.monotonic()
        _wait(both, lambda: second.status().get("generation", {}).get("restarts", 0) >= 1, "restart", RETURN_S)
        _wait(both, second.is_ready, "the generation worker", RETURN_S)
        options.note(worker_back_s=round(time.monotonic() - killed, 1))
        reached(0.6)
        second.child.process.kill()
        second.child.process.wait()
        killed, at = time.monotonic(), second.step
        second.child = second.start()
        _wait(both, second.is_ready, "the node again", START_S)
        options.note(rejoined_s=round(time.monotonic() - killed, 1), rejoined_at_step=at)
        _wait(both, lambda: all(node.child.exit_code == 0 for node in both), "the end", STEPS_S)
        _note(options, both, samples)
    for node in both:
        out = work / "stages/nodes" / f"export-{node.name}"
        began = time.monotonic()
        _run([sys.executable, "-m", "ftis_node", "export", "--home", str(node.home), "--out", str(out)])
        exported = time.monotonic()
        _run([sys.executable, "-c", LOAD, str(out)])
        loaded_s = round(time.monotonic() - exported, 1)
        options.note(**{f"{node.name}_export_s": round(exported - began, 1), f"{node.name}_load_s": loaded_s})


def curves(options: Options, work: Path) -> None:
    """Run two swarms and a lone node together, and note their evaluations."""
    scale = Scale.of(options)
    seeds = CURVE_SEEDS[:1] if options.small else CURVE_SEEDS
    swarms = {f"pair-{seed}": (NODES, seed) for seed in seeds} | {"alone-1": (NODES[:1], 1)}
    settings = node_settings(options, num_nodes=sum(len(names) for names, _ in swarms.values()))
    with children(work / "stages/curves/logs") as commands:
        nodes: dict[str, list[Node]] = {}
        for name, (members, seed) in swarms.items():
            how = {"run": scale.run, "task": scale.task, "steps": scale.curve_steps, "seed": seed}
            nodes[name] = swarm(commands, work / "stages/curves" / name, work, members, settings=settings, **how)
        every = [node for group in nodes.values() for node in group]

        def note() -> None:
            named = {f"{name}_{node.name}": node for name, group in nodes.items() for node in group}
            options.note(**{name: node.curve() for name, node in named.items()})

        _wait(every, lambda: all(node.child.exit_code == 0 for node in every), "the end", STEPS_S, note)
        note()


def _use(options: Options, nodes: list[Node]) -> DeviceUse:
    if options.device == "cuda":
        return read_gpu()
    pids = [node.child.process.pid for node in nodes if node.child.exit_code is None]
    with suppress(psutil.NoSuchProcess):  # it has just ended
        pids += [child.pid for pid in pids for child in psutil.Process(pid).children(recursive=True)]
    return read_processes(pids)


def _note(options: Options, nodes: list[Node], samples: list[tuple[float, DeviceUse]]) -> None:
    uses = [use for _, use in samples]
    found: dict[str, Any] = {"peak_gib": gib(max((use.used_bytes for use in uses), default=0))}
    if uses:
        found["busy_share"] = mean_busy(uses)
    for node in nodes:
        if (node.home / "events.jsonl").exists():
            found |= node.figures()
    options.note(**found)


def _wait(
    nodes: list[Node],
    is_done: Callable[[], bool],
    what: str,
    limit_s: float,
    meanwhile: Callable[[], None] = lambda: None,
) -> None:
    """Return when `is_done`. Raises FtisError at the limit, or if a node ends with an error."""
    deadline = time.monotonic() + limit_s
    while not is_done():
        for node in nodes:
            if node.child.exit_code:
                raise FtisError(f"{node.name} ended with {node.child.exit_code}: {node.child.last_words()}")
        if time.monotonic() > deadline:
            last = "; ".join(node.child.last_words() for node in nodes)
            raise FtisError(f"{what}: not within {limit_s:.0f} s; {last}")
        meanwhile()
        time.sleep(POLL_S)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=_environment())
    if done.returncode:
        raise FtisError(f"{' '.join(command[:4])} ended with {done.returncode}: {done.stderr.strip()[-500:]}")


def _environment() -> Mapping[str, str]:
    return os.environ | {"HF_HUB_OFFLINE": "1"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("stage", choices=["models", "exchange", "curves"])
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--small", action="store_true")
    given = parser.parse_args()
    stage = {"models": ("models", models), "exchange": ("nodes", exchange), "curves": ("curves", curves)}
    folder, run = stage[given.stage]
    cases = given.work / "stages" / folder / "cases"
    cases.mkdir(parents=True, exist_ok=True)
    run(Options(given.device, given.small, figures=cases / f"{given.stage}.json"), given.work.absolute())
    return 0


if __name__ == "__main__":
    sys.exit(main())
