"""`make scan` finds secrets, vulnerable dependencies and unsafe code, and lists what it did not check."""

import re
import shutil
import subprocess
import sys
from typing import Any

import pytest

from tests.scan import __main__ as scan
from tests.scan.secrets import secrets_in, secrets_of

ROOT = scan.ROOT
DIGITS = "a1b2c3d4e5f6a7b8c9d0"


SECRETS = {
    "-----BEGIN " + "OPENSSH PRIVATE KEY-----": "private key", "HF_TOKEN=hf_" + "Ab1" * 11: "access token of the hub",
    "remote: ghp_" + "a" * 36: "access token of a forge", "key AKIA" + "ABCDEFGH12345678": "cloud key",
    "export OPENAI=sk-" + DIGITS * 2: "API key",
    "git clone https://me:" + "hunter22@example.org/x": "password in an address",
    "password = '" + DIGITS + "'": "password",
}  # fmt: skip


def test_each_kind_of_secret_is_found_unless_it_is_marked():
    for line, kind in SECRETS.items():
        assert list(secrets_in(f"first\n{line}\n")) == [(2, kind)]
        assert list(secrets_in(f"{line}  # not-a-secret: an example")) == []


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed: `apt-get install git`")
def test_tracked_and_new_files_are_searched_and_a_finding_does_not_repeat_the_secret(tmp_path):
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    (tmp_path / ".gitignore").write_text("ignored\n")
    for name in ("new.txt", "ignored"):
        (tmp_path / name).write_text("token: '" + DIGITS + "'\n")
    assert secrets_of(tmp_path) == ["new.txt:1: password"]


def test_without_data_of_the_index_every_package_is_listed_as_not_checked(monkeypatch):
    skips: list[dict[str, Any]] = [{"name": "idna", "skip_reason": "not found"}]
    monkeypatch.setattr(scan, "_audited", lambda *arguments, given="": skips)
    outcome = scan.audit()
    assert not outcome.faults
    assert "NOT checked" in outcome.gaps and "torch" in outcome.gaps.split(": ")[-1].split(", ")
    vulnerable = [
        {"name": "idna", "version": "3.7", "vulns": [{"id": "A-1"}]},
        {"name": "own", "skip_reason": "unknown"},
    ]
    monkeypatch.setattr(scan, "_audited", lambda *arguments, given="": vulnerable)
    assert scan.audit() == scan.Outcome(["idna 3.7: A-1"], "1 packages were NOT checked: own (unknown)")


def test_every_disabled_rule_has_a_reason():
    settings = (ROOT / "pyproject.toml").read_text()
    skips = settings[settings.index("[tool.bandit]") :].split("]\n")[1]
    lines = [line for line in skips.splitlines() if '"B' in line]
    assert len(lines) > 3
    assert all(re.fullmatch(r'  "B\d+",  # .{20,}', line) for line in lines)
    marks = [line for path in (ROOT / "ftis_node").rglob("*.py") for line in path.read_text().splitlines()]
    assert all(re.search(r"# nosec B\d+: .{10,}", line) for line in marks if "nosec" in line)


def test_bandit_with_our_settings_finds_a_shell_and_a_pickle(tmp_path):
    pytest.importorskip("bandit")
    (tmp_path / "unsafe.py").write_text(
        "import pickle, subprocess\nsubprocess.run('ls ' + x, shell=True)\npickle.loads(y)\n"
    )
    command = [sys.executable, "-m", "bandit", "-q", "-c", str(ROOT / "pyproject.toml"), str(tmp_path / "unsafe.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert {"B602", "B301", "B403"} <= set(re.findall(r"\bB\d+", done.stdout))
