"""The program that checks a GPU has the documented parts, and a case that fails does not affect others."""

import contextlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from gpu import running
from gpu.cases import NEED_VLLM, PARTS, Case, Options

ROOT = Path(__file__).parents[2]
BENCH = ROOT / "bench"

SMALL = Options("cpu", small=True)
# A case that succeeds, one that fails, and one that hangs.
MODULE = """import subprocess, sys
def case(options, *, name, runs):
    with open(runs, "a") as file:
        file.write(name + "\\n")
    print("a line for people")
    if name == "peak":
        sys.exit("no such instruction")
    if name == "copies":
        options.note(early=3)
        child = subprocess.Popen(["sleep", "600"])
        with open(runs + ".pid", "w") as file:
            file.write(str(child.pid))
        child.wait()
    return {"figure": 7}
"""
# Hide packages as on a machine without them: neither `find_spec` nor an import finds them.
BLOCKED = """import importlib.machinery as machinery
find = machinery.PathFinder.find_spec
def find_spec(name, path=None, target=None):
    return None if name.split(".")[0] in ("vllm", "hivemind", "trl") else find(name, path, target)
machinery.PathFinder.find_spec = staticmethod(find_spec)
"""
IMPORTS = """from importlib import import_module
from gpu.cases import NEED_VLLM, PARTS, Options, cases_of
for options in (Options("cpu", small=True), Options("cuda")):
    for part in PARTS:
        for case in cases_of(part, options):
            if part not in NEED_VLLM:
                getattr(import_module(case.module), case.function)
import sys
assert not {"vllm", "hivemind"} & set(sys.modules)
"""


@pytest.fixture
def cases(tmp_path, monkeypatch):
    """The cases of the part `env`, from a small module."""
    (tmp_path / "fake_measurements.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    fakes = [
        Case("env", name, "fake_measurements", "case", expected_s, {"name": name, "runs": str(tmp_path / "runs")})
        for name, expected_s in (("machine", 20.0), ("peak", 20.0), ("copies", 2.0))
    ]
    monkeypatch.setattr(running, "cases_of", lambda part, options: fakes)
    return fakes


def _blocked(tmp_path: Path, *command: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "sitecustomize.py").write_text(BLOCKED)
    paths = os.pathsep.join([str(tmp_path), str(BENCH), str(ROOT)])
    environment = os.environ | {"PYTHONPATH": paths, "TMPDIR": str(tmp_path)}
    return subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, check=False)


def test_the_parts_equal_those_of_the_page():
    page = (ROOT / "docs/research/performance.md").read_text()
    table = page.split("<!-- parts of gpu_check -->")[1].split("\n\n")[0]
    rows = re.findall(r"^\| `(\w+)` \| (yes|no) \|", table, re.MULTILINE)
    assert rows == [(part, "yes" if part in NEED_VLLM else "no") for part in PARTS]


def test_a_case_that_fails_or_hangs_does_not_affect_others(cases, tmp_path):
    found = running.run_part("env", SMALL, tmp_path, together=2)
    by_name: dict[str, Any] = {case["case"]: case for case in found["cases"]}
    assert [by_name[name]["ok"] for name in ("machine", "peak", "copies")] == [True, False, False]
    assert (found["ok"], by_name["machine"]["figure"]) == (False, 7)
    assert "no such instruction" in by_name["peak"]["error"]
    assert (by_name["copies"]["error"], by_name["copies"]["early"]) == ("took longer than 6 s", 3)
    with contextlib.suppress(psutil.NoSuchProcess):  # the case's child is killed too
        assert psutil.Process(int((tmp_path / "runs.pid").read_text())).status() == psutil.STATUS_ZOMBIE
    assert json.loads((tmp_path / "env.json").read_text()) == found


def test_a_case_with_a_point_in_its_name_has_its_own_file(cases, tmp_path):
    kept = [tmp_path / f"memory-0.5b-{name}.json" for name in ("full", "lora")]
    for path in kept:
        path.write_text(json.dumps({"ok": True, "from": path.name}))
    found = [running.kept_or_run(cases[0], SMALL, path.with_suffix("")) for path in kept]
    assert [each["from"] for each in found] == [path.name for path in kept]


def test_parts_without_vllm_import_neither_vllm_nor_hivemind(tmp_path):
    done = _blocked(tmp_path, "-c", IMPORTS)
    assert done.returncode == 0, done.stderr
    assert _blocked(tmp_path, "-c", "import vllm").returncode == 1, "the packages are hidden"


def test_transfer_runs_without_vllm_and_hivemind(tmp_path):
    out = tmp_path / "out"
    done = _blocked(
        tmp_path, str(BENCH / "gpu_check.py"), "transfer", "--device", "cpu", "--small", "--out", str(out)
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = done.stdout.splitlines()
    found = json.loads(line)
    assert json.loads((out / "transfer.json").read_text()) == found
    by_name = {case["case"]: case for case in found["cases"]}
    assert list(by_name) == ["file", "registered", "ipc"]
    assert all(by_name["ipc"][key] > 0 for key in ("export_s", "open_s", "ipc_s"))
    assert all(by_name[name]["d2h_gbps"] > 0 and by_name[name]["h2d_gbps"] > 0 for name in ("file", "registered"))


def test_no_program_of_bench_needs_the_repository_in_the_path():
    files = Path(__file__).parents[2].joinpath("bench").rglob("*.py")
    assert [path for path in files if "\nfrom bench" in path.read_text()] == []
