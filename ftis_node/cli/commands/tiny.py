"""`ftis-node tiny`: make a small model that trains on any machine, without a download."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from ftis_node.cli.progress import show_fraction


def tiny(
    size: Annotated[
        Literal["s", "sm", "m", "l"],
        typer.Option(
            help="s: about 0.2M parameters; sm (task arithmetic only): 0.5M; m: 0.8M; l (task sums only): 3.1M."
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder to write the model to.")],
    task: Annotated[
        Literal["arithmetic", "sums"], typer.Option(help="Task in which the model is partly competent.")
    ] = "arithmetic",
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same model.")] = 0,
) -> None:
    """Make a small Qwen2-architecture model and tokenizer, partly competent in one task."""
    from ftis_node.lab.tiny import make_tiny
    from ftis_node.models.loading import check_new_or_empty

    out = check_new_or_empty(out)
    with show_fraction(f"tiny {size}") as progress:
        report = make_tiny(size, out, task=task, seed=seed, progress=progress)
    typer.echo(
        f"{out}: {report.num_parameters:,} parameters, pass@1 {report.pass_at_1:.3f} on {task}, "
        f"made in {report.seconds:.0f} s"
    )
