"""`ftis-node export`: the trained model of a home as a folder in the hub's format, a GGUF file, or on the hub."""

from __future__ import annotations

import re
import shlex
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ftis_node.cli.options import HomeOption, home_at
from ftis_node.cli.progress import show_fraction
from ftis_node.errors import FtisError, UsageError

if TYPE_CHECKING:
    from ftis_node.models.hub import PushTarget

GgufType = Literal["f16", "q8_0", "f32"]
LICENSE_ID = re.compile(r"[a-z0-9][a-z0-9.-]{0,63}")


def export(
    out: Annotated[Path | None, typer.Option(help="Folder to write the model to; must be new or empty.")] = None,
    home: HomeOption = None,
    merge: Annotated[bool, typer.Option("--merge", help="Merge a LoRA adapter into the model.")] = False,
    gguf: Annotated[
        Path | None, typer.Option(help="File for ollama and llama.cpp, with a Modelfile beside it. Implies --merge.")
    ] = None,
    gguf_type: Annotated[GgufType, typer.Option(help="Numbers in the file of --gguf.")] = "f16",
    base_model: Annotated[
        str | None, typer.Option(metavar="OWNER/NAME", help="Id on the hub of the base model, if --model was a folder.")
    ] = None,
    license: Annotated[
        str | None, typer.Option(help="License for the card, by the hub's id, such as apache-2.0.")
    ] = None,
    push_to: Annotated[
        str | None,
        typer.Option(
            metavar="OWNER/NAME",
            help="Then push the result to this repository of the Hugging Face hub. A new one is private.",
        ),
    ] = None,
    public: Annotated[
        bool, typer.Option("--public", help="With --push-to: create a public repository, or push to one.")
    ] = False,
    revision: Annotated[str | None, typer.Option(help="With --push-to: the branch.", show_default="main")] = None,
    commit_message: Annotated[str | None, typer.Option(help="With --push-to: the first line of the commit.")] = None,
) -> None:
    """Write the newest checkpoint as a model folder that transformers and vLLM load, or as a GGUF file.

    With LoRA only the adapter is written, unless --merge is given. Works while the node runs. --push-to needs `hf auth
    login`. It pushes the folder with its card: the run, the base model, groups, evaluations, task and license.
    """
    if license is not None and not LICENSE_ID.fullmatch(license):
        raise UsageError(
            f"--license {license!r} is no id of a license on the hub: give one such as apache-2.0 or other"
        )
    target = _push_target(push_to, public=public, revision=revision, message=commit_message)
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
        _push(out.expanduser(), target, message=commit_message or f"Upload the model after step {step}")
    if out is not None:
        typer.echo("\n".join(next_steps(out.expanduser(), home=home, is_pushed=target is not None)))
    if file is not None:
        typer.echo(ollama_step(file))


def _push_target(repo: str | None, *, public: bool, revision: str | None, message: str | None) -> PushTarget | None:
    """Return the target, None without --push-to. Raises UsageError for wrong options, before any work."""
    if repo is None:
        given = {"--public": public, "--revision": revision, "--commit-message": message}
        if stray := [name for name, value in given.items() if value]:
            raise UsageError(f"{', '.join(stray)}: add --push-to OWNER/NAME, or leave it out")
        return None
    from ftis_node.models.hub import PushTarget, check_target

    target = PushTarget(repo, public, revision)
    check_target(target)
    return target


def _push(folder: Path, target: PushTarget, *, message: str) -> None:
    """Push the folder and print its address. A failure names the folder, which stays, and a command to push it."""
    from ftis_node.models.hub import push_folder

    try:
        url, is_private = push_folder(folder, target, message=message)
    except FtisError as error:
        by_hand = f"hf upload {target.repo} {shlex.quote(str(folder))} ."
        raise type(error)(f"{error}; the export is in {folder}: `{by_hand}` pushes it") from error
    typer.echo(f"{url}: pushed to {target.repo} ({'private' if is_private else 'public'})")
