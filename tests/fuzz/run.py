"""Coverage-guided fuzzing by hand: `make fuzz FUZZ_MINUTES=30`, which installs atheris.

Each target has its own process. All chains have the same time, and all readers together that of one chain. A target
starts from its seeds and its corpus, and ends at the first failing case, which it writes to `fuzz-out/crash-TARGET-*`.
The traceback is in `fuzz-out/TARGET.log`. The exit code is then 1. To extend the corpus, copy cases from
`fuzz-out/cases/TARGET` to `tests/fuzz/corpus/TARGET-...`.
"""

import argparse
import hashlib
import os
import random
import subprocess
import sys
from pathlib import Path

CORPUS = Path(__file__).parent / "corpus"
FOUND = Path("fuzz-out")
CHILD = "--libfuzzer"  # then a target, and arguments of libFuzzer
MAX_CASE_BYTES = 2048
INSTRUMENTED = "records validation gossip node swarm replay telemetry dashboard cli learner".split()


def fuzz(name: str, arguments: list[str]) -> None:
    """Fuzz one target. It never returns, because libFuzzer ends the process."""
    import atheris

    with atheris.instrument_imports(include=[f"ftis_node.{package}" for package in INSTRUMENTED]):
        from tests.fuzz.fuzzed_node import quiet
        from tests.fuzz.mutator import mutated
        from tests.fuzz.targets import TARGETS

    target = TARGETS[name]
    options = {}
    if (kinds := target.kinds) is not None:

        def mutate(case: bytes, max_size: int, seed: int) -> bytes:
            rng = random.Random(seed)
            return mutated(case, rng, kinds=kinds, raw=lambda data, _: atheris.Mutate(data, 256))[:max_size]

        options["custom_mutator"] = mutate
    atheris.Setup([sys.argv[0], *arguments], target.run, **options)
    with quiet():
        atheris.Fuzz()


def run_target(name: str, *, seconds: float) -> int:
    """Fuzz one target in a separate process and return its exit code."""
    from tests.fuzz.targets import TARGETS

    cases = FOUND / "cases" / name
    cases.mkdir(parents=True, exist_ok=True)
    for case in (*TARGETS[name].seeds, *(path.read_bytes() for path in CORPUS.glob(f"{name}-*"))):
        (cases / hashlib.sha256(case).hexdigest()[:8]).write_bytes(case)
    command = [
        *(sys.executable, "-m", "tests.fuzz.run", CHILD, name, f"-max_total_time={seconds:.0f}"),
        *(f"-max_len={MAX_CASE_BYTES}", "-rss_limit_mb=3072", "-timeout=60", "-print_final_stats=1"),
        *(f"-artifact_prefix={FOUND}/crash-{name}-", str(cases)),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (FOUND / f"{name}.log").open("wb") as log:
        code = subprocess.run(command, env=environment, stdout=log, stderr=log, check=False).returncode
    lines = (FOUND / f"{name}.log").read_text(errors="replace").splitlines()
    runs = next((line.split()[-1] for line in lines if "number_of_executed_units" in line), "0")
    sys.stdout.write(f"{name:14} {runs:>9} cases in {seconds:.0f} s, exit code {code}\n")
    sys.stdout.flush()
    return code or int(runs == "0")


def main() -> None:
    if sys.argv[1:2] == [CHILD]:
        fuzz(sys.argv[2], sys.argv[3:])
    from tests.fuzz.targets import READERS, TARGETS

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="time of all targets together")
    parser.add_argument("names", nargs="*", metavar="TARGET", help=", ".join(TARGETS))
    options = parser.parse_args()
    FOUND.mkdir(exist_ok=True)
    names = options.names or list(TARGETS)
    shares = {name: 1 if name in READERS else len(READERS) for name in names}
    unit_s = options.minutes * 60 / sum(shares.values())
    codes = [run_target(name, seconds=max(1.0, share * unit_s)) for name, share in shares.items()]
    sys.stdout.writelines(f"{path}\n" for path in sorted(FOUND.glob("crash-*")))
    sys.exit(int(any(codes)))


if __name__ == "__main__":
    main()
