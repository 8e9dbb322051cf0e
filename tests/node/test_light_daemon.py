"""The daemon of a node that trained and exchanged groups has loaded neither torch nor scipy. Its workers load torch."""

from __future__ import annotations

import psutil
import pytest

pytestmark = pytest.mark.timeout(600)
HEAVY = ("libtorch", "/torch/", "/scipy/", "/vllm/")


def _heavy_files(process: psutil.Process) -> list[str]:
    return [file.path for file in process.memory_maps() if any(part in file.path for part in HEAVY)]


@pytest.mark.parametrize("name", ["bootstrap", "ann", "bob"])
def test_a_daemon_loads_no_torch(small_swarm, name):
    daemon, *others = getattr(small_swarm, name).processes()
    assert _heavy_files(daemon) == []
    workers = [process for process in others if ".worker" in " ".join(process.cmdline())]
    assert len(workers) == (0 if name == "bootstrap" else 2)
    assert all(_heavy_files(worker) for worker in workers), "the check does not see torch in a worker"
