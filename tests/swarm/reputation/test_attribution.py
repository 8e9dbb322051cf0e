"""Blame: the signer for what it signed, the one that handed it over for what it could see, else nobody."""

from __future__ import annotations

import pytest

from ftis_node.swarm.reputation.attribution import blame_for
from ftis_node.swarm.reputation.score import Conduct


@pytest.mark.parametrize(
    ("reason", "signed", "blamed", "conduct"),
    [
        ("parse", False, "relay", Conduct.REFUSED),
        ("signature", False, "relay", Conduct.LIED),
        ("run", False, "relay", Conduct.REFUSED),
        ("banned", False, "relay", Conduct.MISHAP),
        ("quota", False, "relay", Conduct.MISHAP),
        ("duplicate", True, "relay", Conduct.MISHAP),
        ("stale", True, "relay", Conduct.MISHAP),
        ("unscored", True, "relay", Conduct.MISHAP),
        ("vocabulary", True, "signer", Conduct.REFUSED),
        ("reward", True, "signer", Conduct.LIED),
        ("copy", True, "signer", Conduct.COPIED),
        ("copy_ours", True, "signer", Conduct.LIED),
    ],
)
def test_who_is_blamed_for_what(reason: str, signed: bool, blamed: str, conduct: Conduct) -> None:
    assert blame_for(reason, origin="relay", sender="signer", signed=signed) == (blamed, conduct)


def test_a_flood_is_the_senders_only_from_its_own_hand() -> None:
    assert blame_for("quota", origin="signer", sender="signer", signed=False) == ("signer", Conduct.FLOODED)


def test_a_name_without_a_signature_blames_nobody_else() -> None:
    assert blame_for("anything", origin="forger", sender="victim", signed=False) == ("forger", Conduct.REFUSED)
