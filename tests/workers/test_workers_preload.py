"""Workers that are forked from a preloading process are supervised like spawned ones."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

import psutil
import pytest
from echo_worker import Die, Echo, EchoReply
from worker_support import PYTHON_PATH, MakeSupervisor

from ftis_node.errors import WorkerDiedError
from ftis_node.workers import preload
from ftis_node.workers.preload import PreloadingProcess
from tests.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ECHO = Echo(payload=b"x")
PR_GET_CHILD_SUBREAPER = 37

OWNER = """
import asyncio, sys
from pathlib import Path
from echo_worker import EchoBoot
from ftis_node.workers.preload import PreloadingProcess
from ftis_node.workers.preload import WorkerSpec
from ftis_node.workers.supervisor import Supervisor

async def main(folder):
    preloading = PreloadingProcess((), {}, folder / "preload.log", num_workers=int(sys.argv[2]))
    supervisor = Supervisor(WorkerSpec(name="echo", module="echo_worker", boot=EchoBoot(trace=str(folder)),
                                       sockets_dir=folder, log_path=folder / "echo.log", preloading=preloading))
    await supervisor.start()
    print(supervisor.pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main(Path(sys.argv[1])))
"""

ALLOCATOR_SCRIPT = """
import ctypes, sys
from ftis_node.workers.fork_server import set_allocator
from ftis_node.learner.client import KEEPS_FREED_BLOCKS
NAMES = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keep"
class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in NAMES.split()]
libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Info
libc.malloc.restype = libc.calloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
set_allocator(KEEPS_FREED_BLOCKS if sys.argv[1] == "kept" else {})
mapped = libc.mallinfo2().hblkhd
block = libc.malloc(ctypes.c_size_t(100 << 20))
is_mapped = libc.mallinfo2().hblkhd - mapped >= 100 << 20
before = libc.mallinfo2().arena
libc.free(block)
print(is_mapped, libc.mallinfo2().arena >= 100 << 20)
"""


def preloading_of(folder: Path, *modules: str, num_workers: int = 2) -> PreloadingProcess:
    return PreloadingProcess(modules, {"PYTHONPATH": PYTHON_PATH}, folder / "preload.log", num_workers=num_workers)


def fork_servers() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if preload.SERVER_MODULE in child.cmdline()]


@pytest.fixture(autouse=True)
def no_server_remains() -> Iterator[None]:
    """Each test ends its fork servers and resets the subreaper flag of this process."""
    yield
    assert not fork_servers()
    adopts = ctypes.c_int()
    ctypes.CDLL(None).prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(adopts), 0, 0, 0)
    assert not adopts.value, "this process still adopts orphans"


async def test_forked_workers_are_like_spawned_ones(make_supervisor: MakeSupervisor, tmp_path: Path) -> None:
    preloading = preloading_of(tmp_path, "colorsys")
    first, second = (make_supervisor(preloading=preloading) for _ in range(2))
    await first.start()
    (server,) = fork_servers()
    await second.start()
    assert not server.is_running(), "the fork server outlives its last fork"
    spawned = make_supervisor()
    await spawned.start()
    assert first.pid is not None and spawned.pid is not None
    forked, other = psutil.Process(first.pid), psutil.Process(spawned.pid)
    assert forked.ppid() == other.ppid() == os.getpid()
    assert os.getsid(first.pid) == os.getpgid(first.pid) == first.pid
    assert [word for word in forked.cmdline() if word] == other.cmdline()
    assert (await first.call(ECHO, EchoReply)).pid == first.pid != second.pid
    log = tmp_path / "logs" / "echo.log"
    for number, path in ((0, os.devnull), (1, str(log)), (2, str(log))):
        assert os.readlink(f"/proc/{first.pid}/fd/{number}") == path
    sockets = [name for name in os.listdir(f"/proc/{first.pid}/fd") if int(name) > 2]
    assert len(sockets) <= len(os.listdir(f"/proc/{spawned.pid}/fd")), "files of the fork server are open"


async def test_a_forked_worker_that_dies_is_replaced_by_a_spawned_one(
    make_supervisor: MakeSupervisor, tmp_path: Path
) -> None:
    supervisor = make_supervisor(preloading=preloading_of(tmp_path, num_workers=1))
    await supervisor.start()
    forked = supervisor.pid
    with pytest.raises(WorkerDiedError, match="exited with code 7"):
        await supervisor.call(Die(exit_code=7), EchoReply)
    await supervisor.wait_ready()
    assert (supervisor.restarts, await supervisor.call(ECHO, EchoReply) is not None) == (1, True)
    assert not psutil.pid_exists(forked or 0), "the dead worker was not reaped"
    await supervisor.stop()


async def test_the_signal_that_killed_a_forked_worker_is_reported(
    make_supervisor: MakeSupervisor, tmp_path: Path
) -> None:
    supervisor = make_supervisor(preloading=preloading_of(tmp_path, num_workers=1))
    await supervisor.start()
    assert supervisor.pid is not None
    os.kill(supervisor.pid, signal.SIGKILL)
    with pytest.raises(WorkerDiedError, match="SIGKILL"):
        await supervisor.call(ECHO, EchoReply)


@pytest.mark.parametrize(("modules", "cause"), [(("has_thread",), "2 threads"), (("ends_early",), "boom")])
async def test_if_the_fork_server_fails_workers_are_spawned(
    modules: tuple[str, ...], cause: str, make_supervisor: MakeSupervisor, tmp_path: Path
) -> None:
    thread = "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
    (tmp_path / "has_thread.py").write_text(thread)
    (tmp_path / "ends_early.py").write_text("raise RuntimeError('boom')\n")
    preloading = preloading_of(tmp_path, *modules)
    preloading.environment = {"PYTHONPATH": f"{tmp_path}:{PYTHON_PATH}"}
    supervisor = make_supervisor(preloading=preloading)
    await supervisor.start()
    assert (await supervisor.call(ECHO, EchoReply)).pid == supervisor.pid
    assert cause in (tmp_path / "preload.log").read_text()


async def test_a_missing_module_is_logged_and_not_preloaded(make_supervisor: MakeSupervisor, tmp_path: Path) -> None:
    supervisor = make_supervisor(preloading=preloading_of(tmp_path, "no_such_module", num_workers=1))
    await supervisor.start()
    assert "not preloaded" in (tmp_path / "preload.log").read_text()
    assert "spawn" not in (tmp_path / "preload.log").read_text()


async def test_a_canceled_request_leaves_no_reply_to_the_next(tmp_path: Path) -> None:
    preloading = preloading_of(tmp_path)
    await preloading.until_loaded()
    (server,) = fork_servers()
    environment = {"PYTHONPATH": PYTHON_PATH}
    command = (sys.executable, "-m", "timeit", "-n1", "-r1", "import time; time.sleep(60)")
    canceled = asyncio.create_task(preloading.fork(command, environment, tmp_path / "log"))
    server.suspend()  # so that the reply is late
    await asyncio.sleep(0.1)
    canceled.cancel()
    await asyncio.wait({canceled})
    with suppress(psutil.NoSuchProcess):
        server.resume()
    assert await preloading.fork(command, environment, tmp_path / "log") is None, "a late reply is taken for the next"
    await preloading.close()


async def test_a_stop_during_the_imports_ends_the_server(make_supervisor: MakeSupervisor, tmp_path: Path) -> None:
    supervisor = make_supervisor(preloading=preloading_of(tmp_path))
    starting = asyncio.create_task(supervisor.start())
    await eventually(fork_servers)
    await supervisor.stop()
    with pytest.raises(WorkerDiedError):
        await starting


@pytest.mark.parametrize("num_workers", [1, 2])
def test_fork_server_and_worker_end_with_a_killed_owner(tmp_path: Path, num_workers: int) -> None:
    command = [sys.executable, "-c", OWNER, str(tmp_path), str(num_workers)]
    environment = {**os.environ, "PYTHONPATH": PYTHON_PATH}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as owner:
        assert owner.stdout is not None
        worker = psutil.Process(int(owner.stdout.readline()))
        family = psutil.Process(owner.pid).children(recursive=True)
        assert worker in family and len(family) == num_workers, "the fork server waits only for a second worker"
        owner.kill()
        _, alive = psutil.wait_procs(family, timeout=20.0)
        assert not alive


@pytest.mark.parametrize("setting", ["kept", "usual"])
def test_set_allocator_has_the_effect_of_the_variables(setting: str) -> None:
    done = subprocess.run([sys.executable, "-c", ALLOCATOR_SCRIPT, setting], capture_output=True, text=True, check=True)
    assert done.stdout.split() == (["False", "True"] if setting == "kept" else ["True", "False"])
