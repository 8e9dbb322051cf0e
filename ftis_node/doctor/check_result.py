"""Result of a check of `doctor`: one record for people and programs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable

Level = Literal["ok", "warn", "fail"]
RANKS: dict[Level, int] = {"fail": 0, "warn": 1, "ok": 2}


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One result. `id` is a key of `table.py`, which explains it. `advice` is empty if there is nothing to do.

    `num_bytes` is set if the result is an amount of memory.
    """

    id: str
    level: Level
    finding: str
    advice: str = ""
    num_bytes: int | None = None

    @property
    def check(self) -> str:
        """The check of the result: the id up to its dot."""
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
