"""Files that a forge reads: workflows against their schema and the Makefile, issue forms, hooks, the citation."""

import re
import subprocess
import sys

import pytest

from tests.deploy.files import ROOT, documents

WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_workflows_agree_with_the_schema():
    pytest.importorskip("check_jsonschema", reason="check-jsonschema is not installed: `pip install -e .[dev]`")
    checker = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows"]
    done = subprocess.run([*checker, *WORKFLOWS], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_workflows_run_targets_of_the_makefile_with_a_time_limit():
    for workflow in WORKFLOWS:
        (document,) = documents(workflow)
        assert document["permissions"]["contents"] == "read"
        for name, job in document["jobs"].items():
            assert "timeout-minutes" in job, name
            for step in job["steps"]:
                for target in re.findall(r"^make (\S+)", step.get("run", ""), re.MULTILINE):
                    assert target in TARGETS, f"{name}: there is no `make {target}`"


def test_the_workflows_run_what_continuous_integration_runs():
    (loop,) = re.findall(r"for target in ([a-z -]+);", (ROOT / ".ci/run").read_text())
    (checks,) = [each for each in WORKFLOWS if each.stem == "checks"]
    assert set(re.findall(r"run: make (\S+)", checks.read_text())) == set(loop.split())


def test_a_release_is_built_twice_compared_and_attached():
    (document,) = documents(ROOT / ".github/workflows/release.yml")
    packages, publish = (
        [step.get("run", "") for step in document["jobs"][name]["steps"]] for name in ("packages", "publish")
    )
    assert packages.count("make packages") == 2 and "diff -r ../first dist" in packages
    assert publish[-1].startswith('gh release create "$GITHUB_REF_NAME" dist/')
    assert document["jobs"]["publish"]["permissions"]["contents"] == "write"


def test_the_matrix_begins_with_the_lowest_supported_python():
    (document,) = documents(ROOT / ".github/workflows/checks.yml")
    pythons = document["jobs"]["test"]["strategy"]["matrix"]["python"]
    (lowest,) = re.findall(r'requires-python = ">=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert pythons[0] == lowest


def test_the_citation_names_the_paper_of_the_readme():
    (citation,) = documents(ROOT / "CITATION.cff")
    (reference,) = citation["references"]
    (paper,) = reference["identifiers"]
    number = paper["value"].removeprefix("arXiv:")
    readme = (ROOT / "README.md").read_text()
    assert f"arXiv {number}" in readme
    assert reference["title"] in readme
