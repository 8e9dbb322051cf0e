"""`replay` shows and exports groups of token ids and a group that a peer sent as text."""

import json
import re
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from ftis_node.cli.app import run
from ftis_node.config.home import Home
from ftis_node.config.manifest import load_manifest
from ftis_node.models.decoder import Decoder
from ftis_node.records.codec import hash_messages
from ftis_node.replay.buffer import ReplayBuffer
from ftis_node.replay.group_history import read_completion, read_group_history
from ftis_node.replay.lifecycle import ReleaseReason
from ftis_node.replay.reader import ReplayReader
from ftis_node.tasks import load_task
from ftis_node.tasks.episodes.episode import EpisodeTask
from ftis_node.telemetry.terminal_text import cells
from tests.conftest import EOS, accept, fill_buffer, make_completion, make_group, make_text_group
from tests.models.tiny_models import save_tiny

EXAMPLES = Path(__file__).parents[2] / "examples/python"


@pytest.fixture
def home(tmp_path, identity):
    """A home whose buffer has a group of token ids and a group of texts."""
    as_text = make_text_group(identity, number=2)
    first, second = as_text.completions
    mallory = replace(first, text="\x1b]0;x\x0710", mean_logprob=-0.5, num_tokens=2, reward=0.0)
    as_text = replace(as_text, completions=(mallory, second))
    fill_buffer(Home(tmp_path).replay, accept(make_group(identity), identity), accept(as_text, identity))
    return tmp_path


@pytest.fixture
def home_with_run(home, identity):
    """The same home with a run, a model's tokenizer, and a status that names the sender."""
    model = save_tiny(home / "model")
    Home(home).settings.write_text(json.dumps({"model": str(model)}))
    Home(home).run_toml.write_text(load_manifest("arithmetic-ftis").to_toml())
    peers = [{"peer_id": identity.peer_id, "name": "ann", "last_seen": time.time() - 90}]
    Home(home).status.write_text(json.dumps({"node": {"peer_id": "p", "name": "me"}, "peers": peers}))
    return home


def _printed(capsys: pytest.CaptureFixture[str], home: Path, *arguments: str) -> str:
    capsys.readouterr()
    assert run(["replay", *arguments, "--home", str(home)]) == 0
    return capsys.readouterr().out


def test_list_and_show_print_both_forms(home, capsys):
    as_text, exact = json.loads(_printed(capsys, home, "list", "--json"))
    assert (as_text["number"], as_text["num_tokens"], exact["num_tokens"]) == (2, 3, 5)
    completions = json.loads(_printed(capsys, home, "show", as_text["id"], "--json"))["completions"]
    assert completions[1] == {
        "text": "naïve 京", "mean_logprob": -2.0, "sender_tokens": 5, "finish_reason": "length", "reward": 0.0,
        "claimed_reward": 0.0,
    }  # fmt: skip
    shown = _printed(capsys, home, "show", as_text["id"])
    assert "\x1b" not in shown and "\x07" not in shown, "control characters of a peer's text are escaped"
    assert "5 tokens, length, log-prob mean -2\n  | naïve 京\n" in shown
    assert max(map(cells, shown.splitlines())) <= 80
    shown = _printed(capsys, home, "show", exact["id"])
    assert "reward 1, advantage +0.50  3 tokens, stop, log-prob mean -1.05," in shown
    assert "least -2.00\n  | ids 10 11 2\n" in shown


def test_the_use_of_a_group_is_reported(home):
    buffer = ReplayBuffer(Home(home).replay)

    def used():
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
    assert "not used: refused (the learner refused its step, or the step changed nothing)" in used()
    buffer.close()


def test_each_format_exports_both_forms(home, capsys):
    import pyarrow.parquet as pq

    rows = home / "rows.jsonl"
    _printed(capsys, home, "export", "--out", str(rows))
    exact, as_text = [json.loads(line)["completions"][0] for line in rows.read_text(encoding="utf-8").splitlines()]
    assert (exact["token_ids"], as_text["text"]) == ([10, 11, 2], "\x1b]0;x\x0710")
    table = home / "rows.parquet"
    _printed(capsys, home, "export", "--format", "parquet", "--out", str(table))
    exact, as_text = [row["completions"][0] for row in pq.read_table(table).to_pylist()]
    assert (exact["token_ids"], exact["text"]) == ([10, 11, 2], None)
    assert (as_text["token_ids"], as_text["text"]) == (None, "\x1b]0;x\x0710")
    _printed(capsys, home, "export", "--format", "envelope", "--out", str(home / "envelopes"))
    assert len(list((home / "envelopes").iterdir())) == 2


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_an_export_with_texts_decodes_completions_and_prompts(home_with_run, capsys, form):
    exact, as_text = _exported(home_with_run, capsys, form, "--text")
    problem = load_task("arithmetic", split="train")[5]
    (message,) = problem.prompt
    assert (exact["prompt"], exact["answer"], exact["sender_name"]) == (message["content"], problem.answer, "ann")
    texts = [completion["text"] for completion in exact["completions"]]
    assert texts == [Decoder(Home(home_with_run)).text(ids) for ids in ([10, 11, 2], [12, 13])]
    assert all(texts), "the tokenizer of the home's model has these ids"
    assert [completion["text"] for completion in as_text["completions"]] == ["\x1b]0;x\x0710", "naïve 京"]
    assert (as_text["prompt"], as_text["answer"]) == (None, None), "its prompt is not the task's"


@pytest.mark.parametrize("name", ["path", "beside"])
def test_an_adapter_without_a_tokenizer_is_decoded_by_its_base(home_with_run, name):
    home, model = Home(home_with_run), home_with_run / "model"
    text = Decoder(home).text([10, 11])
    adapter = home_with_run / "adapter"
    adapter.mkdir()
    base = str(model) if name == "path" else "../model"
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base}))
    home.settings.write_text(json.dumps({"model": str(adapter)}))
    decoder = Decoder(home)
    assert (decoder.text([10, 11]), decoder.missing) == (text, "")
    for config in ({}, {"base_model_name_or_path": "org/none"}, {"base_model_name_or_path": "no such folder"}):
        (adapter / "adapter_config.json").write_text(json.dumps(config))
        assert "is not on this machine" in Decoder(home).missing


def test_special_tokens_inside_an_answer_are_shown_and_its_end_is_not(home_with_run):
    hidden = make_completion(10, 0, 0, 11, EOS)  # <|endoftext|> twice
    whole = make_completion(10, 11, EOS)
    decoder = Decoder(Home(home_with_run))
    shown = read_completion(hidden, 0.0, decoder, end_ids=(EOS,)).text
    assert shown is not None and shown.count("<|endoftext|>") == 2
    assert (
        shown.replace("<|endoftext|>", "")
        == read_completion(whole, 0.0, decoder, end_ids=(EOS,)).text
        == decoder.text([10, 11])
    )


def test_an_episode_is_shown_as_a_chat(home_with_run, identity, capsys, monkeypatch):
    """The observations are those of validation. A viewer has no limits, so it plays no text of a peer."""
    monkeypatch.setattr(EpisodeTask, "play", None)
    home, item = Home(home_with_run), load_task("guess")[5]
    turns = (make_completion(10, EOS, 11, EOS), (2, 2)), (make_completion(10, EOS, 12), (2, 1))
    completions = [replace(one, turn_lengths=lengths) for one, lengths in turns]
    group = make_group(identity, number=9, completions=completions, prompt_ref=item.ref)
    group = replace(group, problem_hash=hash_messages(item.prompt), observation_hash=bytes(16))
    fill_buffer(home.replay, replace(accept(group, identity), observation_ids=((13,), (13,))))
    first, second, third, seen = (Decoder(home).text([one]) for one in range(10, 14))
    home.run_toml.write_text(load_manifest("guess-ftis").to_toml())
    (shown_group,) = (one for one in json.loads(_printed(capsys, home.root, "list", "--json")) if one["number"] == 9)
    shown = _printed(capsys, home.root, "show", shown_group["id"])
    chat = f"  turn 1   | {first}\n  observed | {seen}\n  turn 2   | {second}\n"
    assert "completion 1  reward 0  2 turns, 4 tokens, stop" in shown and chat in shown
    assert f"\n  1 turn as above\n  turn 2   | {third}\n" in shown
    document = json.loads(_printed(capsys, home.root, "show", shown_group["id"], "--json"))
    assert document["completions"][0]["turns"] == [first, second]
    assert document["completions"][1]["observations"] == [seen]
    home.status.write_text("{}")
    assert run(["report", "--home", str(home.root), "--out", str(home.root / "run.html")]) == 0
    page = (home.root / "run.html").read_text()
    assert f'<pre>{first}</pre><pre class="seen">{seen}</pre><pre>{second}</pre></div><small>2 turns, 4 tokens' in page


@pytest.mark.parametrize(
    ("rendered", "seen"),
    [
        ("\n<|im_start|>user\n+<|im_end|>\n<|im_start|>assistant\n", "+"),
        ("\n<|im_start|>user\n1 too high<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n", "1 too high"),
        ("\n\nUser: no number\n\nAssistant:", "no number"),
        ("a user", "a user"),
    ],
)
def test_an_observation_is_shown_without_the_chat_template(home_with_run, rendered, seen):
    tokenizer = Tokenizer.from_file(str(home_with_run / "model/tokenizer.json"))
    completion = replace(make_completion(10, EOS, 11, EOS), turn_lengths=(2, 2))
    ids = tokenizer.encode(rendered, add_special_tokens=False).ids
    assert read_completion(
        completion, 0.0, Decoder(Home(home_with_run)), end_ids=(), observations=[ids]
    ).observations == (seen,)


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_a_flat_export_has_one_row_per_completion(home_with_run, capsys, form):
    rows = _exported(home_with_run, capsys, form, "--flat", "--text")
    assert len({tuple(row) for row in rows}) == 1, "all rows have the same columns"
    assert [row["completion_index"] for row in rows] == [0, 1, 0, 1]
    assert len({row["id"] for row in rows}) == 2
    assert [row["reward"] for row in rows] == [1.0, 0.0, 0.0, 0.0]
    assert [row["num_tokens"] for row in rows] == [3, 2, 2, 5]
    assert rows[0]["mean_logprob"] == pytest.approx(sum(rows[0]["logprobs"]) / 3)
    assert (rows[3]["completion"], rows[3]["token_ids"], rows[3]["mean_logprob"]) == ("naïve 京", None, -2.0)
    assert rows[0]["completion"] and rows[0]["prompt"]
    plain = _exported(home_with_run, capsys, form, "--flat")
    assert (plain[0]["completion"], plain[0]["token_ids"], "prompt" in plain[0]) == (None, [10, 11, 2], False)


def test_an_export_reports_which_texts_are_missing(home, capsys):
    assert run(["replay", "export", "--text", "--out", str(home / "rows"), "--home", str(home)]) == 0
    printed = capsys.readouterr()
    assert printed.out == f"2 groups written to {home / 'rows'}\n"
    assert "2 texts are missing: the home has no run.toml" in printed.err
    assert "settings.json names no model" in printed.err
    assert run(["replay", "export", "--flat", "--format", "envelope", "--out", "x", "--home", str(home)]) == 2


def _exported(home: Path, capsys: pytest.CaptureFixture[str], form: str, *options: str) -> list[dict[str, Any]]:
    import pyarrow.parquet as pq

    out = home / f"rows.{form}"
    _printed(capsys, home, "export", "--format", form, "--out", str(out), *options)
    if form == "jsonl":
        return [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    return list(pq.read_table(out).to_pylist())


def test_lists_have_a_header_and_ages(home_with_run, capsys):
    header, as_text, exact = _printed(capsys, home_with_run, "list").splitlines()
    assert header.split() == ["GROUP", "AGE", "OF", "PROBLEM", "STATE", "STEP", "REWARD", "TOKENS"]
    assert re.fullmatch(r"[0-9a-f]{12}  \d+ (s|min)( \d+ s)? +foreign  arithmetic/5  ready +- +0\.00 +3", as_text)
    assert exact.index("arithmetic/5") == header.index("PROBLEM")
    assert _printed(capsys, home_with_run, "list", "--state", "taken") == "no groups\n"


def test_stats_have_units_and_separators(home, capsys):
    figures = dict(re.split(r" {2,}", line) for line in _printed(capsys, home, "stats").splitlines())
    assert (figures["ready"], figures["released"], figures["tokens"]) == ("2", "0", "8")
    assert re.fullmatch(r"\d\.\d MiB", figures["disk size"])


def test_peers_have_a_header_and_ages(home, capsys):
    row = {
        "peer_id": "p1", "name": "\x1bann", "model": "m", "role": "full", "groups_accepted": 1234,
        "groups_refused": {"stale": 2, "duplicate": 1}, "groups_confirmed": 5, "last_seen": time.time() - 90,
        "trust_level": "banned", "banned_until": 2e9, "ban_reason": "operator",
    }  # fmt: skip
    never = row | {"peer_id": "p2", "last_seen": 0.0, "groups_refused": {}, "banned_until": None, "trust_level": "good"}
    Home(home).status.write_text(json.dumps({"peers": [row, never]}))
    capsys.readouterr()
    assert run(["peers", "--home", str(home)]) == 0
    header, banned, unseen = capsys.readouterr().out.splitlines()
    assert header.startswith("PEER  NAME     MODEL  ROLE  SEEN")
    assert re.match(r"p1    \\x1bann  m      full  1 min 3\d s ago  banned  1,234 ", banned)
    assert "  1 duplicate, 2 stale  5 " in banned
    assert re.search(r" until 2033-\S+ \S+ \(operator\)$", banned)
    assert unseen.endswith("  -"), "a peer without a ban has no note"
    assert unseen.index("never") == header.index("SEEN") and unseen.index("good") == header.index("TRUST")


def test_the_examples_read_the_buffer_and_an_envelope(home, identity, capsys):
    def example(name: str, argument: Path) -> list[str]:
        return subprocess.check_output([sys.executable, EXAMPLES / name, argument], text=True).splitlines()

    header, _, row = example("read_buffer.py", home)
    assert header.split() == ["count", "mean"]
    assert row.split() == [identity.peer_id, "4", "0.25"]
    _printed(capsys, home, "export", "--format", "envelope", "--out", str(home / "envelopes"))
    for path in (home / "envelopes").iterdir():
        assert example("decode_envelope.py", path)[0].startswith(f"{identity.peer_id} (")
