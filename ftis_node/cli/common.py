"""Options and output that several commands share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from ftis_node.config.home import Home, default_home

HomeOption = Annotated[
    Path | None, typer.Option("--home", help="The node's folder.", show_default="the platform's data folder")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def home_at(path: Path | None) -> Home:
    """The home that the option names, or the default one."""
    return Home((path or default_home()).expanduser())


def print_json(value: Any) -> None:
    """One JSON document on stdout."""
    typer.echo(json.dumps(value, indent=2))
