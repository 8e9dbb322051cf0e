"""`ftis-node export`: the trained model of a home, in the hub's format."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ftis_node.cli.options import HomeOption, home_at
from ftis_node.cli.progress import show_fraction


def export(
    out: Annotated[Path, typer.Option("--out", help="Folder to write the model to; must be new or empty.")],
    home: HomeOption = None,
    merge: Annotated[bool, typer.Option("--merge", help="Merge a LoRA adapter into the model.")] = False,
) -> None:
    """Write the newest checkpoint as a model folder that transformers and vLLM load.

    With LoRA only the adapter is written, unless --merge is given. Works while the node runs.
    """
    from ftis_node.node.storage.export import export_model_of

    with show_fraction("export") as progress:
        step = export_model_of(home_at(home), out, merge=merge, on_progress=progress)
    typer.echo(f"{out}: the model after step {step}")
