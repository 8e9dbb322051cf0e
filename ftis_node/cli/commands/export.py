"""`ftis-node export`: the trained model of a home, in the hub's format, as a folder or in a repository of the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ftis_node.cli.options import (
    CommitMessageOption,
    HomeOption,
    LicenseOption,
    PublicOption,
    PushToOption,
    RevisionOption,
    home_at,
    push_and_report,
    push_target,
)
from ftis_node.cli.progress import show_fraction


def export(
    out: Annotated[Path, typer.Option("--out", help="Folder to write the model to; must be new or empty.")],
    home: HomeOption = None,
    merge: Annotated[bool, typer.Option("--merge", help="Merge a LoRA adapter into the model.")] = False,
    base_model: Annotated[
        str | None,
        typer.Option(
            "--base-model", metavar="OWNER/NAME", help="Id on the hub of the base model, if --model was a folder."
        ),
    ] = None,
    license: LicenseOption = None,
    push_to: PushToOption = None,
    public: PublicOption = False,
    revision: RevisionOption = None,
    commit_message: CommitMessageOption = None,
) -> None:
    """Write the newest checkpoint as a model folder that transformers and vLLM load.

    With LoRA only the adapter is written, unless --merge is given. Works while the node runs. --push-to needs `hf auth
    login`. It pushes the folder with its card: the run, the base model, groups, evaluations, task and license.
    """
    target = push_target(push_to, "model", public=public, revision=revision, message=commit_message, license=license)
    if base_model is not None:
        from ftis_node.models.source import check_hub_id

        check_hub_id(base_model)
    from ftis_node.node.hub.model_export import export_model_of
    from ftis_node.node.hub.next_steps import next_steps

    with show_fraction("export") as progress:
        step = export_model_of(
            home_at(home),
            out,
            merge=merge,
            base=base_model,
            license=license,
            repository=target.repo if target else None,
            on_progress=progress,
        )
    typer.echo(f"{out}: the model after step {step}")
    if target is not None:
        push_and_report(out, target, message=f"Upload the model after step {step}")
    typer.echo("\n".join(next_steps(out.expanduser(), home=home, is_pushed=target is not None)))
