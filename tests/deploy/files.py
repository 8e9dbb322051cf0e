"""Readers for the files of `deploy/` and the Dockerfile, and checks of the commands and variables in them."""

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
    """Return the path of an installed program or None; one in the folder of this Python takes precedence."""
    return shutil.which(name, path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))


def documents(path: Path) -> list[dict[str, Any]]:
    """Return all YAML documents of a file. A duplicate key is an error."""
    with path.open() as file:
        return list(yaml.load_all(file, Loader=_StrictLoader))


class _StrictLoader(yaml.SafeLoader):
    """A YAML loader that refuses duplicate keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        assert len(keys) == len(set(keys)), f"{node.start_mark}: duplicate key in {keys}"
        return super().construct_mapping(node, deep)


def check_command(arguments: list[str]) -> None:
    """Parse `ftis-node ARGUMENTS`. Raises for an unknown command or option and for a value of a wrong type."""
    command: Any = typer.main.get_command(app)
    name, words, context = "ftis-node", list(arguments), None
    while True:
        is_group = hasattr(command, "resolve_command")
        try:
            context = command.make_context(name, words, parent=context)
        except typer.Exit:  # --help, --version
            return
        words = [*getattr(context, "_protected_args", []), *context.args] if is_group else []
        if not words:
            return
        name, command, words = command.resolve_command(context, words)


def shell_commands(script: str) -> list[list[str]]:
    parts = re.split(r"\|\||&&|;|\n|\bdo\b|\bthen\b", script)
    return [shlex.split(part)[1:] for part in parts if part.split()[:1] == ["ftis-node"]]


def check_variable(name: str) -> None:
    """Assert that an `FTIS_` variable is a setting, because a node ignores a misspelled one."""
    fields: Any = NodeSettings.model_fields
    *tables, last = name.removeprefix("FTIS_").lower().split("__")
    for table in tables:
        assert table in fields, f"{name}: no table {table!r} in node.toml"
        fields = fields[table].annotation.model_fields
    assert last in fields, f"{name} is no setting"


@dataclass(frozen=True)
class Instruction:
    """An instruction of a Dockerfile: its name, its options (`--from=wheel`), the rest."""

    name: str
    options: dict[str, str]
    rest: str

    @property
    def words(self) -> list[str]:
        """Return the rest as a list, by JSON or by the rules of a shell."""
        return list(json.loads(self.rest)) if self.rest.startswith("[") else shlex.split(self.rest)


def read_stages() -> dict[str, list[Instruction]]:
    """Return the stages of the Dockerfile by name, `FROM` first."""
    text = "\n".join(line for line in DOCKERFILE.read_text().splitlines() if not line.lstrip().startswith("#"))
    stages: dict[str, list[Instruction]] = {}
    for line in text.replace("\\\n", " ").splitlines():
        if not line.strip():
            continue
        name, _, rest = line.strip().partition(" ")
        options = dict(re.findall(r"(?:^|\s)--([a-z-]+)=(\S+)", rest)) if name in ("COPY", "RUN", "HEALTHCHECK") else {}
        instruction = Instruction(name, options, re.sub(r"^(\s*--[a-z-]+=\S+)+\s*", "", rest).strip())
        if name == "FROM":
            stages[rest.split(" AS ")[1]] = []
        if stages:
            stages[list(stages)[-1]].append(instruction)
    return stages


def with_base_stages(stages: dict[str, list[Instruction]], name: str) -> list[Instruction]:
    """Return the instructions of a stage after those of the stages that it is based on."""
    base = stages[name][0].rest.split(" AS ")[0]
    return [*(with_base_stages(stages, base) if base in stages else []), *stages[name][1:]]


def environment(instructions: list[Instruction]) -> dict[str, str]:
    """Return the variables of `ENV`, the last value of each name. `${PATH}` is not expanded."""
    return dict(pair.split("=", 1) for one in instructions if one.name == "ENV" for pair in one.words)
