"""`ftis-node demo`: two different nodes learn from each other on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ftis_node.cli.commands.evaluate import problem_lines
from ftis_node.cli.options import Engine
from ftis_node.cli.progress import show_fraction
from ftis_node.config.home import Home
from ftis_node.errors import FtisError
from ftis_node.telemetry.terminal_text import columns

if TYPE_CHECKING:
    from ftis_node.lab.demo import DemoResult
    from ftis_node.report.facts import Compared


def demo(
    out: Annotated[Path, typer.Option(help="Folder for models, homes, logs and results.")] = Path("demo-out"),
    llm: Annotated[
        bool, typer.Option("--llm", help="Train a small language model (SmolLM2, 135M) instead: 93 MB, 20 minutes.")
    ] = False,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Optimizer steps of each node.", show_default="40; with --llm 30")
    ] = None,
    engine: Annotated[
        Engine, typer.Option(help="Generation engine: torch (small models need no vLLM), vllm or auto.")
    ] = "torch",
    seed: Annotated[int, typer.Option(min=0, help="Seed of models and training.")] = 0,
) -> None:
    """Train a swarm of two different models on this machine. Prints a table, writes curves.png and two reports.

    Exit code 1, with the reason, if the two nodes did not learn as expected.
    """
    from ftis_node.cli.commands.report import write_report
    from ftis_node.lab.demo import llm_plan, run_demo, tiny_plan

    out.mkdir(parents=True, exist_ok=True)
    with show_fraction("demo") as progress:
        plan = llm_plan(on_progress=progress) if llm else tiny_plan(out, seed=seed, on_progress=progress)
        result = run_demo(plan, out, steps=steps or plan.steps, engine=engine, seed=seed, on_progress=progress)
    _print_result(result, out)
    reports = {node.name: out / f"report-{node.name}.html" for node in result.nodes}
    for name, report in reports.items():
        home = Home(out / f"home-{name}")
        write_report(home, report, compared=_answers_of(name, result, home) if result.samples else None)
    for sample in result.samples:
        typer.echo("\n".join(problem_lines(sample)))
    if result.samples:
        name = result.nodes[0].name
        typer.echo(f"\nask it: ftis-node try --model {out / f'model-{name}'} 'What is 8 + 5?'")
    typer.echo(f"reports in {' and '.join(map(str, reports.values()))}: open them in a browser")
    if failures := result.failures():
        raise FtisError("the demo did not reach its goals: " + "; ".join(failures))


def _answers_of(name: str, result: DemoResult, home: Home) -> Compared:
    """Return the card of a node's report: its accuracy, and the answers of the sample problems, before and after."""
    import msgspec

    from ftis_node.lab.demo import read_history
    from ftis_node.report.facts import Compared

    points = read_history(home.root).evaluations
    before, after = ({"pass_at_1": point.pass_at_1, "n": point.n} for point in (points[0], points[-1]))
    document = {
        **{"model": f"node {name}", "task": points[-1].task, **after},
        **{"compared": {"model": "the model before training", **before}},
        **{"problems": [sample | {"after": sample[name]} for sample in result.samples]},
    }
    return msgspec.convert(document, Compared)


def _print_result(result: DemoResult, out: Path) -> None:
    header = (
        *("node", "parameters", "pass@1 before", "after", "gain"),
        *("own groups", "foreign", "tokens sent", "received"),
    )
    rows = [
        (
            node.name,
            f"{node.parameters:,}",
            f"{node.pass_before:.3f}",
            f"{node.pass_after:.3f}",
            f"{node.gain:+.3f}",
            str(node.own_groups),
            f"{node.foreign_groups} ({node.foreign_fraction:.0%})",
            f"{node.tokens_sent:,}",
            f"{node.tokens_received:,}",
        )
        for node in result.nodes
    ]
    for line in columns(header, rows, num_left=0):
        typer.echo(line)
    typer.echo(f"{result.seconds:.0f} s; curves in {out / 'curves.png'}, values in {out / 'results.json'}")
