"""TRL trainers in a real swarm: exchange nodes in processes on real libp2p, with a full node or each other."""

import asyncio
import re
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from ftis_node.integrations.trl.run_task import swarm_rollout
from ftis_node.integrations.trl.swarm_exchange import SwarmExchange
from tests.conftest import with_sections
from tests.episodes.played import RUN
from tests.integrations.test_trl_exchange import swarm_trainer
from tests.node.support import ANY_PORT, RunningNode, bootstrap, started, write_manifest

pytestmark = pytest.mark.filterwarnings("ignore")
START_S = 240.0
STEPS = 12
STOCK = 24  # foreign groups before the training: about a fifth have unequal rewards, which the trainer needs
EXAMPLE = Path(__file__).parents[2] / "examples" / "python" / "trl_exchange.py"


@pytest.mark.timeout(900)
@pytest.mark.parametrize("task", ["arithmetic", "guess"])
def test_a_trainer_and_a_full_node_learn_from_each_other(tmp_path, tiny_models, task):
    run, options = write_manifest(tmp_path / "run.toml", foreign_wait_s=60.0, groups=16), {}
    if task == "guess":
        sizes = {"own_groups": 16, "foreign_groups": 16, "foreign_wait_s": 60.0}
        episodes = with_sections(RUN, sampling={"group_size": 4}, step=sizes, eval={"limit": 8})
        run.write_text(episodes.to_toml())
        options = {"rollout_func": swarm_rollout(str(run))}
    with ExitStack() as stack:
        address = stack.enter_context(bootstrap(tmp_path / "bootstrap"))
        common = ("--run", str(run), "--peers", address, "--listen", ANY_PORT)
        exchange_node = stack.enter_context(
            started(tmp_path / "exchange", "join", "--role", "exchange", "--model", str(tiny_models["s"]), *common)
        )
        full = stack.enter_context(started(tmp_path / "full", "join", "--model", str(tiny_models["m"]), *common))
        for node in (exchange_node, full):
            _wait_until_up(node)
        exchange_node.wait_for(lambda: exchange_node.status()["replay"]["ready"] >= STOCK, timeout_s=START_S)
        _check_that_no_model_is_loaded(exchange_node)
        assert "exchanges groups of" in exchange_node.log.read_text()

        exchange = SwarmExchange(exchange_node.home, per_batch=1)
        grpo = {"per_device_train_batch_size": 12, "max_steps": STEPS}
        trainer = swarm_trainer(tmp_path, exchange, grpo=grpo, **options)
        asyncio.run(asyncio.to_thread(trainer.train))
        num_shared = exchange.take_num_shared() + _total(trainer, "shared_groups")
        exchange.close()
        assert trainer.state.global_step == STEPS
        assert _total(trainer, "foreign_groups") >= 1
        assert STEPS <= num_shared <= 3 * STEPS  # two or three own groups per batch

        full.wait_for(lambda: full.status()["swarm"]["groups_received"] >= num_shared, timeout_s=120)
        assert full.status()["swarm"]["groups_refused"] == {}, "a group of the trainer is refused"
        full.wait_for(lambda: full.status()["learner"]["foreign_groups"] > 0, timeout_s=START_S)
        exchange_node.wait_for(lambda: exchange_node.status()["swarm"]["groups_confirmed"] >= num_shared, timeout_s=120)
        status = exchange_node.status()
        assert status["generation"]["groups_made"] == num_shared
        assert status["replay"]["released"]["delivered"] >= 1
        assert status["swarm"]["groups_refused"] == {}
        rows = {peer["peer_id"]: peer for peer in full.peers()}
        assert rows[status["node"]["peer_id"]]["role"] == "exchange"
        for node in (exchange_node, full):
            node.stop()
        again = stack.enter_context(started(tmp_path / "exchange", "join", "--role", "exchange"))
        _wait_until_up(again, times=2)
        assert again.status()["node"]["peer_id"] == status["node"]["peer_id"]
        again.stop()


def _wait_until_up(node: RunningNode, *, times: int = 1) -> None:
    node.wait_for(lambda: node.log.read_text().count(" is up, ") == times, timeout_s=START_S)


def _total(trainer: Any, name: str) -> int:
    return int(sum(line[name] for line in trainer.state.log_history if name in line))


def _check_that_no_model_is_loaded(node: RunningNode) -> None:
    status = node.status()
    assert (status["node"]["role"], status["generation"]["state"], status["learner"]["state"]) == (
        *("exchange", "off"),
        "off",
    )
    assert status["model"]["parameters"] > 0  # from the header of the file
    for process in node.processes():
        names = [Path(each.path).name for each in process.memory_maps()]
        assert not [name for name in names if name.endswith(".safetensors") or name.startswith("libtorch")]
        assert "ftis_node.workers" not in " ".join(process.cmdline())
    assert not list((node.home / "checkpoints").iterdir())


@pytest.mark.timeout(900)
def test_in_the_example_two_trainers_learn_from_each_other(tmp_path, tiny_models):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(EXAMPLE), str(tmp_path), *map(str, tiny_models.values()), "10"],
        capture_output=True,
        text=True,
        check=False,
        timeout=800,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    totals = re.findall(r"^(first|second): (\d+) shared, (\d+) foreign groups$", done.stdout, flags=re.MULTILINE)
    assert sorted(name for name, *_ in totals) == ["first", "second"]
    for _, shared, foreign in totals:
        assert int(shared) > 10
        assert int(foreign) > 0
    commands = [" ".join(each.info["cmdline"] or ()) for each in psutil.process_iter(["cmdline"])]
    assert not [command for command in commands if str(tmp_path) in command], "a process still runs"
