"""Options and output that several commands share."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ftis_node.config.home import Home, default_home, give_user_folder
from ftis_node.config.home_files import check_schema

# The names of other packages, which help must not import; a test compares them.
Engine = Literal["auto", "vllm", "torch"]
BaseForm = Literal["none", "4bit"]
Device = Literal["auto", "cpu", "cuda"]
LogFormat = Literal["text", "json"]
EngineOption = Annotated[Engine, typer.Option(help="auto, vllm or torch; torch for mixtures of an ensemble.")]


HOME_VARIABLE = "FTIS_HOME"
HomeOption = Annotated[
    Path | None,
    typer.Option(help="The node's home folder.", envvar=HOME_VARIABLE, show_default="the platform's data folder"),
]
GpusOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="GPUs this node may use. The generator takes one (see --tensor-parallel), the learner the others; both "
        "share a single one.",
        show_default="one for each worker",
    ),
]
TensorParallelOption = Annotated[
    int | None, typer.Option(min=1, help="Number of GPUs for the generator (vLLM only).", show_default="1")
]
LogFormatOption = Annotated[
    LogFormat, typer.Option(help="Format of the log lines on stderr: text or json, one object per line.")
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
