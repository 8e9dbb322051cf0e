"""The text of a swarm: nodes are ranked by receipts, and the table fits in 120 columns whatever peers claim."""

from __future__ import annotations

import msgspec

from ftis_node.swarm.overview import RunSummary, SwarmRow, SwarmView, make_view
from ftis_node.telemetry.terminal_text import cells
from ftis_node.view.spans import text_of
from ftis_node.view.swarm import node_lines, rank_text, swarm_text

NOW = 1_800_000_000.0
OWN, BOB, EVE = (f"12D3KooW{name}0001" for name in ("Own00", "Bob00", "Eve00"))


def node(peer_id: str, used: int = 0, age_s: float = 0.0) -> SwarmRow:
    row = SwarmRow(peer_id, peer_id[8:11], "full", "org/tiny", 1, "0.1.0", NOW - age_s, 60.0)
    return msgspec.structs.replace(row, used_groups=used, used_tokens=9 * used)


def view_of(*rows: SwarmRow) -> SwarmView:
    """Return the view as a node shows it, whose rows have their sums already."""
    view = make_view(rows, run=RunSummary("ab" * 16), now=NOW, own_id=OWN)
    used = {row.peer_id: row for row in rows}
    return msgspec.structs.replace(view, peers=tuple(used[row.peer_id] for row in view.peers))


def test_the_widest_claims_fit_in_120_columns() -> None:
    huge, rates = 10**15, tuple((step, 1.0) for step in range(20))
    worst = msgspec.structs.replace(
        node(OWN, huge), name="n" * 64, model="m" * 64, role="generator", step=huge, groups_per_minute=99_999.0,
        tokens_per_minute=99_999.0, pass_rates=rates, measured_at=NOW - 59 * 60, seen_at=NOW - 59 * 60,
    )  # fmt: skip
    lines = swarm_text([view_of(worst)], now=NOW)
    assert "".join(lines[4].split()) == "nameidmodelsteppass@1groups/mintokens/minusedseenasofrole"
    assert max(map(cells, lines)) <= 120


def test_the_screen_of_a_node_has_its_refused_groups() -> None:
    row = msgspec.structs.replace(node(BOB), refused_groups=7)
    assert "refused     7 groups" in map(text_of, node_lines(row, view_of(row), now=NOW))


def test_nodes_with_equal_receipts_have_one_rank() -> None:
    for own, place in ((5, 1), (4, 2), (0, 3)):
        view = view_of(node(OWN, own), node(BOB, 4 if own == 4 else 5), node(EVE, 5 if own == 4 else 1))
        assert rank_text(view).startswith(f"rank {place} of 3 by receipts")
    assert rank_text(view_of(node(BOB, 5))) == "", "before its first record"
