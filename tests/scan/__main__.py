"""`make scan`, `python -m tests.scan`: bandit on the package, secrets in the repository, vulnerable dependencies.

The three scanners run in parallel. Each prints its findings and its seconds. The audit of dependencies needs data of an
index. Without that data it lists the packages that it did not check, and the scan passes; with `--strict` it fails.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import distributions
from pathlib import Path
from typing import NamedTuple

from tests.scan.secrets import secrets_of

ROOT = Path(__file__).parents[2]
PROBE = "idna==3.7"  # has a known vulnerability: an index with data reports it
AUDIT_LIMIT_S = 240


class Outcome(NamedTuple):
    """The result of one scanner. `gaps`: what it did not check."""

    faults: list[str]
    gaps: str = ""


def bandit() -> Outcome:
    command = [sys.executable, "-m", "bandit", "--quiet", "--recursive", "ftis_node", "--configfile", "pyproject.toml"]
    done = _run([*command, "--format", "custom", "--msg-template", "{relpath}:{line}: {test_id} {msg}"])
    if done.returncode not in (0, 1):
        return Outcome([f"bandit failed: {done.stderr.strip()[-500:]}"])
    return Outcome(done.stdout.splitlines())


def secrets() -> Outcome:
    """Search the repository for secrets."""
    return Outcome(secrets_of(ROOT))


def audit() -> Outcome:
    """Run pip-audit on the installed packages."""
    installed = sorted({one.metadata["Name"].lower() for one in distributions()})
    unchecked = f"{len(installed)} packages were NOT checked for known vulnerabilities: {', '.join(installed)}"
    try:
        audited = _audited("--requirement", "/dev/stdin", "--no-deps", "--disable-pip", given=PROBE)
        if not any(one.get("vulns") for one in audited):
            return Outcome([], f"pip-audit's data cannot be reached; {unchecked}")
        audited = _audited("--local", "--skip-editable")
    except (subprocess.TimeoutExpired, ValueError) as error:
        return Outcome([], f"pip-audit did not answer ({type(error).__name__}); {unchecked}")
    skipped = [f"{one['name']} ({one['skip_reason']})" for one in audited if "skip_reason" in one]
    faults = [
        f"{one['name']} {one['version']}: {vulnerability['id']}"
        for one in audited
        for vulnerability in one.get("vulns", [])
    ]
    return Outcome(faults, f"{len(skipped)} packages were NOT checked: {', '.join(skipped)}" if skipped else "")


def _audited(*arguments: str, given: str = "") -> list[dict[str, object]]:
    """Return pip-audit's report on each package. Raises ValueError if it is no JSON."""
    command = [sys.executable, "-m", "pip_audit", "--progress-spinner", "off", "--format", "json", *arguments]
    report = json.loads(_run(command, given=given).stdout)
    return list(report["dependencies"])


def _run(command: list[str], *, given: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=ROOT, input=given, capture_output=True, text=True, check=False, timeout=AUDIT_LIMIT_S
    )


def timed(scanner: Callable[[], Outcome]) -> tuple[str, Outcome, float]:
    began = time.monotonic()
    outcome = scanner()
    return scanner.__name__, outcome, time.monotonic() - began


def main(arguments: list[str]) -> int:
    with ThreadPoolExecutor() as executor:
        results = list(executor.map(timed, (bandit, secrets, audit)))
    num_faults = 0
    for name, outcome, took_s in results:
        for fault in outcome.faults:
            sys.stdout.write(f"{fault}\n")
        if outcome.gaps:
            sys.stdout.write(f"{name}: {outcome.gaps}\n")
        sys.stdout.write(f"{name}: {len(outcome.faults)} found in {took_s:.1f} s\n")
        num_faults += len(outcome.faults) + ("--strict" in arguments and bool(outcome.gaps))
    return 1 if num_faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
