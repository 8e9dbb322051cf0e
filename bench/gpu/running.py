"""Run each case in a separate process, so that a failure or a hang affects only that case, and store its figures.

Processes are forked from a server that has imported torch and transformers once: on some machines that takes 14 s.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from gpu.cases import Case, Options, cases_of

BENCH = Path(__file__).parent.parent
LOG_END = 2000  # characters of a failed case's output that are kept
PRELOADED = ["gpu.steps", "gpu.numbers", "gpu.transfer"]  # imports only, because CUDA does not work after a fork


def run_part(part: str, options: Options, out: Path, *, only: Sequence[str] = (), together: int = 1) -> dict[str, Any]:
    """Run the cases of `part` that have no result in `out` yet, and write `out`/`part`.json.

    `only` are names of cases; none: all. `together` cases run at a time, and take turns to measure.
    """
    chosen = [case for case in cases_of(part, options) if not only or case.name in only]
    folder = out / "cases"
    folder.mkdir(parents=True, exist_ok=True)
    if together > 1:
        options = replace(options, lock=out / "gpu.lock")
    _set_import_path()
    with ThreadPoolExecutor(together) as threads:
        results = list(threads.map(lambda case: kept_or_run(case, options, folder / f"{part}-{case.name}"), chosen))
    found = {
        "check": part,
        "ok": all(result["ok"] for result in results),
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
        "small": options.small,
        "torch": torch.__version__,
        "cases": results,
    }
    (out / f"{part}.json").write_text(json.dumps(found, indent=1) + "\n")
    return found


def kept_or_run(case: Case, options: Options, place: Path) -> dict[str, Any]:
    """Return the figures of a case, with `ok` and `error`. `place`.json has them while the case runs, too.

    A result of an earlier run is kept, also one that failed.
    """
    result = place.with_name(place.name + ".json")
    if result.exists() and "ok" in (found := json.loads(result.read_text())):
        return found
    log = place.with_name(place.name + ".log")
    result.unlink(missing_ok=True)
    began = time.monotonic()
    what = {"check": case.part, "case": case.name, **{key: case.how.get(key) for key in ("shape", "lora")}}
    noted = replace(options, figures=result)
    noted.note(**what)
    process = multiprocessing.get_context("forkserver").Process(target=_run_in_session, args=(case, noted, log))
    process.start()
    process.join(case.limit_s)
    error = f"took longer than {case.limit_s:.0f} s" if process.is_alive() else None
    _end_session(process)
    if error is None and process.exitcode:
        error = f"exit code {process.exitcode}: {log.read_text()[-LOG_END:].strip()}"
    seconds = round(time.monotonic() - began, 1)
    noted.note(ok=error is None, error=error, seconds=seconds, expected_s=case.expected_s)
    return json.loads(result.read_text())


def _set_import_path() -> None:
    """Set the import path of the process server, which ignores `sys.path`, and of other benches."""
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if str(BENCH) not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(BENCH), str(BENCH.parent), *paths]))
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)


def _run_in_session(case: Case, options: Options, log_path: Path) -> None:
    """Run the case in a separate session, which `_end_session` ends with all its processes."""
    os.setsid()
    with log_path.open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    try:
        case.run(options)
    except BaseException:
        traceback.print_exc()
        raise SystemExit(1) from None


def last_object(output: str) -> dict[str, Any] | None:
    """Return the last line that is a JSON object, or None."""
    for line in reversed(output.splitlines()):
        if line.startswith("{"):
            try:
                found = json.loads(line)
            except ValueError:
                continue
            return found if isinstance(found, dict) else None
    return None


def ask_program(command: Sequence[str]) -> dict[str, Any]:
    """Return the last JSON object that another bench prints. Raises RuntimeError if it fails."""
    done = subprocess.run([sys.executable, *command], stdout=subprocess.PIPE, text=True, check=False)
    found = last_object(done.stdout)
    if done.returncode or found is None:
        raise RuntimeError(f"{' '.join(command)} ended with code {done.returncode}")
    return found


def _end_session(process: BaseProcess) -> None:
    """Kill the process and its remaining workers."""
    assert process.pid is not None
    with contextlib.suppress(ProcessLookupError):  # it has ended, or has no session yet
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()
