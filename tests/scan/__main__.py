"""`make scan`, `python -m tests.scan`: bandit over the package, secrets in the repository, known holes in dependencies.

The three run side by side. Each says what it found, and the seconds that it took. The last needs data of an index that
not every machine reaches: then it names what it did not check and the scan goes on, for a machine without a network
must be able to test; `--strict` makes that a fault, too.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import distributions
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tests.scan.secrets import secrets_of

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parents[2]
PROBE = "idna==3.7"  # has a known hole: an index whose data is at hand tells of it
AUDIT_LIMIT_S = 240


class Outcome(NamedTuple):
    """What one of the three said. `gaps`: what it could not look at."""

    faults: list[str]
    gaps: str = ""


def bandit() -> Outcome:
    """bandit over ftis_node, by its section in pyproject.toml."""
    command = [sys.executable, "-m", "bandit", "--quiet", "--recursive", "ftis_node", "--configfile", "pyproject.toml"]
    done = _run([*command, "--format", "custom", "--msg-template", "{relpath}:{line}: {test_id} {msg}"])
    if done.returncode not in (0, 1):
        return Outcome([f"bandit failed: {done.stderr.strip()[-500:]}"])
    return Outcome(done.stdout.splitlines())


def secrets() -> Outcome:
    """Our own search for secrets."""
    return Outcome(secrets_of(ROOT))


def audit() -> Outcome:
    """pip-audit over what is installed here."""
    installed = sorted({one.metadata["Name"].lower() for one in distributions()})
    unchecked = f"{len(installed)} packages were NOT checked for known holes: {', '.join(installed)}"
    try:
        told = _audited("--requirement", "/dev/stdin", "--no-deps", "--disable-pip", given=PROBE)
        if not any(one.get("vulns") for one in told):
            return Outcome([], f"pip-audit's data cannot be reached; {unchecked}")
        told = _audited("--local", "--skip-editable")
    except (subprocess.TimeoutExpired, ValueError) as error:
        return Outcome([], f"pip-audit did not answer ({type(error).__name__}); {unchecked}")
    skipped = [f"{one['name']} ({one['skip_reason']})" for one in told if "skip_reason" in one]
    faults = [f"{one['name']} {one['version']}: {hole['id']}" for one in told for hole in one.get("vulns", [])]
    return Outcome(faults, f"{len(skipped)} packages were NOT checked: {', '.join(skipped)}" if skipped else "")


def _audited(*arguments: str, given: str = "") -> list[dict[str, object]]:
    """What pip-audit tells of each package. Raises ValueError where that is no JSON."""
    command = [sys.executable, "-m", "pip_audit", "--progress-spinner", "off", "--format", "json", *arguments]
    answer = json.loads(_run(command, given=given).stdout)
    return list(answer["dependencies"])


def _run(command: list[str], *, given: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=ROOT, input=given, capture_output=True, text=True, check=False, timeout=AUDIT_LIMIT_S
    )


def timed(look: Callable[[], Outcome]) -> tuple[str, Outcome, float]:
    """A look's name, what it found, and its seconds."""
    began = time.monotonic()
    outcome = look()
    return look.__name__, outcome, time.monotonic() - began


def main(arguments: list[str]) -> int:
    """0 where nothing was found."""
    with ThreadPoolExecutor() as side_by_side:
        looks = list(side_by_side.map(timed, (bandit, secrets, audit)))
    num_faults = 0
    for name, outcome, took_s in looks:
        for fault in outcome.faults:
            sys.stdout.write(f"{fault}\n")
        if outcome.gaps:
            sys.stdout.write(f"{name}: {outcome.gaps}\n")
        sys.stdout.write(f"{name}: {len(outcome.faults)} found in {took_s:.1f} s\n")
        num_faults += len(outcome.faults) + ("--strict" in arguments and bool(outcome.gaps))
    return 1 if num_faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
