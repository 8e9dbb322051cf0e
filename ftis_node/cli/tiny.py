"""`ftis-node tiny`: makes a small model that can be trained on any machine, without a download."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from ftis_node.cli.progress import show_fraction


class Size(StrEnum):
    """The two sizes."""

    S = "s"
    M = "m"


def tiny(
    size: Annotated[Size, typer.Option("--size", help="s: about 0.15M parameters; m: about 0.8M.")],
    out: Annotated[Path, typer.Option("--out", help="Folder to write the model to.")],
    seed: Annotated[int, typer.Option("--seed", min=0, help="The same seed gives the same model.")] = 0,
) -> None:
    """Make a small Qwen2-architecture model and tokenizer, partly competent in the task `arithmetic`."""
    from ftis_node.lab.tiny import make_tiny

    with show_fraction(f"tiny {size.value}") as progress:
        report = make_tiny(size.value, out, seed=seed, progress=progress)
    typer.echo(
        f"{out}: {report.num_parameters:,} parameters, pass@1 {report.pass_at_1:.3f} on arithmetic, "
        f"made in {report.seconds:.0f} s"
    )
