"""The units of systemd in deploy/, and that of `ftis-node service`: commands, variables, systemd's own check."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ftis_node.cli.operate.service import unit_text
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
