"""docs/reference/cli.md, made from the options of the command line.

python -m tests.documented.cli_reference > docs/reference/cli.md
"""

import re
import sys
from collections.abc import Iterator
from typing import Any

import typer

from ftis_node.cli.app import app
from tests.documented.pages import as_links

HEADER = """# Commands

`--help` of each command prints the same. `make docs` writes this page from the code.

Common forms:

    ftis-node join --model DIR --task gsm8k:train.jsonl --steps 3     # a data file of your own
    ftis-node join --model DIR --lora --track tensorboard             # train an adapter, with curves
    ftis-node status; ftis-node peers show PEER_ID; ftis-node replay show ID
    ftis-node peers ban PEER_ID --for 2h                              # also unban, trust
    ftis-node report --out run.html                                   # one page of the run
    ftis-node compare --pair size --methods alone,ftis --seeds 5      # an experiment

[Troubleshooting](../operate/troubleshooting.md#exit-codes) has the exit codes.
"""


def render() -> str:
    program: Any = typer.main.get_command(app)
    return as_links(HEADER + "".join(_sections(program, "ftis-node")))


def _sections(command: Any, name: str) -> Iterator[str]:
    below = {key: one for key, one in getattr(command, "commands", {}).items() if not one.hidden}
    if below and name == "ftis-node":
        yield "\n| command | purpose |\n|---|---|\n"
        for key in sorted(below):
            yield f"| [`{key}`](#ftis-node-{key}) | {_first_line(below[key])} |\n"
    else:
        yield f"\n## {name}\n\n{_first_line(command)}\n"
        yield from _options(command)
    for key in sorted(below):
        yield from _sections(below[key], f"{name} {key}")


def _options(command: Any) -> Iterator[str]:
    shown = [option for option in command.params if not getattr(option, "hidden", False) and option.name != "help"]
    if not shown:
        return
    yield "\n| option | meaning |\n|---|---|\n"
    for option in shown:
        names = ", ".join(f"`{name}`" for name in [*option.opts, *option.secondary_opts])
        if option.param_type_name == "argument":
            names = f"`{(option.metavar or option.name).strip('[]').upper()}`"
        yield f"| {names} | {_cell(getattr(option, 'help', None) or '')} |\n"


def _first_line(command: Any) -> str:
    text = (command.help or "").strip().split("\n\n")[0]
    return _cell(text)


def _cell(text: str) -> str:
    """Return a text as one table cell: one line, with Markdown's special characters escaped."""
    text = " ".join(text.split()).replace("|", "\\|")
    return re.sub(r"(?<!`)<([^>]+)>", r"`<\1>`", text)


if __name__ == "__main__":
    sys.stdout.write(render())
