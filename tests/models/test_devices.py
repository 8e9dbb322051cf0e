"""The GPUs of a machine are listed without an import of torch in the calling process."""

from __future__ import annotations

import subprocess
import sys

import pytest

LIST_SCRIPT = """
import sys
from ftis_node.models import loading, pick_device
from ftis_node.errors import MachineError
version, driver, probe = sys.argv[1:]
loading.metadata.version = lambda name: version
loading.DRIVER_FILES = (driver,)
loading.PROBE = probe or loading.PROBE
try:
    print([(found.name, found.memory_bytes) for found in loading.list_accelerators()], pick_device("auto"))
except MachineError as error:
    print(error)
sys.exit("torch was loaded" if "torch" in sys.modules else 0)
"""
NO_FILE = "/dev/no-such-gpu"
TWO_CARDS = """print("a warning"); print('[["card", 5], ["other", 7]]')"""
BROKEN = "raise SystemExit('no driver')"


def _list_gpus(version: str, driver: str, probe: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", LIST_SCRIPT, version, driver, probe], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("version", "driver", "probe", "found"),
    [
        ("2.13.0+cpu", __file__, BROKEN, "[] cpu"),
        ("2.13.0", NO_FILE, BROKEN, "[] cpu"),
        ("2.13.0", __file__, TWO_CARDS, "[('card', 5), ('other', 7)] cuda"),
        ("2.13.0", __file__, BROKEN, "torch cannot list the GPUs: no driver; see `ftis-node doctor`"),
    ],
    ids=["a build for CPUs", "no driver", "two cards", "torch is broken"],
)
def test_torch_is_asked_for_gpus_only_if_there_may_be_one(version: str, driver: str, probe: str, found: str) -> None:
    assert _list_gpus(version, driver, probe) == found
