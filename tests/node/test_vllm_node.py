"""A node that generates with vLLM: it trains, and it continues after the engine was killed."""

import psutil
import pytest

from ftis_node.swarm.sequence import epoch_base, epoch_of
from tests.node.support import ANY_PORT, RunningNode, started, write_manifest

START_S = 240.0
ENGINE_CORE = "ftis_node.node.startup.factories.ENGINE_CORE"
STEPS = 4


def engine_processes(node: RunningNode) -> list[psutil.Process]:
    """Return the engine processes that the generation worker started."""
    (worker,) = [each for each in node.processes() if "ftis_node.generation.worker" in each.cmdline()]
    return [each for each in worker.children() if "EngineCore" in " ".join(each.cmdline())]


@pytest.mark.timeout(600)
def test_an_engine_that_is_killed_while_it_generates_loses_no_group(tmp_path, tiny_models):
    run = write_manifest(tmp_path / "run.toml", foreign_wait_s=0.5)
    join = ("join", "--model", str(tiny_models["s"]), "--run", str(run), "--listen", ANY_PORT, "--engine", "vllm")
    with started(tmp_path / "node", *join, "--steps", str(STEPS), constants={ENGINE_CORE: "separate"}) as node:
        node.wait_for(lambda: len(node.events("step")) >= 1, timeout_s=START_S)
        killed = engine_processes(node)
        assert len(killed) == 1
        killed[0].kill()
        assert node.wait(timeout_s=START_S) == 0, node.log.read_text()[-3000:]
        assert not [each for each in psutil.process_iter(["pid"]) if each.pid == killed[0].pid]
    status = node.status()
    assert status["generation"]["engine"] == "vllm"
    assert status["generation"]["restarts"] == 1
    assert status["learner"]["step"] == STEPS
    assert status["learner"]["own_groups"] == STEPS * 4
    numbers = [event["number"] for event in node.events("announced")]
    first = epoch_base(epoch_of(numbers[0])) + 1
    assert numbers == list(range(first, first + len(numbers))), "a number is missing or was used twice"
    used = [event["group"] for event in node.events("taken")]
    assert len(used) == len(set(used)) == STEPS * 4, "a group was used twice"
    served = [0, *(event["version"] for event in node.events("served"))]  # a tiny model may never be correct
    assert served[-1] == status["model"]["policy_version"]
    assert status["learner"]["mismatch_kl"] < 1e-9
    assert status["learner"]["mismatch_share"] == 0.0
