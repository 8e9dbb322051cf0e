"""Every rejection reason has its row in docs/reference/rejections.md, and the row says whose fault it is."""

from __future__ import annotations

import re
from pathlib import Path

from ftis_node.swarm.duplicates import DuplicateKind
from ftis_node.swarm.reasons import AFTER_VALIDATION, NO_FAULT, ORIGIN_FAULT, SIGNER_FAULT, attribute_refusal
from ftis_node.swarm.reputation import Behaviour

ROOT = Path(__file__).parents[2]
SOURCES = [
    path
    for room in ("validation", "records")
    for path in (ROOT / "ftis_node" / room).glob("*.py")
    if not path.name.startswith("weights")  # offers of weights have their own reasons (docs/train/roles.md)
]
NOT_AT_THE_DOOR = {"stale_record", "expired"}  # of directory records
ROWS = dict(
    re.findall(
        r"^\| `(\w+)` \|.*\| ([^|]+) \|$", (ROOT / "docs/reference/rejections.md").read_text(), flags=re.MULTILINE
    )
)


def _named() -> set[str]:
    found = {
        reason for path in SOURCES for reason in re.findall(r"(?:Refusal|RecordError)\(\s*\"(\w+)\"", path.read_text())
    }
    return found | {kind.value for kind in DuplicateKind} | AFTER_VALIDATION


def test_every_reason_has_its_row_and_no_row_is_out_of_date() -> None:
    assert _named() - NOT_AT_THE_DOOR <= set(ROWS)
    assert set(ROWS) <= _named()
    assert {*NO_FAULT, *ORIGIN_FAULT, *SIGNER_FAULT} <= set(ROWS)


def test_the_rows_say_whom_the_node_blames() -> None:
    for reason, fault in ROWS.items():
        if reason in {"quota", "scoring_quota", "wrong_encoding", "run", *AFTER_VALIDATION}:
            continue  # these depend on more than the reason
        blamed, conduct = attribute_refusal(reason, origin="relay", sender="signer", signed=True)
        expected = "nobody" if conduct is Behaviour.HARMLESS else f"{blamed}: {conduct.value}"
        assert fault.startswith(expected), reason
