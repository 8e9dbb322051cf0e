"""The files of `deploy/`, read as their programs read them, and what every command and variable in them is held to."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
import yaml

from ftis_node.cli.app import app
from ftis_node.config.node import NodeSettings

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
DOCKERFILE = ROOT / "Dockerfile"


def program(name: str) -> str | None:
    """Return the path of an installed program, first of one beside this Python; None without one."""
    return shutil.which(name, path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))


def documents(path: Path) -> list[dict[str, Any]]:
    """All YAML documents of a file; a key that stands twice is an error."""
    with path.open() as file:
        return list(yaml.load_all(file, Loader=_StrictLoader))


class _StrictLoader(yaml.SafeLoader):
    """YAML in which the last of two equal keys does not silently win."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        assert len(keys) == len(set(keys)), f"{node.start_mark}: a key stands twice in {keys}"
        return super().construct_mapping(node, deep)


def check_command(arguments: list[str]) -> None:
    """Fails unless `ftis-node ARGUMENTS` can be parsed: the command, every option, every value's type."""
    command = typer.main.get_command(app)
    context = command.make_context("ftis-node", list(arguments))
    while hasattr(command, "resolve_command"):
        name, command, rest = command.resolve_command(context, [*context._protected_args, *context.args])
        context = command.make_context(name, rest, parent=context)


def shell_commands(script: str) -> list[list[str]]:
    """The `ftis-node` commands in a line of shell, each as its arguments."""
    parts = re.split(r"\|\||&&|;|\n|\bdo\b|\bthen\b", script)
    return [shlex.split(part)[1:] for part in parts if part.split()[:1] == ["ftis-node"]]


def check_variable(name: str) -> None:
    """Fails unless an `FTIS_` variable is a setting: a misspelt one would be passed over in silence."""
    fields: Any = NodeSettings.model_fields
    *tables, last = name.removeprefix("FTIS_").lower().split("__")
    for table in tables:
        assert table in fields, f"{name}: no table {table!r} in node.toml"
        fields = fields[table].annotation.model_fields
    assert last in fields, f"{name} is no setting"


@dataclass(frozen=True)
class Instruction:
    """One instruction of a Dockerfile: its word, its options (`--from=wheel`), the rest."""

    word: str
    options: dict[str, str]
    rest: str

    @property
    def words(self) -> list[str]:
        """The rest as a list: of JSON, or divided as a shell does it."""
        return list(json.loads(self.rest)) if self.rest.startswith("[") else shlex.split(self.rest)


def read_stages() -> dict[str, list[Instruction]]:
    """The Dockerfile's stages by name, `FROM` first."""
    text = "\n".join(line for line in DOCKERFILE.read_text().splitlines() if not line.lstrip().startswith("#"))
    stages: dict[str, list[Instruction]] = {}
    for line in text.replace("\\\n", " ").splitlines():
        if not line.strip():
            continue
        word, _, rest = line.strip().partition(" ")
        options = dict(re.findall(r"(?:^|\s)--([a-z-]+)=(\S+)", rest)) if word in ("COPY", "RUN", "HEALTHCHECK") else {}
        instruction = Instruction(word, options, re.sub(r"^(\s*--[a-z-]+=\S+)+\s*", "", rest).strip())
        if word == "FROM":
            stages[rest.split(" AS ")[1]] = []
        if stages:
            stages[list(stages)[-1]].append(instruction)
    return stages


def built_upon(stages: dict[str, list[Instruction]], name: str) -> list[Instruction]:
    base = stages[name][0].rest.split(" AS ")[0]
    return [*(built_upon(stages, base) if base in stages else []), *stages[name][1:]]


def environment(instructions: list[Instruction]) -> dict[str, str]:
    """What `ENV` sets, the last one of each name; `${PATH}` is left as it stands."""
    return dict(word.split("=", 1) for one in instructions if one.word == "ENV" for word in one.words)
