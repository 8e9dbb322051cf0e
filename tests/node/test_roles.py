"""A learner and a generator as real processes: weights go one way, groups the other, and each side survives the other's
death."""

from contextlib import ExitStack
from typing import Any

import pytest

from ftis_node.node.storage.weight_versions import PREFIX, SERVED_MARK
from tests.node.support import ANY_PORT, RunningNode, bootstrap, started, write_manifest

START_S = 120.0
DELAY_S = 2.0
GENERATOR = f'[roles]\nweights_delay = "fixed:{DELAY_S}"\nevaluate = true\n'


def _versions(node: RunningNode) -> list[int]:
    return [event["version"] for event in node.events("served")]


def _served_on_disk(node: RunningNode) -> int:
    """Return the newest version that is marked as served."""
    return max(int(mark.parent.name.split("-")[1]) for mark in node.home.rglob(f"{PREFIX}*/{SERVED_MARK}"))


@pytest.mark.timeout(600)
def test_a_generator_follows_a_learner_through_its_death(tmp_path, tiny_models):
    run = write_manifest(tmp_path / "run.toml", foreign_wait_s=60.0)
    with ExitStack() as stack:
        address = stack.enter_context(bootstrap(tmp_path / "bootstrap"))
        common = ("--model", str(tiny_models["s"]), "--run", str(run), "--peers", address, "--listen", ANY_PORT)
        learner = stack.enter_context(started(tmp_path / "learner", "join", "--role", "learner", *common))
        learner.wait_for(lambda: "--follow" in learner.log.read_text(), timeout_s=START_S)
        peer_id = learner.peer_id()
        (tmp_path / "generator").mkdir()
        (tmp_path / "generator" / "node.toml").write_text(GENERATOR)
        follow = ("--role", "generator", "--follow", peer_id, *common)
        generator = stack.enter_context(started(tmp_path / "generator", "join", *follow))
        generator.wait_for(lambda: len(_versions(generator)) >= 2, timeout_s=START_S)
        learner.wait_for(lambda: len(learner.events("step")) >= 3, timeout_s=60)
        _check_learner(learner)
        _check_generator(generator, peer_id=peer_id)

        learner.process.kill()
        learner.process.wait()
        step = max(event["step"] for event in learner.events("step"))
        generator.wait_for(lambda: generator.events("learner_away"), timeout_s=60)
        assert generator.status()["generation"]["state"] == "ready"
        again = stack.enter_context(started(tmp_path / "learner", "join", "--role", "learner", *common))
        again.wait_for(lambda: max(event["step"] for event in again.events("step")) > step + 3, timeout_s=START_S)
        generator.wait_for(
            lambda: generator.events("learner_back") and _versions(generator)[-1] > step + 2, timeout_s=60
        )

        generator.stop()
        num_served = len(_versions(generator))
        on_disk = _served_on_disk(generator)
        assert on_disk >= _versions(generator)[-1], "it may stop between the mark on the disk and the event"
        resumed = stack.enter_context(started(tmp_path / "generator", "join", *follow))
        resumed.wait_for(lambda: len(_versions(resumed)) > num_served, timeout_s=START_S)
        assert _versions(resumed)[num_served] == on_disk, "it begins with the version that it served last"
        resumed.wait_for(lambda: _versions(resumed)[-1] > on_disk, timeout_s=60)
        for node in (resumed, again):
            node.stop()


def _status_with_weights(generator: RunningNode) -> dict[str, Any] | None:
    """Return the status with the age of the served weights, which follows the event within a second or two."""
    status = generator.status()
    return None if status["swarm"]["weights_age_s"] is None else status


def _check_learner(learner: RunningNode) -> None:
    status = learner.status()
    assert (status["node"]["role"], status["generation"]["state"]) == ("learner", "off")
    assert (status["generation"]["groups_made"], status["learner"]["own_groups"]) == (0, 0)
    assert status["learner"]["mismatch_kl"] is None, "it does not count groups of unknown peers"
    assert (status["swarm"]["groups_refused"], status["eval"]) == ({}, [])
    steps = learner.events("step")
    assert {(event["own_groups"], event["foreign_groups"]) for event in steps} == {(0, 8)}, (
        "own groups are those that this node signed"
    )
    offered = {event["version"] for event in learner.events("weights_offered")}
    assert {event["version"] for event in learner.events("weights_served")} <= offered


def _check_generator(generator: RunningNode, *, peer_id: str) -> None:
    versions = _versions(generator)
    assert versions == sorted(set(versions)), "a version fell or was served twice"
    status = generator.wait_for(lambda: _status_with_weights(generator), timeout_s=20)
    assert (status["node"]["role"], status["learner"]["state"]) == ("generator", "off")
    assert status["model"]["parameters"] > 0
    assert (status["swarm"]["weights_bytes_out"], status["swarm"]["groups_received"]) == (0, 0)
    assert status["swarm"]["weights_refused"] == {}
    assert status["replay"]["released"]["delivered"] > 0
    assert all(event["age_s"] >= DELAY_S for event in generator.events("served"))
    evaluated = generator.wait_for(lambda: generator.events("eval"), timeout_s=60)
    assert {entry["task"] for entry in evaluated} == {"arithmetic"}
    assert peer_id in {peer["peer_id"] for peer in generator.peers()}
