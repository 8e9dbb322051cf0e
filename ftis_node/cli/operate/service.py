"""`ftis-node service`: the node as a service of this user, by systemd and without root."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

import typer

from ftis_node.cli.options import HomeOption, home_at
from ftis_node.config.home_files import last_settings
from ftis_node.errors import ConfigError, UsageError
from ftis_node.files import make_folder, read_text, replace_file

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Run the node as a service of this user.")

UNIT = "ftis-node.service"
START = "ExecStart="
LINGER = "loginctl enable-linger"


@app.command()
def install(home: HomeOption = None) -> None:
    """Write a systemd unit of this user that joins with the settings of the home, and start it."""
    where = home_at(home)
    if where.is_held():
        raise UsageError(f"a node runs in {where.root}: `ftis-node stop` ends it, then install the service")
    if not (where.node_toml.exists() or last_settings(where)):
        raise ConfigError(f"{where.root} names no model: start a node there once, or write its node.toml")
    unit, text = unit_path(), unit_text(where.root.absolute())
    if unit.exists() and (command := _command_in(read_text(unit))) != _command_in(text):
        raise UsageError(f"{unit} has another command ({command}): remove it with `ftis-node service remove` first")
    make_folder(unit.parent)
    replace_file(unit, text.encode(), mode=0o644)
    typer.echo(f"wrote {unit}")
    _call(["daemon-reload"], ["enable", "--now", UNIT])
    typer.echo(f"so that it runs without a session, once: {LINGER}")


@app.command()
def remove() -> None:
    """Stop the service and remove its unit. The home stays."""
    unit = unit_path()
    if not unit.exists():
        raise ConfigError(f"no service is installed: there is no {unit}")
    _call(["disable", "--now", UNIT])
    unit.unlink()
    _call(["daemon-reload"])
    typer.echo(f"removed {unit}; the home stays as it is")


def unit_path() -> Path:
    return Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "systemd" / "user" / UNIT


def unit_text(home: Path) -> str:
    """Return the unit of a node with this home, run by this Python."""
    template = resources.files("ftis_node.cli.operate").joinpath(UNIT).read_text(encoding="utf-8")
    words = [sys.executable, "-m", "ftis_node", "join", "--home", str(home)]
    return template.replace("COMMAND", " ".join(map(_quoted, words)))


def _command_in(unit: str) -> str:
    """Return the command line of a unit; "" of a file without one."""
    return next((line.removeprefix(START) for line in unit.splitlines() if line.startswith(START)), "")


def _quoted(word: str) -> str:
    """Return a word as systemd reads it: `%` and `$` begin its own replacements."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"'


def _call(*commands: Sequence[str]) -> None:
    """Run `systemctl --user` with each; print the lines to type if there is no manager of this user, or it refuses."""
    lines = [f"systemctl --user {' '.join(words)}" for words in commands]
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    systemctl = shutil.which("systemctl")
    if systemctl is None or not runtime or not Path(runtime, "systemd").is_dir():
        typer.echo("\n".join(["systemd does not run for this user now; later type:", *lines]))
        return
    for words, line in zip(commands, lines, strict=True):
        done = subprocess.run([systemctl, "--user", *words], capture_output=True, text=True, check=False)
        if done.returncode:
            typer.echo(f"`{line}` failed: {done.stderr.strip()}", err=True)
            raise typer.Exit(3)
