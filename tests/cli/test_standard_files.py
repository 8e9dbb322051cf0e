"""A node continues with closed or full standard files; the garbage collector is off while modules are imported."""

import logging
import os
import subprocess
import sys

import pytest

NODE = """
import logging, os, sys, threading, typer
from ftis_node.cli import app, progress

@app.app.command("join")
def work(home: str) -> None:
    log = logging.getLogger("ftis_node.node")
    with progress.show_fraction("loading", log_period_s=0.01) as show:
        for number in range(20):
            show(number / 20, "weights")
            log.warning("a line of the log, %d", number)
            typer.echo("a line of progress")
            print("a library's line", flush=True)
            threading.Event().wait(0.01)
    with open(home, "w") as file:
        file.write("all done" if file.fileno() > 2 else "a standard file's number was free")

app.app.registered_commands[:] = [c for c in app.app.registered_commands if c.callback is work or c.name == "tasks"]
sys.argv[0] = "ftis-node"
app.main()
"""
REDIRECTED = ["1>&-", "0<&- 1>&- 2>&-", ">/dev/full 2>&1", "2>&1 | head -n 1"]


def in_shell(command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    line = f'set -o pipefail; "$@" {command}'
    node = [sys.executable, "-c", NODE, *arguments]
    return subprocess.run(["bash", "-c", line, "bash", *node], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("redirected", REDIRECTED)
def test_a_node_continues_without_its_standard_files(tmp_path, redirected):
    done = in_shell(redirected, "join", str(tmp_path / "done"))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "done").read_text() == "all done"
    assert "Traceback" not in done.stdout + done.stderr
    if redirected == "1>&-":
        assert "a line of the log, 19" in done.stderr and "loading: " in done.stderr


def test_an_error_keeps_its_exit_code_without_standard_error(tmp_path):
    failed = in_shell("2>/dev/full", "join", str(tmp_path / "no" / "folder"))
    assert (failed.returncode, failed.stderr) == (1, "")
    invalid = in_shell("2>&-", "tasks", "--nonsense")
    assert (invalid.returncode, invalid.stderr) == (2, "")


def test_a_command_that_cannot_write_its_output_reports_it():
    full = in_shell(">/dev/full", "tasks")
    assert full.returncode == 3
    assert full.stderr == "ftis-node: cannot write the output (No space left on device): free disk space\n"
    closed = in_shell("1>&-", "tasks")
    assert (closed.returncode, closed.stderr) == (0, "")
    head = in_shell("| true", "tasks")
    assert head.stderr == ""


def test_a_full_non_blocking_pipe_loses_text_without_an_error():
    from ftis_node.telemetry.log import text_that_may_be_lost

    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    stream = text_that_may_be_lost(writing)
    for _ in range(200):
        assert stream.write("a" * 1000 + "\n") == 1001
    assert not stream.isatty() and stream.fileno() == writing
    handler = logging.StreamHandler(stream)
    os.close(reading)
    handler.emit(logging.makeLogRecord({"msg": "a broken pipe"}))
    stream.close()
    os.close(writing)


SCRIPT = """
import gc
from ftis_node.cli import app

@app.app.command("collects")
def collects():
    print(gc.isenabled(), gc.get_freeze_count() > 1000)

gc.disable()
app.run({arguments!r})
print(gc.isenabled())
"""


def _printed(*arguments: str) -> list[str]:
    script = SCRIPT.format(arguments=list(arguments))
    return subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout.split()


def test_a_command_runs_with_the_collector_on_and_the_modules_frozen():
    assert _printed("collects") == ["True", "True", "True"]


def test_help_is_printed_with_the_collector_off():
    assert _printed("--help")[-1] == "False"
