"""`replay` shows and exports a group that a peer told as text beside ordinary ones."""

from __future__ import annotations

import json
import re
import time
from contextlib import closing
from typing import TYPE_CHECKING, Any

import msgpack
import pytest

from ftis_node.cli.app import run
from ftis_node.config.home import Home
from ftis_node.config.manifest import load_manifest
from ftis_node.models.tokenizer import Decoder
from ftis_node.records.envelope import Accepted, seal_group
from ftis_node.records.group import TextCompletion
from ftis_node.replay.buffer import ReplayBuffer
from ftis_node.replay.group_history import read_group_history
from ftis_node.replay.lifecycle import ReleaseReason
from ftis_node.replay.reader import ReplayReader
from ftis_node.tasks import load_task
from ftis_node.telemetry.terminal_text import cells
from tests.conftest import PROMPT_IDS, make_group, make_text_group
from tests.models.tiny_models import save_tiny

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


@pytest.fixture
def told_home(home: Path, identity: Identity) -> Path:
    """The same with a run, a model's tokenizer, and a status that names the sender."""
    model = save_tiny(home / "model")
    Home(home).settings.write_text(json.dumps({"model": str(model)}))
    Home(home).run_toml.write_text(load_manifest("arithmetic-ftis").to_toml())
    peers = [{"peer_id": identity.peer_id, "name": "ann", "last_seen": time.time() - 90}]
    Home(home).status.write_text(json.dumps({"node": {"peer_id": "p", "name": "me"}, "peers": peers}))
    return home


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
    assert "5 tokens, length, log-prob mean -2\n  | naïve 京\n" in shown
    assert max(map(cells, shown.splitlines())) <= 80
    shown = _said(capsys, home, "show", exact["id"])
    assert "3 tokens, stop, log-prob mean -1.05, least -2.00\n  | ids 10 11 2\n" in shown


def test_what_became_of_a_group_is_said(home: Path) -> None:
    buffer = ReplayBuffer(Home(home).replay)

    def used() -> list[str]:
        with closing(ReplayReader(Home(home).replay)) as reader:
            ids = [group.id for group in reader.list_groups(limit=2)]
        return [story.used for one in ids if (story := read_group_history(Home(home), one))]

    assert used() == ["not yet: it waits for a step"] * 2
    buffer.take(3, own=0, foreign=1)
    assert sorted(used()) == ["being trained in step 3", "not yet: it waits for a step"]
    buffer.release_step(3, ReleaseReason.TRAINED)
    assert sorted(used()) == ["not yet: it waits for a step", "trained in step 3"]
    buffer.take(4, own=0, foreign=1)
    buffer.release_step(4, ReleaseReason.REFUSED)
    assert "not used: refused (the learner rejected its step, or the step changed nothing)" in used()
    buffer.close()


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


@pytest.mark.parametrize("form", ["jsonl", "parquet", "msgpack"])
def test_export_with_texts(told_home: Path, capsys: pytest.CaptureFixture[str], form: str) -> None:
    exact, told = _exported(told_home, capsys, form, "--text")
    problem = load_task("arithmetic", split="train")[5]
    (message,) = problem.prompt
    assert (exact["prompt"], exact["answer"], exact["sender_name"]) == (message["content"], problem.answer, "ann")
    texts = [completion["text"] for completion in exact["completions"]]
    assert texts == [Decoder(Home(told_home)).text(ids) for ids in ([10, 11, 2], [12, 13])]
    assert all(texts), "the tokenizer of the home's model has these ids"
    assert [completion["text"] for completion in told["completions"]] == ["\x1b]0;x\x0710", "naïve 京"]
    assert (told["prompt"], told["answer"]) == (None, None), "its prompt is not the task's"


@pytest.mark.parametrize("form", ["jsonl", "parquet", "msgpack"])
def test_export_of_one_row_a_completion(told_home: Path, capsys: pytest.CaptureFixture[str], form: str) -> None:
    rows = _exported(told_home, capsys, form, "--flat", "--text")
    assert len({tuple(row) for row in rows}) == 1, "all rows have the same columns"
    assert [row["completion_index"] for row in rows] == [0, 1, 0, 1]
    assert len({row["id"] for row in rows}) == 2
    assert [row["reward"] for row in rows] == [1.0, 0.0, 0.0, 0.0]
    assert [row["num_tokens"] for row in rows] == [3, 2, 2, 5]
    assert rows[0]["mean_logprob"] == pytest.approx(sum(rows[0]["logprobs"]) / 3)
    assert (rows[3]["completion"], rows[3]["token_ids"], rows[3]["mean_logprob"]) == ("naïve 京", None, -2.0)
    assert rows[0]["completion"] and rows[0]["prompt"]
    plain = _exported(told_home, capsys, form, "--flat")
    assert (plain[0]["completion"], plain[0]["token_ids"], "prompt" in plain[0]) == (None, [10, 11, 2], False)


def test_a_flat_export_is_a_table_of_pandas(told_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pandas = pytest.importorskip("pandas")
    for form, read in (("jsonl", lambda file: pandas.read_json(file, lines=True)), ("parquet", pandas.read_parquet)):
        _exported(told_home, capsys, form, "--flat", "--text")
        frame = read(told_home / f"rows.{form}")
        assert frame.shape[0] == 4
        assert frame["reward"].mean() == 0.25
        assert set(frame["sender_name"]) == {"ann"}


def test_an_export_says_which_texts_are_missing(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["replay", "export", "--text", "--out", str(home / "rows"), "--home", str(home)]) == 0
    said = capsys.readouterr()
    assert said.out == f"2 groups written to {home / 'rows'}\n"
    assert "2 texts are missing: the home has no run.toml" in said.err
    assert "settings.json names no model" in said.err
    assert run(["replay", "export", "--flat", "--format", "envelope", "--out", "x", "--home", str(home)]) == 2


def _exported(home: Path, capsys: pytest.CaptureFixture[str], form: str, *options: str) -> list[dict[str, Any]]:
    import pyarrow.parquet as pq

    out = home / f"rows.{form}"
    _said(capsys, home, "export", "--format", form, "--out", str(out), *options)
    if form == "jsonl":
        return [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    if form == "msgpack":
        with out.open("rb") as file:
            return list(msgpack.Unpacker(file, strict_map_key=True))
    return list(pq.read_table(out).to_pylist())


def test_a_messagepack_file_holds_the_rows_of_the_json_lines(
    told_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for options in ((), ("--flat",), ("--text", "--flat")):
        assert _exported(told_home, capsys, "msgpack", *options) == _exported(told_home, capsys, "jsonl", *options)


def test_lists_have_a_header_and_ages(told_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    header, told, exact = _said(capsys, told_home, "list").splitlines()
    assert header.split() == ["GROUP", "AGE", "OF", "PROBLEM", "STATE", "STEP", "REWARD", "TOKENS"]
    assert re.fullmatch(r"[0-9a-f]{12}  \d+ (s|min)( \d+ s)? +foreign  arithmetic/5  ready +- +0\.00 +3", told)
    assert exact.index("arithmetic/5") == header.index("PROBLEM")
    assert _said(capsys, told_home, "list", "--state", "taken") == "no groups\n"


def test_stats_are_for_people(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = dict(re.split(r" {2,}", line) for line in _said(capsys, home, "stats").splitlines())
    assert (figures["ready"], figures["released"], figures["tokens"]) == ("2", "0", "8")
    assert re.fullmatch(r"\d\.\d MiB", figures["disk size"])


def test_peers_have_a_header_and_ages(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {
        "peer_id": "p1", "name": "\x1bann", "model": "m", "role": "full", "groups_accepted": 1234,
        "groups_refused": {"stale": 2, "duplicate": 1}, "groups_confirmed": 5, "last_seen": time.time() - 90,
        "standing": "banned", "banned_until": 2e9, "ban_reason": "operator",
    }  # fmt: skip
    never = row | {"peer_id": "p2", "last_seen": 0.0, "groups_refused": {}, "banned_until": None, "standing": "good"}
    Home(home).status.write_text(json.dumps({"peers": [row, never]}))
    capsys.readouterr()
    assert run(["peers", "--home", str(home)]) == 0
    header, banned, unseen = capsys.readouterr().out.splitlines()
    assert header.startswith("PEER  NAME     MODEL  ROLE  SEEN")
    assert re.match(r"p1    \\x1bann  m      full  1 min 3\d s ago  banned  1,234 ", banned)
    assert "  1 duplicate, 2 stale  5 " in banned
    assert re.search(r" until 2033-\S+ \S+ \(operator\)$", banned)
    assert unseen.endswith("  -"), "it has no note"
    assert unseen.index("never") == header.index("SEEN") and unseen.index("good") == header.index("TRUST")
