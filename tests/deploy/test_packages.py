"""The wheel and the sdist, and files that a forge reads: workflows, issue forms, hooks, the citation."""

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from ftis_node import __version__
from tests.deploy.files import ROOT, documents

pytest.importorskip("build", reason="the package `build` is not installed: `pip install -e .[dev]`")

BUILD = [sys.executable, "-m", "build", "--no-isolation", "--outdir"]
WHEEL = f"ftis_node-{__version__}-py3-none-any.whl"
SDIST = f"ftis_node-{__version__}.tar.gz"


def run(command: Sequence[str | Path], folder: Path, **environment: str) -> str:
    """Run `command` in `folder` and return its output. Fail the test with the output if the exit code is not 0."""
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(folder: Path) -> Path:
    """Build both packages from a copy of the files that git does not ignore. Returns the folder of the packages."""
    source, packages = folder / "source", folder / "packages"
    files = run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], ROOT).split("\0")
    for name in filter(None, files):
        if (ROOT / name).is_file():
            copy = source / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes((ROOT / name).read_bytes())
    run([*BUILD, packages, "."], source, SOURCE_DATE_EPOCH="1700000000")
    return packages


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    return build(tmp_path_factory.mktemp("first"))


def test_two_builds_of_the_same_files_give_the_same_bytes(packages, tmp_path):
    again = build(tmp_path)
    assert sorted(each.name for each in packages.iterdir()) == [WHEEL, SDIST]
    for name in (WHEEL, SDIST):
        assert (packages / name).read_bytes() == (again / name).read_bytes(), name


def test_wheel_and_sdist_contain_the_pages_and_the_license_and_no_tests(packages):
    in_wheel = set(zipfile.ZipFile(packages / WHEEL).namelist())
    assert f"ftis_node-{__version__}.dist-info/licenses/LICENSE" in in_wheel
    assert {"ftis_node/_docs/index.md", "ftis_node/_docs/get-started/quickstart.md", "ftis_node/py.typed"} <= in_wheel
    with tarfile.open(packages / SDIST) as archive:
        in_sdist = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "README.md", "docs/index.md", "setup.py"} <= in_sdist
    assert not [name for name in in_wheel | in_sdist if name.startswith("tests/")]


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
    assert f"arXiv {number}" in readme and reference["title"] in readme
