"""A home keeps options of its last start: `join` alone and the printed command use them, and an option replaces one."""

import json
import shlex

import pytest

from ftis_node.cli.app import run
from ftis_node.config.home import Home
from ftis_node.config.home_files import start_command

PEER = "12D3KooWD3eckifWpRn9wQpMG9R9hX3sD158z7EqHWmweQAJU5SA"
LISTEN = "/ip4/0.0.0.0/tcp/4001"


@pytest.fixture
def home(tmp_path):
    return Home(tmp_path / "a home")


@pytest.fixture
def join(home, monkeypatch, capsys):
    """Start a node whose settings are kept as by a real start, and return them."""

    def keep(settings, *_, **__):
        home.root.mkdir(exist_ok=True)
        home.settings.write_text(settings.model_dump_json())

    def start(*options):
        assert run(["join", "--home", str(home.root), *options]) == 0, capsys.readouterr().err
        return json.loads(home.settings.read_text())

    monkeypatch.setattr("ftis_node.node.startup.run.run_until_stopped", keep)
    return start


GENERATOR = ("--model", "org/name", "--listen", LISTEN, "--name", "anna", "--role", "generator", "--follow", PEER)


def test_join_alone_and_the_printed_command_take_the_kept_options(join, home, monkeypatch):
    monkeypatch.setenv("FTIS_ROLES__WEIGHTS_DELAY", "fixed:60")
    first = join(*GENERATOR)
    monkeypatch.delenv("FTIS_ROLES__WEIGHTS_DELAY")
    assert (first["listen"], first["name"], first["role"]) == ([LISTEN], "anna", "generator")
    assert first["roles"]["follow"] == PEER and first["roles"]["weights_delay"] == "fixed:60"
    assert join() == first
    command = shlex.split(start_command(home))
    assert command == ["ftis-node", "join", "--home", str(home.root)]
    assert join(*command[4:]) == first


def test_an_option_replaces_what_is_kept(join, home, monkeypatch):
    join(*GENERATOR)
    other = PEER[:-1] + "B"
    changed = join("--listen", "/ip4/0.0.0.0/tcp/0", "--name", "", "--follow", other)
    assert (changed["listen"], changed["name"]) == (["/ip4/0.0.0.0/tcp/0"], "")
    assert changed["roles"]["follow"] == other
    full = join("--role", "full")
    assert (full["role"], full["roles"]["follow"]) == ("full", ""), "the learner to follow belongs to the former role"
    join(*GENERATOR)
    monkeypatch.setenv("FTIS_ROLE", "learner")
    assert join()["role"] == "learner"
    monkeypatch.delenv("FTIS_ROLE")
    home.node_toml.write_text('role = "full"\nname = "bob"\n')
    assert (join()["role"], join()["name"]) == ("full", "bob")
