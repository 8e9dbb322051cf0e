"""`ftis-node service`: the unit of this user, with any home, and the commands of systemd."""

import json
import os
import shlex
import sys

import pytest

from ftis_node.cli.app import run
from ftis_node.config.node import NodeSettings


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A home that names a model, of a user with a manager of services, which records its calls."""
    folder = tmp_path / 'a home with $HOME, 100% and "quotes"'
    folder.mkdir()
    (folder / "node.toml").write_text('model = "m"\n')
    (tmp_path / "run" / "systemd").mkdir(parents=True)
    systemctl = tmp_path / "bin" / "systemctl"
    systemctl.parent.mkdir()
    systemctl.write_text(f'#!/bin/sh\necho "$@" >> {shlex.quote(str(tmp_path / "calls"))}\n')
    systemctl.chmod(0o755)
    monkeypatch.setenv("PATH", f"{systemctl.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    return folder


def test_install_and_remove(home, tmp_path, monkeypatch, capsys):
    unit = tmp_path / "config" / "systemd" / "user" / "ftis-node.service"
    assert run(["service", "remove"]) == 2
    assert run(["service", "install", "--home", str(home)]) == 0
    (start,) = [line for line in unit.read_text().splitlines() if line.startswith("ExecStart=")]
    words = shlex.split(start.removeprefix("ExecStart="))
    assert [word.replace("%%", "%").replace("$$", "$") for word in words] == [
        *(sys.executable, "-m", "ftis_node", "join", "--home", str(home))
    ]
    assert run(["service", "remove"]) == 0
    assert not unit.exists()
    calls = ["daemon-reload", "enable --now ftis-node.service", "disable --now ftis-node.service", "daemon-reload"]
    assert (tmp_path / "calls").read_text().splitlines() == [f"--user {call}" for call in calls]
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    capsys.readouterr()
    assert run(["service", "install", "--home", str(home)]) == 0
    assert "systemctl --user enable --now ftis-node.service" in capsys.readouterr().out, "no line to type"
    assert len((tmp_path / "calls").read_text().splitlines()) == len(calls)


def test_the_unit_starts_with_the_options_that_the_home_keeps(home, tmp_path, monkeypatch):
    kept = {"model": "org/name", "listen": ["/ip4/0.0.0.0/tcp/4001"], "name": "anna", "role": "learner"}
    (home / "node.toml").unlink()
    (home / "settings.json").write_text(json.dumps(kept))
    assert run(["service", "install", "--home", str(home)]) == 0
    unit = (tmp_path / "config" / "systemd" / "user" / "ftis-node.service").read_text()
    (words,) = [shlex.split(line) for line in unit.splitlines() if line.startswith("ExecStart=")]
    started_with: list[NodeSettings] = []
    monkeypatch.setattr(
        "ftis_node.node.startup.run.run_until_stopped", lambda settings, *_, **__: started_with.append(settings)
    )
    assert run([word.replace("%%", "%").replace("$$", "$") for word in words[words.index("join") :]]) == 0
    assert started_with[0].model_dump(mode="json", include=set(kept)) == kept


def test_the_service_of_another_home_is_not_replaced(home, tmp_path, capsys):
    unit, other = tmp_path / "config" / "systemd" / "user" / "ftis-node.service", tmp_path / "other"
    other.mkdir()
    (other / "node.toml").write_text('model = "m"\n')
    assert run(["service", "install", "--home", str(other)]) == 0
    installed = unit.read_text()
    capsys.readouterr()
    assert run(["service", "install", "--home", str(home)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f'"--home" "{other}"' in line and "ftis-node service remove" in line
    assert unit.read_text() == installed
    unit.write_text(f"# of an older version\n{installed}")
    assert run(["service", "install", "--home", str(other)]) == 0
    assert unit.read_text() == installed, "the unit of the same node is not renewed"


def test_a_home_without_a_model_is_refused_and_a_refusal_of_systemd_is_shown(home, tmp_path, capsys):
    assert run(["service", "install", "--home", str(tmp_path / "none")]) == 2
    (tmp_path / "bin" / "systemctl").write_text("#!/bin/sh\necho no bus >&2\nexit 1\n")
    assert run(["service", "install", "--home", str(home)]) == 3
    assert "`systemctl --user daemon-reload` failed: no bus" in capsys.readouterr().err
