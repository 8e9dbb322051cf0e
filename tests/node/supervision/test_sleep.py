"""A laptop that slept for three hours, a process that is suspended while it stops, and a closed terminal."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from contextlib import AsyncExitStack
from functools import partial
from unittest.mock import AsyncMock

import pytest

from ftis_node.swarm.reputation import Reputation
from ftis_node.telemetry.clock import SleepDetector, SteadyClock
from ftis_node.validation import ValidationContext
from tests.node.light_swarm import LightSwarm, held, identity_of, manifest_of
from tests.waiting import eventually

SLEEP_S = 3 * 3600.0


class Clocks:
    """All clocks of this process, ahead of the real ones by `slept_s`."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.slept_s = 0.0
        loop = asyncio.get_running_loop()
        now, monotonic, since_boot, loop_time = time.time, time.monotonic, time.clock_gettime, loop.time
        patch.setattr(time, "time", lambda: now() + self.slept_s)
        patch.setattr(time, "monotonic", lambda: monotonic() + self.slept_s)
        patch.setattr(time, "clock_gettime", lambda kind: since_boot(kind) + self.slept_s)
        patch.setattr(loop, "time", lambda: loop_time() + self.slept_s)


def test_a_sleep_is_noticed_once_and_a_busy_machine_is_none():
    now = 100.0
    detector = SleepDetector(lambda: now)
    found = []
    for elapsed_s in (0.0, 1.0, 12.0, SLEEP_S + 1.0, 1.0):
        now += elapsed_s
        found.append(detector.slept_s(period_s=1.0))
    assert found == [None, None, None, SLEEP_S, None]


def test_a_ban_ends_at_its_time_also_if_the_machine_sleeps(monkeypatch):
    """A sleep moves the wall clock, the clock since the boot, and not the monotonic one. It is no jump of the clock."""
    clock, real_now, real_since_boot = SteadyClock(), time.time, time.clock_gettime
    banned = Reputation().banned(7200.0, now=clock.now(), reason="refused")
    monkeypatch.setattr("time.time", lambda: real_now() + SLEEP_S)
    monkeypatch.setattr("time.clock_gettime", lambda kind: real_since_boot(kind) + SLEEP_S)
    assert not banned.is_banned(now=clock.now())
    assert clock.jump_s() is None


STOPS = """
import asyncio, os, signal, sys
from ftis_node.node.supervision.shutdown import until_signalled
async def work():
    os.kill(os.getpid(), signal.SIGTERM)
    try:
        await asyncio.sleep(60)
    finally:
        print("stopping", flush=True)
        await asyncio.sleep(0.3)
        print("saved", flush=True)
asyncio.run(until_signalled(work(), stop_limit_s=1.0))
"""


def test_a_process_that_is_suspended_while_it_stops_is_not_ended_by_force():
    with subprocess.Popen([sys.executable, "-c", STOPS], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "stopping\n"
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(1.5)  # longer than the limit
        os.kill(process.pid, signal.SIGCONT)
        assert (process.stdout.read(), process.wait(30)) == ("saved\n", 0)


async def test_light_nodes_that_slept_exchange_groups_again_and_charge_nobody(tmp_path, monkeypatch):
    by_patched_clock = partial(ValidationContext, now=lambda: time.time())
    monkeypatch.setattr("ftis_node.node.loops.intake.ValidationContext", by_patched_clock)
    swarm = LightSwarm(tmp_path, manifest_of())
    async with AsyncExitStack() as stack:
        one, other = [await stack.enter_async_context(swarm.node(number)) for number in (1, 2)]
        watching = asyncio.create_task(one.wiring.upkeep_loop.run())
        await swarm.publish(one, 4)
        await swarm.publish(other, 4)
        await eventually(lambda: held(one) == held(other) == 4)
        clocks = Clocks(monkeypatch)
        published = AsyncMock(return_value=True)
        monkeypatch.setattr(one.gossip, "publish_record", published)
        clocks.slept_s = SLEEP_S
        await eventually(lambda: "woke" in one.parts.home.events.read_text())
        await eventually(lambda: published.await_count)
        await swarm.publish(one, 4)
        await swarm.publish(other, 4)
        await eventually(lambda: held(one) == held(other) == 8)
        for node, peer in ((one, identity_of(2)), (other, identity_of(1))):
            row = node.parts.peers.row(peer.peer_id)
            assert (row["trust_level"], row["reasons"]) == ("good", {})
            assert not node.parts.context.counters.refused
        watching.cancel()
        await asyncio.wait({watching})


WORKS = """
import asyncio, logging, os, signal
from ftis_node.node.supervision.shutdown import until_signalled
async def work():
    try:
        os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.sleep(0.5)
        print("continues")
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(60)
    finally:
        print("saved")
logging.basicConfig(level="INFO", format="%(message)s")
asyncio.run(until_signalled(work()))
"""


@pytest.mark.parametrize(
    ("prefix", "out", "err"),
    [((), "saved\n", "SIGHUP: stopping\n"), (("nohup",), "continues\nsaved\n", "SIGTERM: stopping\n")],
    ids=["plain", "nohup"],
)
def test_a_hang_up_stops_in_order_and_nohup_is_respected(prefix, out, err):
    command = (*prefix, sys.executable, "-c", WORKS)
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # the tests themselves may run under nohup
    )
    assert (done.returncode, done.stdout, done.stderr.replace("nohup: ignoring input\n", "")) == (0, out, err)
