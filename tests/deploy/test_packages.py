"""The wheel and the sdist: equal files give equal bytes, and the wheel works without the repository."""

import os
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from ftis_node import __version__
from tests.deploy.files import ROOT

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
