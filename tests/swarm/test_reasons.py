"""Every reason has a sentence; the page of refusals has the same sentences."""

import re
from pathlib import Path

from ftis_node.gossip import FetchOutcome
from ftis_node.swarm.reasons import BEHAVIOUR, REFUSALS, UNKNOWN, sentence
from ftis_node.swarm.reputation import BY_OPERATOR, GOOD_BEHAVIOUR, Behaviour

PAGE = Path(__file__).parents[2] / "docs/reference/refusals.md"


def test_the_page_of_refusals_has_the_same_sentences():
    text = PAGE.read_text(encoding="utf-8")
    table = text[text.index("| reason | the group is refused") : text.index("## Other names")]
    assert dict(re.findall(r"^\| `(\w+)` \| (.+?) \| .+ \|$", table, flags=re.MULTILINE)) == {
        name: reason.meaning for name, reason in REFUSALS.items()
    }


def test_every_reason_in_a_peers_record_has_a_sentence():
    for reason in [
        *(set(Behaviour) - GOOD_BEHAVIOUR),
        BY_OPERATOR,
        "logprob_mismatch",
        "announcement_flood",
        "announcement_malformed",
    ]:
        assert sentence(reason) != UNKNOWN, reason
    for outcome in FetchOutcome:
        assert outcome.value.replace("_", " ") in sentence(f"pull_{outcome.value}")
    assert sentence("nonsense") == UNKNOWN
    assert not set(REFUSALS) & set(BEHAVIOUR)
