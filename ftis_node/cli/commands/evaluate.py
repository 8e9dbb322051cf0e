"""`ftis-node eval`: accuracy of a model on a task."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Annotated, Any

import typer

from ftis_node.cli.commands.ensemble import LimitOption, TaskOption, TemplateOption
from ftis_node.cli.completion import ENGINES, one_of
from ftis_node.cli.options import HomeOption, JsonOption, home_at, print_json
from ftis_node.cli.progress import show_fraction


def evaluate(
    model: Annotated[str, typer.Option("--model", help="Hub id or folder.")],
    task: TaskOption,
    limit: LimitOption = 512,
    k: Annotated[int, typer.Option("--k", min=1, help="Also estimate pass@k from samples.")] = 1,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", min=1, help="Maximum tokens of prompt and completion together.")
    ] = 760,
    engine: Annotated[
        str, typer.Option("--engine", help="auto, vllm or torch.", autocompletion=one_of(*ENGINES))
    ] = "auto",
    home: HomeOption = None,
    template: TemplateOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure greedy pass@1 (and pass@k) on held-out problems.

    Prompts are rendered by `[prompts]` of the home's node.toml.

    JSON shape: {model, task, pass_at_1, n, k, pass_at_k, truncated, unscored, too_long, completion_tokens_mean}.
    """
    from ftis_node.evaluation.evaluate import evaluate_model
    from ftis_node.node.startup.prompts import prompts_for_command

    prompts = prompts_for_command(home_at(home), template=template)
    with show_fraction("eval") as progress:
        options: dict[str, Any] = {"limit": limit, "k": k, "max_tokens": max_tokens, "engine": engine}
        result = asyncio.run(evaluate_model(model, task, prompts=prompts, on_progress=progress, **options))
    if as_json:
        print_json({"model": model, "task": task, **dataclasses.asdict(result)})
        return
    line = f"{model} on {task}: pass@1 {result.pass_at_1:.3f} ({result.n} problems)"
    if result.pass_at_k is not None:
        line += f", pass@{result.k} {result.pass_at_k:.3f}"
    typer.echo(line)
