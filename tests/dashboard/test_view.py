"""The texts of the dashboard: three answers about the health, escaped texts of peers, rows, curves, one group."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from ftis_node.dashboard.view.events import event_line, notable_events
from ftis_node.dashboard.view.figures import head_line, metric_lines, plot_rows, thinned
from ftis_node.dashboard.view.groups import group_lines
from ftis_node.dashboard.view.health_answers import answer_lines, next_lines, problems, trend, worst_tone
from ftis_node.dashboard.view.peers import PEER_COLUMNS, is_found, peer_lines, peer_row, sorted_peers
from ftis_node.dashboard.view.spans import Span, Tone, ago, count, text_of
from ftis_node.dashboard.watcher import MachineUsage, NodeSnapshot
from ftis_node.telemetry.health_summary import duration
from ftis_node.telemetry.history import History
from ftis_node.telemetry.status import stopped
from ftis_node.telemetry.terminal_text import printable, size
from tests.dashboard.sample_node import ANN, BOB, GROUP, HISTORY, HOSTILE, NOW, PEERS, RUNNING, STOPPED

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ftis_node.dashboard.view.spans import Line


def _texts(lines: Iterable[Line]) -> str:
    return "\n".join(map(text_of, lines))


def _with(section: str, **changes: Any) -> NodeSnapshot:
    """Return the running node with changes in one section of its status."""
    status = RUNNING.status
    changed = msgspec.structs.replace(getattr(status, section), **changes)
    return replace(RUNNING, status=msgspec.structs.replace(status, **{section: changed}))


def _later(snapshot: NodeSnapshot, seconds: float) -> NodeSnapshot:
    """Return the snapshot as if taken later, of a node that still answers."""
    health = msgspec.structs.replace(snapshot.status.health, taken_at=NOW + seconds)
    return replace(snapshot, taken_at=NOW + seconds, status=msgspec.structs.replace(snapshot.status, health=health))


def _answers(snapshot: NodeSnapshot) -> list[str]:
    """Return the three answers: contributing, learning, healthy."""
    return [shown[1].text.strip() for shown in answer_lines(snapshot)]


def test_control_characters_of_a_peer_are_escaped() -> None:
    assert printable(HOSTILE) == r"\x1b[2J[red]evil[/]\u202e"
    assert printable("a\nb") == r"a\nb"
    assert printable("a\nb\x00", keep_newlines=True) == "a\nb\\x00"
    assert printable("naïve 京") == "naïve 京"
    lines = [
        *(event_line(event) for event in HISTORY.events),
        *(peer_row(PEERS[1], now=NOW), *peer_lines(PEERS[1], now=NOW)),
        *group_lines(GROUP, with_tokens=True),
        *answer_lines(_with("swarm", state="standalone", reason=HOSTILE)),
        head_line(_with("run", name=HOSTILE)),
    ]
    assert "\x1b" not in _texts(lines) and "\u202e" not in _texts(lines)


def test_numbers_are_rounded_with_units() -> None:
    assert [count(value) for value in (0, 999, 9999, 10_000, 172_832, 3.1e9)] == [
        "0",
        "999",
        "9999",
        "10.0k",
        "173k",
        "3.1B",
    ]
    assert [size(value) for value in (0, 999, 1500, 308_100, 25.3e9)] == ["0 B", "999 B", "1.5 kB", "308 kB", "25.3 GB"]
    assert [duration(value) for value in (59, 61, 3660, 90_000)] == ["59 s", "1 min 1 s", "1 h 1 min", "1 d 1 h"]
    assert [ago(then, 1000.0) for then in (0.0, 995.0, 800.0)] == ["never", "5 s", "3 min"]


def test_a_healthy_node_has_three_times_yes() -> None:
    assert _answers(RUNNING) == ["yes", "yes", "yes"]
    assert problems(RUNNING) == []
    assert "402 confirmed (98 %)" in _texts(answer_lines(RUNNING))
    assert "pass@1 0.42 -> 0.59" in _texts(answer_lines(RUNNING))
    assert next_lines(RUNNING) == ()


@pytest.mark.parametrize(
    ("snapshot", "answer"),
    [
        (_with("swarm", state="standalone", reason="no peers were given"), "no"),
        (_with("generation", state="failed"), "no"),
        (_with("swarm", groups_sent=0, groups_confirmed=0), "not yet"),
        (_with("swarm", groups_confirmed=0), "no"),
        (_with("swarm", groups_sent=3, groups_confirmed=0), "not yet"),
        (_with("generation", state="off"), "yes"),
        (STOPPED, "stopped"),
        (_with("node", state="starting"), "not yet"),
    ],
)
def test_the_answer_to_contributing(snapshot: NodeSnapshot, answer: str) -> None:
    assert _answers(snapshot)[0] == answer


def test_an_exchange_node_shares_the_groups_of_a_trainer() -> None:
    status = RUNNING.status
    off = {name: msgspec.structs.replace(getattr(status, name), state="off") for name in ("generation", "learner")}
    node = msgspec.structs.replace(status.node, role="exchange")
    snapshot = replace(RUNNING, status=msgspec.structs.replace(status, node=node, **off))
    assert _answers(snapshot) == ["yes", "not applicable", "yes"]
    lines = _texts(answer_lines(snapshot))
    assert "402 confirmed" in lines
    assert "of weights sent" not in lines
    assert "the trainer beside this node trains the model" in lines


def test_a_trend_is_distinguished_from_noise() -> None:
    assert trend([0.1, 0.2] * 8 + [0.5, 0.6] * 8)[2] == "up"
    assert trend([0.5, 0.6] * 8 + [0.1, 0.2] * 8)[2] == "down"
    assert trend([0.1, 0.9] * 8 + [0.2, 0.9] * 8)[2] == "flat"
    early = replace(RUNNING, history=History(HISTORY.steps[:7]))
    assert "the trend shows after 8 steps" in _texts(answer_lines(early))
    assert _answers(_with("learner", state="off"))[1] == "not applicable"
    assert _answers(_with("learner", kept_fraction=0.0, last_step_at=NOW))[1] == "no"


@pytest.mark.parametrize(
    ("snapshot", "problem", "answer"),
    [
        (_with("learner", state="backing-off"), "the learner worker died and restarts: see logs/learner.log", "no"),
        (_with("generation", state="failed"), "the generation worker failed for good", "no"),
        (_with("swarm", clock_skew_s=-40.0), "peers' clocks are -40 s off ours: switch on time synchronization", "no"),
        (_with("learner", out_of_memory=2), "ran out of memory 2 times", "no"),
        (_with("limits", disk_free_bytes=1_000_000_000), "1.0 GB of disk left", "no"),
        (
            replace(RUNNING, machine=MachineUsage(ram_used_bytes=99, ram_total_bytes=100)),
            "memory is nearly full",
            "yes",
        ),
        (_later(_with("node", uptime_s=9000.0), 500), "no step for 8 min", "yes"),
    ],
)
def test_a_problem_is_described(snapshot: NodeSnapshot, problem: str, answer: str) -> None:
    assert len(found := problems(snapshot)) == 1
    assert problem in found[0]
    assert _answers(snapshot)[2] == answer
    assert problem in _texts(answer_lines(snapshot))


def test_a_node_that_just_started_has_no_stalled_steps() -> None:
    assert problems(_later(_with("node", uptime_s=5.0), 3000)) == []


def test_a_stopped_node_is_faint_and_names_its_start_command() -> None:
    lines = metric_lines(STOPPED)
    assert {span.tone for shown in lines[:-1] for span in shown} == {Tone.FAINT}
    assert {span.tone for shown in metric_lines(RUNNING)[:-1] for span in shown} > {Tone.FAINT, Tone.STRONG}
    assert _answers(STOPPED) == ["stopped"] * 3
    assert "as asked, 1 min ago" in _texts(answer_lines(STOPPED))
    assert RUNNING.start_command in _texts(next_lines(STOPPED))
    assert next_lines(STOPPED)[0][0].tone is Tone.PLAIN
    assert "stopped" in [span.text for span in head_line(STOPPED) if span.tone is Tone.FAINT]
    killed = replace(STOPPED, status=stopped(RUNNING.status))
    assert next_lines(killed)[0][0].tone is Tone.WARN
    assert _answers(killed) == ["no"] * 3 and "killed, or a fault" in _texts(answer_lines(killed))
    silent = replace(STOPPED, status=RUNNING.status, is_silent=True)
    assert _answers(silent)[2] == "no" and f"does not answer: see {STOPPED.logs}" in _texts(answer_lines(silent))


def test_a_stopping_node_shows_what_it_waits_for() -> None:
    stopping = _with("node", state="stopping", waits_for="the checkpoint of step 7")
    assert _answers(stopping) == ["not yet"] * 3
    assert "the node is stopping: it waits for the checkpoint of step 7" in _texts(answer_lines(stopping)[2:])
    assert _texts(next_lines(stopping)).endswith("it waits for the checkpoint of step 7"), "it does not wait for a step"
    assert "stopping" in [span.text for span in head_line(stopping) if span.tone is Tone.WARN]


def test_the_kind_of_training_has_a_line_if_it_is_known() -> None:
    training = "a LoRA adapter of rank 128: full training of 3.09 B needs 59.4 GiB, this card has 22.0 (20.9 usable)"
    known = metric_lines(_with("model", training=training))
    assert len(known) == len(metric_lines(RUNNING)) + 1
    assert f"trains      {training}" in [text_of(shown) for shown in known]
    assert "\x1b" not in _texts(metric_lines(_with("model", training=HOSTILE)))


def test_lines_fit_into_80_columns() -> None:
    for shown in (
        head_line(RUNNING),
        *answer_lines(RUNNING),
        *metric_lines(_with("swarm", groups_refused={"stale": 3})),
    ):
        assert len(text_of(shown)) <= 80, text_of(shown)


def test_a_peer_has_a_row_and_lines() -> None:
    assert [row["peer_id"] for row in sorted_peers(reversed(PEERS))] == [ANN, BOB]
    assert _texts([peer_row(PEERS[0], now=NOW)]) == "annQwen2.5-7B 7.6Bgood39843 %3400" + "3 s"
    assert "neither fetches from it" in _texts(peer_lines(PEERS[1], now=NOW))
    shown = _texts(peer_lines(PEERS[0], now=NOW))
    assert "43 % of its completions, effectively, over its last 20 steps" in shown
    assert "960 completions, 91 % kept; of the negatives 82 %" in shown
    assert "no step has taken a group of it" in _texts(peer_lines(PEERS[1], now=NOW))
    of_an_older_node = {name: value for name, value in PEERS[0].items() if name != "teaching"}
    assert "398-3400" in _texts([peer_row(of_an_older_node, now=NOW)])


def test_events_have_one_line_each() -> None:
    assert [event["event"] for event in notable_events(HISTORY.events)] == ["start", "refused", "eval", "step"]
    assert text_of(event_line(HISTORY.events[-1])).endswith("101  reward 0.61, loss -0.021, 8 own, 4 foreign, 6.9 s")
    assert "had no effect: not finite" in text_of(event_line({"time": 0, "event": "step", "refused": "not finite"}))


def test_curves_are_thinned_and_fit_their_area() -> None:
    assert thinned(((0, 1.0), (1, 3.0), (2, 5.0), (3, 7.0)), 2) == [(0.5, 2.0), (2.5, 6.0)]
    rows = plot_rows([(0, 0.0), (50, 1.0)], width=30, height=5)
    assert len(rows) == 5 and max(map(len, rows)) <= 30
    assert rows[0].startswith("1.00") and rows[3].startswith("0.00") and rows[4].split() == ["0", "50"]
    assert rows[0][-1] not in " ⠀" and rows[3][-1] != rows[0][-1]
    assert plot_rows([], width=30, height=5) == ["no data yet"]
    assert len(plot_rows([(3, 0.5)], width=30, height=5)) == 5
    assert plot_rows([(3, 0.5)], width=5, height=5) == []


def test_a_group_is_shown_with_its_history() -> None:
    shown = _texts(group_lines(GROUP))
    assert "| user: What is 6 x 7?\nanswer      42\n" in shown and "| ids 12 13 14" in shown
    assert "reward 1  3 tokens, stop, log-prob mean -1.1, least -2.90" in shown
    assert "log-prob mean -0.5, least -0.50, version 88 to 89" in shown
    assert "trained in step 100" in shown and "taken          step 100" in shown
    assert "2 -2.90" not in shown and "2 -2.90" in _texts(group_lines(GROUP, with_tokens=True))
    assert Span("trained in step 100", Tone.GOOD) in [span for shown in group_lines(GROUP) for span in shown]
    refused = replace(GROUP, summary=None, verdict="refused", reason=HOSTILE, detail=HOSTILE, completions=())
    assert f"rejected ({printable(HOSTILE)})" in _texts(group_lines(refused))


def test_a_waiting_node_shows_what_it_waits_for() -> None:
    waiting = _with("learner", last_step_at=None)
    assert "wait for the first step; a step usually takes 7 s" in _texts(next_lines(waiting))
    assert "its time is not known yet" in _texts(next_lines(replace(waiting, history=History())))
    assert "wait for the first confirmation" in _texts(next_lines(_with("swarm", groups_sent=3, groups_confirmed=0)))
    assert "wait while models load" in _texts(next_lines(_with("node", state="starting")))
    assert [worst_tone(snapshot) for snapshot in (RUNNING, waiting, STOPPED)] == [Tone.GOOD, Tone.WARN, Tone.FAINT]
    assert worst_tone(_with("swarm", clock_skew_s=-40.0)) is Tone.BAD


@pytest.mark.parametrize("order", PEER_COLUMNS)
def test_peers_are_sorted_by_every_column(order: str) -> None:
    first = {"trust": BOB, "peer": BOB, "model": BOB}  # BOB is banned, and its texts begin with a control character
    assert sorted_peers(reversed(PEERS), order)[0]["peer_id"] == first.get(order, ANN)


def test_peers_are_searched_by_name_model_and_trust() -> None:
    def found(search_text: str) -> list[str]:
        return [row["peer_id"] for row in PEERS if is_found(row, search_text)]

    assert found("QWEN2.5-7b") == [ANN] and found("ANN") == [ANN, BOB] and found("banned") == [BOB]
    assert found("") == [ANN, BOB] and found("no such") == []


def test_a_curve_has_the_requested_width() -> None:
    rows = plot_rows([(step, step / 100) for step in range(101)], width=300, height=10)
    assert len(rows) == 10 and max(map(len, rows)) > 290
