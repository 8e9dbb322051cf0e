"""The program accepts every command in README and docs/; `test_running.py` runs those that take seconds."""

import re
import subprocess
import tomllib
from itertools import chain
from typing import Any

import pytest
import typer

from ftis_node.cli.app import app
from ftis_node.config.manifest import parse_manifest
from tests.deploy.files import check_command, check_variable
from tests.documented.pages import PAGES, ROOT, Command, blocks, commands

ALL = list(chain.from_iterable(commands(page) for page in PAGES))
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
PROGRAM = typer.main.get_command(app)
ACT_AT_PARSING = {"--install-completion", "--show-completion"}  # typer executes these while it parses
CUT_SHORT = ("...", "…", "|")  # inline code may show only the beginning of a command


def _error_of(command: Command) -> str:
    """Return the program's error for a command; "" if it is accepted, or if inline code shows only its beginning."""
    if ACT_AT_PARSING & set(command.words):
        return ""
    if command.words[0] != "ftis-node" or (command.is_inline and any(cut in command.text for cut in CUT_SHORT)):
        return ""
    try:
        check_command(list(command.words[1:]))
    except typer.TyperException as error:
        message = error.format_message()
        return "" if command.is_inline and "Missing" in message else message
    return ""


def test_the_program_accepts_every_command(capsys):
    assert len(ALL) > 80
    errors = [f"{command.page}: {command.line.strip()}: {error}" for command in ALL if (error := _error_of(command))]
    assert not errors, "\n".join(errors)


def test_an_unknown_command_is_an_error():
    for line in ("fly --high", "join --model DIR --no-such-option"):
        with pytest.raises(typer.TyperException):
            check_command(line.split())


def test_settings_in_the_environment_exist():
    names = {setting.split("=")[0] for command in ALL for setting in command.settings}
    for name in sorted(names - _variables(PROGRAM)):
        if name.startswith("FTIS_") and not name.startswith("FTIS_TEST"):
            check_variable(name)


def _variables(command: Any) -> set[str]:
    """Return the environment variables of the options of a command and of its subcommands."""
    below = [_variables(one) for one in getattr(command, "commands", {}).values()]
    own = [option.envvar for option in command.params if isinstance(option.envvar, str)]
    return set(own).union(*below)


def test_make_has_every_target():
    named = {word for command in ALL if command.words[0] == "make" for word in command.words[1:]}
    named |= set(re.findall(r"`make ([a-z][a-z-]*)", " ".join(page.read_text() for page in PAGES)))
    targets = sorted(word for word in named if re.fullmatch(r"[a-z][a-z-]*", word))
    assert {"demo", "test", "bench"} <= set(targets)
    done = subprocess.run(["make", "-n", *targets], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    dry_run = ["make", "--no-print-directory", "-n", "demo"]
    demo = subprocess.run(dry_run, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    _, arguments = demo.strip().splitlines()[-1].split("/ftis-node ", 1)
    check_command(arguments.split())
    assert arguments.startswith("demo --out ")


def test_every_extra_that_is_installed_is_declared():
    extras = {
        extra
        for command in ALL
        for word in command.words
        for extra in re.findall(r"(?:^\.|ftis-node)\[([\w,-]+)\]", word)
        if command.words[:2] == ("pip", "install")
    }
    assert {"vllm", "vllm-cpu"} <= extras <= set(EXTRAS)


def test_manifests_on_the_pages_are_valid():
    shown = [block for page in PAGES for block in blocks(page) if block.lines[:1] == ("# run.toml",)]
    assert shown
    for block in shown:
        parse_manifest("\n".join(block.lines), source=block.page)
