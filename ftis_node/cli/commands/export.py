"""`ftis-node export`: the trained model of a home as a folder in the hub's format, a GGUF file, or on the hub."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Literal

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
from ftis_node.errors import UsageError

GgufType = Literal["f16", "q8_0", "f32"]


def export(
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder to write the model to; must be new or empty.")
    ] = None,
    home: HomeOption = None,
    merge: Annotated[bool, typer.Option("--merge", help="Merge a LoRA adapter into the model.")] = False,
    gguf: Annotated[
        Path | None,
        typer.Option("--gguf", help="File for ollama and llama.cpp, with a Modelfile beside it. Implies --merge."),
    ] = None,
    gguf_type: Annotated[GgufType, typer.Option("--gguf-type", help="Numbers in the file of --gguf.")] = "f16",
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
    """Write the newest checkpoint as a model folder that transformers and vLLM load, or as a GGUF file.

    With LoRA only the adapter is written, unless --merge is given. Works while the node runs. --push-to needs `hf auth
    login`. It pushes the folder with its card: the run, the base model, groups, evaluations, task and license.
    """
    target = push_target(push_to, "model", public=public, revision=revision, message=commit_message, license=license)
    if out is None and (gguf is None or target is not None):
        raise UsageError(f"{'nothing to write' if gguf is None else '--push-to'}: add --out FOLDER")
    if base_model is not None:
        from ftis_node.models.source import check_hub_id

        check_hub_id(base_model)
    from ftis_node.evaluation.chat import system_message_of
    from ftis_node.export.model_export import check_gguf_file, export_gguf, export_model_of, next_steps, ollama_step

    where, file = home_at(home), gguf.expanduser() if gguf else None
    if file is not None:
        check_gguf_file(file, where)
    with show_fraction("export") as progress, ExitStack() as stack:
        scratch = "" if out else stack.enter_context(TemporaryDirectory(prefix="ftis-export-"))
        folder = out or Path(scratch, file.stem if file else "")
        step = export_model_of(
            where,
            folder,
            merge=merge or file is not None,
            base=base_model,
            license=license,
            repository=target.repo if target else None,
            on_progress=progress,
        )
        if file is not None:
            progress(None, f"writing {file.name}")
            export_gguf(folder.expanduser(), file, kind=gguf_type, system=system_message_of(where))
    for path in filter(None, (out, file)):
        typer.echo(f"{path}: the model after step {step}")
    if out is not None and target is not None:
        push_and_report(out, target, message=f"Upload the model after step {step}")
    if out is not None:
        typer.echo("\n".join(next_steps(out.expanduser(), home=home, is_pushed=target is not None)))
    if file is not None:
        typer.echo(ollama_step(file))
