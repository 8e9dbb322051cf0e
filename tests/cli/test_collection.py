"""Garbage collection is on again when a command runs."""

from __future__ import annotations

import subprocess
import sys

COMMAND_THAT_SAYS_IT = """
import gc
from ftis_node.cli import app, pause_collection

@app.app.command("collects")
def collects():
    print(gc.isenabled(), gc.get_freeze_count() > 1000)

pause_collection()
app.run({arguments!r})
print(gc.isenabled())
"""


def _said(*arguments: str) -> list[str]:
    script = COMMAND_THAT_SAYS_IT.format(arguments=list(arguments))
    return subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout.split()


def test_a_command_runs_with_the_collector_on_and_the_modules_left_out() -> None:
    assert _said("collects") == ["True", "True", "True"]


def test_help_is_printed_without_a_collection() -> None:
    assert _said("--help")[-1] == "False"
