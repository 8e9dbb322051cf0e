"""`replay` shows and exports a group that a peer told as text beside ordinary ones."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from ftis_node.cli.app import run
from ftis_node.config.home import Home
from ftis_node.records.envelope import Accepted, seal_group
from ftis_node.records.text_group import TextCompletion
from ftis_node.replay.buffer import ReplayBuffer
from ftis_node.telemetry.terminal_text import cells
from tests.conftest import PROMPT_IDS, make_group, make_text_group

if TYPE_CHECKING:
    from pathlib import Path

    from ftis_node.records.identity import Identity


@pytest.fixture
def home(tmp_path: Path, identity: Identity) -> Path:
    """A home whose buffer holds one group in each form."""
    buffer = ReplayBuffer(Home(tmp_path).replay)
    exact, told = make_group(identity), make_text_group(identity, number=2)
    rude = TextCompletion(
        "\x1b]0;x\x0710", mean_logprob=-0.5, num_tokens=2, finish_reason=told.completions[0].finish_reason
    )
    told = make_text_group(identity, number=2, completions=(rude, told.completions[1]))
    for group, text in ((exact, None), (told.in_tokens([[1, 2], [3]]), told)):
        envelope = seal_group(text or group, identity)
        retells = text.retells if text else None
        assert buffer.admit(Accepted(envelope, envelope.to_bytes(), group, tuple(PROMPT_IDS), retells), own=False)
    buffer.close()
    return tmp_path


def _said(capsys: pytest.CaptureFixture[str], home: Path, *arguments: str) -> str:
    capsys.readouterr()
    assert run(["replay", *arguments, "--home", str(home)]) == 0
    return capsys.readouterr().out


def test_list_and_show(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told, exact = json.loads(_said(capsys, home, "list", "--json"))
    assert (told["number"], told["num_tokens"], exact["num_tokens"]) == (2, 3, 5)
    completions = json.loads(_said(capsys, home, "show", told["id"], "--json"))["completions"]
    assert completions[1] == {
        "text": "naïve 京", "mean_logprob": -2.0, "sender_tokens": 5, "finish_reason": "length", "reward": 0.0,
        "claimed_reward": 0.0,
    }  # fmt: skip
    shown = _said(capsys, home, "show", told["id"])
    assert "\x1b" not in shown and "\x07" not in shown, "a peer's text does not reach the terminal as it is"
    assert "5 tokens, length, mean log-prob -2.0000: 'naïve 京'" in shown
    assert max(map(cells, shown.splitlines())) <= 80
    assert "3 tokens, stop, mean log-prob -1.0500, lowest -2.0000: [10, 11, 2]" in _said(
        capsys, home, "show", exact["id"]
    )


def test_export(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import pyarrow.parquet as pq

    rows = home / "rows.jsonl"
    _said(capsys, home, "export", "--out", str(rows))
    exact, told = [json.loads(line)["completions"][0] for line in rows.read_text(encoding="utf-8").splitlines()]
    assert exact["token_ids"] == [10, 11, 2]
    assert told["text"] == "\x1b]0;x\x0710"
    table = home / "rows.parquet"
    _said(capsys, home, "export", "--format", "parquet", "--out", str(table))
    exact, told = [row["completions"][0] for row in pq.read_table(table).to_pylist()]
    assert (exact["token_ids"], exact["text"]) == ([10, 11, 2], None)
    assert (told["token_ids"], told["text"]) == (None, "\x1b]0;x\x0710")
    _said(capsys, home, "export", "--format", "envelope", "--out", str(home / "envelopes"))
    assert len(list((home / "envelopes").iterdir())) == 2
