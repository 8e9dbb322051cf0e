"""Coverage-guided fuzzing by hand: `make fuzz FUZZ_MINUTES=10`, which installs atheris.

Starts from the seeds and the kept corpus. A case that breaks a target is written as `crash-...` into --found and ends
the run with its traceback. With --keep, what reached new code is reduced and put into the kept corpus.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import subprocess
import sys
from pathlib import Path

CORPUS = Path(__file__).parent / "corpus"
CHILD = "--libfuzzer"  # what follows is libFuzzer's
MAX_CASE_BYTES = 2048
MAX_KEPT = 64


def fuzz(arguments: list[str]) -> None:
    """Never returns: libFuzzer ends the process."""
    import atheris

    with atheris.instrument_imports(include=["ftis_node.records", "ftis_node.validation", "ftis_node.gossip"]):
        from tests.fuzz import targets

    atheris.Setup([sys.argv[0], *arguments], targets.run_case)
    atheris.Fuzz()


def write_seeds(folder: Path) -> None:
    from tests.fuzz.targets import name_of, seed_cases

    for case in seed_cases():
        (folder / f"{name_of(case)}-{hashlib.sha256(case).hexdigest()[:8]}").write_bytes(case)


def keep(found: Path) -> int:
    """Puts the smallest cases of each target from `found` into the kept corpus; returns how many are new."""
    from tests.fuzz.targets import TARGETS, name_of

    by_target: dict[str, list[bytes]] = {}
    for path in found.iterdir():
        if path.is_file() and (case := path.read_bytes()) and len(case) <= MAX_CASE_BYTES:
            by_target.setdefault(name_of(case), []).append(case)
    num_new = 0
    for name, cases in by_target.items():
        for case in sorted(cases, key=len)[-MAX_KEPT // len(TARGETS) :]:
            path = CORPUS / f"{name}-{hashlib.sha256(case).hexdigest()[:8]}"
            num_new += not path.exists()
            path.write_bytes(case)
    return num_new


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--found", type=Path, default=Path("fuzz-out"))
    parser.add_argument("--keep", action="store_true", help="add what reached new code to the kept corpus")
    if sys.argv[1:2] == [CHILD]:
        fuzz(sys.argv[2:])
    options = parser.parse_args()
    cases = options.found / "cases"
    cases.mkdir(parents=True, exist_ok=True)
    write_seeds(cases)
    command = [
        *(sys.executable, "-m", "tests.fuzz.run", CHILD),
        *(f"-max_total_time={options.minutes * 60:.0f}", f"-max_len={MAX_CASE_BYTES}", "-rss_limit_mb=2048"),
        *("-timeout=10", f"-artifact_prefix={options.found}/", str(cases), str(CORPUS)),
    ]
    with contextlib.suppress(KeyboardInterrupt):
        code = subprocess.run(command, env={**os.environ, "PYTHONPATH": "."}, check=False).returncode
        if options.keep and code == 0:
            sys.stdout.write(f"{keep(cases)} cases kept\n")
        sys.exit(code)


if __name__ == "__main__":
    main()
