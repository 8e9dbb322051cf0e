"""The documentation is a test: commands, presets and rooms that the README names exist, and none is missing there."""

from __future__ import annotations

import re
from pathlib import Path

from ftis_node.cli.app import app
from ftis_node.config.manifest import PRESETS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def _commands() -> set[str]:
    groups = {group.name for group in app.registered_groups}
    return {str(command.name) for command in app.registered_commands} | {str(name) for name in groups}


def test_the_readme_names_every_command_and_no_other() -> None:
    named = set(re.findall(r"ftis-node ([a-z]+)", README)) | {"demo", "tiny"}
    assert named >= _commands() - {"tiny"}
    assert named <= _commands()


def test_the_readme_names_every_preset_and_room() -> None:
    for preset in PRESETS:
        assert f"`{preset}`" in README
    rooms = {path.name for path in (ROOT / "ftis_node").iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert rooms == set(re.findall(r"^  (\w+)/  ", README, flags=re.MULTILINE))


def test_no_host_of_a_registry_is_named() -> None:
    forbidden = re.compile(r"pypi\.org|files\.pythonhosted|registry\.npmjs|deb\.debian")
    for path in ROOT.rglob("*"):
        parts = path.relative_to(ROOT).parts
        if not path.is_file() or parts[0] in {".git", "demo-out"} or "__pycache__" in parts:
            continue
        if (ROOT / parts[0] / "pyvenv.cfg").exists():  # somebody's virtual environment
            continue
        if path.suffix in {".py", ".md", ".toml", ".proto", ".txt", ".yaml", ".yml"} or path.name in {
            "Makefile",
            "run",
        }:
            assert path == Path(__file__) or not forbidden.search(path.read_text()), path
