"""Coverage-guided fuzzing by hand: `make fuzz FUZZ_MINUTES=30`, which installs atheris.

It starts from the seeds and the corpus. The readers share one process, each chain has its own, and all have the same
time. The run continues after a failing case. Of all cases that fail at the same lines it writes the smallest to
--found: `crash-...`, and its traceback. Then the exit code is 1. With --keep, cases that reached new code are added to
the corpus.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import re
import subprocess
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

CORPUS = Path(__file__).parent / "corpus"
CHILD = "--libfuzzer"  # then a target, a folder for failing cases, and arguments of libFuzzer
READERS = "readers"
MAX_CASE_BYTES = 2048
MAX_KEPT = 6  # cases of each target
INSTRUMENTED = (
    "records",
    "validation",
    "gossip",
    "node",
    "swarm",
    "replay",
    "telemetry",
    "dashboard",
    "cli",
    "learner",
)
RUNS = re.compile(r"stat::number_of_executed_units:\s+(\d+)")


def fuzz(name: str, found: Path, arguments: list[str]) -> None:
    """Fuzz one target. It never returns, because libFuzzer ends the process."""
    import atheris

    with atheris.instrument_imports(include=[f"ftis_node.{package}" for package in INSTRUMENTED]):
        from tests.fuzz import cases
        from tests.fuzz.fuzzed_node import quiet

    findings = Findings(found)
    if name == READERS:
        atheris.Setup([sys.argv[0], *arguments], findings.wrap(cases.run_case))
    else:
        first = bytes([cases.NAMES.index(name)])
        mutate = _mutator(first, cases.CHAINS[name].kinds)
        atheris.Setup([sys.argv[0], *arguments], findings.wrap(cases.run_case), custom_mutator=mutate)
    with quiet():
        atheris.Fuzz()


def _mutator(first: bytes, kinds: Callable[[int], type | None]) -> Callable[[bytes, int, int], bytes]:
    import atheris

    from tests.fuzz.mutator import mutated

    def mutate(case: bytes, max_size: int, seed: int) -> bytes:
        changed = mutated(case[1:], random.Random(seed), kinds=kinds, raw=lambda data: atheris.Mutate(data, 256))
        return (first + changed)[:max_size]

    return mutate


class Findings:
    """Failing cases, one for each place that raised."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._smallest: dict[str, int] = {}

    def wrap(self, run_case: Callable[[bytes], None]) -> Callable[[bytes], None]:
        """Return a target that records failing cases instead of raising."""

        def run(case: bytes) -> None:
            try:
                run_case(case)
            except Exception as error:
                self._note(case, error)

        return run

    def _note(self, case: bytes, error: Exception) -> None:
        key = origin_of(error)
        if len(case) >= self._smallest.get(key, 1 << 30):
            return
        self._smallest[key] = len(case)
        path = self._folder / f"crash-{hashlib.sha256(key.encode()).hexdigest()[:8]}"
        path.write_bytes(case)
        text = f"{key}\n\n{''.join(traceback.format_exception(error))}"
        path.with_suffix(".txt").write_text(text, errors="backslashreplace")


def origin_of(error: BaseException) -> str:
    """Return a key of a failure: the type of the exception and the lines of this repository that raised it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "ftis_node" in frame.filename or "/fuzz/" in frame.filename] or frames
    lines = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in ours[-2:]]
    return " ".join((type(error).__name__, *lines))


def write_seeds(folder: Path, name: str) -> None:
    """Write seeds and cases of the corpus for a target, or for all readers."""
    from tests.fuzz import cases

    kept = [path.read_bytes() for path in CORPUS.iterdir()]
    for case in (*cases.seed_cases(), *kept):
        found = cases.name_of(case)
        if found == name or (name == READERS and found not in cases.CHAINS):
            (folder / f"{found}-{hashlib.sha256(case).hexdigest()[:8]}").write_bytes(case)


def keep(found: Path) -> int:
    """Add the largest cases below the limit of each target to the corpus; return how many are new."""
    from tests.fuzz.cases import name_of

    by_target: dict[str, list[bytes]] = {}
    for path in found.iterdir():
        if path.is_file() and (case := path.read_bytes()) and len(case) <= MAX_CASE_BYTES:
            by_target.setdefault(name_of(case), []).append(case)
    num_new = 0
    for name, some in by_target.items():
        for case in sorted(some, key=len)[-MAX_KEPT:]:
            path = CORPUS / f"{name}-{hashlib.sha256(case).hexdigest()[:8]}"
            num_new += not path.exists()
            path.write_bytes(case)
    return num_new


def run_target(name: str, folder: Path, *, seconds: float) -> int:
    """Fuzz one target in a separate process; return how many cases it ran."""
    cases = folder / "cases" / name
    cases.mkdir(parents=True, exist_ok=True)
    write_seeds(cases, name)
    command = [
        *(sys.executable, "-m", "tests.fuzz.run", CHILD, name, str(folder)),
        *(f"-max_total_time={seconds:.0f}", f"-max_len={MAX_CASE_BYTES}", "-rss_limit_mb=3072", "-timeout=60"),
        *("-print_final_stats=1", "-verbosity=1", f"-artifact_prefix={folder}/", str(cases)),
    ]
    log = folder / f"{name}.log"
    with log.open("wb") as file:
        environment = {**os.environ, "PYTHONPATH": ".", "OMP_NUM_THREADS": "1"}
        code = subprocess.run(command, env=environment, stdout=file, stderr=file, check=False).returncode
    found = RUNS.search(log.read_text(errors="replace"))
    num_runs = int(found[1]) if found else 0
    sys.stdout.write(f"{name:10} {num_runs:>9,} cases in {seconds:.0f} s, exit code {code}\n")
    sys.stdout.flush()
    return num_runs


def main() -> None:
    if sys.argv[1:2] == [CHILD]:
        fuzz(sys.argv[2], Path(sys.argv[3]), sys.argv[4:])
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="time of all targets together")
    parser.add_argument("--found", type=Path, default=Path("fuzz-out"))
    parser.add_argument("--only", action="append", help="a chain's name, or `readers`; may be given several times")
    parser.add_argument("--keep", action="store_true", help="add cases that reached new code to the corpus")
    options = parser.parse_args()
    options.found.mkdir(parents=True, exist_ok=True)
    from tests.fuzz.cases import CHAINS

    names = options.only or [READERS, *CHAINS]
    runs = [run_target(name, options.found, seconds=options.minutes * 60 / len(names)) for name in names]
    crashes = sorted(path for path in options.found.glob("*-*") if path.suffix == "" and path.is_file())
    for path in crashes:
        text = path.with_suffix(".txt")
        sys.stdout.write(f"{path}: {text.read_text().splitlines()[0] if text.exists() else 'see the logs'}\n")
    if options.keep and not crashes:
        sys.stdout.write(f"{sum(keep(options.found / 'cases' / name) for name in names)} cases kept\n")
    sys.exit(1 if crashes or not all(runs) else 0)


if __name__ == "__main__":
    main()
