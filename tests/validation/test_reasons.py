"""Every refusal reason has a row in docs/reference/refusals.md, and the row names the peer at fault."""

import re
from pathlib import Path

from ftis_node.swarm.duplicates import DuplicateKind
from ftis_node.swarm.reasons import AFTER_VALIDATION, attribute_refusal
from ftis_node.swarm.reputation import Behaviour

ROOT = Path(__file__).parents[2]
SOURCES = [
    path
    for package in ("validation", "records")
    for path in (ROOT / "ftis_node" / package).glob("*.py")
    if not path.name.startswith("weights")  # weight offers have other reasons (docs/train/roles.md)
]
OF_DIRECTORY_RECORDS = {"stale_record", "expired"}
ROWS = dict(
    re.findall(r"^\| `(\w+)` \|.*\| ([^|]+) \|$", (ROOT / "docs/reference/refusals.md").read_text(), flags=re.MULTILINE)
)


def _reasons() -> set[str]:
    found = {
        reason for path in SOURCES for reason in re.findall(r"(?:Refusal|RecordError)\(\s*\"(\w+)\"", path.read_text())
    }
    return found | {kind.value for kind in DuplicateKind} | AFTER_VALIDATION


def test_every_reason_has_a_row_and_every_row_a_reason():
    assert _reasons() - OF_DIRECTORY_RECORDS <= set(ROWS)
    assert set(ROWS) <= _reasons()


def test_the_rows_name_the_peer_at_fault():
    for reason, fault in ROWS.items():
        if reason in {"quota", "scoring_quota", "run", *AFTER_VALIDATION}:
            continue  # their attribution depends on more than the reason
        blamed, behaviour = attribute_refusal(reason, origin="relay", sender="signer", signed=True)
        expected = "nobody" if behaviour is Behaviour.HARMLESS else f"{blamed}: {behaviour.value}"
        assert fault.startswith(expected), reason
