"""The completions that a shell gets, and a comparison of their names with those of the code."""

import inspect
import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest

from ftis_node.algorithms.methods import METHODS
from ftis_node.cli import completion, options
from ftis_node.cli.app import run
from ftis_node.cli.commands.replay import list_groups
from ftis_node.config.home import Home
from ftis_node.config.node import NodeSettings
from ftis_node.evaluation.ensemble import MODES
from ftis_node.replay.database import SCHEMA, SCHEMA_VERSION
from ftis_node.replay.lifecycle import State

Complete = Callable[[str], list[str]]


PEER = "12D3KooWKVUU6HyBAxFk1xtH4qEU7NmphAH9gx5PWRmJPNd1wnPM"
GROUP = bytes.fromhex("ab12" + "cd" * 30)


@pytest.fixture
def complete(monkeypatch, capsys):
    """A function that returns the completions that bash gets for `ftis-node LINE`."""

    def completions_of(line):
        words = f"ftis-node {line}"
        monkeypatch.setenv("_FTIS_NODE_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", words)
        monkeypatch.setenv("COMP_CWORD", str(len(words.split(" ")) - 1))
        with pytest.raises(SystemExit) as ended:
            run([])
        assert ended.value.code == 0
        return capsys.readouterr().out.split()

    return completions_of


@pytest.fixture
def home(tmp_path):
    home = Home(tmp_path)
    invalid = [{"peer_id": "$(reboot)"}, {"peer_id": "a b"}]
    home.status.write_text(json.dumps({"peers": [{"peer_id": PEER}, *invalid]}))
    with sqlite3.connect(home.replay) as buffer:
        buffer.executescript(f"{SCHEMA} PRAGMA user_version = {SCHEMA_VERSION};")
        columns = "id, own, sender, number, state, task, prompt_index, model, policy_version, created_at, admitted_at"
        row = (GROUP, 0, PEER, 1, "ready", "arithmetic", 1, "tiny", 0, 0.0, 0.0, 1, bytes(4), b"", b"", b"", 0, 0)
        buffer.execute(
            f"INSERT INTO groups ({columns}, num_tokens, rewards, prompt_ids, envelope, problem, num_bytes, checksum) "
            f"VALUES ({', '.join('?' * len(row))})",
            row,
        )
    buffer.close()
    return home


def test_values_of_options_are_completed(complete):
    assert complete("join --run a") == ["arithmetic-ftis", "arithmetic-compare", "arithmetic-hdee"]
    assert complete("join --role e") == ["exchange"]
    assert complete("eval --task gsm8k+math") == ["gsm8k+math500"]
    assert complete("compare --methods ftis,to") == ["ftis,topr"]
    assert complete("ensemble --mode mean,v") == ["mean,vote"]
    assert complete("ensemble --task gsm8k+math") == ["gsm8k+math500"]
    assert complete("ident") == ["identity"]


def test_groups_and_peers_of_the_home_are_completed(complete, home, monkeypatch):
    assert complete(f"replay show --home {home.root} a") == [GROUP.hex()[:12]]
    assert complete(f"replay show --home {home.root} {GROUP.hex()[:20]}") == [GROUP.hex()[:20]]
    assert complete(f"replay show --home {home.root} b") == []
    assert complete(f"peers --home {home.root} ban ") == [PEER], "an id with characters of shell syntax is left out"
    monkeypatch.setenv("FTIS_HOME", str(home.root))
    assert (complete("peers trust 12D"), complete("replay show a")) == ([PEER], [GROUP.hex()[:12]])


def test_an_unreadable_home_gives_no_completions(complete, home):
    home.replay.write_bytes(b"no database at all" * 100)
    home.status.write_text("{")
    assert complete(f"replay show --home {home.root} ") == []
    assert complete(f"peers ban --home {home.root} ") == []
    assert complete(f"replay show --home {home.root}/nowhere ") == []
    home.marker.write_text('{"schema": 99}')
    assert complete(f"replay show --home {home.root} ") == []


def test_a_shell_has_a_script():
    command = [sys.executable, "-m", "ftis_node", "--show-completion", "zsh"]
    environment = os.environ | {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert "_FTIS_NODE_COMPLETE=complete_zsh" in done.stdout


def test_bash_completes_a_value_with_a_colon():
    """Bash breaks the word at the colon and replaces what follows it."""
    program = Path(sys.executable).with_name("ftis-node")
    script = f"""
        eval "$({program} --show-completion bash)"
        for words in 'arithmetic : ad' 'arithmetic :' 'words : 1+arithmetic : b' 'arith'; do
            COMP_WORDS=(ftis-node eval --task $words)
            COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
            "$(complete -p ftis-node | sed 's/.*-F //; s/ .*//')" {program}
            echo "${{COMPREPLY[*]}}"
        done
    """
    environment = os.environ | {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True, env=environment)
    added, every, second, whole = done.stdout.splitlines()
    assert (added, second) == ("add", "borrow")
    assert every.split()[:3] == ["add", "sub", "easy"] and whole.startswith("arithmetic arithmetic:add ")


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
    assert completion.ENSEMBLE_MODES == MODES
    assert completion.methods("ftis,") == [f"ftis,{name}" for name in ("alone", *METHODS)]
