"""`ftis-node eval`: accuracy of a model on a task, alone or beside another model, with some of its answers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from ftis_node.cli.commands.chat import CompareOption, ModelOption
from ftis_node.cli.commands.ensemble import LimitOption
from ftis_node.cli.options import EngineOption, HomeOption, JsonOption, home_at, print_document
from ftis_node.cli.progress import show_fraction
from ftis_node.errors import UsageError
from ftis_node.telemetry.terminal_text import printable

MAX_TOKENS = 760


def evaluate(
    model: ModelOption = None,
    task: Annotated[
        str | None,
        typer.Option(help="Task SPEC, such as gsm8k or math500:PATH.", show_default="with a home, its run's"),
    ] = None,
    limit: LimitOption = 512,
    k: Annotated[int, typer.Option(min=1, help="Also estimate pass@k from samples.")] = 1,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Maximum tokens of prompt and completion together.",
            show_default=f"on the problems of a home's run, its limits; else {MAX_TOKENS}",
        ),
    ] = None,
    engine: EngineOption = "auto",
    compare: CompareOption = None,
    show: Annotated[int, typer.Option(min=0, help="Print the answers to this many problems.")] = 0,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure greedy pass@1 (and pass@k) on held-out problems.

    Without --model: the newest checkpoint of a home, and before it the model that it started from.
    Prompts are rendered by `[prompts]` of the home's node.toml. Of a home, answers have the limits of its run.

    JSON shape: {model, task, pass_at_1, n, k, pass_at_k, truncated, unscored, too_long, completion_tokens_mean}; with
    --compare or of a home also compared: {model, pass_at_1 and so on} and difference: {pass_at_1, standard_error,
    gained, lost}, where gained counts problems that only the model itself solves; with --show also problems:
    [{problem, right_answer, after: {text, is_right}, before: the same of the compared model}].
    """
    from ftis_node.evaluation.members import Member, before_and_after, held_out_task, limits_of_run, prompts_for_command
    from ftis_node.evaluation.model_answers import answers_of, difference, shown_problems
    from ftis_node.generation.evaluate import summarize

    if task is None and model:
        raise UsageError("eval --model needs problems: add --task SPEC, such as --task gsm8k")
    where = home_at(home)
    has_run_limits = not model and task is None and max_tokens is None
    task = task or held_out_task(where)
    prompts = prompts_for_command(where)
    with show_fraction("eval") as progress, TemporaryDirectory(prefix="ftis-eval-") as scratch:
        asked: dict[str, str | Member]
        if model:
            asked = {"before": compare} if compare else {}
            asked["after"] = model
        else:
            start, trained = before_and_after(where, Path(scratch), on_progress=progress)
            asked = {"before": compare or start, "after": trained}
        options: dict[str, Any] = {"limit": limit, "k": k, "max_tokens": max_tokens or MAX_TOKENS, "engine": engine}
        options |= limits_of_run(where) if has_run_limits else {}
        options |= {"prompts": prompts, "on_progress": progress}
        answers = dict(zip(asked, asyncio.run(answers_of([*asked.values()], task, **options)), strict=True))
    models = {when: each.name if isinstance(each, Member) else each for when, each in asked.items()}
    results = {when: {"model": models[when], **asdict(summarize(answers[when], k=k))} for when in models}
    document = {"task": task, **results["after"]}
    if "before" in results:
        document["compared"] = results["before"]
        document["difference"] = difference(answers["before"], answers["after"])
    if show:
        document["problems"] = shown_problems(answers, limit=show)
    print_document(document, lambda: _lines(document), as_json=as_json)


def _lines(document: dict[str, Any]) -> Iterator[str]:
    for row in filter(None, (document.get("compared"), document)):
        too_long = f", {row['too_long']} too long: raise --max-tokens" if row["too_long"] else ""
        line = f"{row['model']} on {document['task']}: pass@1 {row['pass_at_1']:.3f} ({row['n']} problems{too_long})"
        yield line if row["pass_at_k"] is None else f"{line}, pass@{row['k']} {row['pass_at_k']:.3f}"
    if gain := document.get("difference"):
        yield (
            f"difference {gain['pass_at_1']:+.3f}, standard error {gain['standard_error']:.3f}: "
            f"{gain['gained']} problems gained, {gain['lost']} lost"
        )
    for problem in document.get("problems", ()):
        yield from problem_lines(problem)


def problem_lines(shown: dict[str, Any]) -> Iterator[str]:
    """Yield one of `shown_problems`: the problem, the answer of each model, and the right answer."""
    yield f"\nproblem  {_indented(shown['problem'])}"
    for name, answer in shown.items():
        if name not in ("problem", "right_answer"):
            yield f"{name:7}  {_indented(answer['text'])}  ({'right' if answer['is_right'] else 'wrong'})"
    yield f"correct  {_indented(shown['right_answer'])}"


def _indented(text: str) -> str:
    return printable(text.strip(), keep_newlines=True).replace("\n", f"\n{' ' * 9}")
