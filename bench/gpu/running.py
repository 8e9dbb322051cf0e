"""Run each case in a separate process, so that a failure or a hang affects only that case, and store its result.

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
import tempfile
import time
import traceback
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from gpu.cases import Case, Options, cases_of

BENCH = Path(__file__).parent.parent
LOG_END = 2000  # characters of a failed case's output that are kept
PRELOADED = ["gpu.steps", "gpu.numbers", "gpu.transfer"]  # imports only, because CUDA does not work after a fork


class OutOfTimeError(Exception):
    """The remaining time is too short for the next case."""


def run_part(part: str, options: Options, out: Path, *, ends_at: float) -> dict[str, Any]:
    """Run the cases of `part` that have no result in `out` yet, and write `out`/`part`.json.

    Raises OutOfTimeError before a case that may not end by `ends_at`. Earlier results are kept.
    """
    results = []
    for case in cases_of(part, options):
        kept = out / "cases" / f"{part}-{case.name}.json"
        if not kept.exists():
            if time.monotonic() + case.limit_s > ends_at:
                raise OutOfTimeError(f"{part} {case.name} may take {case.limit_s:.0f} s")
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_text(json.dumps(run_case(case, options)))
        results.append(json.loads(kept.read_text()))
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


def run_case(case: Case, options: Options) -> dict[str, Any]:
    """Return the figures of one case, with `ok` and `error`."""
    _set_import_path()
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(PRELOADED)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        process = processes.Process(target=_run_in_session, args=(case, options, Path(folder)))
        process.start()
        process.join(case.limit_s)
        error = f"took longer than {case.limit_s:.0f} s" if process.is_alive() else None
        _end_session(process)
        result = Path(folder) / "result.json"
        figures = json.loads(result.read_text()) if result.exists() else {}
        if error is None and not figures:
            error = f"exit code {process.exitcode}: {(Path(folder) / 'log').read_text()[-LOG_END:].strip()}"
    what = {key: case.how.get(key) for key in ("shape", "lora")}
    found = {"check": case.part, "case": case.name, **what, "ok": error is None, "error": error}
    return found | figures | {"seconds": round(time.monotonic() - began, 1)}


def _set_import_path() -> None:
    """Set the import path of the process server, which ignores `sys.path`, and of other benches."""
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if str(BENCH) not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(BENCH), str(BENCH.parent), *paths]))


def _run_in_session(case: Case, options: Options, folder: Path) -> None:
    """Run the case in a separate session, which `_end_session` ends with all its processes."""
    os.setsid()
    with (folder / "log").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    try:
        figures = case.run(options)
    except BaseException:
        traceback.print_exc()
        raise SystemExit(1) from None
    whole = folder / "whole.json"
    whole.write_text(json.dumps(figures))
    whole.rename(folder / "result.json")


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
