"""A fault in a background task ends the node: exit code 1, one line with the reason, work that ends in order."""

import asyncio
import re
import subprocess
import sys

import pytest

from ftis_node.errors import FtisError
from ftis_node.node.daemon import _without_end
from ftis_node.node.supervision.shutdown import until_signalled
from ftis_node.telemetry.faults import report
from tests.node.support import ANY_PORT

RUN = "\nsys.argv = ['ftis-node', *sys.argv[4:]]\nfrom ftis_node.cli.app import main\nmain()\n"
READER_FAILS = """
import asyncio, sys
from ftis_node.gossip.p2pd.process import P2pdProcess
read = P2pdProcess._read_lines
async def read_and_fail(self):
    reading = asyncio.create_task(read(self))
    await asyncio.wait({reading, asyncio.create_task(self._ready.wait())}, return_when="FIRST_COMPLETED")
    await asyncio.sleep(0.2)
    reading.cancel()
    raise LookupError("on purpose")
P2pdProcess._read_lines = read_and_fail
"""


@pytest.mark.timeout(120)
def test_a_reader_of_p2pd_that_fails_ends_a_bootstrap_node(tmp_path):
    command = [sys.executable, "-c", READER_FAILS + RUN, "", "", "", "bootstrap", "--listen", ANY_PORT]
    done = subprocess.run(
        [*command, "--home", str(tmp_path / "home")], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 1, done.stderr
    assert done.stderr.splitlines()[-1].startswith("ftis-node: internal fault (LookupError: on purpose)")


async def test_a_loop_that_ends_by_itself_is_a_fault():
    with pytest.raises(FtisError, match="the upkeep loop ended by itself"):
        await _without_end("upkeep", asyncio.sleep(0))


async def test_a_fault_ends_the_work_in_order_and_is_raised():
    calls: list[str] = []

    async def work():
        async def stray():
            raise LookupError("a bug")

        task = asyncio.create_task(stray(), name="stray")
        task.add_done_callback(report)
        try:
            await asyncio.sleep(60)
        finally:
            calls.append("saved")

    with pytest.raises(LookupError, match="a bug"):
        await until_signalled(work(), on_fault=lambda where, error: calls.append(where))
    assert calls == ["the task stray", "saved"]


HANGS = """
import asyncio, os, signal
from ftis_node.node.supervision.shutdown import until_signalled
async def work():
    os.kill(os.getpid(), signal.SIGTERM)
    try:
        await asyncio.sleep(60)
    finally:
        await asyncio.Event().wait()
asyncio.run(until_signalled(work(), stop_limit_s=0.5))
"""


SAVES = """
import asyncio, logging, os, signal, sys
from ftis_node.node.supervision import shutdown
shutdown.SLOW_STOP_S = 0.1
async def work():
    os.kill(os.getpid(), signal.SIGTERM)
    try:
        await asyncio.sleep(60)
    finally:
        for number in range(25):
            shutdown.delay_forced_end("the checkpoint of step 7")
            await asyncio.sleep(0.05)
            if number in AGAIN:
                os.kill(os.getpid(), signal.SIGINT)
        print("saved", file=sys.stderr)
shutdown.delay_forced_end("nothing")
logging.basicConfig(level="INFO", format="%(message)s")
asyncio.run(shutdown.until_signalled(work(), stop_limit_s=0.5))
"""


@pytest.mark.parametrize(("again", "code", "last"), [((0,), 0, "saved"), ((0, 20), 1, "SIGINT: ended without waiting")])
def test_a_save_is_not_cut_off_by_the_time_limit_but_by_a_second_signal(again, code, last):
    """A repeated signal before the line about the save does nothing, because some senders send two at once."""
    program = SAVES.replace("AGAIN", str(again))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == code, done.stderr
    first, second, *_, end = done.stderr.splitlines()
    assert (first, end[: len(last)]) == ("SIGTERM: stopping", last)
    assert second.startswith("stopping: waiting for the checkpoint of step 7; ctrl-C again ends the node")


def test_an_end_that_does_not_come_is_forced():
    done = subprocess.run([sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 1
    assert "ended by force" in done.stderr
    assert re.search(r"waits for the task node: \S+ work > asyncio/locks.py:\d+ wait$", done.stderr, re.M), done.stderr
