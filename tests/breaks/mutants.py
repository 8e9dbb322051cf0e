"""`make mutants PACKAGE=validation` changes one operator or value of a package at a time and lists undetected changes.

mutmut runs the tests of `tests/PACKAGE` with each change, in a copy of the tree in `build/mutants`. In this folder,
`python -m mutmut show NAME` prints a change, and `python -m mutmut browse` all of them.
"""

import shutil
import subprocess
import sys

from tests.breaks.__main__ import ROOT, copy_of_tree

FOLDER = ROOT / "build" / "mutants"
PACKAGES = ("algorithms", "records", "replay", "validation")  # quick tests without child processes
# test_reasons.py reads the source, which mutmut rewrites
SETTINGS = """
[tool.mutmut]
source_paths = ["ftis_node"]
only_mutate = ["ftis_node/{package}/*"]
do_not_mutate = ["*_pb2.py"]
pytest_add_cli_args_test_selection = ["tests/{package}"]
pytest_add_cli_args = ["--numprocesses=0", "-p", "no:cacheprovider", "--ignore=tests/validation/test_reasons.py"]
also_copy = ["bench", "docs", "examples", "proto", "README.md"]
process_isolation = "forkserver"
"""


def main(package: str) -> int:
    """Run mutmut, list the changes that no test detects, and return the exit code."""
    if package not in PACKAGES:
        sys.stderr.write(f"PACKAGE is one of {', '.join(PACKAGES)}\n")
        return 2
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    copy_of_tree(FOLDER)
    with (FOLDER / "pyproject.toml").open("a") as file:
        file.write(SETTINGS.format(package=package))
    for command in ("run", "results"):
        done = subprocess.run([sys.executable, "-m", "mutmut", command], cwd=FOLDER, check=False)
        if done.returncode:
            return done.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) == 2 else ""))
