"""Options and output that several commands share; the push to the hub, with its options, progress and result."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ftis_node.config.home import Home, default_home, give_user_folder
from ftis_node.config.home_files import check_schema
from ftis_node.errors import FtisError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ftis_node.models.hub_push import PushTarget

LICENSE_ID = re.compile(r"[a-z0-9][a-z0-9.-]{0,63}")
PushToOption = Annotated[
    str | None,
    typer.Option(
        "--push-to",
        metavar="OWNER/NAME",
        help="Then push the result to this repository of the Hugging Face hub. A new one is private.",
    ),
]
PublicOption = Annotated[
    bool, typer.Option("--public", help="With --push-to: create a public repository, or push to one.")
]
RevisionOption = Annotated[
    str | None, typer.Option("--revision", help="With --push-to: the branch.", show_default="main")
]
CommitMessageOption = Annotated[
    str | None, typer.Option("--commit-message", help="With --push-to: the first line of the commit.")
]
LicenseOption = Annotated[
    str | None, typer.Option("--license", help="License for the card, by the hub's id, such as apache-2.0.")
]
MODEL_FILES = ("*.safetensors", "*.safetensors.index.json", "adapter_config.json")
DATA_FILES = ("data/train.*",)


# The names of other packages, which help must not import; a test compares them.
Engine = Literal["auto", "vllm", "torch"]
BaseForm = Literal["none", "4bit"]
Device = Literal["auto", "cpu", "cuda"]
LogFormat = Literal["text", "json"]
EngineOption = Annotated[
    Engine, typer.Option("--engine", help="auto, vllm or torch; torch for mixtures of an ensemble.")
]


HOME_VARIABLE = "FTIS_HOME"
HomeOption = Annotated[
    Path | None,
    typer.Option(
        "--home", help="The node's home folder.", envvar=HOME_VARIABLE, show_default="the platform's data folder"
    ),
]
GpusOption = Annotated[
    int | None,
    typer.Option(
        "--gpus",
        min=1,
        help="GPUs this node may use. The generator takes one (see --tensor-parallel), the learner the others; both "
        "share a single one.",
        show_default="one for each worker",
    ),
]
TensorParallelOption = Annotated[
    int | None,
    typer.Option("--tensor-parallel", min=1, help="Number of GPUs for the generator (vLLM only).", show_default="1"),
]
LogFormatOption = Annotated[
    LogFormat,
    typer.Option("--log-format", help="Format of the log lines on stderr: text or json, one object per line."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def home_at(path: Path | None) -> Home:
    """Return the home at `path`, or the default home. Raises ConfigError if another version has written it.

    Gives a user without a home folder one in the home.
    """
    home = Home((path or default_home()).expanduser())
    check_schema(home)
    give_user_folder(home.user)
    return home


def generation_settings(tensor_parallel: int | None) -> dict[str, Any] | None:
    """Return the settings of `[generation]` for `--tensor-parallel`; None if the option is not given."""
    return None if tensor_parallel is None else {"engine_options": {"tensor_parallel_size": tensor_parallel}}


def print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2))


def print_document(document: Any, lines: Callable[[], Iterable[str]], *, as_json: bool) -> None:
    if as_json:
        print_json(document)
    else:
        typer.echo("\n".join(lines()))


def print_line(document: Any) -> None:
    """Print a document, or an error, as one line of JSON."""
    shown = {"error": str(document)} if isinstance(document, FtisError) else document
    typer.echo(json.dumps(shown, separators=(",", ":")))


def push_target(
    repo: str | None,
    kind: Literal["model", "dataset"],
    *,
    public: bool,
    revision: str | None,
    message: str | None,
    license: str | None,
) -> PushTarget | None:
    """Return the target, None without --push-to. Raises UsageError for wrong options, before any work."""
    if license is not None and not LICENSE_ID.fullmatch(license):
        raise UsageError(
            f"--license {license!r} is no id of a license on the hub: give one such as apache-2.0 or other"
        )
    if repo is None:
        given = {"--public": public, "--revision": revision, "--commit-message": message}
        if stray := [name for name, value in given.items() if value]:
            raise UsageError(f"{', '.join(stray)}: add --push-to OWNER/NAME, or leave it out")
        return None
    from ftis_node.models.hub_push import PushTarget, check_target

    replaces = MODEL_FILES if kind == "model" else DATA_FILES
    target = PushTarget(repo, kind, public, revision, message, replaces)
    check_target(target)
    return target


def push_and_report(folder: Path, target: PushTarget, *, message: str) -> None:
    """Push the folder and print its address. A failure names the folder, which stays, and a command to push it.

    `message` is for the commit if `target` has none.
    """
    from ftis_node.models.hub_push import push_folder

    folder = folder.expanduser()
    try:
        url, is_private = push_folder(folder, replace(target, message=target.message or message))
    except FtisError as error:
        by_hand = f"hf upload {target.repo} {shlex.quote(str(folder))} . --type {target.kind}"
        raise type(error)(f"{error}; the export is in {folder}: `{by_hand}` pushes it") from error
    typer.echo(f"{url}: pushed to {target.repo} ({'private' if is_private else 'public'})")
