"""`ftis-node` collects no garbage while it imports modules, and turns the collector on before a command runs."""

import subprocess
import sys

SCRIPT = """
import gc
from ftis_node.cli import app

@app.app.command("collects")
def collects():
    print(gc.isenabled(), gc.get_freeze_count() > 1000)

gc.disable()
app.run({arguments!r})
print(gc.isenabled())
"""


def _printed(*arguments: str) -> list[str]:
    script = SCRIPT.format(arguments=list(arguments))
    return subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout.split()


def test_a_command_runs_with_the_collector_on_and_the_modules_frozen():
    assert _printed("collects") == ["True", "True", "True"]


def test_help_is_printed_with_the_collector_off():
    assert _printed("--help")[-1] == "False"
