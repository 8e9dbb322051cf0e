"""A learner and two generators as real processes: weights go one way, groups the other, and each side survives the
other's death."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest

from ftis_node.cli.app import run as run_command
from ftis_node.node.weights.weight_download import PREFIX, SERVED_MARK
from tests.node.support import ANY_PORT, RunningNode, bootstrap, started, write_manifest

START_S = 120.0
DELAY_S = 2.0
# The mismatch is measured on a group that the learner's present weights sampled. Groups of a new version must arrive
# before the next step. So steps need many large groups, few are in flight, and `prompt` often asks for new weights.
GROUPS = 40
GROUP_SIZE = 64
FEW_IN_FLIGHT = f"[generation]\nmax_batch = {GROUP_SIZE}\n"
NO_SPARE = {"ftis_node.node.loops.generate.SPARE_GROUPS": 0}


def _versions(node: RunningNode) -> list[int]:
    return [event["version"] for event in node.events("served")]


def _served_on_disk(node: RunningNode) -> int:
    """Return the newest version that is marked as served."""
    return max(int(mark.parent.name.removeprefix(PREFIX)) for mark in node.home.rglob(f"{PREFIX}*/{SERVED_MARK}"))


@pytest.mark.timeout(600)
def test_generators_follow_a_learner_through_its_death(tmp_path: Path, tiny_models: Mapping[str, Path]) -> None:
    run = write_manifest(tmp_path / "run.toml", foreign_wait_s=60.0, groups=GROUPS, group_size=GROUP_SIZE)
    with ExitStack() as stack:
        address = stack.enter_context(bootstrap(tmp_path / "bootstrap"))
        common = ("--model", str(tiny_models["s"]), "--run", str(run), "--peers", address, "--listen", ANY_PORT)
        learner = stack.enter_context(started(tmp_path / "learner", "join", "--role", "learner", *common))
        learner.wait_for(lambda: "--follow" in learner.log.read_text(), timeout_s=START_S)
        peer_id = learner.peer_id()
        roles = {"prompt": "", "late": f'[roles]\nweights_delay = "fixed:{DELAY_S}"\nevaluate = true\n'}
        for name, settings in roles.items():
            (tmp_path / name).mkdir()
            (tmp_path / name / "node.toml").write_text(FEW_IN_FLIGHT + settings)
        follow = ("--role", "generator", "--follow", peer_id, *common)
        quick = NO_SPARE | {"ftis_node.node.loops.weight_follow.POLL_INTERVAL_S": 0.05}
        prompt = stack.enter_context(started(tmp_path / "prompt", "join", *follow, constants=quick))
        late = stack.enter_context(started(tmp_path / "late", "join", *follow, constants=NO_SPARE))
        for node in (prompt, late):
            node.wait_for(lambda node=node: len(_versions(node)) >= 3, timeout_s=START_S)
        learner.wait_for(lambda: len(learner.events("step")) >= 3, timeout_s=60)
        assert learner.status()["learner"]["mismatch_kl"] is None, "it does not count groups of unknown peers"
        _trust(learner, prompt.peer_id())
        learner.wait_for(lambda: learner.status()["learner"]["mismatch_kl"] is not None, timeout_s=2 * START_S)
        _check_learner(learner)
        _check_generators(prompt, late, peer_id=peer_id)

        learner.process.kill()
        learner.process.wait()
        step = max(event["step"] for event in learner.events("step"))
        prompt.wait_for(lambda: prompt.events("learner_away"), timeout_s=60)
        assert prompt.status()["generation"]["state"] == "ready"
        again = stack.enter_context(started(tmp_path / "learner", "join", "--role", "learner", *common))
        again.wait_for(lambda: max(event["step"] for event in again.events("step")) > step + 3, timeout_s=START_S)
        prompt.wait_for(lambda: prompt.events("learner_back") and _versions(prompt)[-1] > step + 2, timeout_s=60)

        late.stop()
        num_served = len(_versions(late))
        on_disk = _served_on_disk(late)
        assert on_disk >= _versions(late)[-1], "it may stop between the mark on the disk and the event"
        resumed = stack.enter_context(started(tmp_path / "late", "join", *follow))
        resumed.wait_for(lambda: len(_versions(resumed)) > num_served, timeout_s=START_S)
        assert _versions(resumed)[num_served] == on_disk, "it begins with the version that it served last"
        resumed.wait_for(lambda: _versions(resumed)[-1] > on_disk, timeout_s=60)
        for node in (prompt, resumed, again):
            node.stop()


def _trust(node: RunningNode, peer_id: str) -> None:
    assert run_command(["peers", "trust", peer_id, "--home", str(node.home)]) == 0


def _check_learner(learner: RunningNode) -> None:
    status = learner.status()
    assert (status["node"]["role"], status["generation"]["state"]) == ("learner", "off")
    assert (status["generation"]["groups_made"], status["learner"]["own_groups"]) == (0, 0)
    assert status["learner"]["foreign_groups"] >= 2 * GROUPS
    assert status["swarm"]["groups_refused"] == {}
    assert status["swarm"]["weights_bytes_out"] > 3 * 600_000
    assert status["learner"]["mismatch_kl"] < 1e-6, "the followers' engine computes other log-probs"
    assert status["eval"] == []
    assert {event["own_groups"] for event in learner.events("step")} == {0}, (
        "own groups are those that this node signed"
    )
    assert max(event["foreign_groups"] for event in learner.events("step")) == 2 * GROUPS
    offered = {event["version"] for event in learner.events("weights_offered")}
    assert {event["version"] for event in learner.events("weights_served")} <= offered


def _check_generators(prompt: RunningNode, late: RunningNode, *, peer_id: str) -> None:
    for node in (prompt, late):
        versions = _versions(node)
        assert versions == sorted(set(versions)), "a version fell or was served twice"
        status = node.status()
        assert (status["node"]["role"], status["learner"]["state"]) == ("generator", "off")
        assert status["model"]["parameters"] > 0
        assert (status["swarm"]["weights_bytes_out"], status["swarm"]["groups_received"]) == (0, 0)
        assert status["swarm"]["weights_refused"] == {}
        assert status["swarm"]["weights_age_s"] is not None
        assert status["replay"]["released"]["delivered"] > 0
    assert all(event["age_s"] >= DELAY_S for event in late.events("served"))
    assert min(event["age_s"] for event in prompt.events("served")) < DELAY_S
    assert {entry["task"] for entry in late.events("eval")} == {"arithmetic"}
    assert peer_id in {peer["peer_id"] for peer in late.peers()}
