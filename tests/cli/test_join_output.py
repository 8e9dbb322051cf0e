"""`join` prints its plan at the start, steps, peers and warnings while it runs, and a summary at the end.

One home is started four times. The first start uses up its budget, and the second asks for the same budget. The third
logs JSON lines until it is stopped, and the fourth is killed.
"""

import contextlib
import io
import json
import re
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from ftis_node.cli.app import run
from ftis_node.config.home import Home
from ftis_node.config.node import NodeSettings
from ftis_node.dashboard.watcher import Watcher
from ftis_node.node.http_api.node_client import read_document
from ftis_node.telemetry.metrics import render_metrics
from ftis_node.telemetry.status import Status
from ftis_node.view.health_answers import answer_lines
from ftis_node.view.spans import text_of
from tests.node.support import ANY_PORT, started, write_manifest
from tests.waiting import wait_until

START_S = 300.0
pytestmark = pytest.mark.timeout(900)
NO_PEER = "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWD3eckifWpRn9wQpMG9R9hX3sD158z7EqHWmweQAJU5SA"
SHOWN = re.compile(r"step \d+|node \S+ is up|working alone|in the swarm|SIGTERM: stopping|peers are those")
PREFIX = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d{4} (INFO|WARNING) +")


@dataclass(frozen=True)
class Starts:
    """The lines of each start, and the status after it."""

    home: Home
    finished: list[str]
    status: dict[str, Any]
    screen: str
    answers: list[str]
    again: list[str]
    stopped: list[dict[str, Any]]
    stopped_status: dict[str, Any]
    killed_status: dict[str, Any]
    other_model: tuple[int, str]


@pytest.fixture(scope="module")
def starts(tmp_path_factory, tiny_models):
    folder = tmp_path_factory.mktemp("first-contact")
    home = Home(folder / "node")
    manifest = write_manifest(folder / "run.toml", foreign_wait_s=0.2)
    first = ("--model", str(tiny_models["s"]), "--run", str(manifest), "--peers", NO_PEER, "--engine", "torch")
    finished = _lines(home, *first, "--steps", "2")
    status, screen = read_document(home, "/status"), _screen(home)
    answers = [text_of(line) for line in answer_lines(Watcher(home).poll())]
    again = _lines(home, "--steps", "2")
    other = _run(home, "join", "--model", str(tiny_models["m"]), "--steps", "2")
    with started(home.root, "join", "--log-format", "json", "--listen", ANY_PORT) as node:
        node.wait_for(lambda: node.events("eval")[-1]["step"] >= 4, timeout_s=START_S)
        node.stop()
        assert node.process.returncode == 0
        text = node.log.read_text().partition("\n{")
    stopped = [json.loads(line) for line in (text[1] + text[2]).strip().splitlines()]
    stopped_status = read_document(home, "/status")
    with started(home.root, "join", "--listen", ANY_PORT) as node:
        node.wait_for(lambda: json.loads(home.status.read_text())["node"]["state"] == "starting", timeout_s=START_S)
        node.process.kill()
        node.process.wait()
    wait_until(
        lambda: read_document(home, "/status")["node"]["end"], within_s=START_S
    )  # its workers end a little later
    killed_status = read_document(home, "/status")
    return Starts(home, finished, status, screen, answers, again, stopped, stopped_status, killed_status, other)


def _run(home: Home, *arguments: str) -> tuple[int, str]:
    with contextlib.redirect_stderr(out := io.StringIO()):
        return run([*arguments, "--home", str(home.root)]), out.getvalue()


def _lines(home: Home, *arguments: str) -> list[str]:
    """Run `join` until it ends with exit code 0, and return its lines."""
    with started(home.root, "join", *arguments, "--listen", ANY_PORT) as node:
        before = node.log.stat().st_size
        assert node.wait(timeout_s=START_S) == 0, node.log.read_text()[-3000:]
        lines = node.log.read_bytes()[before:].decode().splitlines()
    return [line for line in lines if not line.startswith("start: ")]  # how many depends on the machine's load


def _screen(home: Home) -> str:
    with contextlib.redirect_stdout(out := io.StringIO()):
        assert run(["status", "--home", str(home.root)]) == 0
    return out.getvalue()


def test_the_first_ten_lines_describe_the_start(starts):
    block = "\n".join(line for line in starts.finished[:10])
    for pattern in (
        r"^ftis-node \S+ generates with and trains s \([\d,]+ parameters\) on arithmetic$",
        r"^run       test \([0-9a-f]{12}\), method ftis; begins at step 0, ends after step 2$",
        r"^trains    all weights",
        r"^memory    cpu: .* GiB .* at the peak",
        r"^peers     1 address to dial first$",
        r"^shares    groups \(prompts, completions, log-probs, rewards\), .* no other file leaves$",
        rf"^files     all in {starts.home.root}; ",
        rf"^watch     ftis-node dashboard --home {starts.home.root}$",
        r"^stop      ctrl-C; ",
    ):
        assert re.search(pattern, block, re.MULTILINE), (pattern, block)


def test_later_lines_are_steps_peers_and_warnings(starts):
    end = next(number for number, line in enumerate(starts.finished) if line.startswith("finished: "))
    timed = starts.finished[9:end]
    assert all(PREFIX.match(line) for line in timed), timed
    plain = [line for line in timed if PREFIX.match(line)[1] != "WARNING"]  # type: ignore[index]
    assert plain and all(SHOWN.match(PREFIX.sub("", line)) for line in plain), plain


def test_the_last_lines_summarize_the_run_and_name_further_commands(starts):
    end = next(number for number, line in enumerate(starts.finished) if line.startswith("finished: "))
    block = dict(line.strip().split(maxsplit=1) for line in starts.finished[end:])
    assert re.match(r"2 steps trained \(0 to 2\) in \d", block.pop("finished:"))
    assert re.match(r"0\.\d{3} \(step 0\) -> 0\.\d{3} \(step 2\), 32 problems of arithmetic$", block.pop("pass@1"))
    assert re.match(r"trained on [1-9]\d* own and 0 foreign; [1-9]\d* generated, ", block.pop("groups"))
    assert re.match(r"[1-9]\d* generated, [1-9]\d* trained on$", block.pop("tokens"))
    home = str(starts.home.root)
    assert block == {
        "saved": f"{home}, the checkpoint of step 2",
        "ask": f"ftis-node chat --home {home}",
        "export": f"ftis-node export --home {home} --out MODEL",
        "report": f"ftis-node report --home {home}",
        "go": f"on     ftis-node join --home {home} --steps 4",
    }


def test_status_dashboard_and_metrics_agree_on_a_finished_home(starts):
    assert (starts.status["node"]["state"], starts.status["node"]["end"]) == ("stopped", "finished")
    assert starts.status["node"]["resume"] == f"ftis-node join --home {starts.home.root} --steps 4"
    assert starts.screen.startswith("finished: 2 of 2 steps\ngo on with ftis-node join")
    assert [line.split()[1] for line in starts.answers] == ["finished"] * 3
    assert "2 of 2 steps, " in starts.answers[2]
    text = render_metrics(msgspec.convert(starts.status, Status)).decode()
    for question in ("contributing", "learning"):
        assert f"ftis_node_{question} 0.0" in text, "a finished node neither contributes nor learns"


def test_a_finished_home_loads_no_model_and_names_the_command_to_continue(starts):
    assert "peers are those of the last start" in starts.again[0]
    assert starts.again[1] == "finished: the budget of 2 steps is used up, there is nothing to do"
    assert starts.again[-1].strip() == f"go on     ftis-node join --home {starts.home.root} --steps 4"
    assert "generates with" not in "\n".join(starts.again)


def test_a_finished_home_refuses_another_model(starts):
    code, line = starts.other_model
    assert (code, "trains s, not this m: give another --home" in line) == (2, True), line


def test_a_node_killed_while_models_load_does_not_report_the_end_of_the_start_before(starts):
    assert (starts.stopped_status["node"]["end"], starts.killed_status["node"]["end"]) == ("stopped", "killed")
    assert starts.killed_status["learner"]["step"] == starts.stopped_status["learner"]["step"], (
        "the figures stay those of the last status"
    )


def test_a_stopped_node_reports_it_and_the_home_stores_peers_and_engine(starts):
    messages = [entry["message"] for entry in starts.stopped]
    assert f"peers are those of the last start ({NO_PEER}); --no-peers forgets them" in messages
    heading = next(message for message in messages if message.startswith("stopped at step "))
    last = starts.stopped_status["learner"]["step"]
    assert heading.startswith(f"stopped at step {last}, saved: {last - 2} step")
    assert messages[-1].endswith(f"ftis-node join --home {starts.home.root}")
    assert (starts.stopped_status["node"]["end"], starts.status["node"]["end"]) == ("stopped", "finished")
    kept = json.loads(starts.home.settings.read_text())
    assert (kept["peers"], kept["engine"]) == ([NO_PEER], "torch")


def test_json_lines_have_time_level_logger_message_and_fields(starts):
    for entry in starts.stopped:
        assert list(entry)[:5] == ["time", "level", "logger", "message", "fields"]
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d{4}", entry["time"])
    steps = [entry["fields"] for entry in starts.stopped if re.match(r"step \d+: reward", entry["message"])]
    assert all(fields["step"] > 2 and "reward_mean" in fields for fields in steps)
    evaluations = [entry["fields"] for entry in starts.stopped if "pass@1" in entry["message"] and entry["fields"]]
    assert evaluations and {"step", "task", "pass_at_1", "n"} <= set(evaluations[0])


def test_flags_replace_or_remove_the_peers_of_the_last_start(tmp_path, monkeypatch, capsys):
    started_with: list[NodeSettings] = []
    monkeypatch.setattr(
        "ftis_node.node.startup.run.run_until_stopped", lambda settings, *args, **kwargs: started_with.append(settings)
    )
    monkeypatch.delenv("FTIS_ENGINE", raising=False)
    (tmp_path / "settings.json").write_text(json.dumps({"model": "org/name", "peers": [NO_PEER], "engine": "torch"}))
    join = ["join", "--home", str(tmp_path)]
    other = NO_PEER.replace("tcp/1", "tcp/2")
    for more in ([], ["--peers", other], ["--no-peers"], ["--engine", "vllm"]):
        assert run([*join, *more]) == 0, capsys.readouterr().err
    assert [settings.peers for settings in started_with] == [(NO_PEER,), (other,), (), (NO_PEER,)]
    assert [settings.engine for settings in started_with] == ["torch", "torch", "torch", "vllm"]
    (tmp_path / "node.toml").write_text('engine = "auto"\n')
    assert run(join) == 0
    assert started_with[-1].engine == "auto", "node.toml overrides the last start"
    capsys.readouterr()
    assert run([*join, "--no-peers", "--peers", other]) == 2
    assert "--peers and --no-peers contradict each other" in capsys.readouterr().err
