"""Options and output that several commands share."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from ftis_node.config.home import Home, default_home
from ftis_node.config.home_files import refuse_newer


class LogFormat(StrEnum):
    """Form of log lines."""

    TEXT = "text"
    JSON = "json"


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
    LogFormat, typer.Option("--log-format", help="Form of the log lines on stderr: text or json, one object a line.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def home_at(path: Path | None) -> Home:
    """Return the home at `path`, or the default home. Raises ConfigError if a newer version has written it."""
    home = Home((path or default_home()).expanduser())
    refuse_newer(home)
    return home


def spread_over(tensor_parallel: int | None) -> dict[str, Any] | None:
    """Return the settings of `[generation]` for `--tensor-parallel`; None if the option is not given."""
    return None if tensor_parallel is None else {"engine_options": {"tensor_parallel_size": tensor_parallel}}


def print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2))
