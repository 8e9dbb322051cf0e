"""`ftis-node ensemble`: accuracy of several models together on a task."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ftis_node.cli.options import EngineOption, HomeOption, JsonOption, home_at, print_document
from ftis_node.cli.progress import show_fraction
from ftis_node.telemetry.terminal_text import columns

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ftis_node.evaluation.ensemble import EnsembleResult, EvaluationRow


ENSEMBLE_MODES = ("posterior", "mean", "answer", "vote", "confidence")  # same as in evaluation/ensemble.py
LimitOption = Annotated[int, typer.Option(min=1, help="Maximum number of problems.")]


def ensemble(
    task: Annotated[str, typer.Option(help="Task SPEC, such as gsm8k or math500:PATH.")],
    models: Annotated[str, typer.Option(help="Hub ids, folders or GGUF files, comma-separated.")] = "",
    swarm: Annotated[
        list[str] | None,
        typer.Option(help="Folder of exported models or of nodes' homes; repeatable, or comma-separated."),
    ] = None,
    mode: Annotated[
        str, typer.Option(help=f"{', '.join(ENSEMBLE_MODES)}, comma-separated, or all.")
    ] = "posterior,vote",
    limit: LimitOption = 512,
    max_tokens: Annotated[int, typer.Option(min=3, help="Maximum tokens of prompt and completion together.")] = 760,
    engine: EngineOption = "auto",
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure several models together on held-out problems: each alone, their mixture, their vote.

    Prompts are rendered by `[prompts]` of the home's node.toml, those of a home in --swarm by that home's settings.

    JSON shape: {task, n, experts: [{name, model, domain, pass_at_1, n, truncated, unscored, too_long,
    completion_tokens_mean, generated_tokens, forward_tokens}], modes: [{name, chosen, and the same but model and
    domain}]}.
    """
    from ftis_node.evaluation.ensemble import MODES, run_ensemble
    from ftis_node.evaluation.members import prompts_for_command

    prompts = prompts_for_command(home_at(home))
    with show_fraction("ensemble") as progress:
        result = run_ensemble(
            _parts([models]),
            [Path(folder) for folder in _parts(swarm or [])],
            task,
            modes=MODES if mode == "all" else _parts([mode]),
            limit=limit,
            max_tokens=max_tokens,
            engine=engine,
            prompts=prompts,
            on_progress=progress,
        )
    print_document(_document(result), lambda: _lines(result), as_json=as_json)


def _parts(values: Iterable[str]) -> list[str]:
    return [part.strip() for value in values for part in value.split(",") if part.strip()]


def _document(result: EnsembleResult) -> dict[str, Any]:
    return {
        "task": result.task,
        "n": result.n,
        "experts": [_flat(entry, leave_out=("chosen",)) for entry in result.experts],
        "modes": [_flat(entry, leave_out=("model", "domain")) for entry in result.modes],
    }


def _flat(entry: EvaluationRow, *, leave_out: Sequence[str]) -> dict[str, Any]:
    values = dataclasses.asdict(entry)
    figures = values.pop("result")
    return {key: value for key, value in (values | figures).items() if key not in (*leave_out, "k", "pass_at_k")}


def _lines(result: EnsembleResult) -> list[str]:
    header = ("", "pass@1", "generated", "forward", "domain")
    rows = [_row(entry) for entry in (*result.experts, *result.modes)]
    lines = [f"{result.task}: {result.n} problems", *columns(header, rows, num_left=1)]
    for entry in result.modes:
        if entry.chosen is not None:
            chosen = ", ".join(f"{name} {number}" for name, number in entry.chosen.items())
            lines.append(f"{entry.name} chose {chosen}")
    return lines


def _row(entry: EvaluationRow) -> tuple[str, ...]:
    tokens = (f"{entry.generated_tokens:,}", f"{entry.forward_tokens:,}")
    return (entry.name, f"{entry.result.pass_at_1:.3f}", *tokens, entry.domain or "")
