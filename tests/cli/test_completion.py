"""What a shell completes, and a comparison of the names of choices with those of the code."""

import inspect
import os
import subprocess
import sys
from typing import get_args

import pytest

from ftis_node.cli import options
from ftis_node.cli.app import run
from ftis_node.cli.commands.ensemble import ENSEMBLE_MODES
from ftis_node.cli.commands.replay import list_groups
from ftis_node.config.node import NodeSettings
from ftis_node.evaluation.ensemble import MODES
from ftis_node.replay.lifecycle import State


@pytest.mark.parametrize(("line", "completed"), [("ident", ["identity"]), ("join --role e", ["exchange"])])
def test_commands_and_choices_are_completed(line, completed, monkeypatch, capsys):
    words = f"ftis-node {line}"
    monkeypatch.setenv("_FTIS_NODE_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split(" ")) - 1))
    with pytest.raises(SystemExit) as ended:
        run([])
    assert ended.value.code == 0
    assert capsys.readouterr().out.split() == completed


def test_a_shell_has_a_script():
    command = [sys.executable, "-m", "ftis_node", "--show-completion", "zsh"]
    environment = os.environ | {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert "_FTIS_NODE_COMPLETE=complete_zsh" in done.stdout


def test_the_names_of_options_equal_those_of_the_code():
    """Help repeats them, because it imports nothing heavy."""
    of_state = inspect.signature(list_groups, eval_str=True).parameters["state"].annotation
    for names, code in (
        (options.Engine, get_args(NodeSettings.model_fields["engine"].annotation)),
        (options.BaseForm, get_args(NodeSettings.model_fields["quantize"].annotation)),
        (options.Device, get_args(NodeSettings.model_fields["device"].annotation)),
        (get_args(get_args(of_state)[0])[0], tuple(State)),
    ):
        assert {*get_args(names)} == {*code}
    assert ENSEMBLE_MODES == MODES
