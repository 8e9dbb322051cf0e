"""Supervisors of the echo worker with short time limits, stopped at the end of a test."""

import pytest
import pytest_asyncio
from echo_worker import EchoBoot, Tick
from worker_support import PATIENT, PYTHON_PATH, QUICK

from ftis_node.workers.process import WorkerSpec
from ftis_node.workers.supervisor import Supervisor


@pytest_asyncio.fixture
async def make_supervisor(tmp_path):
    """`make_supervisor(fault="", timing=QUICK, **options)` makes one that is not started yet."""
    made: list[Supervisor] = []

    def make(*, fault="", num_faults=1000, timing=QUICK, on_event=None, on_slow_stop=None, preload=None, **options):
        spec = WorkerSpec(
            name="echo",
            module="echo_worker",
            boot=EchoBoot(trace=str(tmp_path), fault=fault, num_faults=num_faults),
            sockets_dir=tmp_path / "s",
            log_path=tmp_path / "logs" / "echo.log",
            event_types=(Tick,),
            timing=timing,
            on_event=on_event,
            on_slow_stop=on_slow_stop,
            environment={"PYTHONPATH": PYTHON_PATH, "OMP_NUM_THREADS": "1"},
            preload=preload,
        )
        options.setdefault("restart_policy", PATIENT)
        made.append(Supervisor(spec, **options))
        return made[-1]

    yield make
    for supervisor in made:
        await supervisor.stop()


@pytest.fixture
def start_supervisor(make_supervisor):
    """`await start_supervisor(...)` makes a supervisor, as `make_supervisor` does, and starts it."""

    async def start(**options):
        supervisor = make_supervisor(**options)
        await supervisor.start()
        return supervisor

    return start
