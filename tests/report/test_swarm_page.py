"""The page of a swarm has the claims of its nodes, escaped and bounded, and loads nothing."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace

import msgspec
import pytest

from ftis_node.cli.app import run
from ftis_node.config.home import Home
from ftis_node.records.identity import Identity
from ftis_node.records.peer_messages import Receipt, receipt_key
from ftis_node.report.run_charts import Chart
from ftis_node.report.swarm_page import script_hash, swarm_page
from ftis_node.swarm.overview import RunSummary, SwarmRow, SwarmView, make_view
from ftis_node.telemetry.status import NodeStatus, Status
from tests.report.support import ATTACK
from tests.report.test_page import IMAGE, Page

NOW = time.time()
ADA, BOB = "12D3KooWada00001", "12D3KooWbob00001"


def node(peer_id, name="", **changes):
    row = SwarmRow(peer_id, name, "full", "org/tiny", 1, "0.1.0", NOW, 60.0, step=8, pass_rates=((0, 0.25), (8, 0.5)))
    return msgspec.structs.replace(row, **changes)


def swarm(*rows, **changes):
    return make_view(rows, run=RunSummary("ab" * 16, "first", "sums", "ftis"), now=NOW, own_id=ADA, **changes)


@pytest.fixture
def shown(tmp_path, monkeypatch):
    monkeypatch.setattr("ftis_node.report.swarm_page.time", SimpleNamespace(time=lambda: NOW))

    def page_of(*views, **options):
        (tmp_path / "swarm.html").write_text(swarm_page(views, **options), encoding="utf-8")
        return Page(tmp_path / "swarm.html")

    return page_of


def test_nodes_totals_rank_and_the_heat_map_are_shown(shown):
    ada = node(ADA, "ada", learns_from={ADA: 0.25, BOB: 0.75}, groups_per_minute=2.0)
    bob = node(BOB, "bob", learns_from={ADA: 0.25, BOB: 0.75}, groups_per_minute=1.5)
    page = shown(swarm(ada, bob, node("12D3KooWgone0001", "gone", seen_at=NOW - 4000), num_unreadable=1))
    strong = [text for tag, text in page.texts if tag == "strong"]
    assert strong == ["2", "3.5", "120", "50 %"], "active nodes, groups and tokens a minute, best accuracy"
    assert "rank 2 of 3: 1 node learned from it, 25 %" in page.source
    assert '<td class="own" style="--share:0.75">75</td><td style="--share:0.25">25</td>' in page.source
    assert ["bob bob00001", "tiny", "8", "1.5", "60", "50 %", "1 node, 75 %"] in [row[:7] for row in page.rows()]
    assert "1 nodes are not shown, 1 of them without a readable record" in page.source


def test_nodes_are_ranked_by_receipts_also_for_an_observer(shown):
    bob, eve = (Identity.from_seed(bytes([number]) * 32).peer_id for number in (1, 2))
    receipt = Receipt(receipt_key(bob), 7, 1_200_000)
    view = swarm(node(eve, "eve", receipts=(receipt,)), node(bob, "bob", seen_at=NOW - 60))
    page = shown(msgspec.structs.replace(view, own_id=""))
    assert [row[0].split()[0] for row in page.rows()[1:]] == ["bob", "eve"], "not by the last contact"
    assert [row[7] for row in page.rows()] == ["Used", "7", "0"]
    assert "<strong>1.2M</strong><small>in 7 groups of other nodes, by receipts</small>" in page.source


def test_hostile_claims_are_escaped_and_bounded(shown, monkeypatch):
    """The readers of records refuse these values; the page must not rely on that."""
    drawn = []
    monkeypatch.setattr(Chart, "image", lambda chart, **_: drawn.append(chart) or IMAGE)
    huge = 10**300
    worst = node(
        ATTACK,
        ATTACK * 10_000,
        **{"role": ATTACK, "model": ATTACK, "step": huge, "tokens_per_minute": float("nan"), "refused_groups": huge},
        **{"groups_per_minute": float("inf"), "pass_rates": ((huge, 1e300), (huge, float("nan")))},
        **{"learns_from": {ADA: 1e300, ATTACK: float("nan")}, "measured_at": None},
    )
    many = [node(f"12D3KooW{number:08}", f"n{number}") for number in range(150)]
    view = swarm(node(ADA, "ada"), worst, *many)
    view = msgspec.structs.replace(view, run=RunSummary("ab" * 16, ATTACK, ATTACK, ATTACK))
    page = shown(*[view] * 9, addresses=[f"/ip4/1.2.3.4/tcp/1;{ATTACK}", "/ip4/9.9.9.9/tcp/1"])
    assert len(page.source) < 1_000_000
    assert {tag for tag, _ in page.tags} & {"script", "img", "iframe", "form"} == {"script", "img"}
    assert sum(tag == "script" for tag, _ in page.tags) == 1 and "<script>alert" not in page.source
    assert "\x1b" not in page.source and "\u202e" not in page.source
    assert page.source.count("--peers /ip4/9.9.9.9/tcp/1<") == 8 and "1.2.3.4" not in page.source
    assert max(x for one in drawn for series in one.series for x, _ in series.points) == 8.0, (
        "no node stretches the axis"
    )


def test_the_page_loads_nothing_and_runs_only_its_own_script(shown):
    page = shown(swarm(node(ADA), node(BOB)), is_live=True)
    for tag, attributes in page.tags:
        assert attributes.get("src", IMAGE).startswith(IMAGE), tag
        assert attributes.get("href", "data:,") == "data:,", tag
        assert not any(name.startswith("on") for name in attributes), tag
    (script,) = [text for tag, text in page.texts if tag == "script"]
    raw = page.source.partition("<script>")[2].partition("</script>")[0]
    assert raw.strip() == script and f"script-src 'sha256-{script_hash(raw)}'" in page.source
    assert 'http-equiv="refresh"' in page.source
    assert "No run yet" in shown().source


def test_a_home_is_exported_with_public_addresses(tmp_path, capsys):
    addresses = ["/ip4/127.0.0.1/tcp/1/p2p/x", "/ip4/192.168.0.4/tcp/1/p2p/x", "/dns4/swarm.example/tcp/1/p2p/x"]
    document = json.loads(Status(node=NodeStatus(addresses=addresses)).to_json())
    home, out = Home(tmp_path), tmp_path / "page.html"
    home.status.write_text(json.dumps(document | {"swarm_view": [swarm(node(ADA)).as_dict()]}))
    assert run(["swarm", "--home", str(tmp_path), "--html", str(out)]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    line = "ftis-node join --model MODEL --run " + "ab" * 16 + " --peers /dns4/swarm.example/tcp/1/p2p/x"
    assert f"<code>{line}</code>" in out.read_text()
    assert 'http-equiv="refresh"' not in out.read_text()
    assert run(["swarm", "--home", str(tmp_path), "--html", "/no/such/page"]) == 2
    assert "cannot write /no/such/page" in capsys.readouterr().err
    assert run(["swarm", "--home", str(tmp_path), "--html", str(out), "--json"]) == 2
    assert capsys.readouterr().err.endswith("--html writes a page and --json prints: give one of the two\n")


def test_a_damaged_view_is_one_line(tmp_path, capsys):
    Home(tmp_path).status.write_text(json.dumps({"swarm_view": [{"run": 1}]}))
    assert run(["swarm", "--home", str(tmp_path), "--html", str(tmp_path / "x")]) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_a_view_survives_its_json_form():
    view = swarm(node(ADA, learns_from={BOB: 0.5}))
    assert SwarmView.from_dict(json.loads(json.dumps(view.as_dict()))) == view
