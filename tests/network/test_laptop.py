"""A node of a laptop: it sleeps, or it does not, and gets another address. Then it is in the swarm again."""

import json
import signal
import sys
import time
from contextlib import ExitStack

import pytest

from tests.node.support import RunningNode, started, write_manifest

BACK_S = 120.0  # one timed run: 36 s
COMMAND = (sys.executable, "-m", "ftis_node")
ANY_ADDRESS = "/ip4/0.0.0.0/tcp/0"


def _signal(node: RunningNode, number: signal.Signals) -> None:
    for process in node.processes():
        process.send_signal(number)


def _foreign_groups(node: RunningNode) -> int:
    return sum(event["foreign_groups"] for event in node.events("step"))


@pytest.mark.timeout(400)
@pytest.mark.parametrize("sleep_s", [25.0, 0.0])
def test_a_laptop_wakes_in_another_network(internet, tmp_path, tiny_models, sleep_s):
    run = write_manifest(tmp_path / "run.toml", foreign_wait_s=30.0)
    host = internet.host("bootstrap")
    hosts = {"s": internet.host("home"), "m": internet.host("laptop")}
    with ExitStack() as stack:
        bootstrap = started(tmp_path / "b", "bootstrap", "--listen", host.listen, on=host.inside())
        address = stack.enter_context(bootstrap).first_line()
        common = ("--run", str(run), "--peers", address, "--listen", ANY_ADDRESS)
        home, laptop = (
            stack.enter_context(
                started(tmp_path / size, "join", "--model", str(tiny_models[size]), *common, on=hosts[size].inside())
            )
            for size in ("s", "m")
        )
        for node in (home, laptop):
            node.wait_for(lambda node=node: _foreign_groups(node) >= 8, timeout_s=120)
        _signal(laptop, signal.SIGSTOP)
        time.sleep(sleep_s)
        internet.move(hosts["m"])
        before = {node.home.name: _foreign_groups(node) for node in (home, laptop)}
        _signal(laptop, signal.SIGCONT)
        for node in (laptop, home):  # both use groups of the other again
            enough = before[node.home.name] + 8
            node.wait_for(lambda node=node, enough=enough: _foreign_groups(node) >= enough, timeout_s=BACK_S)
        for node in (home, laptop):
            shown = hosts[node.home.name].run(*COMMAND, "peers", "--json", "--home", str(node.home))
            (peer,) = [row for row in json.loads(shown) if row["name"]]
            assert (peer["groups_refused"], peer["trust_level"]) == ({}, "good"), peer
            assert all(reason.startswith("pull_") for reason in peer["reasons"]), "in progress during the sleep"
            steps = [event["step"] for event in node.events("step")]
            assert steps == sorted(set(steps)), "a step was done twice"
            taken = [event["group"] for event in node.events("taken")]
            assert len(taken) == len(set(taken)), "a group was trained on twice"
