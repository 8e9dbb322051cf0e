"""`make breaks`, `python -m tests.breaks [NAME ...]` applies known faults one by one and names the test that finds it.

The faults are the tables `[[fault]]` of `security.toml`, `exactly_once.toml` and `mathematics.toml`. A fault replaces
the text `old` of one file with `new`. `old` occurs exactly once in the file. `why` is the fault and its effect for a
user in one sentence. `tests` are paths for pytest; one of these tests finds the fault.

A fault is applied to a copy of the working tree, and its tests run there. The tests that found faults then run without
them. The exit code is 1 if a fault is not found, or if a test fails without its fault. It is 2 for an unknown name.
"""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.util import cache_from_source
from pathlib import Path

from ftis_node.errors import FtisError, UsageError

ROOT = Path(__file__).parents[2]
LIMIT_S = 1800.0  # of one run; the suite limits each test
INTERRUPTED = 130
TESTS_FAILED = 1  # exit code of pytest
TEST = r"(?:[\w.-]+/)*[\w.-]+\.py::\w+(?:\[.*?\])?"  # without a function, a file could not be imported
FAILED = re.compile(rf"^(?:FAILED|ERROR) ({TEST})(?: - .*)?$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. `topic` is the stem of its file; paths are relative to the root of the repository."""

    topic: str
    name: str
    why: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def applied_to(self, text: str) -> str:
        """Return a file's text with the fault. Raises ValueError if `old` does not occur exactly once."""
        if (found := text.count(self.old)) != 1 or self.new == self.old:
            raise ValueError(f"{self.name}: {self.old!r} occurs {found} times in {self.file}")
        return text.replace(self.old, self.new)


def all_faults() -> list[Fault]:
    return [
        Fault(path.stem, tests=tuple(entry.pop("tests")), **entry)
        for path in sorted(Path(__file__).parent.glob("*.toml"))
        for entry in tomllib.loads(path.read_text())["fault"]
    ]


def chosen(faults: Sequence[Fault], names: Sequence[str]) -> list[Fault]:
    """Return the faults with these names or topics, or all. Raises UsageError for an unknown name."""
    known = {name for one in faults for name in (one.name, one.topic)}
    if unknown := [name for name in names if name not in known]:
        raise UsageError(f"no fault {unknown[0]!r}: `python -m tests.breaks --list` prints the names")
    return [one for one in faults if not names or one.name in names or one.topic in names]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.breaks", description="Name the test that finds each fault.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="a fault, or security, exactly_once or mathematics")
    parser.add_argument("--list", action="store_true", help="list the faults and exit")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # removes the copy, as ctrl-C does
    try:
        faults = chosen(all_faults(), options.names)
        if options.list:
            write_line("\n".join(f"{one.topic} {one.name}: {one.why}" for one in faults))
            return 0
        with tempfile.TemporaryDirectory(prefix="breaks-") as folder:
            return run_all(copy_of_tree(Path(folder).resolve()), faults)
    except KeyboardInterrupt:
        return INTERRUPTED
    except FtisError as error:
        sys.stderr.write(f"breaks: {error}\n")
        return error.exit_code


def copy_of_tree(folder: Path) -> Path:
    """Copy the files that git tracks or would add. Raises FtisError if tests would import another `ftis_node`."""
    listing = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(listing, capture_output=True, text=True, check=True).stdout.split("\0"):
        if (ROOT / name).is_file():  # else it is removed, but not committed yet
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    found = run_python(folder, "-c", "import ftis_node; print(ftis_node.__file__)").stdout.strip()
    if found != str(folder / "ftis_node" / "__init__.py"):
        raise FtisError(f"the tests in {folder} would import {found}")
    return folder


def run_all(tree: Path, faults: Sequence[Fault]) -> int:
    """Apply each fault and run its tests, then run the tests that found faults without them. Return the exit code."""
    found_by = {}
    for number, one in enumerate(faults, start=1):
        if test := first_failure_with(one, tree):
            found_by[one.name] = test
        write_line(f"[{number} of {len(faults)}] {one.name}: {f'found by {test}' if test else 'NOT FOUND'}")
    always_failing = failures(tree, sorted(set(found_by.values()))) if found_by else []
    for name, test in found_by.items():
        if test in always_failing:
            write_line(f"{name}: NOT FOUND, because {test} fails without it, too")
    num_found = sum(test not in always_failing for test in found_by.values())
    write_line(f"{num_found} of {len(faults)} faults found")
    return int(num_found < len(faults))


def first_failure_with(fault: Fault, tree: Path) -> str | None:
    """Return the first of a fault's tests that fails, None if all pass."""
    path = tree / fault.file
    text = path.read_text()
    try:
        path.write_text(fault.applied_to(text))
    except ValueError as error:
        raise FtisError(str(error)) from None
    bytecode = Path(cache_from_source(str(path)))
    bytecode.unlink(missing_ok=True)  # Python compares size and time in seconds, and a fault may change neither
    try:
        return next(iter(failures(tree, fault.tests, "--exitfirst")), None)
    finally:
        path.write_text(text)
        bytecode.unlink(missing_ok=True)


def failures(tree: Path, tests: Iterable[str], *options: str) -> list[str]:
    """Run tests in the tree and return those that fail. Raises FtisError if they cannot run."""
    done = run_python(tree, "-m", "pytest", *tests, "-q", "-n0", "-p", "no:cacheprovider", *options)
    failed = FAILED.findall(done.stdout)
    if done.returncode not in (0, TESTS_FAILED) or (done.returncode and not failed):
        raise FtisError(f"pytest ended with {done.returncode}: {(done.stdout + done.stderr)[-500:].strip()}")
    return failed


def run_python(tree: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python in the tree, with the tree's packages. Raises FtisError after `LIMIT_S`."""
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    command = [sys.executable, *arguments]
    try:
        return subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, check=False, timeout=LIMIT_S
        )
    except subprocess.TimeoutExpired:
        raise FtisError(f"{' '.join(command)} still ran after {LIMIT_S:.0f} s") from None


def write_line(text: str) -> None:
    """Print a line and flush, so that a pipe shows the progress."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
