"""The results of `doctor`: a level, a finding and advice. `docs/reference/doctor.md` explains each by its id."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

Level = Literal["ok", "warn", "fail"]
RANKS: dict[Level, int] = {"fail": 0, "warn": 1, "ok": 2}
NETWORK_CHECKS = frozenset({"clock", "hub", "nat", "peer", "port", "route"})  # the exit code is 4 if one fails


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One result. `id` is CHECK.NAME. `advice` is empty if there is nothing to do.

    `num_bytes` is set if the result is an amount of memory.
    """

    id: str
    level: Level
    finding: str
    advice: str = ""
    num_bytes: int | None = None

    @property
    def check(self) -> str:
        return self.id.split(".")[0]

    def as_dict(self) -> dict[str, Any]:
        """Return the fields that `doctor --json` prints."""
        return {"check": self.check, **asdict(self)}


def worst_first(findings: Iterable[CheckResult]) -> list[CheckResult]:
    """Sort checks by their worst result, failed ones first. The results of one check stay together and in order."""
    findings = list(findings)
    worst: dict[str, int] = {}
    for finding in findings:
        worst[finding.check] = min(RANKS[finding.level], worst.get(finding.check, RANKS["ok"]))
    first_at = {check: at for at, check in enumerate(worst)}
    return sorted(findings, key=lambda finding: (worst[finding.check], first_at[finding.check]))
