"""`ftis-node tiny`: make a small model that trains on any machine, without a download."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from ftis_node.cli.progress import show_fraction


class Size(StrEnum):
    """Sizes; `sm` exists only for the task `arithmetic`, `l` only for `sums`."""

    S = "s"
    SM = "sm"
    M = "m"
    L = "l"


class TinyTask(StrEnum):
    ARITHMETIC = "arithmetic"
    SUMS = "sums"


def tiny(
    size: Annotated[
        Size,
        typer.Option(
            "--size",
            help="s: about 0.2M parameters; sm (task arithmetic only): 0.5M; m: 0.8M; l (task sums only): 3.1M.",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", help="Folder to write the model to.")],
    task: Annotated[
        TinyTask, typer.Option("--task", help="Task in which the model is partly competent.")
    ] = TinyTask.ARITHMETIC,
    seed: Annotated[int, typer.Option("--seed", min=0, help="The same seed gives the same model.")] = 0,
) -> None:
    """Make a small Qwen2-architecture model and tokenizer, partly competent in one task."""
    from ftis_node.lab.tiny import make_tiny

    with show_fraction(f"tiny {size.value}") as progress:
        report = make_tiny(size.value, out, task=task.value, seed=seed, progress=progress)
    typer.echo(
        f"{out}: {report.num_parameters:,} parameters, pass@1 {report.pass_at_1:.3f} on {task.value}, "
        f"made in {report.seconds:.0f} s"
    )
