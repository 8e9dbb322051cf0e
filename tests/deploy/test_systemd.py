"""The units of systemd in deploy/, and `ftis-node service`: commands, variables, any home, and the check of systemd."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ftis_node.cli.app import run
from ftis_node.cli.operate.service import unit_text
from ftis_node.config.node import NodeSettings
from ftis_node.config.workers import SAVE_LIMIT_S
from tests.deploy.files import DEPLOY, check_command, check_variable

OLD_SYSTEMD = re.compile(r"Unknown key (name )?'(RestartSteps|RestartMaxDelaySec)' .*ignoring")  # before 254
PROGRAM = "/opt/ftis-node/bin/ftis-node"


def lines(unit: Path, key: str) -> list[str]:
    return [line.split("=", 1)[1] for line in unit.read_text().splitlines() if line.startswith(f"{key}=")]


@pytest.fixture(params=["ftis-bootstrap", "ftis-node", "user/ftis-node"])
def unit(request, tmp_path):
    """A unit file; that of a user as the command writes it, with another program."""
    if request.param != "user/ftis-node":
        return DEPLOY / "systemd" / f"{request.param}.service"
    written = tmp_path / "user" / "ftis-node.service"
    written.parent.mkdir()
    written.write_text(unit_text(tmp_path / "h").replace(f'"{sys.executable}" "-m" "ftis_node"', PROGRAM))
    return written


def test_a_unit_has_a_valid_command_time_to_stop_and_endless_restarts(unit):
    (start,) = lines(unit, "ExecStart")
    program, *arguments = shlex.split(start)
    assert program == PROGRAM
    check_command([argument for argument in arguments if not argument.startswith("$")])
    assert lines(unit, "KillMode") == ["mixed"]
    saves = unit.name != "ftis-bootstrap.service"
    assert int(lines(unit, "TimeoutStopSec")[0]) == (SAVE_LIMIT_S + 60 if saves else 20)
    assert lines(unit, "RestartPreventExitStatus") == ["2 3"]
    assert lines(unit, "StartLimitIntervalSec") == ["0"], "it restarts forever"
    assert lines(unit, "RestartMaxDelaySec") == ["10min"]
    for variable in lines(unit, "Environment"):
        name = variable.split("=")[0]
        assert not name.startswith("FTIS_") or check_variable(name) is None


def test_the_home_of_the_unit_is_the_default_home():
    unit = DEPLOY / "systemd" / "ftis-node.service"
    assert "XDG_DATA_HOME=/var/lib" in lines(unit, "Environment")
    assert lines(unit, "StateDirectory") == ["ftis-node"]


def test_systemd_reports_no_problem(unit, tmp_path):
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed: `apt-get install systemd`")
    text = unit.read_text().replace(PROGRAM, sys.executable)  # it need not be installed
    copy = tmp_path / unit.name
    copy.write_text(text)
    scope = ["--user"] if unit.parent.name == "user" else []
    command = [analyze, "verify", "--man=no", *scope, str(copy)]
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    problems = [line for line in done.stderr.splitlines() if not OLD_SYSTEMD.search(line)]
    assert (done.returncode, problems) == (0, [])


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
    assert (run(["service", "remove"]), run(["service", "install", "--home", str(home)])) == (2, 0)
    (start,) = [line for line in unit.read_text().splitlines() if line.startswith("ExecStart=")]
    words = shlex.split(start.removeprefix("ExecStart="))
    assert [word.replace("%%", "%").replace("$$", "$") for word in words] == [
        *(sys.executable, "-m", "ftis_node", "join", "--home", str(home))
    ]
    assert run(["service", "remove"]) == 0 and not unit.exists()
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
