"""The answers of a status document, contributing, learning and healthy, with their causes and advice."""

from typing import Any

import pytest
from msgspec.structs import replace

from ftis_node.telemetry.health_summary import AnswerWord, duration, summarize_health
from ftis_node.telemetry.status import (
    GenerationStatus,
    HealthStatus,
    LearnerStatus,
    NodeStatus,
    PauseStatus,
    Status,
    SwarmStatus,
    amount,
)
from ftis_node.telemetry.status_at_rest import at_rest

NOW = 1_000_000.0
HEALTHY = Status(
    node=NodeStatus(peer_id="12D3", state="running", uptime_s=8000.0),
    generation=GenerationStatus(state="ready", last_group_at=NOW - 5),
    learner=LearnerStatus(
        state="ready", step=3, reward_mean=0.5, kept_fraction=0.9, grad_norm=1.0, last_step_at=NOW - 60
    ),
    swarm=SwarmStatus(state="connected", peers_connected=1, groups_sent=40, groups_confirmed=4, groups_received=40),
    health=HealthStatus(healthy=True, ready=True, taken_at=NOW - 1),
)
EXCHANGE: dict[str, Any] = {
    "node": {"role": "exchange"},
    "generation": {"state": "off", "last_group_at": None},
    "learner": {"state": "off"},
}
YES, NO, NOT_YET, NOT_APPLICABLE = AnswerWord.YES, AnswerWord.NO, AnswerWord.NOT_YET, AnswerWord.NOT_APPLICABLE


def _with(**changes: Any) -> Status:
    """Return `HEALTHY` with changed fields in its sections: `learner={"state": "off"}`."""
    sections = {name: replace(getattr(HEALTHY, name), **fields) for name, fields in changes.items()}
    return replace(HEALTHY, **sections)


@pytest.mark.parametrize(
    ("changes", "words", "text"),
    [
        ({}, (YES, YES, YES), "40 groups sent, 4 confirmed"),
        ({"swarm": {"state": "standalone", "reason": "no peers were given; waiting"}}, (NO, YES, YES), "give --peers"),
        ({"swarm": {"state": "standalone", "reason": "no bootstrap peer answers"}}, (NO, YES, YES), "doctor --peers"),
        ({"swarm": {"state": "starting", "reason": "looking for peers"}}, (NOT_YET, YES, YES), "looking for peers"),
        ({"swarm": {"groups_sent": 0}}, (NOT_YET, YES, YES), "no group sent"),
        ({"swarm": {"groups_confirmed": 0}}, (NO, YES, YES), "none confirmed"),
        ({"swarm": {"groups_sent": 3, "groups_confirmed": 0}}, (NOT_YET, YES, YES), "3 groups sent, none confirmed"),
        ({"limits": {"disk_free_bytes": 1_900_000_000}}, (YES, YES, NO), "1.9 GB of disk left"),
        ({"learner": {"out_of_memory": 2}}, (YES, YES, NO), "ran out of memory 2 times"),
        ({"swarm": {"clock_skew_s": -11.0}}, (YES, YES, NO), "time synchronization"),
        ({"swarm": {"groups_refused": {"reward_mismatch": 30, "stale": 11}}}, (YES, YES, NO), "41 of 81 groups"),
        ({"swarm": {"groups_refused": {"reward_mismatch": 29, "stale": 11}}}, (YES, YES, YES), ""),
        ({"generation": {"state": "starting"}}, (NOT_YET, YES, YES), "logs/generation.log"),
        ({"generation": {"state": "paused"}}, (NOT_YET, YES, YES), "the generation worker is starting"),
        ({"generation": {"state": "backing-off"}}, (NO, YES, NO), "died and restarts"),
        ({"generation": {"state": "off"}}, (YES, YES, YES), "1 peer may fetch its weights"),
        ({"generation": {"last_group_at": NOW - 1000}}, (NO, YES, YES), "no group generated for 16 min 40 s"),
        ({"generation": {"last_group_at": NOW - 1000}, "replay": {"ready": 4}}, (YES, YES, YES), ""),
        ({"generation": {"last_group_at": None}}, (NO, YES, YES), "no group generated for 2 h 13 min"),
        ({"learner": {"state": "off"}}, (YES, NOT_APPLICABLE, YES), "follows"),
        ({**EXCHANGE}, (YES, NOT_APPLICABLE, YES), "the trainer beside this node"),
        ({**EXCHANGE, "swarm": {"groups_sent": 0}}, (NOT_YET, NOT_APPLICABLE, YES), "start the trainer"),
        ({**EXCHANGE, "swarm": {"groups_confirmed": 0}}, (NO, NOT_APPLICABLE, YES), "none confirmed"),
        ({"learner": {"state": "failed"}}, (YES, NO, NO), "failed for good"),
        ({"learner": {"last_step_at": NOW - 3601}}, (YES, NO, YES), "no step for 1 h"),
        ({"learner": {"last_step_at": None}, "node": {"uptime_s": 60.0}}, (YES, NOT_YET, YES), "wait for the first"),
        ({"learner": {"kept_fraction": 0.0}}, (YES, NO, YES), "kl_threshold"),
        ({"learner": {"reward_mean": 0.0}}, (YES, NO, YES), "easier task"),
        ({"learner": {"grad_norm": 0.0}}, (YES, NO, YES), "gradient was 0"),
        ({"generation": {"groups_without_reward": 50, "sample": "a\x1b b"}}, (YES, YES, YES),
            r"one completion: 'a\x1b b'"),
        ({"generation": {"groups_without_reward": 49, "sample": "a"}}, (YES, YES, YES), "step 3"),
        ({"generation": {"groups_without_reward": 50}, "learner": {"grad_norm": 0.0}}, (YES, NO, YES), "in 50 groups"),
        ({"learner": {"no_signal_fraction": 0.95}}, (YES, YES, YES), "95 % of the node's groups have no signal"),
        ({"learner": {"no_signal_fraction": 0.95, "reward_mean": 0.8}}, (YES, YES, YES), "use a harder task"),
        ({"learner": {"no_signal_fraction": 0.9}}, (YES, YES, YES), "step 3"),
        ({"learner": {"cut_fraction": 0.6}, "generation": {"max_completion_tokens": 64}}, (YES, YES, YES),
            "60 % of the answers are cut at 64 tokens raise sampling.max_completion_tokens"),
        ({"learner": {"cut_fraction": 0.5}}, (YES, YES, YES), "step 3"),
        ({"learner": {"kl_to_start": 1.1}}, (YES, YES, YES), "1.10 nats a token from its start"),
        ({"learner": {"kl_from_start": 2.9}}, (YES, YES, YES), "step 3"),
        ({"learner": {"kl_from_start": 3.1}}, (YES, YES, YES), "a lower learning rate"),
        ({"health": {"problems": ["the intake loop ended"]}}, (YES, YES, NO), "the intake loop ended"),
        ({"health": {"taken_at": NOW - 31}}, (YES, YES, NO), "31 s old"),
        ({"node": {"state": "failed", "end": "failed", "resume": "ftis-node join --home h"}}, (NO, NO, NO),
            "join --home h"),
    ],
)  # fmt: skip
def test_each_state_gets_its_answers_and_advice(changes, words, text):
    verdict = summarize_health(_with(**changes), now=NOW)
    assert tuple(answer.word for _, answer in verdict.items()) == words
    assert text in " ".join(f"{answer.why} {answer.advice}" for _, answer in verdict.items())
    assert "node" in changes or all(answer.advice for _, answer in verdict.items() if answer.word is NO)


@pytest.mark.parametrize(
    ("resumed_s", "contributing", "learning"), [(10, YES, YES), (901, NO, YES), (3601, NO, NO), (9e5, NO, NO)]
)
def test_the_time_of_a_pause_is_no_silence(resumed_s, contributing, learning):
    silent = _with(generation={"last_group_at": NOW - 32400}, learner={"last_step_at": NOW - 32400})
    status = replace(silent, pause=PauseStatus(resumed_at=NOW - resumed_s))
    answers = summarize_health(status, now=NOW)
    assert (answers.contributing.word, answers.learning.word) == (contributing, learning)
    assert NO not in (contributing, learning) or duration(min(32400, resumed_s)) in answers.contributing.why


def test_a_pause_names_the_disk_space_for_which_the_step_in_progress_waits():
    full = replace(_with(limits={"paused": "the disk is full"}), pause=PauseStatus("by command"))
    advice = summarize_health(full, now=NOW).contributing.advice
    assert advice == "the step in progress ends first; the disk is full"


def test_the_answers_of_a_killed_and_of_a_starting_node():
    words = [answer.word for _, answer in summarize_health(at_rest(HEALTHY, "stopped"), now=NOW).items()]
    assert words == [NO, NO, NO], "its last status does not end: it was killed"
    words = [answer.word for _, answer in summarize_health(at_rest(HEALTHY, "starting"), now=NOW).items()]
    assert words == [NOT_YET, NOT_YET, NOT_YET]


def test_a_stopping_node_names_what_it_waits_for():
    for waits_for, text in (("the checkpoint of step 7", "it waits for the checkpoint of step 7"), ("", "wait")):
        document = _with(node={"state": "stopping", "waits_for": waits_for})
        answers = [answer for _, answer in summarize_health(document, now=NOW).items()]
        assert [(answer.word, answer.why) for answer in answers] == [(NOT_YET, "the node is stopping")] * 3
        assert all(text in answer.advice for answer in answers)
    assert summarize_health(at_rest(HEALTHY, "stopping"), now=NOW).healthy.word is NOT_YET
    problem = _with(node={"state": "stopping"}, health={"problems": ["the status loop hangs"]})
    assert summarize_health(problem, now=NOW).healthy.word is NO


@pytest.mark.parametrize(
    ("node", "word", "text"),
    [
        ({"state": "stopping", "waits_for": "its end"}, NO, "did not end by itself: killed"),
        ({"state": "running"}, NO, "did not end by itself: killed, or a fault: start it again with C"),
        ({"state": "stopped", "end": "stopped"}, AnswerWord.STOPPED, "as asked: go on with C"),
        ({"state": "stopped", "end": "finished"}, AnswerWord.FINISHED, "10 of 10 steps: go on with C"),
        ({"state": "stopped", "end": "failed"}, NO, "the node failed; see logs/ in the home: start it again with C"),
        ({"state": "failed"}, NO, "the node failed; see logs/ in the home: start it again with C"),
        ({"state": "stopped", "peer_id": ""}, NO, "killed"),
    ],
)  # fmt: skip
def test_the_end_of_a_node_is_described(node, word, text):
    saved = _with(node=node, budget={"learn_steps": amount(10, 10)})
    status = at_rest(saved, "stopped", resume="C")
    assert (status.node.state, status.node.resume, status.node.waits_for) == ("stopped", "C", "")
    assert (status.generation.state, status.learner.state, status.learner.step) == ("stopped", "stopped", 3)
    verdict = summarize_health(status, now=NOW)
    for answer in (verdict.contributing, verdict.learning, verdict.healthy):
        assert answer.word is word and text in f"{answer.why}: {answer.advice}"
    assert at_rest(status, "starting").node.end == "", "a node that starts has not ended"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (59.9, "59 s"), (60, "1 min"), (3661, "1 h 1 min"), (7200, "2 h"), (90000, "1 d 1 h"), (-5, "0 s")],
)
def test_durations_are_written_in_two_units(seconds, text):
    assert duration(seconds) == text
