"""Workers that are forked from a preloading process are supervised like spawned ones."""

import os
import subprocess
import sys
from importlib.util import find_spec

import psutil
import pytest
from echo_worker import Die, Echo, EchoReply
from test_workers_owner import wait_for_end
from worker_support import PYTHON_PATH, pid_of

from ftis_node.errors import WorkerDiedError
from ftis_node.learner.client import KEEPS_FREED_BLOCKS
from ftis_node.workers import preload
from ftis_node.workers.preload import Preload
from tests.waiting import wait_until

SHOWN = """
import ctypes, sys
libc = ctypes.CDLL(None)
libc.sbrk.restype = libc.malloc.restype = ctypes.c_void_p
before = libc.sbrk(0)
libc.malloc(ctypes.c_size_t(100 << 20))
print(libc.sbrk(0) - before > 50 << 20, sys.argv[1:], flush=True)
"""
OWNER = "import subprocess as s, sys; s.Popen(sys.argv[1:], stdin=-1, stdout=-1); sys.stdin.read()"
SERVER = f"""
import os, sys, time, {preload.MODULE} as p
p.import_quickly = lambda path: (open(path, "w").write(str(os.getpid())), time.sleep(60))
p.serve(os.getppid(), sys.argv[1:])
"""
THREAD = "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()"
DRIVER = "import __main__\n__main__.DRIVERS, file = ('/dev/null',), open('/dev/null')"


@pytest.fixture
def begin(tmp_path):
    """`begin(*modules)` starts a process that imports them."""
    made = []

    def begin(*modules):
        environment = {"PYTHONPATH": f"{tmp_path}:{PYTHON_PATH}"}
        made.append(Preload(environment, tmp_path / "preload.log", modules=modules))
        made[-1].begin()
        return made[-1]

    yield begin
    for each in made:
        each.close()
    assert not [child for child in psutil.Process().children() if preload.MODULE in child.cmdline()]


async def test_forked_workers_are_like_spawned_ones(start_supervisor, begin, tmp_path):
    preloading = begin("colorsys")
    first, second = [await start_supervisor(preload=preloading) for _ in range(2)]
    preloading.close()
    forked, other = (psutil.Process(pid_of(each)) for each in (first, await start_supervisor(preload=preloading)))
    assert forked.ppid() == other.ppid() == os.getpid()
    assert os.getsid(forked.pid) == os.getpgid(forked.pid) == forked.pid
    assert forked.cmdline()[:3] == other.cmdline()[:3]
    assert (await first.call(Echo(payload=b"x"), EchoReply)).pid == forked.pid != second.pid
    log = str(tmp_path / "logs" / "echo.log")
    assert [os.readlink(f"/proc/{forked.pid}/fd/{number}") for number in range(3)] == [os.devnull, log, log]
    assert forked.num_fds() <= other.num_fds(), "files of the preloading process are open"
    with pytest.raises(WorkerDiedError, match="exited with code 7"):
        await first.call(Die(exit_code=7), EchoReply)
    await first.wait_ready()
    assert not psutil.pid_exists(forked.pid), "the dead worker was not reaped"
    psutil.Process(pid_of(second)).kill()
    with pytest.raises(WorkerDiedError, match="SIGKILL"):
        await second.call(Echo(payload=b"x"), EchoReply)


@pytest.mark.parametrize(
    ("code", "cause"),
    [(THREAD, "2 threads"), (DRIVER, "/dev/null is open"), ("raise OSError('boom')", "boom"), ("", "")],
)
async def test_without_a_preloading_process_workers_are_spawned(code, cause, start_supervisor, begin, tmp_path):
    (tmp_path / "odd.py").write_text(code)
    preloading = begin("odd")
    await preloading.until_loaded()
    if not code:
        preloading._process.kill()
        preloading._process.wait()
    supervisor = await start_supervisor(preload=preloading)
    assert (await supervisor.call(Echo(payload=b"x"), EchoReply)).pid == supervisor.pid
    assert cause in (tmp_path / "preload.log").read_text()
    assert supervisor.restarts == 0


async def test_without_pidfd_nothing_is_forked(begin, monkeypatch, tmp_path):
    monkeypatch.delattr(os, "pidfd_open")
    preloading = begin()
    await preloading.until_loaded()
    assert await preloading.fork((sys.executable, "-m", "shown"), {}, tmp_path / "log") is None
    assert preloading._process is None


async def test_a_forked_process_has_the_arguments_and_the_allocator_of_its_command(begin, tmp_path):
    (tmp_path / "shown.py").write_text(SHOWN)
    preloading = begin()
    await preloading.until_loaded()
    for variables in ({}, KEEPS_FREED_BLOCKS):
        environment = {"PYTHONPATH": str(tmp_path)} | variables
        forked = await preloading.fork((sys.executable, "-m", "shown", "7"), environment, tmp_path / "log")
        assert await forked.wait() == 1, "only a worker ends by itself"
    assert (tmp_path / "log").read_text().splitlines() == ["False ['7']", "True ['7']"]


def test_the_preloading_process_ends_with_its_owner_while_it_imports(tmp_path):
    pid_file = tmp_path / "pid"
    command = [sys.executable, "-c", OWNER, sys.executable, "-c", SERVER, str(pid_file)]
    with subprocess.Popen(command, stdin=-1) as owner:
        wait_until(lambda: pid_file.exists() and pid_file.read_text() != "", within_s=60.0)
        owner.kill()
        wait_for_end(int(pid_file.read_text()))


def test_the_modules_that_workers_import_exist():
    assert all(map(find_spec, preload.WORKER_IMPORTS))
