"""`status` and `peers show`: names of any width, a node that starts, runs or is stopped, the records of a peer."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest

from ftis_node.cli.app import run
from ftis_node.cli.status_screen import screen
from ftis_node.config.home import Home
from ftis_node.dashboard import watcher
from ftis_node.swarm.overview import RunSummary, SwarmRow, SwarmView
from ftis_node.telemetry.events import EventLog
from ftis_node.telemetry.status import (
    BudgetStatus,
    EvalStatus,
    GenerationStatus,
    HealthStatus,
    LearnerStatus,
    ModelStatus,
    NodeStatus,
    ReceiptFigures,
    RefusalStatus,
    RunStatus,
    Status,
    SwarmStatus,
    amount,
)
from ftis_node.telemetry.terminal_text import cells
from ftis_node.view.snapshot import GpuUsage, MachineUsage
from tests.conftest import accept, fill_buffer, make_group

NOW = 1_000_000.0
USED_UP = BudgetStatus(learn_steps=amount(10, 10))
HOSTILE = "\x1b[2J京都" * 40
LONG = Status(
    node=NodeStatus(peer_id="12D3KooW" + "x" * 44, name=HOSTILE, version="0.1.0", state="running", uptime_s=9e6),
    run=RunStatus(id="ab" * 16, name=HOSTILE, method="ftis", task="gsm8k=3+rg:chain_sum=1"),
    model=ModelStatus(name="Qwen/" + "Q" * 60, parameters=3 * 10**9, trainable_parameters=10**7),
    generation=GenerationStatus(engine="vllm", state="backing-off", tokens_per_s=12345.6, restarts=3),
    learner=LearnerStatus(
        state="ready", step=10**6, loss=-1.5e-9, reward_mean=0.5, kept_fraction=0.5, truncated_fraction=0.1,
        mean_kl=1e-3, grad_norm=1e3, learning_rate=1e-6, kl_to_start=1.0, mismatch_kl=1e-6, mismatch_share=0.5,
        mismatch_version=10**6, own_groups=10**7, foreign_groups=10**7, restarts=2, last_step_at=NOW - 10**6,
        layout="packed rows",
    ),
    swarm=SwarmStatus(
        state="standalone", reason="no bootstrap peer answers " + HOSTILE, clock_skew_s=-99.5, weights_bytes_in=10**12,
        weights_age_s=1e5, groups_refused={f"reason_{number}": 10**6 for number in range(40)},
    ),
    eval=[EvalStatus(step=step, task=f"task-{step % 5}", pass_at_1=0.25, n=1319) for step in range(50)],
    health=HealthStatus(taken_at=NOW - 90, problems=["the intake loop hangs: " + HOSTILE]),
)  # fmt: skip


def _document(status: Status) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(status.to_json())
    return document


@pytest.mark.parametrize("width", [80, 60])
@pytest.mark.parametrize("status", [LONG, Status()], ids=["long", "empty"])
def test_it_fits_the_width_and_control_characters_are_escaped(status: Status, width: int) -> None:
    lines = screen(status, now=NOW, width=width)
    assert max(map(cells, lines)) <= width
    assert all(line.isprintable() for line in lines)


def test_every_fact_is_printed_also_beyond_a_screen() -> None:
    swarm = msgspec.structs.replace(LONG.swarm, used_by_peers=ReceiptFigures(peers=3, groups=41, tokens=9))
    machine = MachineUsage(2, 10**9, 10**10, 10**11, (GpuUsage(10**9, 10**10, 0.5, watts=187.4),))
    lines = screen(msgspec.structs.replace(LONG, swarm=swarm), now=NOW, machine=machine)
    labels = [line.split("  ")[0] for line in lines if not line.startswith(" ")]
    assert len(lines) > 24 and labels[-1] == "memory" and {"used", "buffer", "weights"} < set(labels)
    assert "187 W" in " ".join(lines[-2:])


def test_a_part_of_a_gpu_shows_its_memory_without_a_load(monkeypatch: pytest.MonkeyPatch) -> None:
    class NVMLError(Exception): ...

    class NVMLError_NotSupported(NVMLError): ...

    nvml = Mock(NVMLError=NVMLError, NVMLError_NotSupported=NVMLError_NotSupported)
    nvml.nvmlDeviceGetCount.return_value = 1
    nvml.nvmlDeviceGetMemoryInfo.return_value = Mock(used=10**9, total=10**10)
    nvml.nvmlDeviceGetUtilizationRates.side_effect = nvml.nvmlDeviceGetPowerUsage.side_effect = NVMLError_NotSupported
    monkeypatch.setattr(watcher, "opened_nvml", lambda: nvml)
    lines = screen(LONG, now=NOW, machine=watcher.read_machine(None))
    assert lines[-1].endswith("GPU 1.0 of 10.0 GB")


def test_the_first_lines_report_the_health_and_what_to_do() -> None:
    short = msgspec.structs.replace(LONG.swarm, reason="no peers were given; waiting for others to dial this node")
    lines = screen(msgspec.structs.replace(LONG, swarm=short, health=HealthStatus()), now=NOW)
    assert lines[:5] == [
        "contributing: no   learning: no   healthy: no",
        "! contributing: the generation worker is backing-off: see logs/generation.log in",
        "  the home",
        "! learning: no step for 11 d 13 h, 0 groups ready: check that groups arrive; see",
        "  logs/learner.log in the home",
    ]


def test_a_stopped_node_shows_who_refused_its_groups() -> None:
    refusal = RefusalStatus("p", "ann", "stale", "", 3, NOW - 60, "wait")
    swarm = msgspec.structs.replace(LONG.swarm, refused_by=[refusal])
    node = msgspec.structs.replace(LONG.node, state="stopped", end="stopped", resume="JOIN")
    lines = screen(msgspec.structs.replace(LONG, node=node, swarm=swarm), now=NOW)
    assert lines[:3] == [
        "stopped: as asked",
        "go on with JOIN",
        "! its groups are refused by ann (..p): stale, 3 groups in 1 min: wait",
    ]


def test_states_before_a_start_while_starting_and_after_the_end(tmp_path, capsys):
    home = Home(tmp_path)
    assert run(["status", "--home", str(tmp_path)]) == 2
    assert "no node has run" in capsys.readouterr().err
    with home.owned():
        assert run(["status", "--home", str(tmp_path)]) == 0
        assert "the node is starting" in capsys.readouterr().out
        home.status.write_bytes(LONG.to_json())
        run(["status", "--home", str(tmp_path), "--json"])
        document = json.loads(capsys.readouterr().out)
        assert (document["node"]["state"], document["learner"]["step"]) == ("starting", 10**6)
        run(["status", "--home", str(tmp_path)])
        assert "\nmemory      node " in capsys.readouterr().out
    run(["status", "--home", str(tmp_path)])
    out = capsys.readouterr().out
    assert "\nmemory " not in out
    assert out.startswith(
        "contributing: no   learning: no   healthy: no\n! contributing: the node did not end by itself"
    )
    assert "stopped, last seen" in out
    ended = msgspec.structs.replace(LONG.node, state="stopped", end="finished")
    home.status.write_bytes(msgspec.structs.replace(LONG, node=ended, budget=USED_UP).to_json())
    run(["status", "--home", str(tmp_path)])
    first, second = capsys.readouterr().out.splitlines()[:2]
    assert (first, second[:28]) == ("finished: 10 of 10 steps", "go on with ftis-node join --")
    run(["status", "--home", str(tmp_path), "--json"])
    node = json.loads(capsys.readouterr().out)["node"]
    assert (node["state"], node["end"]) == ("stopped", "finished")
    assert node["resume"] == f"ftis-node join --home {tmp_path} --model MODEL --steps 20"


def test_a_node_that_closed_its_port_and_still_runs_is_stopping(tmp_path, capsys):
    """Trackers may still write when no port listens at the address in the lock file."""
    home = Home(tmp_path)
    with home.owned():
        home.publish_address("http://127.0.0.1:9")  # no service
        home.status.write_bytes(LONG.to_json())
        assert run(["status", "--home", str(tmp_path)]) == 1
        assert "does not answer" in capsys.readouterr().err, "a node that hangs does not answer"
        ended = msgspec.structs.replace(LONG.node, state="stopped", end="stopped", waits_for="its port")
        home.status.write_bytes(msgspec.structs.replace(LONG, node=ended).to_json())
        assert run(["status", "--home", str(tmp_path), "--json"]) == 0
        node = json.loads(capsys.readouterr().out)["node"]
        assert (node["state"], node["end"], node["waits_for"]) == ("stopping", "", "")
    assert run(["status", "--home", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("stopped: as asked")


def test_the_swarm_is_printed_as_table_or_json(tmp_path, capsys):
    row = SwarmRow("12D3KooWpeer0001", "an\x1bn", "full", "org/tiny", 1, "1", 0.0, 60.0)
    view = json.loads(json.dumps(SwarmView(RunSummary("ab" * 16, task="arithmetic"), 1.0, (row,)).as_dict()))
    (tmp_path / "status.json").write_text(json.dumps(_document(Status()) | {"swarm_view": [view]}))
    assert run(["swarm", "--home", str(tmp_path)]) == 0
    title, sums, _, header, peer, *_ = capsys.readouterr().out.splitlines()
    assert title.endswith("; task arithmetic") and sums.startswith("1 node, 0 active, as of ")
    assert header.startswith("name") and peer.startswith("an\\x1bn  peer0001")
    assert run(["swarm", "--home", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [view]


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
        "refused", group=b"\xab" * 32, origin=identity.peer_id, reason="reward_mismatch",
        detail="claimed \x1b]0;x\x07 1",
    )  # fmt: skip
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
