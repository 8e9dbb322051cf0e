"""Half an hour on a borrowed GPU machine without a network: an unattended driver of stages (`stages.py`).

    PYTHONPATH=bench:. python -m gpu.parts build --out .parts      # before, with a network: parts of at most 46 MB
    PYTHONPATH=bench:. python -m gpu.half_hour start --parts .parts          # on the machine: returns at once
    PYTHONPATH=bench:. python -m gpu.half_hour wait nodes --out "$OUT"       # until it has ended; then what is next
    PYTHONPATH=bench:. python -m gpu.half_hour run --device cpu --small      # all of it on two CPU cores, minutes

    parts arrive --> unpacked --> stages that may start --> one JSON file a stage --> table

The driver needs no reply to go on. The commands after `start` only bring parts and wait. A stage's file has each figure
as soon as it is measured. If all take what is expected, `--minutes 14` (the default) skips `engines`, `base` and
`curves`, and 28 none. A stage that takes twice what is expected is killed, and keeps its figures. Without `--parts` all
packages are those of this Python. A second `start` measures everything again, with the parts already unpacked.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any

import psutil

from gpu.parts import complete_parts, unpack
from gpu.stages import ENDED, PARTS, Stage, State, impossible, stages_of, startable

ROOT = Path(__file__).parents[2]
WORK = Path(tempfile.gettempdir()) / "ftis-half-hour"
POLL_S = 0.5
PARTS_SHARE = 0.4  # of the time, from the start; then a stage without its part is skipped
WAIT_S = 570.0
NOT_ENDED = 75  # EX_TEMPFAIL
LOG_END = 1500
KILLED_WITHIN_S = 15.0


class Driver:
    """The owner of the stages' processes. Its state is in the files of `work`."""

    def __init__(self, stages: Sequence[Stage], work: Path, *, parts: Path | None, limit_s: float) -> None:
        self._stages, self._work, self._parts, self._limit_s = stages, work, parts, limit_s
        self._unpacked = {name for name in PARTS if parts is None or (work / "site" / name).exists()}
        self._begun = set(self._unpacked)
        self._damaged: set[str] = set()
        self._states: dict[str, State] = {stage.name: "waiting" for stage in stages}
        self._running: dict[str, tuple[subprocess.Popen[bytes], float]] = {}
        self._began = time.monotonic()
        self._results = work / "results"
        self._results.mkdir(parents=True, exist_ok=True)

    def run(self) -> None:
        """Run until every stage has ended or was skipped. After an error no stage runs on, and the table is written."""
        try:
            self._run()
        finally:
            for process, _ in self._running.values():
                kill_family(process)
            for name, state in self._states.items():
                if state not in ENDED:
                    self._end(name, "skipped" if state == "waiting" else "killed", "the driver ended; see its log")
            (self._work / "table.txt").write_text(table(self._work))

    def _run(self) -> None:
        for stage in self._stages:
            self._write(stage)
        while any(state not in ENDED for state in self._states.values()):
            self._unpack_arrived()
            elapsed_s = time.monotonic() - self._began
            left_s, more_parts = self._limit_s - elapsed_s, elapsed_s < PARTS_SHARE * self._limit_s
            unpacked = frozenset(self._unpacked)
            for name, reason in impossible(
                self._stages, self._states, unpacked, left_s=left_s, more_parts=more_parts, damaged=self._damaged
            ).items():
                self._end(name, "skipped", reason)
            for stage in startable(self._stages, self._states, unpacked, left_s=left_s):
                self._start(stage)
            for name, (process, began) in list(self._running.items()):
                self._look_at(self._stage(name), process, time.monotonic() - began)
            time.sleep(POLL_S)

    def _unpack_arrived(self) -> None:
        """Unpack each part that has arrived, in a separate thread."""
        arrived: dict[str, list[Path]] = {}
        with suppress(FileNotFoundError):  # a piece is being replaced; the next look finds it
            arrived = complete_parts(self._parts) if self._parts is not None else {}
        for name in arrived.keys() - self._begun:
            self._begun.add(name)
            Thread(target=self._unpack, args=(name, arrived[name]), daemon=True).start()

    def _unpack(self, name: str, pieces: Sequence[Path]) -> None:
        try:
            unpack(pieces, self._work / "site" / name)
        except Exception:  # damaged bytes raise errors of many kinds
            traceback.print_exc()
            self._damaged.add(name)
        else:
            self._unpacked.add(name)

    def _start(self, stage: Stage) -> None:
        out = self._out(stage.name)
        out.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, *(word.format(out=out, work=self._work) for word in stage.command)]
        with (out / "log").open("wb") as log:
            process = subprocess.Popen(
                command, cwd=ROOT, env=self._environment(stage), stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        self._running[stage.name] = process, time.monotonic()
        self._states[stage.name] = "running"
        self._write(stage)

    def _environment(self, stage: Stage) -> dict[str, str]:
        """Return the environment of a stage. vLLM is visible only if its import test has passed, or is the stage."""
        with_vllm = stage.name == "imports" or self._states.get("imports") == "passed"
        parts = ("node", "vllm", "needs") if with_vllm else ("node",)
        sites = [self._work / "site" / part for part in parts if self._parts is not None]
        paths = [ROOT / "bench", ROOT, *sites]
        caches = {"VLLM_CACHE_ROOT": self._work / "vllm-cache", "XDG_CACHE_HOME": self._work / "cache"}
        found = os.environ | {name: str(path) for name, path in caches.items()} | {"HF_HUB_OFFLINE": "1"}
        if not stage.on_gpu:  # it may run beside a stage that measures
            found["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // 2))
        given = os.environ.get("PYTHONPATH", "")
        return found | {"PYTHONPATH": os.pathsep.join(filter(None, [*map(str, paths), given])), "PYTHONUNBUFFERED": "1"}

    def _look_at(self, stage: Stage, process: subprocess.Popen[bytes], seconds: float) -> None:
        """Store the figures so far. End the stage if its process has ended, or kill it at its limit."""
        left_s = self._limit_s - (time.monotonic() - self._began)
        if process.poll() is None and (seconds > stage.limit_s or left_s < 0):
            kill_family(process)
            why = f"longer than {stage.limit_s:.0f} s" if left_s >= 0 else "the time is over"
            self._end(stage.name, "killed", why, seconds)
        elif process.poll() is None:
            self._write(stage, seconds=seconds)
        else:
            log = (self._out(stage.name) / "log").read_text(errors="replace")[-LOG_END:].strip()
            state: State = "failed" if process.returncode else "passed"
            self._end(stage.name, state, log if process.returncode else "", seconds)

    def _end(self, name: str, state: State, reason: str, seconds: float = 0.0) -> None:
        self._running.pop(name, None)
        self._states[name] = state
        self._write(self._stage(name), reason=reason, seconds=seconds)

    def _write(self, stage: Stage, *, reason: str = "", seconds: float = 0.0) -> None:
        """Write the stage's file, with the figures of its cases as they are now."""
        cases = sorted((self._out(stage.name) / "cases").glob("*.json"))
        found = {
            "stage": stage.name,
            "state": self._states[stage.name],
            "seconds": round(seconds, 1),
            "expected_s": stage.expected_s,
            "reason": reason,
            "figures": {path.stem: _figures(path) for path in cases},
        }
        whole = self._results / f"{stage.name}.new"
        whole.write_text(json.dumps(found, indent=1) + "\n")
        whole.rename(whole.with_suffix(".json"))

    def _stage(self, name: str) -> Stage:
        return next(stage for stage in self._stages if stage.name == name)

    def _out(self, name: str) -> Path:
        return self._work / "stages" / name


def kill_family(parent: subprocess.Popen[bytes]) -> None:
    """Kill a process and all below it, also those in other sessions, and wait until their memory is free."""
    try:
        process = psutil.Process(parent.pid)
        family = [*process.children(recursive=True), process]
    except psutil.NoSuchProcess:
        return
    for process in family:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(family, timeout=KILLED_WITHIN_S)
    parent.poll()


def _figures(path: Path) -> dict[str, Any]:
    """Return the figures of a case; the problem, if its file is damaged."""
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError) as error:
        return {"unreadable": str(error)}


def results(work: Path) -> list[dict[str, Any]]:
    """Return the files of all stages, in the order of the table."""
    found = []
    for stage in stages_of(small=False):
        with suppress(FileNotFoundError):
            found.append(json.loads((work / "results" / f"{stage.name}.json").read_text()))
    return found


def table(work: Path) -> str:
    """Return a readable table: one line a stage, and one a case with its figures."""
    return "\n".join(_lines(results(work))) + "\n"


def _lines(found: list[dict[str, Any]]) -> Iterator[str]:
    yield f"{'stage':10} {'state':8} {'s':>6} {'expected':>8}"
    for result in found:
        reason = result["reason"].splitlines()[-1][:120] if result["reason"] else ""
        yield f"{result['stage']:10} {result['state']:8} {result['seconds']:6.0f} {result['expected_s']:8.0f}  {reason}"
        for name, figures in result["figures"].items():
            texts = {key: _text(value) for key, value in figures.items()}
            yield f"    {name}: " + ", ".join(f"{key} {text}" for key, text in texts.items() if text)


def _text(value: object) -> str:
    """Return a figure as text, of a curve the last point; "" for anything else."""
    if isinstance(value, list) and value and isinstance(value[-1], list):
        step, height = value[-1]
        return f"{height:g} at step {step:g}"
    return f"{value:g}" if isinstance(value, int | float) and not isinstance(value, bool) else ""


def note_driver(work: Path, pid: int) -> None:
    """Write which process is the driver, so that `wait_for` knows whether it lives."""
    new = work / f"driver.{os.getpid()}.new"  # `start` and the driver both write it
    new.write_text(json.dumps({"pid": pid, "created": psutil.Process(pid).create_time()}))
    new.rename(work / "driver.json")


def driver_lives(work: Path) -> bool:
    """Return whether the driver of `note_driver` runs."""
    try:
        noted = json.loads((work / "driver.json").read_text())
        process = psutil.Process(noted["pid"])
        is_same = abs(process.create_time() - noted["created"]) < 1  # else another process has its id
        return is_same and process.status() != psutil.STATUS_ZOMBIE
    except (FileNotFoundError, psutil.NoSuchProcess):
        return False


def wait_for(name: str, work: Path, out: Path | None) -> int:
    """Return when the stage or the driver has ended. Print the table and what is next, and copy all results to `out`.

    The end of the driver's log is copied, too, and printed if the driver ended early.
    """
    ends_at = time.monotonic() + WAIT_S
    while True:
        lives = driver_lives(work)  # before its results are read, which it writes last
        by_name = {result["stage"]: result for result in results(work)}
        if name in by_name and by_name[name]["state"] in ENDED:
            break
        if not lives or time.monotonic() > ends_at:
            break
        time.sleep(POLL_S)
    sys.stdout.write(table(work))
    log = work / "driver.log"
    log_end = log.read_text(errors="replace")[-LOG_END:] if log.exists() else ""
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "half-hour.json").write_text(json.dumps(results(work), indent=1) + "\n")
        (out / "table.txt").write_text(table(work))
        (out / "driver.log").write_text(log_end)
    still = [each for each in by_name.values() if each["state"] not in ENDED]
    if not lives and (still or not by_name):
        sys.stdout.write(f"the driver does not run; start it again. The end of its log:\n{log_end}\n")
    elif still:
        following, expected_s = still[0]["stage"], sum(each["expected_s"] for each in still)
        sys.stdout.write(f"next: wait {following} (about {expected_s:.0f} s until the end of all)\n")
    return 0 if name in by_name and by_name[name]["state"] in ENDED else NOT_ENDED


def _clear(work: Path) -> None:
    for folder in ("results", "stages"):
        shutil.rmtree(work / folder, ignore_errors=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=["start", "run", "wait"])
    parser.add_argument("stage", nargs="?", help="of wait")
    parser.add_argument("--work", type=Path, default=WORK, help="folder of all outputs")
    parser.add_argument("--parts", type=Path, help="folder in which parts arrive")
    parser.add_argument("--out", type=Path, help="of wait: copy the results there")
    parser.add_argument("--minutes", type=float, default=14.0, help="of the loan that are left")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--small", action="store_true", help="with --device cpu")
    options = parser.parse_args()
    if options.small != (options.device == "cpu"):
        parser.error("--small and --device cpu go together")
    if options.action == "wait":
        names = [stage.name for stage in stages_of(small=options.small)]
        if options.stage not in names:
            parser.error(f"wait needs a stage: {', '.join(names)}")
        return wait_for(options.stage, options.work, options.out)
    options.work.mkdir(parents=True, exist_ok=True)
    if options.action == "start":
        if driver_lives(options.work):
            parser.error(f"a driver runs already in {options.work}")
        _clear(options.work)
        command = [sys.executable, "-m", "gpu.half_hour", "run", *sys.argv[2:]]
        with (options.work / "driver.log").open("wb") as log:
            driver = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        note_driver(options.work, driver.pid)
        return 0
    _clear(options.work)
    note_driver(options.work, os.getpid())
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that it ends its stages
    stages, limit_s = stages_of(small=options.small), 60 * options.minutes
    Driver(stages, options.work, parts=options.parts, limit_s=limit_s).run()
    sys.stdout.write(table(options.work))
    return 0 if all(result["state"] == "passed" for result in results(options.work)) else 1


if __name__ == "__main__":
    sys.exit(main())
