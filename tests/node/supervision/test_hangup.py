"""A closed terminal (SIGHUP) ends a node like SIGTERM, unless `nohup` started it."""

import signal
import subprocess
import sys

import pytest

WORKS = """
import asyncio, logging, os, signal
from ftis_node.node.supervision.background import until_signalled
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
