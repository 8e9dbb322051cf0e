"""What status, the dashboard and the report say about a node: answers, facts, peers, events, groups.

tests/telemetry/test_health_summary.py has the answers for each state.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from ftis_node.dashboard.screens.main import metric_lines, plot_rows
from ftis_node.telemetry.history import History, thinned
from ftis_node.telemetry.status import EvalStatus, PauseStatus, ReceiptFigures, RefusalStatus, Status
from ftis_node.telemetry.status_at_rest import at_rest
from ftis_node.telemetry.terminal_text import printable, size
from ftis_node.view.events import event_line, notable_events
from ftis_node.view.formats import ago, count, number, percent
from ftis_node.view.groups import group_lines
from ftis_node.view.health_answers import (
    answer_lines,
    answer_texts,
    next_lines,
    problems,
    refusal_lines,
    refusal_texts,
    trend,
    worst_tone,
)
from ftis_node.view.node_facts import head_line, node_facts
from ftis_node.view.peers import PEER_COLUMNS, is_found, peer_lines, peer_row, sorted_peers
from ftis_node.view.snapshot import MachineUsage, NodeSnapshot
from ftis_node.view.spans import Line, Span, Tone, text_of
from tests.dashboard.sample_node import ANN, BOB, GROUP, HISTORY, HOSTILE, NOW, PEERS, RUNNING, STOPPED


def _texts(lines: Iterable[Line]) -> str:
    return "\n".join(map(text_of, lines))


def _with(section: str, **changes: Any) -> NodeSnapshot:
    """Return the running node with changes in one section of its status."""
    status = RUNNING.status
    changed = msgspec.structs.replace(getattr(status, section), **changes)
    return replace(RUNNING, status=msgspec.structs.replace(status, **{section: changed}))


def _facts(snapshot: NodeSnapshot) -> dict[str, str]:
    return {label: text_of(shown) for label, shown in node_facts(snapshot)}


def _later(snapshot: NodeSnapshot, seconds: float) -> NodeSnapshot:
    """Return the snapshot as if taken later, of a node that still answers."""
    health = msgspec.structs.replace(snapshot.status.health, taken_at=NOW + seconds)
    return replace(snapshot, taken_at=NOW + seconds, status=msgspec.structs.replace(snapshot.status, health=health))


def _answers(snapshot: NodeSnapshot) -> list[str]:
    """Return the three answers: contributing, learning, healthy."""
    return [shown[1].text.strip() for shown in answer_lines(snapshot)]


def _refusals(number_of_peers: int) -> list[RefusalStatus]:
    return [RefusalStatus("x" * 9, HOSTILE, "stale", "", 12, NOW - 300, HOSTILE)] * number_of_peers


def test_control_characters_of_a_peer_are_escaped() -> None:
    hostile = _with("swarm", state="standalone", reason=HOSTILE, refused_by=_refusals(1), groups_refused={HOSTILE: 1})
    lines = [
        *(event_line(event) for event in HISTORY.events),
        *(peer_row(PEERS[1], now=NOW), *peer_lines(PEERS[1], now=NOW)),
        *group_lines(GROUP, with_tokens=True),
        *(*answer_lines(hostile), *refusal_lines(hostile), *(shown for _, shown in node_facts(hostile))),
        *(head_line(_with("run", name=HOSTILE)), *(shown for _, shown in node_facts(_with("model", training=HOSTILE)))),
    ]
    assert printable(HOSTILE) in _texts(lines)
    assert "\x1b" not in _texts(lines) and "\u202e" not in _texts(lines)


def test_numbers_are_rounded_with_units() -> None:
    assert [count(value) for value in (0, 9999, 10_000, 172_832, 3.1e9)] == ["0", "9999", "10.0k", "173k", "3.1B"]
    assert [size(value) for value in (0, 1500, 308_100, 25.3e9)] == ["0 B", "1.5 kB", "308 kB", "25.3 GB"]
    assert [ago(then, 1000.0) for then in (0.0, 995.0, 800.0)] == ["never", "5 s", "3 min"]
    values = (None, 0.0, 0.71428, -12.345, 1240.4, 2.1e-6, float("inf"), float("nan"))
    assert [number(value) for value in values] == ["-", "0", "0.714", "-12.3", "1,240", "2.1e-06", "inf", "nan"]
    assert [percent(part) for part in (None, 0.5, 0.9961, 1.0)] == ["-", "50 %", "99.6 %", "100 %"]


def test_a_healthy_node_has_three_times_yes() -> None:
    assert _answers(RUNNING) == ["yes", "yes", "yes"]
    assert (problems(RUNNING), answer_texts(RUNNING), next_lines(RUNNING)) == ([], [], ())
    assert "402 confirmed (98 %)" in _texts(answer_lines(RUNNING))
    assert "pass@1 0.42 -> 0.59" in _texts(answer_lines(RUNNING))


def test_a_trend_is_distinguished_from_noise() -> None:
    assert trend([0.1, 0.2] * 8 + [0.5, 0.6] * 8)[2] == "up"
    assert trend([0.5, 0.6] * 8 + [0.1, 0.2] * 8)[2] == "down"
    assert trend([0.1, 0.9] * 8 + [0.2, 0.9] * 8)[2] == "flat"
    early = replace(RUNNING, history=History(HISTORY.steps[:7]))
    assert "the trend shows after 8 steps" in _texts(answer_lines(early))


@pytest.mark.parametrize(
    ("snapshot", "problem", "answer"),
    [
        (_with("learner", state="backing-off"), "the learner worker died and restarts: see logs/learner.log", "no"),
        (replace(RUNNING, machine=MachineUsage(ram_used_bytes=99, ram_total_bytes=100)), "memory is nearly", "yes"),
        (_later(_with("node", uptime_s=9000.0), 500), "no step for 8 min", "yes"),
    ],
)
def test_a_problem_is_described(snapshot: NodeSnapshot, problem: str, answer: str) -> None:
    assert len(found := problems(snapshot)) == 1
    assert problem in found[0]
    assert _answers(snapshot)[2] == answer
    assert problem in _texts(answer_lines(snapshot))


def test_advice_of_a_node_that_learns_is_shown_as_a_problem() -> None:
    cut = _with("learner", cut_fraction=0.6)
    assert [text.partition(":")[0] for text in problems(cut)] == ["60 % of the answers are cut"]
    assert _answers(cut) == ["yes", "yes", "yes"]
    assert [tone for tone, _ in answer_texts(cut)] == [Tone.GOOD]
    assert "60 % of the answers are cut: raise" in _texts(answer_lines(cut))


def test_a_node_that_just_started_has_no_stalled_steps() -> None:
    assert problems(_later(_with("node", uptime_s=5.0), 3000)) == []


def test_steps_do_not_stall_in_a_pause_and_are_awaited_after_it() -> None:
    node = _with("node", uptime_s=9000.0)

    def found(**pause: Any) -> list[str]:
        changed = replace(node, status=msgspec.structs.replace(node.status, pause=PauseStatus(**pause)))
        return problems(_later(changed, 3000))

    assert (found(reason="by command"), found(resumed_at=NOW + 2910.0)) == ([], [])
    assert found(resumed_at=NOW + 2520.0) == ["no step for 8 min: are groups ready? press `g`"]


def test_a_cause_of_two_answers_and_each_refusal_appear_once() -> None:
    assert [text for _, text in answer_texts(_with("limits", paused="disk full"))] == [
        "contributing: paused: disk full: free disk space or raise limits.home_bytes; the node resumes by itself"
    ]
    refused = _with("swarm", refused_by=_refusals(3), refused_peers=_refusals(1))
    texts = refusal_texts(refused, limit=2)
    assert [tone for tone, _ in texts] == [Tone.BAD] * 3 + [Tone.WARN]
    assert texts[2][1] == "its groups are refused by 1 more peers: see status --json"
    assert "12 groups in 5 min" in texts[0][1] and "(and 2 more: `?`)" in _texts(refusal_lines(refused))


def test_a_stopped_node_is_faint_and_names_its_start_command() -> None:
    lines = metric_lines(STOPPED)
    assert {span.tone for shown in lines[:-1] for span in shown} == {Tone.FAINT}
    assert {span.tone for shown in metric_lines(RUNNING)[:-1] for span in shown} > {Tone.FAINT, Tone.STRONG}
    assert _answers(STOPPED) == ["stopped"] * 3
    assert "as asked, 1 min ago" in _texts(answer_lines(STOPPED))
    assert RUNNING.start_command in _texts(next_lines(STOPPED))
    assert next_lines(STOPPED)[0][0].tone is Tone.PLAIN
    assert "stopped" in [span.text for span in head_line(STOPPED) if span.tone is Tone.FAINT]
    killed = replace(STOPPED, status=at_rest(RUNNING.status, "stopped"))
    assert next_lines(killed)[0][0].tone is Tone.WARN
    assert _answers(killed) == ["no"] * 3 and "killed, or a fault" in _texts(answer_lines(killed))
    silent = replace(STOPPED, status=RUNNING.status, is_silent=True)
    assert _answers(silent)[2] == "no" and f"does not answer: see {STOPPED.logs}" in _texts(answer_lines(silent))


def test_a_stopping_node_shows_what_it_waits_for() -> None:
    stopping = _with("node", state="stopping", waits_for="the checkpoint of step 7")
    assert _answers(stopping) == ["not yet"] * 3
    assert "the node is stopping: it waits for the checkpoint of step 7" in _texts(answer_lines(stopping)[2:])
    assert _texts(next_lines(stopping)).endswith("it waits for the checkpoint of step 7"), "it does not wait for a step"
    assert "stopping: it waits for the checkpoint of step 7" in _facts(stopping)["node"]


def test_a_waiting_node_shows_what_it_waits_for() -> None:
    waiting = _with("learner", last_step_at=None)
    assert "wait for the first step; a step usually takes 7 s" in _texts(next_lines(waiting))
    assert "its time is not known yet" in _texts(next_lines(replace(waiting, history=History())))
    assert "wait while models load" in _texts(next_lines(_with("node", state="starting")))
    assert [worst_tone(snapshot) for snapshot in (RUNNING, waiting, STOPPED)] == [Tone.GOOD, Tone.WARN, Tone.FAINT]
    assert worst_tone(_with("swarm", clock_skew_s=-40.0)) is Tone.BAD


def test_facts_that_are_known_have_a_line() -> None:
    usual = "node run model generation learner answers trained on swarm groups buffer memory"
    assert " ".join(_facts(RUNNING)) == usual
    assert _facts(RUNNING)["trained on"] == f"own 808 {'█' * 13}{'░' * 7} 404 foreign (33.3 %)"
    training = "a LoRA adapter of rank 128: full training of 3.09 B needs 59.4 GiB, 20.9 GiB are usable"
    known = metric_lines(_with("model", training=training))
    assert len(known) == len(metric_lines(RUNNING)) + 1
    assert f"trains      {training}" in [text_of(shown) for shown in known]
    told = _with("swarm", used_by_peers=ReceiptFigures(4, 90, 999, 3, 41), newer_release="update to 0.2.0")
    assert "used        3 peers trained on 41 of this node's groups since yesterday" in _texts(metric_lines(told))
    assert "release     update to 0.2.0" in _texts(metric_lines(told))
    episodes = metric_lines(_with("generation", turns_made=12, observations_made=1))
    assert "episodes    12 turns and 1 observation since the start" in _texts(episodes)
    evaluations = [EvalStatus(step=step, task="t", pass_at_1=step / 10, n=8) for step in (0, 5, 7)]
    evaluated = replace(RUNNING, status=msgspec.structs.replace(RUNNING.status, eval=evaluations))
    assert _facts(evaluated)["pass@1"] == "0.700 at step 7, 0.000 at step 0 (8 problems of t)"
    mismatch = _facts(_with("learner", mismatch_kl=1e-6, mismatch_share=0.5, mismatch_version=9))["mismatch"]
    assert mismatch == "engine to learner KL 1e-06, 50 % of ratios off by more than 1 % (version 9)"
    answers = _with("learner", cut_fraction=0.6, entropy=None, kl_to_start=None, kl_from_start=0.1)
    shown = next(text for label, text in node_facts(answers) if label == "answers")
    assert text_of(shown) == "148 tokens, 60 % cut, 25 % no signal, KL from start 0.1"
    assert [span.tone for span in shown] == [Tone.PLAIN, Tone.WARN, Tone.PLAIN, Tone.PLAIN]
    disk = _with("limits", home_bytes=10**9, home_limit_bytes=2 * 10**9, disk_free_bytes=5 * 10**9)
    assert _facts(disk)["disk"] == "home 1.0 GB of 2.0 GB, groups 0 B of 0 B, 5.0 GB free"
    weights = _with("swarm", weights_bytes_in=3 * 10**6, weights_age_s=65.0, weights_refused={"hash": 2})
    assert _facts(weights)["weights"] == "3.0 MB in, 0 B out, 2 refused, those served are 1 min 5 s old"
    assert "-2.5 s off ours" in _facts(_with("swarm", clock_skew_s=-2.5))["swarm"]
    assert "2 restarts, loss" in _facts(_with("learner", restarts=2))["learner"]


def test_a_role_without_a_worker_is_explained() -> None:
    assert "others generate" in _facts(_with("generation", state="off"))["generation"]
    facts = _facts(_with("learner", state="off"))
    assert "for a learner elsewhere" in facts["learner"] and "trained on" not in facts
    exchange = _with("node", role="exchange")
    facts = _facts(exchange)
    assert facts["trainer"] == "step 101, groups in all: 412 shared, 404 foreign given to it"
    assert not {"generation", "learner"} & facts.keys()
    assert "trainer" in _texts(metric_lines(exchange))


def test_a_node_without_a_status_has_facts() -> None:
    assert "stopped" in _facts(NodeSnapshot(taken_at=NOW, status=Status()))["node"]


def test_a_peer_has_a_row_and_lines() -> None:
    assert [row["peer_id"] for row in sorted_peers(reversed(PEERS))] == [ANN, BOB]
    assert _texts([peer_row(PEERS[0], now=NOW)]) == "annQwen2.5-7B 7.6Bgood39843 %3400" + "3 s"
    assert "neither fetches from it" in _texts(peer_lines(PEERS[1], now=NOW))
    shown = _texts(peer_lines(PEERS[0], now=NOW))
    assert "43 % of its completions, effectively, over its last 20 steps" in shown
    assert "960 completions, 91 % kept; of the negatives 82 %" in shown
    assert "no step has taken a group of it" in _texts(peer_lines(PEERS[1], now=NOW))


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
    rows = plot_rows([(step, step / 100) for step in range(101)], width=300, height=10)
    assert len(rows) == 10 and max(map(len, rows)) > 290


def test_a_group_is_shown_with_its_history() -> None:
    shown = _texts(group_lines(GROUP))
    assert "| user: What is 6 x 7?\nanswer      42\n" in shown and "| ids 12 13 14" in shown
    assert "reward 1, advantage +0.50  3 tokens, stop, log-prob mean -1.1, least -2.90" in shown
    assert "log-prob mean -0.5, least -0.50, version 88 to 89" in shown
    assert "trained in step 100" in shown and "taken       by step 100" in shown
    assert "2 -2.90" not in shown and "2 -2.90" in _texts(group_lines(GROUP, with_tokens=True))
    assert Span("trained in step 100", Tone.GOOD) in [span for shown in group_lines(GROUP) for span in shown]
    refused = replace(GROUP, summary=None, verdict="refused", reason=HOSTILE, detail=HOSTILE, completions=())
    assert f"refused ({printable(HOSTILE)})" in _texts(group_lines(refused))


def test_equal_completions_of_a_group_are_one() -> None:
    right, wrong = GROUP.completions
    shown = _texts(group_lines(replace(GROUP, completions=(right, wrong, right, right))))
    assert "completions 1, 3, 4  reward 1, advantage +0.25" in shown and "completion 2  reward 0, adv" in shown
    assert shown.count("  | 42\n") == 1


@pytest.mark.parametrize("order", PEER_COLUMNS)
def test_peers_are_sorted_by_every_column(order: str) -> None:
    first = {"trust": BOB, "peer": BOB, "model": BOB}  # BOB is banned, and its texts begin with a control character
    assert sorted_peers(reversed(PEERS), order)[0]["peer_id"] == first.get(order, ANN)


def test_peers_are_searched_by_name_model_and_trust() -> None:
    def found(search_text: str) -> list[str]:
        return [row["peer_id"] for row in PEERS if is_found(row, search_text)]

    assert found("QWEN2.5-7b") == [ANN] and found("ANN") == [ANN, BOB] and found("banned") == [BOB]
    assert found("") == [ANN, BOB] and found("no such") == []
