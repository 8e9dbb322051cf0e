"""`ftis-node demo`: two different tiny nodes learn from each other on this machine."""

from __future__ import annotations

import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ftis_node.errors import FtisError
from ftis_node.telemetry.log import RateLimitedLog
from ftis_node.telemetry.terminal_text import columns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from rich.table import Table

    from ftis_node.lab.demo import DemoResult, LearningCurves

DEFAULT_STEPS = 40
LOG_PERIOD_S = 10.0


def demo(
    out: Annotated[Path, typer.Option("--out", help="Folder for models, homes, logs and results.")] = Path("demo-out"),
    steps: Annotated[int, typer.Option("--steps", min=1, help="Optimizer steps of each node.")] = DEFAULT_STEPS,
    engine: Annotated[
        str, typer.Option("--engine", help="Generation engine: torch (tiny models need no vLLM), vllm or auto.")
    ] = "torch",
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of models and training.")] = 0,
) -> None:
    """Train a swarm of two different tiny models on this machine. Prints a table, writes curves.png and two reports.

    Exit code 1, with the reason, if the two nodes did not learn as expected.
    """
    from ftis_node.cli.commands.report import write_report
    from ftis_node.config.home import Home
    from ftis_node.lab.demo import DemoPlan, run_demo

    out.mkdir(parents=True, exist_ok=True)
    with _live_view() as watch:
        result = run_demo(DemoPlan(out=out, steps=steps, engine=engine, seed=seed), watch=watch)
    _print_result(result, out)
    reports = {node.name: out / f"report-{node.name}.html" for node in result.nodes}
    for name, report in reports.items():
        write_report(Home(out / f"home-{name}"), report)
    typer.echo(f"reports in {' and '.join(map(str, reports.values()))}: open them in a browser")
    if failures := result.failures():
        raise FtisError("the demo did not reach its goals: " + "; ".join(failures))


@contextmanager
def _live_view() -> Iterator[Callable[[str, Mapping[str, LearningCurves]], None]]:
    """Yield a callback that redraws a table on a terminal, or prints a line from time to time elsewhere."""
    started_at = time.monotonic()
    if not sys.stderr.isatty():
        yield _lines_now_and_then(started_at)
        return
    from rich.console import Console
    from rich.live import Live

    with Live(console=Console(stderr=True), refresh_per_second=4) as live:
        yield lambda text, curves: live.update(_progress_table(text, curves, time.monotonic() - started_at))


def _progress_table(text: str, curves: Mapping[str, LearningCurves], elapsed_s: float) -> Table:
    from rich.table import Table

    table = Table(title=f"{text} ({elapsed_s:.0f} s)", title_justify="left")
    for column in ("node", "step", "pass@1", "reward", "own groups", "foreign groups"):
        table.add_column(column, justify="right")
    for name, curve in curves.items():
        table.add_row(
            name,
            str(curve.step),
            " -> ".join(f"{value:.2f}" for _, value in curve.pass_at_1[:1] + curve.pass_at_1[1:][-1:]),
            f"{curve.reward[-1][1]:.2f}" if curve.reward else "",
            str(curve.own_groups),
            str(curve.foreign_groups),
        )
    return table


def _lines_now_and_then(started_at: float) -> Callable[[str, Mapping[str, LearningCurves]], None]:
    limit = RateLimitedLog(period_s=LOG_PERIOD_S)

    def show(text: str, curves: Mapping[str, LearningCurves]) -> None:
        if not limit.is_due():
            return
        states = "; ".join(
            f"{name}: step {curve.step}, pass@1 {curve.pass_at_1[-1][1]:.2f}, {curve.foreign_groups} foreign groups"
            for name, curve in curves.items()
            if curve.pass_at_1
        )
        typer.echo(f"[{time.monotonic() - started_at:4.0f} s] {text} {states}", err=True)

    return show


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
    for line in (*columns(header, rows, num_left=0), *result.wire_lines()):
        typer.echo(line)
    typer.echo(f"{result.seconds:.0f} s; curves in {out / 'curves.png'}, values in {out / 'results.json'}")
