"""`peers show` prints all records of one peer, a sentence for each reason, and no control character of a peer.

The peer's texts set a window's title. The printing library strips colors from a pipe, but not this sequence.
"""

import json
import re
from pathlib import Path

import pytest

from ftis_node.cli.app import run
from ftis_node.config.home import Home
from ftis_node.telemetry.events import EventLog
from ftis_node.telemetry.status import Status
from tests.conftest import accept, fill_buffer, make_group

UNKNOWN_PEER = "12D3KooW" + "z" * 44


@pytest.fixture
def home(tmp_path, identity):
    """The home of a stopped node that accepted one group of a peer and refused another."""
    where = Home(tmp_path)
    fill_buffer(where.replay, accept(make_group(identity), identity))
    row = {
        "peer_id": identity.peer_id, "name": "mallory\x1b]0;x\x07", "model": "tiny", "parameters": 1000, "role": "full",
        "policy_version": 3, "groups_accepted": 1, "groups_refused": {"reward_mismatch": 2}, "failed_pulls": 1,
        "groups_confirmed": 7, "last_seen": 1000.0, "trust_level": "banned", "score": -10.0, "banned_until": 4e9,
        "ban_reason": "reward_mismatch", "reasons": {"reward_mismatch": 3, "pull_busy": 1}, "trusted": False,
        "training": {
            "steps": 3, "groups": 8, "completions": 96, "kept": 0.9, "kept_negatives": None, "signal": 0.5, "ess": 0.75,
            "effective": 0.34, "weight_mean": 1.0, "weight_variance": 0.25, "clipped": 0.0, "truncated": 0.125,
            "mean_log_ratio": -0.5, "mean_kl": 2.5,
        },
    }  # fmt: skip
    where.status.write_text(json.dumps(json.loads(Status().to_json()) | {"peers": [row]}))
    events = EventLog(where.events)
    events.write(
        "refused",
        group=b"\xab" * 32,
        origin=identity.peer_id,
        reason="reward_mismatch",
        detail="claimed \x1b]0;x\x07 1",
    )
    events.close()
    return tmp_path


def _printed(capsys: pytest.CaptureFixture[str], home: Path, *arguments: str) -> str:
    capsys.readouterr()
    assert run([*arguments, "--home", str(home)]) == 0
    return capsys.readouterr().out


def test_all_records_of_one_peer_are_printed(home, identity, capsys):
    shown = _printed(capsys, home, "peers", "show", identity.peer_id[:20])
    assert "mallory\\x1b]0;x\\x07" in shown and "\x1b" not in shown
    assert "2 x reward_mismatch: a claimed reward differs from the one computed here" in " ".join(shown.split())
    assert "1 x pull_busy: it announced groups, and fetching them ended as 'busy'" in " ".join(shown.split())
    assert "`peers unban` ends it" in " ".join(shown.split())
    assert "34 % of its completions, effectively, over its last 3 steps" in shown
    assert "96 completions, 90 % kept; of the negatives -" in shown
    assert max(map(len, shown.splitlines())) <= 80
    document = json.loads(_printed(capsys, home, "peers", "show", identity.peer_id, "--json"))
    assert (document["groups"]["ready"], len(document["groups"]["newest"])) == (1, 1)
    assert [reason["count"] for reason in document["held_against"]] == [3, 1]
    listed = _printed(capsys, home, "peers")
    header, row = listed.splitlines()
    assert "\x1b" not in listed
    assert [row[header.index(name) :].split("  ")[0] for name in ("CONFIRMED", "EFFECTIVE")] == [
        "7", "34 %",
    ]  # fmt: skip
    assert re.search(r"^groups +\d+ groups accepted since the start; it confirmed", shown, re.MULTILINE)


def test_an_unknown_peer_is_a_one_line_error(home, capsys):
    assert run(["peers", "show", UNKNOWN_PEER, "--home", str(home)]) == 2
    assert "does not know" in capsys.readouterr().err


def test_a_refused_group_is_shown_from_the_event_log(home, capsys):
    shown = _printed(capsys, home, "replay", "show", "abababab")
    sentence = "a claimed reward differs from the one computed here"
    assert f"refused (reward_mismatch): {sentence}. claimed \\x1b]0;x\\x07 1" in " ".join(shown.split())
    assert "\x1b" not in shown
    document = json.loads(_printed(capsys, home, "replay", "show", "ab" * 32, "--json"))
    assert (document["verdict"], document["refusal"], document["completions"]) == ("refused", "reward_mismatch", [])
    assert max(map(len, shown.splitlines())) <= 80
    assert run(["replay", "show", "abac", "--home", str(home)]) == 2
