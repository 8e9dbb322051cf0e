"""The saved status of a start that ends before its loops run, and the lines that a node prints at its end."""

import json

import pytest

from ftis_node.config.home import Home
from ftis_node.config.node import NodeSettings
from ftis_node.node.context import NodeCounters
from ftis_node.node.http_api.node_client import read_document
from ftis_node.node.startup.previous_run import mark_end, mark_start, read_last_status, read_saved_status
from ftis_node.node.startup.summaries import end_lines, finished_lines
from ftis_node.telemetry.status import EndWord, LearnerStatus, NodeStatus, Status
from ftis_node.workers.durable import complete_folder

PEERS = [{"peer_id": "a"}]


@pytest.fixture
def home(tmp_path):
    """Write the home of a node that finished."""
    home = Home(tmp_path)
    node = {"peer_id": "p", "state": "stopped", "end": "finished"}
    home.status.write_text(json.dumps({"node": node, "learner": {"step": 7}, "peers": PEERS}))
    return home


def test_a_start_clears_the_previous_end_and_keeps_the_rest(home):
    assert read_document(home, "/status")["node"]["end"] == "finished"
    mark_start(home)
    assert read_document(home, "/status")["node"]["end"] == "killed", "no later end was saved"
    assert (read_last_status(home).learner.step, read_document(home, "/peers")) == (7, PEERS)


@pytest.mark.parametrize(("steps", "is_finished"), [((), False), ((3, 6), False), ((3, 7), True), ((8,), True)])
def test_a_home_without_a_checkpoint_of_its_last_step_is_not_finished(home, steps, *, is_finished):
    for step in steps:
        with complete_folder(home.checkpoints / f"step-{step}"):
            pass
    document = json.loads(home.status.read_text())
    document["budget"] = {"learn_steps": {"used": 7, "limit": 7, "left": 0}}
    home.status.write_text(json.dumps(document))
    settings = NodeSettings(model="org/m", budget={"learn_steps": 7})
    assert (finished_lines(read_saved_status(home), home, settings=settings) is not None) is is_finished


@pytest.mark.parametrize(
    ("saved", "heading"), [(5, "stopped at step 5, saved: "), (3, "stopped at step 5, saved only to ")]
)
def test_the_end_names_the_checkpoint_that_is_on_disk(home, saved, heading):
    with complete_folder(home.checkpoints / f"step-{saved:08d}"):
        pass
    status = Status(node=NodeStatus(role="full", end="stopped"), learner=LearnerStatus(step=5))
    lines = end_lines(status, status, home, settings=NodeSettings(model="org/m"), counters=NodeCounters())
    assert lines[0].startswith(heading)
    assert [line for line in lines if line.endswith(f"the checkpoint of step {saved}")]


@pytest.mark.parametrize("end", [EndWord.STOPPED, EndWord.FAILED])
def test_a_start_that_ends_before_its_loops_saves_its_end(home, end):
    mark_end(home, end)
    assert read_last_status(home).node.end == "finished", "the end that the status loop saved was replaced"
    mark_start(home)
    mark_end(home, end)
    node = read_last_status(home).node
    assert (node.state, node.end) == ("stopped", end)


def test_a_first_start_that_is_killed_leaves_a_readable_status(tmp_path):
    home = Home(tmp_path)
    mark_start(home)
    document = read_document(home, "/status")
    assert (document["node"]["state"], document["node"]["end"]) == ("stopped", "killed")
    assert document["budget"]["learn_steps"]["used"] == 0, "the document lacks a section"
    assert read_document(home, "/peers") == []


@pytest.mark.parametrize(("end", "more"), [("finished", " --generate-tokens 640"), ("stopped", ""), ("", "")])
def test_only_a_finished_node_needs_a_larger_budget_to_resume(home, end, more):
    node = {"peer_id": "p", "state": "stopped", "end": end}
    budget = {"generate_tokens": {"used": 320, "limit": 320, "left": 0}}
    home.status.write_text(json.dumps({"node": node, "budget": budget}))
    home.settings.write_text('{"model": "m"}')
    assert read_document(home, "/status")["node"]["resume"] == f"ftis-node join --home {home.root}{more}"
