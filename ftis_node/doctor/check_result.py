"""What `doctor` finds: one record for every result, so that people and programs read the same list."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable

Level = Literal["ok", "warn", "fail"]
RANKS: dict[Level, int] = {"fail": 0, "warn": 1, "ok": 2}


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One result. `id` is stable, `table.py` says what each means; `advice` is empty where nothing need be done.

    `num_bytes` is set where the finding is an amount of memory.
    """

    id: str
    level: Level
    finding: str
    advice: str = ""
    num_bytes: int | None = None

    @property
    def check(self) -> str:
        """The check that it is of: the id up to its dot."""
        return self.id.split(".")[0]

    def as_dict(self) -> dict[str, Any]:
        """As `doctor --json` prints it."""
        return {"check": self.check, **asdict(self)}


def worst_first(findings: Iterable[CheckResult]) -> list[CheckResult]:
    """Checks by their worst finding, failed ones first; what one check found stays together and in its order."""
    findings = list(findings)
    worst: dict[str, int] = {}
    for finding in findings:
        worst[finding.check] = min(RANKS[finding.level], worst.get(finding.check, RANKS["ok"]))
    first_at = {check: at for at, check in enumerate(worst)}
    return sorted(findings, key=lambda finding: (worst[finding.check], first_at[finding.check]))
