"""`ftis-node tasks`: the tasks and plug-ins that are available here, and a sample problem of a task."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ftis_node.cli.options import JsonOption, print_document
from ftis_node.telemetry.terminal_text import printable

if TYPE_CHECKING:
    from ftis_node.tasks import Task


def tasks(
    spec: Annotated[str | None, typer.Argument(help="Show the first problem of this task SPEC.")] = None,
    split: Annotated[str, typer.Option(help="train or test.")] = "train",
    as_json: JsonOption = False,
) -> None:
    """List the tasks and rewards that a SPEC may name, and plug-ins of all kinds; or show the first problem of a SPEC.

    JSON shape: {built_in: [spec], plugins: [{kind, name, package, version, target}]}; of a SPEC: {name, split,
    num_problems, prompt: [{role, content}], answer, reward_of_answer}, where the answer alone is scored as a text.
    The kinds of plug-ins are task, reward, method and filter.
    """
    if spec is not None:
        tried = _tried(spec, split)
        print_document(tried, lambda: _problem_lines(tried), as_json=as_json)
        return
    from ftis_node.plugins import KINDS, find_plugins
    from ftis_node.tasks.registry import BUILT_IN

    plugins = [asdict(plugin) for group in KINDS for plugin in find_plugins(group)]
    lines = [
        printable(f"plug-in   {one['kind']} {one['name']}  ({one['package']} {one['version']}, {one['target']})")
        for one in plugins
    ]
    lines = [f"built in  task {name}" for name in BUILT_IN] + (lines or ["no plug-ins (ftis-node docs train/tasks)"])
    print_document({"built_in": list(BUILT_IN), "plugins": plugins}, lambda: lines, as_json=as_json)


def _tried(spec: str, split: str) -> dict[str, Any]:
    import asyncio

    from ftis_node.tasks import load_task

    task = load_task(spec, split=split)
    item = task[0]
    return {
        "name": task.name,
        "split": task.split,
        "num_problems": len(task),
        "prompt": [dict(message) for message in item.prompt],
        "answer": item.answer,
        "reward_of_answer": asyncio.run(_reward_of_answer(task)),
    }


async def _reward_of_answer(task: Task) -> float | None:
    """Return the reward of the answer; None if scoring failed, which the scorer has logged."""
    from ftis_node.records.group import CompletionStatus
    from ftis_node.tasks.scorer import IsolatedScorer

    item = task[0]
    async with IsolatedScorer(task) as scorer:
        ((reward, status),) = await scorer.score(item, [item.answer])
    return reward if status is CompletionStatus.SCORED else None


def _problem_lines(document: dict[str, Any]) -> list[str]:
    reward = document["reward_of_answer"]
    return [
        f"{document['name']}, split {document['split']}: {document['num_problems']:,} problems; the first:",
        *(printable(f"{message['role']}: {message['content']}", keep_newlines=True) for message in document["prompt"]),
        printable(f"answer: {document['answer']}", keep_newlines=True),
        f"reward of the answer alone: {'scoring failed' if reward is None else reward}",
    ]
