"""Commands that load a model, each as the first work of a new process: what they import must not depend on others."""

import re
import subprocess
import sys

import pytest

PROGRAM = (sys.executable, "-m", "ftis_node")
SHORT = ("--limit", "2", "--engine", "torch", "--task", "arithmetic")
COMMANDS = {
    "eval": ("eval", "--model", "M", "--compare", "M", *SHORT),
    "ensemble": ("ensemble", "--models", "M,M", *SHORT),
    "try": ("try", "12+30=", "--model", "M", "--alone", "--max-tokens", "4", "--device", "cpu"),
    "chat": ("chat", "--model", "M", "--alone", "--max-tokens", "4", "--device", "cpu"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_that_loads_a_model_runs_in_a_new_process(name, tiny_models):
    model = str(tiny_models["s"])
    command = [*PROGRAM, *(word.replace("M", model) if set(word) <= {"M", ","} else word for word in COMMANDS[name])]
    done = subprocess.run(command, input="12+30=\n", capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert all(line.startswith(f"{name}: ") for line in done.stderr.splitlines()), done.stderr  # progress
    assert re.search(r"pass@1|^\d+$", done.stdout, re.MULTILINE), done.stdout
